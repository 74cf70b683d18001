"""The shards of the ladder (`rungs.yaml`): their bundles, exported from seeded weights,
their calls, and the shipped portable results."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import yaml

from workbench.bundle import Bundle, Shard
from workbench.bundle.names import X
from workbench.check import metrics
from workbench.check.price import HALF_ULP
from workbench.decode.inputs import Host
from workbench.export import options as export_options
from workbench.export.package import WEIGHTS, read_package, serialize
from workbench.models.checkpoint import Checkpoint, random
from workbench.runtime import Model, load_shard
from workbench.sweep.cell import bundle_for

DATA = Path(__file__).parent / "shipped"
DIGESTS, OUTPUTS = DATA / "packages.json", DATA / "outputs.npz"
OF_EVERY_CHECKPOINT = {
    "num_hidden_layers": 1,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Rung:
    """One shard of the ladder: one change of the rung `over`.

    `kind` is the shard that runs: `layers`, or the `head`, which has no state.
    """

    name: str
    says: str
    options: dict
    over: str | None = None
    kind: str = "layers"
    checkpoint: str = "small"


@cache
def _table() -> dict:
    return yaml.safe_load(Path(__file__).with_name("rungs.yaml").read_text())


def ladder() -> dict[str, Rung]:
    """Every rung by its name, in order."""
    return {row["name"]: Rung(**row) for row in _table()["rungs"]}


class Noise:
    """Seeded values in [-1.75, 1.75), of variance 1, from 11 bits of Philox each: they
    are exact in fp16 and equal on every machine."""

    def __init__(self, seed: int):
        self.bits = np.random.Philox(key=seed)

    def __call__(self, shape) -> torch.Tensor:
        count = int(np.prod(shape))
        words = self.bits.random_raw(-(-count // 4)).astype("<u8").view("<u2")[:count]
        values = (np.int32(words & 0x7FF) - 1024) * np.float32(1.75 / 1024)
        return torch.from_numpy(values.reshape(tuple(shape)))


def seeded_checkpoint(name: str, folder: Path, **changed) -> Path:
    """The checkpoint `name` of the table in `folder`, written where it is missing;
    `changed` are keywords of its configuration."""
    path = folder / "-".join([name, *map(str, changed.values())])
    if not path.exists():
        config = OF_EVERY_CHECKPOINT | _table()["checkpoints"][name] | changed
        random(path, noise=Noise(0), **config)
    return path


def exported(source: Path, folder: Path, **options) -> Bundle:
    """The bundle of a checkpoint in `folder`, exported where it is missing."""
    options = export_options(**{"max_seq_len": 64} | options)
    return bundle_for(Checkpoint(source), options, folder)


def opened(rung: Rung, folder: Path) -> tuple[Bundle, Shard]:
    """The shard that a rung runs, behind its bundle in `folder`."""
    source = seeded_checkpoint(rung.checkpoint, folder)
    bundle = exported(source, folder, **rung.options)
    return bundle, bundle.shards(rung.kind)[0]


def digest(package: Path) -> str:
    """SHA-256 of a package's program and weights, without the metadata of the library's
    build."""
    spec = read_package(package)
    spec.description.metadata.Clear()
    return hashlib.sha256(
        serialize(spec) + (package / WEIGHTS).read_bytes()
    ).hexdigest()


def tokens_per_call(bundle: Bundle) -> list[int]:
    """T of every call of a rung: each fixed shape twice, or 1, t_max and 1 again."""
    options = bundle.manifest.options
    shapes = options.shapes or (1, options.t_max)
    return [*shapes, shapes[0]]


def call_inputs(bundle: Bundle, shard: Shard, T: int, offset: int, seed: int) -> dict:
    """Inputs of one call of T tokens behind `offset` others; `x` is seeded."""
    B = bundle.manifest.options.batch
    C = bundle.manifest.dims.C
    host = Host(bundle.manifest)
    inputs = host.inputs(np.full(B, offset), np.full(B, T), T)
    inputs[X] = host.plane(Noise(seed)((B, C, T)).numpy())
    return {name: inputs[name] for name in shard.inputs}


def fresh_state(model: Model):
    """The state of a new sequence, None for a shard without one."""
    return model.make_state() if model.shard.states else None


def run_calls(bundle: Bundle, model: Model) -> Iterator[tuple[int, np.ndarray]]:
    """T and the output of each call of a rung, one sequence from its start."""
    state, offset = fresh_state(model), 0
    output = next(iter(model.shard.outputs))
    for seed, T in enumerate(tokens_per_call(bundle), 1):
        inputs = call_inputs(bundle, model.shard, T, offset, seed)
        yield T, model.predict(inputs, state)[output]
        offset += T


@dataclass(frozen=True)
class Expected:
    """The portable runtime's `output` of one call of a rung, and the `distance` (RMS)
    of arithmetic that rounds sums to fp16."""

    output: np.ndarray
    distance: float

    def ratio(self, output: np.ndarray) -> float:
        """The distance of another runtime's output over `distance`; the limit is
        `device.DEVICE_FACTOR`, as in the gate `device`."""
        error = _rms(np.float64(self.output) - output)
        return float(metrics.over(np.float64(error), np.float64(self.distance)))


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.float64(values) ** 2)))


def portable_results(bundle: Bundle, shard: Shard) -> list[Expected]:
    """One result for each call of a rung, by the portable runtime."""
    calls, results = [], []
    for precision in ("declared", "narrow"):
        model = load_shard(bundle, shard, "portable", precision=precision)
        calls.append(run_calls(bundle, model))
    for (_, output), (_, narrow) in zip(*calls):
        distance = max(_rms(np.float64(output) - narrow), HALF_ULP * _rms(output))
        results.append(Expected(output, distance))
    return results


def shipped_digests() -> dict[str, str]:
    """Rung → `digest` of its package exported on Linux."""
    return json.loads(DIGESTS.read_text())


def shipped_results(name: str) -> list[Expected]:
    """The results of a rung that came with the project."""
    results = []
    with np.load(OUTPUTS) as arrays:
        for i, distance in enumerate(arrays[f"{name} distance"].tolist()):
            results.append(Expected(np.float32(arrays[f"{name} {i}"]), distance))
    return results
