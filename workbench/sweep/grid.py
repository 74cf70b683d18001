"""The grid of a sweep: its schema, its reader, and the cells of its cross product."""

import itertools
import math
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
    model_validator,
)

from workbench import exporter, log, paths
from workbench.bundle import Bundle, Options
from workbench.bundle.presets import check_calibrated
from workbench.check.gates import MAX_KL
from workbench.decode.checks import token_ids
from workbench.errors import InputError, did_you_mean, field_error
from workbench.files import checkout, output_root
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import check_runtime, resolve
from workbench.sweep import identity, timing
from workbench.sweep.grid_file import NEXT_STEP, read_grid_file

Value = TypeVar("Value")
Axis = Annotated[list[Value], Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]

MAX_CELLS = 100_000  # of a sweep, all rounds together
RUN_AXES = """runtime precision fast reads compute_units hints T depth""".split()
"""Fields of `Run` that are axes."""


class Hints(BaseModel, extra="forbid"):
    """Core ML's optimization hints, by its own names."""

    reshapeFrequency: Literal["Frequent", "Infrequent"] | None = None
    specializationStrategy: Literal["Default", "FastPrediction"] | None = None
    allowLowPrecisionAccumulationOnGPU: bool | None = None


class Run(BaseModel, extra="forbid", allow_inf_nan=False):
    """The ways to run each bundle; every list is an axis.

    `repetitions` counts the sequences that one process times; `min_tokens` and
    `min_seconds` ask for more of them. `rounds` counts the processes of a cell: every
    round measures each cell once, in a random order, `cool_down_s` seconds apart.
    `reads` names the rows of a cache that attention reads: the `used` ones, or `all`.
    The runtime `auto` stands for this machine's (see `cells`)."""

    T: Axis[Count] = [1]
    depth: Axis[NonNegativeInt] = [0]
    n_gen: Count = 16
    repetitions: Count = 3
    min_tokens: Count | None = None
    min_seconds: PositiveFloat | None = None
    rounds: Count = 1
    cool_down_s: NonNegativeFloat = 0
    threads: Count = 1
    timeout_s: PositiveFloat = 3600
    runtime: Axis[Annotated[str, AfterValidator(check_runtime)]] = ["auto"]
    precision: Axis[Literal["declared", "exact", "narrow"]] = ["declared"]
    fast: Axis[bool] = [True]
    reads: Axis[Literal["used", "all"]] = ["used"]
    compute_units: Axis[Literal["CPU_AND_NE", "CPU_ONLY", "CPU_AND_GPU", "ALL"]] = [
        "CPU_AND_NE"
    ]
    hints: Axis[Hints] = [Hints()]


class Grid(BaseModel, extra="forbid"):
    """A sweep: its bundles, the ways to run them, and the prompt of their validation.

    The bundles are exported from `checkpoint` with the lists of options in `export`; or
    they are the finished bundles in `bundle`, which the prompt of the stored `golden`
    validates. `max_kl` is the user's limit on the mean KL in nats."""

    checkpoint: str = ""
    bundle: list[str] = []
    golden: str | None = None
    export: dict[Literal[tuple(Options.model_fields)], Axis] = {}
    run: Run = Run()
    validate_ids: list[int] = []
    max_kl: NonNegativeFloat = MAX_KL
    experiment: str = Field("sweep", pattern=r"^\w[\w-]*$")

    # the texts say what is needed: `make_grid` prints them after "needs"
    @model_validator(mode="after")
    def _check(self) -> "Grid":
        has_checkpoint, has_bundles = bool(self.checkpoint), bool(self.bundle)
        if has_checkpoint == has_bundles or (has_bundles and self.export):
            raise ValueError("either checkpoint (and export), or bundle")
        if has_bundles and self.validate_ids and not self.golden:
            raise ValueError("golden (run: workbench golden CHECKPOINT --out G)")
        # every cell would be killed before it had measured for so long
        if (self.run.min_seconds or 0) >= self.run.timeout_s:
            raise ValueError("min_seconds below timeout_s")
        # counted before anything lists the cells, which would fill the memory
        axes = [getattr(self.run, name) for name in RUN_AXES]
        lengths = [len(axis) for axis in (*self.export.values(), *axes)]
        if self.run.rounds * math.prod(lengths) > MAX_CELLS:
            raise ValueError(f"at most {MAX_CELLS:,} cells")
        return self


@dataclass(frozen=True)
class Source:
    """The source of a cell's bundle: a checkpoint, or one finished bundle."""

    path: Path
    """The checkpoint or the bundle, on this machine."""
    finished: bool
    """Whether `path` is a finished bundle."""
    name: str
    """The checkpoint's name."""
    checkpoint_hash: str | None
    """The checkpoint's hash. Where the checkpoint is not on this machine, the hash in
    the newest logged run of a checkpoint of this name; None without such a run."""
    contents_hash: str | None
    """The identity of a finished bundle, otherwise `checkpoint_hash`."""
    tokenizer: Path | None
    """The folder of the tokenizer."""


@dataclass(frozen=True)
class RunSettings:
    """One way to run a bundle: a value for every field of `Run`."""

    runtime: str
    """Never `auto`."""
    precision: str
    fast: bool
    reads: str
    compute_units: str
    hints: dict[str, str | bool]
    """The fields of `Hints` that are set."""
    T: int
    depth: int
    n_gen: int
    repetitions: int
    min_tokens: int | None
    min_seconds: float | None
    rounds: int
    cool_down_s: float
    threads: int
    timeout_s: float

    def json(self) -> dict:
        """The settings as the log stores them in `config`: those that are not null."""
        return {
            name: value for name, value in asdict(self).items() if value is not None
        }


class RunKey(NamedTuple):
    """Identifies a run in the log. Cells with equal keys share one run."""

    setting: str
    round: int
    prompt: str | None
    """The hash of the validation's prompt; None for a cell that validates nothing."""


MEASURED = ("ok", "invalid")
"""Statuses of runs with samples. An invalid run did not run as its settings say."""


class CellResult(NamedTuple):
    """The end of a cell's measurement."""

    status: str
    """`ok`, `invalid` or `failed`, as in the log's `runs`."""
    reason: str | None
    """None where the status is `ok`."""


@dataclass(frozen=True)
class Cell:
    """One bundle, one way to run it, and one round."""

    source: Source
    options: Options
    """The options of the export."""
    run: RunSettings
    round: int
    validate_ids: tuple[int, ...]
    """The prompt if this cell also validates its bundle, otherwise empty."""

    def columns(self) -> dict:
        """The columns of `runs` that the cell decides, both hashes among them."""
        execution = identity.execution_columns(self.run)
        counts = {name: getattr(self.run, name) for name in identity.COUNTS}
        options = identity.non_default_options(self.options)
        source = self.source
        return identity.export_columns(self.options) | {
            **execution,
            **counts,
            "values": identity.values_hash(source.checkpoint_hash, options, execution),
            "setting": identity.setting_hash(
                source.contents_hash, options, execution, counts
            ),
            "round": self.round,
            "prompt": identity.prompt_hash(self.validate_ids),
        }

    def key(self) -> RunKey:
        columns = self.columns()
        return RunKey(columns["setting"], columns["round"], columns["prompt"])


def load_grid(path: str | Path) -> Grid:
    """Reads a grid from a YAML file.

    Raises:
        InputError: no YAML file, or an unknown key or value.
    """
    return make_grid(read_grid_file(path), f"grid {path}")


def make_grid(mapping: dict, subject: str = "grid") -> Grid:
    """A grid from a mapping.

    Args:
        subject: what an error calls the mapping.

    Raises:
        InputError: an unknown key, option or value, bundles of one name, or a golden of
            another checkpoint or prompt.
    """
    if not isinstance(mapping, dict):
        actual = "no keys" if mapping is None else reprlib.repr(mapping)
        needed = "keys with values, such as checkpoint: data/tiny-llama"
        raise InputError(subject, actual, needed, NEXT_STEP)
    try:
        grid = Grid.model_validate(mapping)
    except ValidationError as problem:
        raise _grid_error(problem, subject) from None
    _check_export_options(grid, subject)
    sources = _open_sources(grid)
    # the log and the Explorer tell finished bundles apart by their folder's name
    if len({source.path.name for source in sources}) < len(grid.bundle):
        needed, step = "bundles of different names", "rename one"
        raise InputError(subject, f"bundle: {grid.bundle}", needed, step)
    if grid.golden:
        grid = _with_golden(grid, sources, subject)
    return grid


def _grid_error(problem: ValidationError, subject: str) -> InputError:
    """The error for the first key or value of a grid that is wrong."""
    fault = problem.errors(include_url=False)[0]
    place = fault["loc"]
    if "[key]" in place:  # pydantic's word for a wrong name of an export option
        part, name, *_ = place
        step = did_you_mean(name, Options.model_fields, NEXT_STEP)
        needed = f"one of the export options {', '.join(Options.model_fields)}"
        return InputError(subject, f"{part}: {name}", needed, step)
    return field_error(fault, Grid, subject, NEXT_STEP)


def _check_export_options(grid: Grid, subject: str) -> None:
    """Refuses a value that no export option has. Presets and combinations of options are
    left to `exporter.make_options`."""
    for name, values in grid.export.items():
        for index, value in enumerate(values if name != "compress" else ()):
            if fault := _option_fault(name, value):
                fault["loc"] = "export", name, index
                raise field_error(fault, Grid, subject, NEXT_STEP)


def _option_fault(name: str, value: object) -> dict | None:
    """Pydantic's error for a value that no combination of export options can have."""
    try:
        Options(**{name: value})
    except ValidationError as problem:
        fault = problem.errors(include_url=False)[0]
        return fault if fault["loc"] else None
    return None


def _open_sources(grid: Grid) -> set[Source]:
    """Opens each bundle of a grid, checks each set of export options, and returns the
    sources of the bundles. Relative paths are looked up in the project of the default
    log, since a grid does not know the log of its sweep.

    Raises:
        InputError: a bundle that cannot be opened, or a value of an export option that
            `exporter.make_options` refuses.
    """
    return {source for source, _ in _bundles(grid, None)}


def _with_golden(grid: Grid, sources: set[Source], subject: str) -> Grid:
    """The grid with the absolute path and the prompt of its golden.

    Raises:
        InputError: the golden is of another checkpoint, or the grid names another
            prompt.
    """
    from workbench.check.golden import Golden

    golden = Golden.load(locate(grid.golden).absolute())
    hashes = {source.checkpoint_hash for source in sources} - {
        None,
        golden.checkpoint_sha256,
    }
    if hashes:
        digest = golden.checkpoint_sha256[:12]
        actual = f"golden of a checkpoint with content hash {digest}"
        step = "run: workbench golden CHECKPOINT --out G"
        raise InputError(subject, actual, f"a golden of {min(hashes)[:12]}", step)
    ids = golden.ids.tolist()
    if grid.validate_ids not in ([], ids):
        actual, needed = f"validate_ids {grid.validate_ids}", f"the golden's {ids}"
        raise InputError(subject, actual, needed, "leave validate_ids out")
    return grid.model_copy(update={"validate_ids": ids, "golden": str(golden.file)})


def check_cells(planned: list[Cell], grid: Grid, runs_locally: bool = True) -> None:
    """Refuses a grid with a cell that cannot run.

    Args:
        runs_locally: whether the cells run on this machine, which then needs their
            runtimes.

    Raises:
        InputError: T, depth, n_gen or validate_ids do not fit the cell's bundle, or
            this machine lacks the runtime.
    """
    for cell in planned:
        run = cell.run
        if runs_locally:
            resolve(run.runtime, cell.options.plugin)
        timing.check_size(cell.options, run.T, run.depth, run.n_gen)
        # a prompt that fits T and depth may still be too long for the cache
        count, S = len(cell.validate_ids), cell.options.max_seq_len
        if count > S:
            needed, step = f"at most max_seq_len = {S}", "validate on fewer tokens"
            raise InputError("grid, validate_ids", f"{count} tokens", needed, step)
    for source in {cell.source for cell in planned}:
        if source.finished:
            V = Bundle.open(source.path).manifest.dims.V
        else:
            V = Checkpoint(source.path).config.vocab_size
        token_ids(grid.validate_ids, V, "validate_ids of the grid")


def cells(
    grid: Grid, root: log.Root = None, auto: Sequence[str] = ()
) -> Iterator[Cell]:
    """The cross product of a grid's axes, round by round.

    In the first round, the cells of the smallest T and depth also validate their
    bundle. The runtime `auto` is resolved here and nowhere else: programs of a
    plug-in's target run on the target's runtime, all others on each one in `auto`.

    Args:
        root: the log; relative paths are looked up beside its project, too.
        auto: the runtimes that `auto` stands for; default: that of this machine.
    """
    run = vars(grid.run)
    axes = {name: run[name] for name in RUN_AXES}
    axes["hints"] = [hints.model_dump(exclude_none=True) for hints in grid.run.hints]
    # a validation does not depend on T and depth of the cell: one for each bundle
    smallest = min(axes["T"]), min(axes["depth"])
    bundles = list(_bundles(grid, root))
    for round_, (source, options) in itertools.product(range(run["rounds"]), bundles):
        runtimes = _resolve_auto(grid.run.runtime, options, auto)
        for values in itertools.product(*(axes | {"runtime": runtimes}).values()):
            settings = RunSettings(**run | dict(zip(axes, values)))
            validates = round_ == 0 and (settings.T, settings.depth) == smallest
            ids = tuple(grid.validate_ids) if validates else ()
            yield Cell(source, options, settings, round_, ids)


def stored_cells(grid: Grid, root: log.Root = None) -> list[Cell]:
    """The cells of a grid whose runs a log may hold, from any machine: where the grid's
    runtime is `auto`, a cell for each runtime that `auto` may stand for."""
    return list(cells(grid, root, identity.RUNTIMES))


def _resolve_auto(
    runtimes: Sequence[str], options: Options, auto: Sequence[str]
) -> list[str]:
    """The runtimes of a bundle, each once, with those in `auto` (default: this
    machine's) in place of the word `auto`."""
    names = []
    for runtime in runtimes:
        if runtime != "auto":
            names.append(runtime)
        elif options.plugin:
            names.append(options.plugin.runtime)
        else:
            names += auto or [resolve()]
    return list(dict.fromkeys(names))


def _bundles(grid: Grid, root: log.Root) -> Iterator[tuple[Source, Options]]:
    """Yields the source and the export options of each bundle of a grid."""
    for path in grid.bundle:
        bundle = Bundle.open(locate(path, root))
        checkpoint = bundle.manifest.checkpoint
        source = Source(
            path=bundle.root,
            finished=True,
            name=checkpoint["name"],
            checkpoint_hash=checkpoint["sha256"],
            contents_hash=bundle.identity,
            tokenizer=bundle.tokenizer,
        )
        yield source, bundle.manifest.options
    if grid.checkpoint:
        source = _checkpoint_source(grid, root)
        step = (
            "a grid names no text: run workbench export --calibrate TEXT, and name the "
            "bundle in a grid under bundle"
        )
        for values in itertools.product(*grid.export.values()):
            options = exporter.make_options(**dict(zip(grid.export, values)))
            check_calibrated(options.preset, False, step)
            yield source, options


def _checkpoint_source(grid: Grid, root: log.Root) -> Source:
    """The checkpoint of a grid. Where it is not on this machine, the log has its hash."""
    path = locate(grid.checkpoint, root).absolute()
    name = paths.model_name(path)
    if path.is_dir():
        files = filter(Path.exists, sorted(path.iterdir()))  # a link may be broken
        sha256 = _sha256(path, tuple(map(_stamp, files)))
    else:
        runs = log.load("runs", root, {"checkpoint": name})
        sha256 = next(iter(runs["checkpoint_hash"].dropna()[::-1]), None)
    return Source(
        path=path,
        finished=False,
        name=name,
        checkpoint_hash=sha256,
        contents_hash=sha256,
        tokenizer=path,
    )


def _stamp(file: Path) -> tuple:
    """Fields of a file's status that change whenever the file is replaced. A copying
    program may give both files the same modification time; no program can set the time
    of the last status change (`st_ctime_ns`)."""
    status = file.stat()
    times = status.st_mtime_ns, status.st_ctime_ns
    return file.name, status.st_size, *times, status.st_ino


@lru_cache(maxsize=64)
def _sha256(folder: Path, stamps: tuple) -> str:
    """A checkpoint's hash, computed again once the stamp of a file has changed."""
    return Checkpoint(folder).sha256


def locate(path: str | Path, root: log.Root = None) -> Path:
    """Finds a path of a grid, which may be relative to the working folder or to the
    project of the log at `root` (see `paths.find`)."""
    project = log.project(root)
    if project == output_root():
        project = checkout()
    return paths.find(path, project)
