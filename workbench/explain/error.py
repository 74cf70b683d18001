"""Splits the error of a bundle into its causes: one difference vector per cause.

From Hugging Face to the device one thing changes at a time, and each step adds a
difference to every layer's update:

    part          what changes                                         runs on
    storage       weights rounded to fp16                              Hugging Face, float32
    quantization  weights as the bundle stores them, compressed        Hugging Face, float32
    reauthoring   the bundle's program in place of the model           portable, exact
    precision     every result rounded to the dtype it declares        portable, declared
    runtime       the device in place of the portable runtime          Core ML, on a Mac alone

Of a plug-in's target in fp32, the first three parts are all.

The vectors add up to the total; their norms do not. A fault of the bundle's program is
re-authoring error in whatever format the weights are stored."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from workbench.bundle import Bundle
from workbench.check import gates, golden, metrics, run
from workbench.check.hf import Weights
from workbench.check.program import exact_runtime
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import resolve

PARTS = ("storage", "quantization", "reauthoring", "precision", "runtime")
MODES = ("isolated", "chained")


@dataclass
class Split:
    """Hugging Face's updates [L, n, C] of one mode, `reference`, and the difference that
    each part makes; a part that was not measured is absent."""

    reference: np.ndarray
    parts: dict[str, np.ndarray]

    @property
    def total(self) -> np.ndarray:
        return sum(self.parts.values())

    def layers(self) -> pd.DataFrame:
        """Relative RMS per layer of every part (null: not measured) and of the
        `total`."""
        frame = self._relative((len(self.reference), 1, -1))
        for part in PARTS:
            if part not in self.parts:
                frame[part] = None
        return frame[["layer", *PARTS, "total"]]

    def positions(self) -> pd.DataFrame:
        """Relative RMS of each measured part and of the total per layer and
        position."""
        return self._relative(self.reference.shape)

    def _relative(self, shape: tuple) -> pd.DataFrame:
        """Relative RMS over the last axis of vectors in this shape."""
        scale = metrics.rms(self.reference.reshape(shape))
        layer, position = np.indices(scale.shape)
        frame = pd.DataFrame({"layer": layer.ravel(), "position": position.ravel()})
        for name, part in (self.parts | {"total": self.total}).items():
            errors = metrics.over(metrics.rms(part.reshape(shape)), scale)
            frame[name] = errors.ravel()
        return frame

    def shares(self) -> pd.DataFrame:
        """Inner products of the parts over ‖total‖², all layers together: a part × part
        table whose cells sum to 1."""
        names = list(self.parts)
        vectors = np.stack(list(self.parts.values()))
        flat = vectors.reshape(len(names), -1)
        squared = (self.total**2).sum() or 1.0
        return pd.DataFrame(flat @ flat.T / squared, names, names)


def needs_hidden(bundle: Bundle) -> None:
    """Refuses a bundle of which only caches and logits can be compared."""
    if not bundle.manifest.shows_hidden:
        subject = f"updates of {bundle.root.name}"
        actual = "packages of another exporter, which show caches and logits alone"
        step = "run: workbench explain with --only variant, or --only ranges"
        raise InputError(subject, actual, "a bundle of workbench export", step)


def split_error(
    checkpoint: Checkpoint,
    bundle: Bundle,
    ids: Sequence[int],
    *,
    T: int | None = None,
    reference: golden.Golden | None = None,
    runtime: str = "portable",
    compute_units: str = "CPU_AND_NE",
    progress: bool = False,
) -> dict[str, Split]:
    """Splits the error of `bundle` over `ids`, isolated (every layer reads the golden's
    input) and chained.

    Args:
        T: tokens per call (default: t_max).
        reference: the checkpoint's golden of `ids` (default: made now).
        runtime: the device whose part is measured, on `compute_units`; `portable`, and
            any runtime of a plug-in's target: no device.
    """
    from tqdm.auto import tqdm

    needs_hidden(bundle)
    runs = _runs(bundle, runtime)
    source = reference or golden.make_golden(checkpoint, ids)
    stages = _stages(checkpoint, bundle, source, T, runs, compute_units)
    stages = dict(tqdm(stages, desc="error", unit="stage", disable=not progress))
    splits = {}
    for mode, *updates in zip(MODES, *stages.values(), strict=True):
        updates = np.stack([_updates(source), *updates])
        differences = np.diff(updates, axis=0)
        parts = dict(zip(stages, differences, strict=True))
        splits[mode] = Split(updates[0], parts)
    return splits


def _runs(bundle: Bundle, runtime: str) -> list[tuple[str, str, str]]:
    """(part, runtime, precision) of each run of the bundle's own program.

    Raises:
        InputError: a runtime that is not here; see also `exact_runtime`.
    """
    runs = [("reauthoring", exact_runtime(bundle), "exact")]
    if not bundle.manifest.options.plugin:
        runs.append(("precision", "portable", "declared"))
        runtime = resolve(runtime)
        if runtime != "portable":
            runs.append(("runtime", runtime, "declared"))
    return runs


def _stages(
    checkpoint, bundle, source, T, runs, compute_units
) -> Iterator[tuple[str, list[np.ndarray]]]:
    """(part, [isolated, chained] updates once the part's cause is in place), in
    order."""
    readers = {"storage": fp16_weights, "quantization": golden.stored_weights}
    for part, read in readers.items():
        weights = read(checkpoint, bundle)
        arguments = checkpoint, source.ids, weights, "stored"
        isolated = golden.make_golden(*arguments, feed=source.values)
        yield part, [_updates(isolated), _updates(golden.make_golden(*arguments))]
    for part, *how in runs:
        decoder = Decoder(bundle, *how, compute_units=compute_units)
        tokens = T or decoder.options.t_max
        yield part, [updates(decoder, source, tokens, mode) for mode in MODES]


def _updates(source: golden.Golden) -> np.ndarray:
    """What each layer adds, [L, n, C] float64."""
    return np.stack([np.float64(source[f"update.{i}"]) for i in range(source.layers)])


def fp16_weights(checkpoint: Checkpoint, bundle: Bundle) -> Weights:
    """The checkpoint's values rounded to fp16 as an uncompressed bundle would store
    them, with the offsets that `bundle` adds."""
    offsets = {}
    for shard in bundle.manifest.shards:
        offsets |= shard.offsets

    def read(name: str) -> torch.Tensor:
        offset = offsets.get(name, 0.0)
        return (checkpoint.tensor(name) + offset).half().float() - offset

    return read


def updates(decoder: Decoder, source: golden.Golden, T: int, mode: str) -> np.ndarray:
    """The difference of each layer's output and input, [L, n, C] float64, over the
    golden's tokens in calls of T.

    Raises:
        InputError: a runtime that does not show every layer's output (all but the
            portable one, inside a shard of several layers).
    """
    trace = run.run_golden(decoder, source, T, mode, forced=False)
    names = [f"hidden.{layer}" for layer in range(source.layers)]
    if not trace.keys() >= {*names}:
        actual = f"layers inside a shard that {decoder.runtime} does not show"
        step = "export with --layers-per-shard 1"
        subject = f"bundle {decoder.bundle.root.name}"
        raise InputError(subject, actual, "one layer a shard", step)
    after = np.float64([trace[name] for name in names])
    if mode == "isolated":
        return after - np.stack([trace[f"x.{layer}"] for layer in range(len(names))])
    embedded = decoder.bundle.embed(source.ids[None])
    embedded = embedded * decoder.manifest.stream_scale
    return after - np.concatenate([embedded, after[:-1]])


def error_gates(splits: dict[str, Split]) -> list[gates.Gate]:
    """Gate `reauthoring`: the re-authoring error is within its limit."""
    errors = splits["isolated"].layers()["reauthoring"]
    worst = int(errors.fillna(np.inf).idxmax())
    exact = "exact arithmetic on the stored weights against Hugging Face, relative RMS"
    return [
        gates.at_most(
            "reauthoring",
            float(errors[worst]),
            gates.REAUTHORING,
            f"{exact}: layer {worst}",
        )
    ]
