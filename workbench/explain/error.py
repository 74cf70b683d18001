"""Splits the error of a bundle into its causes: one difference vector per cause.

From Hugging Face to the device one thing changes at a time, and each step adds a
difference to every layer's update:

    part          what changes                                         runs on
    storage       weights rounded to fp16                              Hugging Face, float32
    quantization  weights as the bundle stores them, compressed        Hugging Face, float32
    reauthoring   the bundle's program in place of the model           portable, exact
    precision     every result rounded to the dtype it declares        portable, declared
    runtime       the device in place of the portable runtime          Core ML, on a Mac alone

A plug-in's target has the first three parts alone, and only one in fp32 can be split:
`exact_runtime` refuses any other.

The vectors add up to the total; their norms do not. A fault of the bundle's program is
re-authoring error in whatever format the weights are stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch

from workbench.bundle import Bundle
from workbench.check import compare, gates, golden, run
from workbench.check.hf import Reference, Weights
from workbench.check.program import exact_runtime
from workbench.check.trace import Trace
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.progress import bar
from workbench.runtime import resolve

PARTS = ("storage", "quantization", "reauthoring", "precision", "runtime")
MODES = ("isolated", "chained")
NAMED_LAYERS = 3
"""Layers with the largest errors, whose sum and whose numbers the sentences state."""
SHOWN_TOKENS = 32
"""Tokens of a prompt that a sentence shows."""


@dataclass
class Split:
    """The error in one mode: Hugging Face's updates [L, n, C] in `reference`, and the
    difference [L, n, C] that each measured part adds, by name."""

    reference: np.ndarray
    parts: dict[str, np.ndarray]

    @property
    def total(self) -> np.ndarray:
        """[L, n, C], the sum of all parts."""
        return sum(self.parts.values())

    def layers(self) -> pd.DataFrame:
        """Relative RMS per layer of every part (null: not measured) and of the
        `total`."""
        frame = self._relative((len(self.reference), 1, -1))
        for part in set(PARTS) - self.parts.keys():
            frame[part] = None
        return frame[["layer", *PARTS, "total"]]

    def positions(self) -> pd.DataFrame:
        """Relative RMS of each measured part and of the total per layer and
        position."""
        return self._relative(self.reference.shape)

    def _relative(self, shape: tuple) -> pd.DataFrame:
        """Relative RMS over the last axis of vectors in this shape."""
        scale = compare.rms(self.reference.reshape(shape))  # [L, n], or [L, 1]
        layer, position = np.indices(scale.shape)
        columns = {"layer": layer.ravel(), "position": position.ravel()}
        for name, part in (self.parts | {"total": self.total}).items():
            ratio = compare.safe_ratio(compare.rms(part.reshape(shape)), scale)
            columns[name] = ratio.ravel()
        return pd.DataFrame(columns)

    def shares(self) -> pd.DataFrame:
        """Inner products of the parts over ‖total‖², all layers together: a part × part
        table whose cells sum to 1."""
        names = list(self.parts)
        flat = np.stack([part.ravel() for part in self.parts.values()])
        squared = (self.total**2).sum() or 1.0
        return pd.DataFrame(flat @ flat.T / squared, names, names)

    def signed_shares(self) -> pd.DataFrame:
        """Per layer, the inner product of each measured part with the total over ‖total‖²:
        the parts of a layer add up to 1, and a part that cancels others is negative. A
        layer without an error has zeros."""
        total = self.total
        error = (total**2).sum((1, 2))  # [L]
        table = pd.DataFrame({"layer": range(len(error))})
        for name, part in self.parts.items():
            product = (part * total).sum((1, 2))
            table[name] = np.divide(
                product, error, out=np.zeros_like(error), where=error > 0
            )
        return table

    def layer_shares(self) -> pd.DataFrame:
        """Per layer, its share of the squared error of all layers (`share`), and the
        square of each measured part over the layer's own squared error. Squares of parts
        add up to 1 with the products of two parts, which are not here. A layer without
        an error has zeros."""
        error = (self.total**2).sum((1, 2))  # [L]
        table = pd.DataFrame({"layer": range(len(error))})
        table["share"] = error / (error.sum() or 1.0)
        for name, part in self.parts.items():
            square = (part**2).sum((1, 2))
            table[name] = np.divide(
                square, error, out=np.zeros_like(error), where=error > 0
            )
        return table

    def token_shares(self, tokens: Sequence[str]) -> pd.DataFrame:
        """Per token, its share of the squared error of all layers (`share`).

        Args:
            tokens: the texts of the n tokens.
        """
        error = (self.total**2).sum((0, 2))  # [n]
        table = pd.DataFrame({"position": range(len(error)), "token": list(tokens)})
        return table.assign(share=error / (error.sum() or 1.0))

    def without(self, position: int) -> "Split":
        """The split of the other positions, such as those behind an attention sink, whose
        large updates outweigh all others."""
        parts = {
            name: np.delete(part, position, axis=1) for name, part in self.parts.items()
        }
        return Split(np.delete(self.reference, position, axis=1), parts)


def describe_largest(
    shares: pd.DataFrame, layer_shares: pd.DataFrame, token_shares: pd.DataFrame
) -> str:
    """The largest part of the squared error, and how few layers and which token carry that
    error, since a part that is large there says little of the others; then what the squared
    error is of.

    Args:
        shares: of `Split.shares`.
        layer_shares: of `Split.layer_shares`.
        token_shares: of `Split.token_shares`.
    """
    diagonal = pd.Series({part: shares.loc[part, part] for part in shares.index})
    largest = diagonal.idxmax()
    carrying = layer_shares["share"].nlargest(NAMED_LAYERS)
    token = token_shares.loc[token_shares["share"].idxmax()]
    name = largest.replace("reauthoring", "re-authoring").capitalize()
    return (
        f"{name} makes up {diagonal[largest]:.1%} of the squared error; {len(carrying)} "
        f"of {len(layer_shares)} layers carry {carrying.sum():.1%} of it, and token "
        f"{token['position']} alone {token['share']:.1%}. Each layer is fed "
        "Hugging Face's input; products of two parts make up "
        f"{1 - diagonal.sum():+.1%} of the squared error."
    )


def describe_prompt(token_shares: pd.DataFrame) -> str:
    """The prompt on which the error was measured, with its first tokens.

    Args:
        token_shares: of `Split.token_shares`, in any order.
    """
    tokens = token_shares.sort_values("position")["token"].tolist()
    shown = tokens[:SHOWN_TOKENS]
    # labels are ids without a tokenizer
    separator = "" if any("·" in token for token in tokens) else " "
    text = separator.join(shown).replace("·", " ").strip()
    rest = " …" if len(tokens) > len(shown) else ""
    return f"One prompt was measured, of {len(tokens)} tokens: “{text}{rest}”."


def describe_without_token(
    token_shares: pd.DataFrame, layer_shares: pd.DataFrame
) -> str:
    """The layers that carry the error of all tokens but the one with the largest share.

    Args:
        token_shares: of `Split.token_shares`, with two tokens or more.
        layer_shares: of the split without that token.
    """
    token = token_shares.loc[token_shares["share"].idxmax()]
    carrying = layer_shares.nlargest(NAMED_LAYERS, "share")
    named = [f"{row.layer} ({row.share:.1%})" for row in carrying.itertuples()]
    return (
        f"Without token {token['position']}, “{token['token']}”, the layers "
        f"{', '.join(named)} carry most of the rest."
    )


def describe_layers(table: pd.DataFrame, part: str) -> str:
    """The layers that carry most of the squared error, and in how many layers a part is
    the largest, in two sentences.

    Args:
        table: of `Split.layer_shares`.
        part: the largest part of all layers together.
    """
    count = len(table)
    carrying = table.nlargest(NAMED_LAYERS, "share")
    named = [f"{row.layer} ({row.share:.1%})" for row in carrying.itertuples()]
    squares = table.drop(columns=["layer", "share"])
    is_largest = squares[part].gt(0) & squares[part].eq(squares.max(axis=1))
    return (
        f"The layers that carry most are {', '.join(named)}; even shares would be "
        f"{len(carrying) / count:.1%} together. By layer, {part} is the largest part in "
        f"{is_largest.sum()} of {count}; its unweighted mean share over layers is "
        f"{squares[part].mean():.1%}."
    )


def split_error(
    checkpoint: Checkpoint,
    bundle: Bundle,
    ids: Sequence[int],
    *,
    reference: golden.Golden | None = None,
    runtime: str = "portable",
    compute_units: str = "CPU_AND_NE",
) -> dict[str, Split]:
    """Splits the error of `bundle` over `ids`, isolated (every layer reads the golden's
    input) and chained, in calls of t_max tokens. Returns a split for each of `MODES`.

    Args:
        reference: the checkpoint's golden of `ids` (default: computed now).
        runtime: the device whose part is measured, on `compute_units`. With `portable`
            and with the runtime of a plug-in's target no device is measured.

    Raises:
        InputError: a runtime that this machine lacks, or one that does not give the
            update of every layer; see also `exact_runtime`.
    """
    runs = plan_runs(bundle, runtime)
    source = reference or golden.make_golden(checkpoint, ids)
    golden.check_exported_from(source, bundle)
    weights = {
        "storage": fp16_weights(checkpoint, bundle),
        "quantization": golden.stored_weights(checkpoint, bundle),
    }
    expected = updates(source.trace)
    splits = {mode: Split(expected, {}) for mode in MODES}
    # mode → updates before the change of a part
    before = dict.fromkeys(MODES, expected)
    for part in bar([*weights, *runs], "error", unit="stage"):
        if part in weights:
            model = Reference(checkpoint, weights[part])
            measure = partial(reference_updates, model, source)
        else:
            planned = runs[part]
            decoder = Decoder(
                bundle, planned.runtime, planned.precision, compute_units=compute_units
            )
            measure = partial(bundle_updates, decoder, source)
        for mode in MODES:
            after = measure(mode)
            splits[mode].parts[part] = after - before[mode]
            before[mode] = after
    return splits


@dataclass(frozen=True)
class Execution:
    """How a decoder runs the bundle to measure a part."""

    runtime: str
    precision: str


def plan_runs(bundle: Bundle, runtime: str) -> dict[str, Execution]:
    """Part → the run of the bundle that measures it, for the parts after
    `quantization`.

    Raises:
        InputError: see `split_error`.
    """
    options = bundle.manifest.options
    runs = {"reauthoring": Execution(exact_runtime(bundle), "exact")}
    if not options.plugin:
        runs["precision"] = Execution("portable", "declared")
        if (device := resolve(runtime)) != "portable":
            runs["runtime"] = Execution(device, "declared")
    check_shows_updates(bundle, runs)
    return runs


def check_shows_updates(bundle: Bundle, runs: dict[str, Execution]) -> None:
    """Refuses a bundle if one of the runs does not give the update of every layer.

    Raises:
        InputError: packages of another exporter, or shards of several layers on another
            runtime than the portable one.
    """
    subject = f"bundle {bundle.root.name}"
    if not bundle.manifest.shows_hidden:
        actual = "packages of another exporter, which output only caches and logits"
        step = "run: workbench explain variant BUNDLE, or explain ranges BUNDLE"
        raise InputError(subject, actual, "a bundle of workbench export", step)
    if bundle.manifest.options.layers_per_shard == 1:
        return
    # runtimes other than the portable one show only the output of a shard's last layer
    for planned in runs.values():
        if planned.runtime != "portable":
            actual = (
                f"shards of several layers, of which {planned.runtime} shows the last"
            )
            step = "export with --layers-per-shard 1"
            raise InputError(subject, actual, "one layer per shard", step)


def updates(trace: Trace) -> np.ndarray:
    """The updates of all layers, [L, n, C] float64."""
    return np.float64([layer.update for layer in trace.layers])


def reference_updates(model: Reference, source: golden.Golden, mode: str) -> np.ndarray:
    """The updates of Hugging Face's layers over the golden's tokens, [L, n, C]
    float64."""
    feed = source.trace if mode == "isolated" else None
    return updates(model.run(source.ids, feed=feed, head=False))


def bundle_updates(decoder: Decoder, source: golden.Golden, mode: str) -> np.ndarray:
    """The updates of a bundle's layers over the golden's tokens in calls of t_max, [L,
    n, C] float64."""
    T = decoder.options.t_max
    (trace,) = run.trace_bundle(decoder, source, (T, mode), forced=False)
    return updates(trace)


def fp16_weights(checkpoint: Checkpoint, bundle: Bundle) -> Weights:
    """The checkpoint's values rounded to fp16 as an uncompressed bundle would store
    them: with the offset that `bundle` adds to a tensor (Gemma's 1 + γ) before the
    rounding, and without it afterwards."""
    offsets = {}
    for shard in bundle.manifest.shards:
        offsets |= shard.offsets

    def read(name: str) -> torch.Tensor:
        offset = offsets.get(name, 0.0)
        return (checkpoint.tensor(name) + offset).half().float() - offset

    return read


def error_gates(splits: dict[str, Split]) -> list[gates.Gate]:
    """Gate `reauthoring`: the re-authoring error is within its limit."""
    errors = splits["isolated"].layers()["reauthoring"].fillna(np.inf)
    worst = int(errors.idxmax())
    reason = "exact arithmetic on the stored weights against Hugging Face, relative RMS"
    gate = gates.at_most(
        "reauthoring",
        float(errors[worst]),
        gates.REAUTHORING,
        f"{reason}: layer {worst}",
    )
    return [gate]
