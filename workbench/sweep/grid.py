"""The grid of a sweep: its schema, its reader, and the cells of its cross product."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
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

from workbench import export as exporting
from workbench import log, paths
from workbench.bundle import Bundle, Options
from workbench.bundle.manifest import first_fault
from workbench.check.gates import MAX_KL
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import check_runtime, resolve
from workbench.sweep import identity, timing

Value = TypeVar("Value")
Axis = Annotated[list[Value], Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]

PORTABLE_AXES = ("precision", "fast", "reads")
"""The axes of the portable runtime alone."""
RUN_AXES = ("runtime", *PORTABLE_AXES, "compute_units", "hints", "T", "depth")
"""Fields of `Run` that are axes."""


class Hints(BaseModel, extra="forbid"):
    """Core ML's optimization hints, by its own names."""

    reshapeFrequency: Literal["Frequent", "Infrequent"] | None = None
    specializationStrategy: Literal["Default", "FastPrediction"] | None = None
    allowLowPrecisionAccumulationOnGPU: bool | None = None


class Run(BaseModel, extra="forbid"):
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

    @model_validator(mode="after")
    def _in_time(self) -> "Run":
        if self.min_seconds and self.min_seconds >= self.timeout_s:
            raise ValueError(f"needs min_seconds below timeout_s, {self.timeout_s:g}")
        return self


class Grid(BaseModel, extra="forbid"):
    """A sweep: bundles, the ways to run them, and the prompt on which each bundle is
    validated.

    Bundles are exported from `checkpoint` with lists of options in `export`, or are the
    finished ones in `bundle`, which are validated against the stored `golden` on its
    prompt. `max_kl` is the user's limit on the mean KL in nats."""

    checkpoint: str = ""
    bundle: list[str] = []
    golden: str | None = None
    export: dict[str, Axis] = {}
    run: Run = Run()
    validate_ids: list[int] = []
    max_kl: NonNegativeFloat = MAX_KL
    experiment: str = Field("sweep", pattern=r"^\w[\w-]*$")


@dataclass(frozen=True)
class Source:
    """A checkpoint whose bundles are exported, or a finished bundle, at a path of this
    machine."""

    path: Path
    finished: bool
    root: Path

    @cached_property
    def bundle(self):
        """The finished bundle; its files are not checked."""
        return Bundle.unchecked(self.path)

    @property
    def name(self) -> str:
        """Of the checkpoint."""
        if self.finished:
            return self.bundle.manifest.checkpoint["name"]
        return paths.model_name(self.path)

    @cached_property
    def checkpoint_hash(self) -> str | None:
        """Of a checkpoint that is not at hand: of the newest run of its name."""
        if self.finished:
            return self.bundle.manifest.checkpoint["sha256"]
        if self.path.is_dir():
            return _sha256(self.path, _stamps(self.path))
        rows = log.load("runs", self.root, {"checkpoint": self.name})
        return rows["checkpoint_hash"].dropna().iloc[-1] if len(rows) else None

    @cached_property
    def contents(self) -> str | None:
        """What the hash `setting` begins with."""
        return self.bundle.identity if self.finished else self.checkpoint_hash


def _stamps(folder: Path) -> tuple:
    """Names, sizes and times of a folder's files."""
    files = [(path, path.stat()) for path in sorted(folder.iterdir())]
    return tuple((path.name, stat.st_size, stat.st_mtime_ns) for path, stat in files)


@lru_cache(maxsize=64)
def _sha256(folder: Path, stamps: tuple) -> str:
    """A checkpoint's hash, which is computed again when a file has changed."""
    return Checkpoint(folder).sha256


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
        options, source = identity.chosen(self.options), self.source
        hashes = {
            "values": identity.values(source.checkpoint_hash, options, how),
            "setting": identity.setting(source.contents, options, how, counts),
        }
        prompt = identity.digest(*self.judge_ids)[:6] if self.judge_ids else None
        about = {"round": self.round, "prompt": prompt}
        return identity.exported(self.options) | how | counts | hashes | about


def load_grid(path: str | Path) -> Grid:
    """Reads a grid; unknown keys and values are refused before anything runs."""
    try:
        mapping = yaml.safe_load(Path(path).read_text())
    # ValueError: not UTF-8, or an invalid date
    except (OSError, ValueError, yaml.YAMLError) as problem:
        raise InputError(
            f"grid {path}",
            getattr(problem, "strerror", None) or " ".join(str(problem).split()),
            "a YAML file",
            "see README: sweeps",
        ) from None
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
        raise InputError(
            subject, f"{where}: {first.get('input')!r}", needed, "see README: sweeps"
        ) from None
    if unknown := sorted(grid.export.keys() - Options.model_fields.keys()):
        raise InputError(
            subject,
            f"export options {', '.join(unknown)}",
            ", ".join(Options.model_fields),
            "correct the key",
        )
    grid = _with_golden(grid, subject)
    list(cells(grid))  # refuses wrong values of export options
    return grid


def _with_golden(grid: Grid, subject: str) -> Grid:
    """The grid with the prompt of its golden; refuses keys that exclude each other."""
    if bool(grid.checkpoint) == bool(grid.bundle) or (grid.bundle and grid.export):
        raise InputError(
            subject,
            "checkpoint or export beside bundle, or neither checkpoint nor bundle",
            "checkpoint (and export options), or a list of finished bundles",
            "leave one of them out",
        )
    if grid.golden is None:
        if grid.bundle and grid.validate_ids:
            raise InputError(
                subject,
                "validate_ids of bundles without golden",
                "golden",
                "run: workbench golden CHECKPOINT --out G",
            )
        return grid
    from workbench.check.golden import Golden

    ids = Golden.load(find(grid.golden)).ids.tolist()
    if grid.validate_ids not in ([], ids):
        raise InputError(
            subject,
            f"validate_ids {grid.validate_ids}",
            f"the golden's {ids}",
            "leave validate_ids out",
        )
    return grid.model_copy(update={"validate_ids": ids})


def check_sizes(every: list[Cell]) -> None:
    """Refuses a cell that its bundle could not run: T, depth, n_gen, validate_ids."""
    for cell in every:
        sizes = {name: cell.run[name] for name in ("T", "depth", "n_gen")}
        timing.check_size(cell.options, **sizes, subject="grid, ")
        count, S = len(cell.judge_ids), cell.options.max_seq_len
        if count > S:
            raise InputError(
                "grid, validate_ids",
                f"{count} tokens",
                f"at most max_seq_len = {S}",
                "validate on fewer, or export more",
            )


def cells(grid: Grid, root: log.Root = None) -> Iterator[Cell]:
    """The cross product, round by round.

    Runtimes other than the portable one have only the first values of `PORTABLE_AXES`.
    In the first round, the cells of the smallest T and depth also validate their
    bundle.

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
            others = any(how[name] != axes[name][0] for name in PORTABLE_AXES)
            portable = not options.plugin and how["runtime"] in ("auto", "portable")
            if others and not portable:
                continue  # other runtimes lack these axes: the cell would be a duplicate
            first = (round_, how["T"], how["depth"]) == least
            ids = tuple(grid.validate_ids) if first else ()
            yield Cell(source, options, how, round_, ids)


def _bundles(grid: Grid, root: log.Root) -> Iterator[tuple[Source, Options]]:
    """The grid's bundles: where each comes from, and its export options."""
    whole = log.whole(root)
    for path in grid.bundle:
        source = Source(find(path, root).resolve(), True, whole)
        yield source, source.bundle.manifest.options
    if grid.checkpoint:
        source = Source(find(grid.checkpoint, root).absolute(), False, whole)
        for values in itertools.product(*grid.export.values()):
            yield source, exporting.options(**dict(zip(grid.export, values)))


def find(path: str | Path, root: log.Root = None) -> Path:
    """The place of a grid's path, beside the project of the log at `root` too (see
    `paths.find`)."""
    return paths.find(path, log.project(root))


def varied_axes(grid: Grid) -> list[str]:
    """The axes of a grid that have several values, by the names of their columns in
    `runs`."""
    run = {name: getattr(grid.run, name) for name in RUN_AXES}
    axes = grid.export | {"bundle": grid.bundle} | run
    return [axis for axis, values in axes.items() if len(values) > 1]
