"""The cross product of export and run options, one logged run per cell; what is in the log already is not run again."""

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pandas as pd
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workbench import log, runs
from workbench import export as exporting
from workbench.bundle import Bundle, Options
from workbench.bundle.contract import VERSION
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.eval import golden, speed
from workbench.eval.validate import validate
from workbench.models.checkpoint import Checkpoint

Several = Annotated[list[int], Field(min_length=1)]


class Run(BaseModel):
    """How each bundle is run; every list is an axis."""

    model_config = ConfigDict(extra="forbid")
    T: Several = [1]
    depth: Several = [0]
    n_gen: int = Field(16, ge=1)
    repetitions: int = Field(3, ge=1)
    runtime: list[Literal["auto", "portable", "coreml"]] = ["auto"]
    precision: list[Literal["declared", "exact", "narrow"]] = ["declared"]
    compute_units: list[Literal["CPU_AND_NE", "CPU_ONLY", "CPU_AND_GPU", "ALL"]] = ["CPU_AND_NE"]


class Grid(BaseModel):
    """A sweep: `checkpoint`, lists of export options, run options, and the prompt each bundle is validated on, if any."""

    model_config = ConfigDict(extra="forbid")
    checkpoint: str
    export: dict[str, list] = {}
    run: Run = Run()
    validate_ids: list[int] = []
    experiment: str = "34"


@dataclass(frozen=True)
class Cell:
    """One bundle and one way to run it."""

    checkpoint: str
    options: Options
    run: dict
    validate_ids: tuple[int, ...]

    def config(self, checkpoint_hash: str) -> dict:
        return {"cell": self.key(checkpoint_hash), "export": self.options.model_dump(), "run": self.run}

    def key(self, checkpoint_hash: str) -> str:
        """Identity of the cell: checkpoint contents, export options, run options."""
        text = json.dumps([checkpoint_hash, self.options.model_dump(), self.run, self.validate_ids], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_grid(path: str | Path) -> Grid:
    """Reads a grid; unknown keys and values are refused before anything runs."""
    try:
        found = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as problem:
        raise InputError(f"grid {path}", type(problem).__name__, "a YAML file", "see README: sweeps") from None
    return make_grid(found, f"grid {path}")


def make_grid(found: dict, subject: str = "grid") -> Grid:
    """A grid from a mapping, every export option and value checked."""
    try:
        grid = Grid.model_validate(found)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the grid"
        raise InputError(subject, f"{where}: {first.get('input')!r}", first["msg"], "see README: sweeps") from None
    unknown = sorted(grid.export.keys() - Options.model_fields.keys())
    if unknown:
        raise InputError(subject, f"export options {', '.join(unknown)}", f"{', '.join(Options.model_fields)}",
                         "correct the key")  # fmt: skip
    for _ in cells(grid):
        pass
    return grid


def cells(grid: Grid) -> Iterator[Cell]:
    """The cross product, bundles outermost, so that each is exported and loaded once."""
    names, lists = list(grid.export), list(grid.export.values())
    run = grid.run
    for values in itertools.product(*lists):
        options = exporting.options(**dict(zip(names, values, strict=True)))
        for runtime, precision, units, T, depth in itertools.product(
            run.runtime, run.precision, run.compute_units, run.T, run.depth
        ):
            how = {"T": T, "depth": depth, "n_gen": run.n_gen, "repetitions": run.repetitions, "runtime": runtime,
                   "precision": precision, "compute_units": units}  # fmt: skip
            yield Cell(grid.checkpoint, options, how, tuple(grid.validate_ids))


def bundle_for(checkpoint: Checkpoint, options: Options, folder: Path, progress: bool = False) -> Bundle:
    """The bundle of a checkpoint and options, exported into `folder` when it is not there yet."""
    text = json.dumps([VERSION, checkpoint.sha256, options.model_dump(), exporting.versions()], sort_keys=True)
    path = folder / f"{checkpoint.path.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    if (path / "bundle.json").exists():
        return Bundle.open(path)
    return exporting.export(checkpoint.path, path, progress=progress, **options.model_dump())


def sweep(grid: Grid, *, root: str | Path | None = None, bundles: Path | None = None, progress: bool = True) -> dict:
    """Runs every cell that the log does not hold yet.

    Args:
        root: the log's folder.
        bundles: where bundles are cached (default: data/bundles beside the experiments).

    Returns:
        {cells, done, resumed, failed, log}: counts, and the log's folder.
    """
    from tqdm.auto import tqdm

    root = Path(root) if root else log.default_root()
    bundles = bundles or root.parent.parent / "data" / "bundles"
    checkpoint = Checkpoint(_find(grid.checkpoint, root))
    todo, finished = list(cells(grid)), done_cells(root)
    counts = {"cells": len(todo), "done": 0, "resumed": 0, "failed": 0, "log": str(root)}
    decoder, loaded, validated = None, None, set()
    for cell in tqdm(todo, desc="sweep", unit="cell", disable=not progress):
        if cell.key(checkpoint.sha256) in finished:
            counts["resumed"] += 1
            continue
        wanted = (cell.options, cell.run["runtime"], cell.run["precision"], cell.run["compute_units"])
        try:
            if wanted != loaded:
                bundle = bundle_for(checkpoint, cell.options, bundles)
                decoder, loaded = Decoder(bundle, *wanted[1:]), wanted
            first = wanted not in validated and bool(cell.validate_ids)
            _run_cell(cell, decoder, checkpoint, grid.experiment, root, first)
            validated.add(wanted)
            counts["done"] += 1
        except InputError as problem:
            _record_failure(cell, checkpoint, grid.experiment, root, problem)
            counts["failed"] += 1
    return counts


def stored(grid: Grid, root: str | Path | None = None) -> dict[str, pd.DataFrame]:
    """What the log holds of a grid: tables `samples`, `layers`, `fidelity` with settings joined on, newest runs only."""
    found = {name: runs.table(name, grid.experiment, root) for name in ("samples", "layers", "fidelity")}
    axes = {**grid.export, "checkpoint": [Path(grid.checkpoint).name], "T": grid.run.T}
    for name, frame in found.items():
        for axis, values in axes.items():
            if axis in frame and not (axis == "T" and name == "fidelity"):
                frame = frame[frame[axis].isin(values)]
        found[name] = frame
    return found


def _find(checkpoint: str, root: Path) -> Path:
    """A checkpoint path as given, or relative to the project that the log belongs to (notebooks run elsewhere)."""
    here = Path(checkpoint)
    return here if here.exists() or here.is_absolute() else root.parent.parent / checkpoint


def done_cells(root: Path) -> set[str]:
    """Keys of the cells that ended well in the log at `root`, on a machine like this one: times belong to a machine."""
    here = log.environment()
    found = log.load("runs", root=root)
    found = found[(found["status"] == "ok") & (found["chip"] == here["chip"]) & (found["platform"] == here["platform"])]
    configs = (json.loads(text) for text in found["config"].dropna())
    return {config["cell"] for config in configs if "cell" in config}


def _run_cell(cell: Cell, decoder: Decoder, checkpoint: Checkpoint, experiment: str, root: Path, judge: bool) -> None:
    how = {name: cell.run[name] for name in ("T", "depth", "n_gen", "repetitions")}
    samples = speed.measure(decoder, **how)
    row = runs.describe(decoder.bundle, decoder) | {"T": cell.run["T"], "command": "sweep"}
    fidelity, config = None, cell.config(checkpoint.sha256)
    if judge:
        judged = validate(decoder, golden.make(checkpoint, cell.validate_ids))
        fidelity, row["verdict"] = judged.rows, judged.verdict
        config["gates"] = [g.json() for g in judged.gates]
    runs.record(experiment, row | {"config": config}, root=root, fidelity=fidelity, samples=samples,
                layers=speed.layer_table(samples, decoder))  # fmt: skip


def _record_failure(cell: Cell, checkpoint: Checkpoint, experiment: str, root: Path, problem: InputError) -> None:
    row = {"checkpoint": checkpoint.path.name, "checkpoint_hash": checkpoint.sha256, "status": "failed",
           "reason": str(problem), "command": "sweep", "config": cell.config(checkpoint.sha256), "T": cell.run["T"],
           "max_seq_len": cell.options.max_seq_len, "t_max": cell.options.t_max}  # fmt: skip
    runs.record(experiment, row, root=root)
