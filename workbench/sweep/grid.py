"""The grid of a sweep: its schema, its reader, and the cells of its cross product."""

import itertools
import math
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import yaml
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
from workbench.bundle.manifest import first_fault
from workbench.check.gates import MAX_KL
from workbench.decode.checks import token_ids
from workbench.errors import InputError
from workbench.files import checkout, output_root, read_bytes
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import check_runtime, resolve
from workbench.sweep import identity, timing

Value = TypeVar("Value")
Axis = Annotated[list[Value], Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]

MAX_CELLS = 100_000  # of a sweep, all rounds together
MAX_GRID_BYTES = 1 << 22
RUN_AXES = """runtime precision fast reads compute_units hints T depth""".split()
"""Fields of `Run` that are axes."""
STEP = "see docs/guide.md: Sweeps"


class Hints(BaseModel, extra="forbid"):
    """Core ML's optimization hints, by its own names."""

    reshapeFrequency: Literal["Frequent", "Infrequent"] | None = None
    specializationStrategy: Literal["Default", "FastPrediction"] | None = None
    allowLowPrecisionAccumulationOnGPU: bool | None = None


class Run(BaseModel, extra="forbid", allow_inf_nan=False):
    """How each bundle is run; every list is an axis.

    `repetitions` are sequences within one process; `min_tokens` and `min_seconds` add
    more. `rounds` are processes: each round measures every cell once, in an order of
    its own, `cool_down_s` seconds apart. `reads` are the rows of a cache that attention
    reads: those that are `used`, or `all`."""

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
    """A sweep: bundles, the ways to run them, and the prompt on which each bundle is
    validated.

    Bundles are exported from `checkpoint` with lists of options in `export`, or are the
    finished ones in `bundle`, which are validated against the stored `golden` on its
    prompt. `max_kl` is the user's limit on the mean KL in nats."""

    checkpoint: str = ""
    bundle: list[str] = []
    golden: str | None = None
    export: dict[Literal[tuple(Options.model_fields)], Axis] = {}
    run: Run = Run()
    validate_ids: list[int] = []
    max_kl: NonNegativeFloat = MAX_KL
    experiment: str = Field("sweep", pattern=r"^\w[\w-]*$")

    @model_validator(mode="after")
    def _fits(self) -> "Grid":
        one, several = bool(self.checkpoint), bool(self.bundle)
        if one == several or (several and self.export):
            raise ValueError("either checkpoint (and export), or bundle")
        if several and self.validate_ids and not self.golden:
            raise ValueError("golden (run: workbench golden CHECKPOINT --out G)")
        if (self.run.min_seconds or 0) >= self.run.timeout_s:
            raise ValueError("min_seconds below timeout_s")
        axes = [getattr(self.run, name) for name in RUN_AXES]
        lengths = [len(axis) for axis in (*self.export.values(), *axes)]
        if self.run.rounds * math.prod(lengths) > MAX_CELLS:
            raise ValueError(f"at most {MAX_CELLS:,} cells")
        return self


@dataclass(frozen=True)
class Source:
    """A checkpoint whose bundles are exported, or a finished bundle, at a path of this
    machine: name and hash of the checkpoint (of one that is not at hand, the hash of the
    newest run of its name), `contents`, the identity of a finished bundle, else the
    same hash, and the folder of its tokenizer."""

    path: Path
    finished: bool
    name: str
    checkpoint_hash: str | None
    contents: str | None
    tokenizer: Path | None


@dataclass(frozen=True)
class Cell:
    """One bundle, one way to run it, one round; `judge_ids` is the prompt if this cell
    also validates its bundle, else empty."""

    source: Source
    options: Options
    run: dict
    round: int
    judge_ids: tuple[int, ...]

    def columns(self, auto: str | None = None) -> dict:
        """The columns of `runs` that the cell decides, both hashes among them.

        Args:
            auto: the runtime that auto means; default: the one that it means here.
        """
        runtime = self.run["runtime"]
        if runtime == "auto":
            target = self.options.plugin
            runtime = target.runtime if target else auto or resolve()
        how = identity.executed(**self.run | {"runtime": runtime})
        counts = {name: self.run.get(name) for name in identity.COUNTS}
        chosen, source = identity.chosen(self.options), self.source
        return identity.exported(self.options) | {
            **how,
            **counts,
            "values": identity.values(source.checkpoint_hash, chosen, how),
            "setting": identity.setting(source.contents, chosen, how, counts),
            "round": self.round,
            "prompt": identity.prompt(self.judge_ids),
        }


def load_grid(path: str | Path) -> Grid:
    """Reads a grid; unknown keys and values are refused before anything runs."""
    try:
        mapping = yaml.safe_load(read_bytes(Path(path), MAX_GRID_BYTES).decode("utf-8"))
    except InputError:
        raise
    # ValueError: not UTF-8, or an invalid date
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as problem:
        found = getattr(problem, "strerror", None) or " ".join(str(problem).split())
        raise InputError(f"grid {path}", found, "a YAML file", STEP) from None
    return make_grid(mapping, f"grid {path}")


def make_grid(mapping: dict, subject: str = "grid") -> Grid:
    """A grid from a mapping, every export option and value checked."""
    try:
        grid = Grid.model_validate(mapping)
    except ValidationError as problem:
        where, first = first_fault(problem, "the grid")
        needed = first["msg"]
        if first["type"] == "extra_forbidden":
            part = {0: Grid, 1: Run}.get(where.count("."), Hints)
            needed = f"one of the keys {', '.join(part.model_fields)}"
        found = f"{where}: {reprlib.repr(first.get('input'))}"
        raise InputError(subject, found, needed, STEP) from None
    # refuses wrong values of export options
    sources = {source for source, _ in _bundles(grid, None)}
    if len({source.path.name for source in sources}) < len(grid.bundle):
        needed, step = "bundles of different names", "rename one"
        raise InputError(subject, f"bundle: {grid.bundle}", needed, step)
    if grid.golden:
        from workbench.check.golden import Golden

        golden = Golden.load(find(grid.golden).absolute())
        ids, known = golden.ids.tolist(), {None, golden.sha256}
        if others := {source.checkpoint_hash for source in sources} - known:
            found = f"golden of checkpoint {golden.sha256[:12]}"
            step = "run: workbench golden CHECKPOINT --out G"
            raise InputError(subject, found, f"one of {min(others)[:12]}", step)
        if grid.validate_ids not in ([], ids):
            found, needed = f"validate_ids {grid.validate_ids}", f"the golden's {ids}"
            raise InputError(subject, found, needed, "leave validate_ids out")
        known = {"validate_ids": ids, "golden": str(golden.file)}
        grid = grid.model_copy(update=known)
    return grid


def check_cells(every: list[Cell], grid: Grid, here: bool = True) -> None:
    """Refuses a cell that its bundle could not run: T, depth, n_gen, validate_ids, and
    a runtime that this machine lacks, if the cells run `here`."""
    for cell in every:
        if here:
            resolve(cell.run["runtime"], cell.options.plugin)
        sizes = {name: cell.run[name] for name in ("T", "depth", "n_gen")}
        timing.check_size(cell.options, **sizes)
        count, S = len(cell.judge_ids), cell.options.max_seq_len
        if count > S:
            needed, step = f"at most max_seq_len = {S}", "validate on fewer tokens"
            raise InputError("grid, validate_ids", f"{count} tokens", needed, step)
    for source in {cell.source for cell in every}:
        if source.finished:
            V = Bundle.open(source.path).manifest.dims.V
        else:
            V = Checkpoint(source.path).config.vocab_size
        token_ids(grid.validate_ids, V, "validate_ids of the grid")


def cells(grid: Grid, root: log.Root = None) -> Iterator[Cell]:
    """The cross product, round by round. In the first round, the cells of the smallest T
    and depth also validate their bundle.

    Args:
        root: the log beside whose project relative paths may be.
    """
    run = grid.run.model_dump(exclude_none=True)
    axes = {name: run.pop(name) for name in RUN_AXES}
    least = 0, min(axes["T"]), min(axes["depth"])
    bundles = list(_bundles(grid, root))
    for round_, (source, options) in itertools.product(range(run["rounds"]), bundles):
        for values in itertools.product(*axes.values()):
            how = dict(zip(axes, values)) | run
            validates = (round_, how["T"], how["depth"]) == least
            ids = tuple(grid.validate_ids) if validates else ()
            yield Cell(source, options, how, round_, ids)


def _bundles(grid: Grid, root: log.Root) -> Iterator[tuple[Source, Options]]:
    """The grid's bundles: where each comes from, and its export options."""
    for path in grid.bundle:
        bundle = Bundle.open(find(path, root))
        name, sha256 = (bundle.manifest.checkpoint[key] for key in ("name", "sha256"))
        where = bundle.identity, bundle.tokenizer
        yield Source(bundle.root, True, name, sha256, *where), bundle.manifest.options
    if grid.checkpoint:
        path = find(grid.checkpoint, root).absolute()
        name = paths.model_name(path)
        if path.is_dir():
            files = filter(Path.exists, sorted(path.iterdir()))  # a link may be broken
            sha256 = _sha256(path, tuple(map(_stamp, files)))
        else:
            known = log.load("runs", root, {"checkpoint": name})["checkpoint_hash"]
            sha256 = next(iter(known.dropna()[::-1]), None)
        for values in itertools.product(*grid.export.values()):
            options = exporter.make_options(**dict(zip(grid.export, values)))
            yield Source(path, False, name, sha256, sha256, path), options


def _stamp(file: Path) -> tuple:
    """What tells a file from another one at its path: a copying program may give both
    the same time, and no program sets the time of the last change of status."""
    status = file.stat()
    times = status.st_mtime_ns, status.st_ctime_ns
    return file.name, status.st_size, *times, status.st_ino


@lru_cache(maxsize=64)
def _sha256(folder: Path, stamps: tuple) -> str:
    """A checkpoint's hash, computed again when a file has changed."""
    return Checkpoint(folder).sha256


def find(path: str | Path, root: log.Root = None) -> Path:
    """The place of a grid's path, beside the project of the log at `root` too (see
    `paths.find`)."""
    project = log.project(root)
    if project == output_root():
        project = checkout()
    return paths.find(path, project)
