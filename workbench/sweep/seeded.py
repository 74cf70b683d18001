"""Checkpoints of seeded weights, equal on every machine, and the grids of first
light."""

from pathlib import Path

import numpy as np
import torch
import yaml

from workbench.files import locked
from workbench.models.checkpoint import random
from workbench.sweep.grid import Grid, make_grid
from workbench.sweep.identity import digest

VALIDATED = {"validate_ids": [1, 42, 100, 200, 7, 9]}
COMMON = {"num_hidden_layers": 1, "vocab_size": 512, "tie_word_embeddings": False}


class Noise:
    """Seeded float32 values in [-1.75, 1.75), of variance 1, from 11 bits of Philox
    each: they are equal on every machine."""

    def __init__(self, seed: int):
        self.bits = np.random.Philox(key=seed)

    def __call__(self, shape) -> torch.Tensor:
        count = int(np.prod(shape))
        words = self.bits.random_raw(-(-count // 4)).astype("<u8").view("<u2")[:count]
        values = (words & 0x7FF).astype(np.float32) - 1024
        values *= np.float32(1.75 / 1024)
        return torch.from_numpy(values.reshape(tuple(shape)))


def seeded(config: dict, folder: Path) -> Path:
    """The checkpoint of a configuration in `folder`, written where it is missing."""
    config = COMMON | config
    path = folder / f"seeded-{digest(config)}"
    with locked(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            random(path, noise=Noise(0), **config)
    return path


def first_light(project: Path, runtime: str = "auto") -> list[Grid]:
    """The shipped grids of first light, their checkpoints in `project`."""
    text = Path(__file__).with_name("first_light.yaml").read_text()
    grids = []
    for rung in yaml.safe_load(text)["grids"]:
        source = seeded(rung["checkpoint"], project / "data" / "checkpoints")
        run = {"n_gen": 8, "repetitions": 1, "runtime": [runtime], "timeout_s": 600}
        grid = {"checkpoint": str(source), "experiment": "first-light"}
        grid |= {"export": rung["export"], "run": run | rung.get("run", {})}
        grids.append(make_grid(grid | (VALIDATED if rung.get("validated") else {})))
    return grids
