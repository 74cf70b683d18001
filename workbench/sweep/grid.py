"""The grid of a sweep: its schema, its reader, and the cells of its cross product."""

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
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
from workbench import log
from workbench.adopt.decoder import folder_options
from workbench.adopt.folder import AdoptedOptions
from workbench.bundle import Options
from workbench.bundle.manifest import first_fault
from workbench.check.gates import MAX_KL
from workbench.check.golden import Golden
from workbench.errors import InputError
from workbench.runtime import named
from workbench.sweep import runs, timing
from workbench.sweep.cell import find

Value = TypeVar("Value")
Axis = Annotated[list[Value], Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]

RUN_AXES = ("runtime", "precision", "fast", "compute_units", "hints", "T", "depth")
"""Fields of `Run` that are axes."""
PORTABLE_AXES = ("precision", "fast")
"""The axes of the portable runtime alone."""


def may_be_portable(runtime: str) -> bool:
    """Whether a runtime of a grid is, or on some machine may be, the portable one."""
    return runtime in ("auto", "portable")


_COMMON = (
    "n_gen",
    "repetitions",
    "cool_down_s",
    "threads",
    "min_tokens",
    "min_seconds",
)


def _runtime(name: str) -> str:
    """The name of a runtime, with its fault; another one is refused."""
    named(name)
    return name


class Hints(BaseModel, extra="forbid"):
    """Core ML's optimization hints, by its own names."""

    reshapeFrequency: Literal["Frequent", "Infrequent"] | None = None
    specializationStrategy: Literal["Default", "FastPrediction"] | None = None
    allowLowPrecisionAccumulationOnGPU: bool | None = None


class Run(BaseModel, extra="forbid"):
    """How each bundle is run; every list is an axis.

    `repetitions` are sequences within one process; `min_tokens` and `min_seconds` add
    more. `rounds` are processes: each round measures every cell once, in an order of
    its own, `cool_down_s` seconds apart."""

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
    runtime: Axis[Annotated[str, AfterValidator(_runtime)]] = ["auto"]
    precision: Axis[Literal["declared", "exact", "narrow"]] = ["declared"]
    fast: Axis[bool] = [True]
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
class Cell:
    """One bundle, one way to run it, one round.

    `judge_ids` is the prompt if this cell also validates its bundle, else empty.
    `bundle` is the path of a finished bundle, None if it is exported."""

    checkpoint: str
    options: Options
    run: dict
    round: int
    judge_ids: tuple[int, ...]
    bundle: str | None = None

    def setting(self, checkpoint_hash: str) -> str:
        """The hash that all rounds of a cell share: checkpoint (of a finished bundle:
        its identity), export options, run options."""
        return _hash([checkpoint_hash, self.options.model_dump(), self.run])

    def key(self, checkpoint_hash: str) -> str:
        """Identity of the cell: its setting, its round, and a hash of its prompt if it
        has one."""
        key = f"{self.setting(checkpoint_hash)}-{self.round}"
        if self.judge_ids:
            key += f"-{_hash(list(self.judge_ids))[:6]}"
        return key

    def columns(self, auto: str) -> dict:
        """Columns of `runs` of a run of this cell (see `runs.TIMES`); `auto` is the
        runtime that auto means."""
        runtime = self.run["runtime"]
        if runtime == "auto" and self.options.target == "coreai":
            runtime = "coreai"
        elif runtime == "auto":
            runtime = auto
        executed = runs.executed(**self.run | {"runtime": runtime})
        return runs.exported(self.options) | executed | runs.counted(self.run)


def _hash(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


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


def check_sizes(grid: Grid) -> None:
    """Refuses a grid with a cell that its bundle could not run: T, depth, n_gen,
    validate_ids."""
    for cell in cells(grid):
        S = cell.options.max_seq_len
        count = len(cell.judge_ids)
        sizes = runs.pick(cell.run, "T", "depth", "n_gen")
        timing.check_size(cell.options, **sizes, subject="grid, ")
        if count > S:
            raise InputError(
                "grid, validate_ids",
                f"{count} tokens",
                f"at most max_seq_len = {S}",
                "validate on fewer, or export more",
            )


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
    ids = Golden.load(find(grid.golden, log.default_root())).ids.tolist()
    if grid.validate_ids not in ([], ids):
        raise InputError(
            subject,
            f"validate_ids {grid.validate_ids}",
            f"the golden's {ids}",
            "leave validate_ids out",
        )
    return grid.model_copy(update={"validate_ids": ids})


def cells(grid: Grid) -> Iterator[Cell]:
    """The cross product, round by round.

    Runtimes other than the portable one have only the first values of `PORTABLE_AXES`.
    In the first round, the cells of the smallest T and depth also validate their
    bundle."""
    run = grid.run.model_dump(exclude_none=True)
    common = runs.pick(run, *(name for name in _COMMON if name in run))
    axes = runs.pick(run, *RUN_AXES).values()
    if grid.bundle:
        bundles = [(path, options_of(path)) for path in grid.bundle]
    else:
        bundles = []
        for values in itertools.product(*grid.export.values()):
            options = exporting.options(**dict(zip(grid.export, values)))
            bundles.append((None, options))
    for round_, (bundle, options) in itertools.product(range(run["rounds"]), bundles):
        for values in itertools.product(*axes):
            how = dict(zip(RUN_AXES, values)) | common
            others = any(how[name] != run[name][0] for name in PORTABLE_AXES)
            portable = options.target == "coreml" and may_be_portable(how["runtime"])
            if others and not portable:
                continue  # Core ML and Core AI lack these axes: the cell would be a duplicate
            if isinstance(options, AdoptedOptions):  # they run their literal graph only
                if how["fast"] != run["fast"][0]:
                    continue
                how["fast"] = False
            ids = ()
            if (round_, how["T"], how["depth"]) == (
                0,
                min(run["T"]),
                min(run["depth"]),
            ):
                ids = tuple(grid.validate_ids)
            yield Cell(grid.checkpoint, options, how, round_, ids, bundle)


def options_of(bundle: str) -> Options | AdoptedOptions:
    """The options of a finished bundle, or of adopted packages, that a grid names."""
    return folder_options(find(bundle, log.default_root()))
