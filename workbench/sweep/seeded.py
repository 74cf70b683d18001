"""The grids of first light. The weights of their checkpoints are seeded, and equal on
every machine."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import yaml

from workbench import paths
from workbench.files import locked
from workbench.models.random_checkpoint import write_random_checkpoint
from workbench.sweep.grid import Grid, make_grid
from workbench.sweep.identity import digest

VALIDATE_IDS = [1, 42, 100, 200, 7, 9]
"""The prompt of the grids that validate their bundles."""


def noise(seed: int) -> Callable:
    """A function from a shape to seeded float32 values of mean 0 and variance 1, which
    are equal on every machine: Philox is the same everywhere, and the uniform values
    are scaled without a function whose rounding may differ."""
    draw = np.random.Generator(np.random.Philox(key=seed)).random
    width = np.float32(12**0.5)
    return lambda shape: torch.from_numpy((draw(tuple(shape), "f4") - 0.5) * width)


def first_light(project: Path, runtime: str = "auto") -> list[Grid]:
    """The shipped grids of first light (`first_light.yaml`): those of its section
    `validated`, whose bundles are compared with Hugging Face's model and with the portable
    runtime, then those of `timed`.

    Args:
        project: the folder to whose `data/checkpoints` missing checkpoints are written.
        runtime: of all cells.
    """
    shipped = yaml.safe_load(Path(__file__).with_name("first_light.yaml").read_text())
    grids = []
    for section, ids in (("validated", VALIDATE_IDS), ("timed", [])):
        for entry in shipped[section]:
            config = shipped["layer"] | entry.get("checkpoint", {})
            path = project / "data" / "checkpoints" / f"seeded-{digest(config)}"
            _write_checkpoint(path, config)
            run = {"n_gen": 8, "repetitions": 1, "runtime": [runtime], "timeout_s": 600}
            grid = {
                "checkpoint": str(path),
                "experiment": "first-light",
                "export": entry["export"],
                "run": run | entry.get("run", {}),
                "validate_ids": ids,
            }
            grids.append(make_grid(grid))
    return grids


def _write_checkpoint(path: Path, config: dict) -> None:
    """Writes a checkpoint of a configuration with seeded weights, unless it exists."""
    with locked(path.with_name(f".{path.name}.lock")):
        if path.exists():
            return
        partial = paths.unfinished_folder(path)
        shutil.rmtree(partial, ignore_errors=True)  # of an earlier, interrupted call
        write_random_checkpoint(partial, noise=noise(0), **config).rename(path)
