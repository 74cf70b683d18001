"""Gates `program` and `scores`: whether a bundle's program computes Hugging Face's
model on the weights that the bundle stores. Both run in float32 and differ only in the
order of sums, so that one limit holds for every compression and family."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from workbench.bundle import Bundle
from workbench.bundle.names import (
    ATTN_MASK,
    MATRIX_STATE,
    PENDING_STATE,
    REMAINDER_STATE,
    split_layer,
)
from workbench.bundle.states import MATRIX, PENDING, TAIL
from workbench.check import fidelity, gates
from workbench.check import reach as positions
from workbench.check.gates import Gate
from workbench.check.metrics import over, rms
from workbench.check.reach import Stretch
from workbench.decode import Decoder
from workbench.decode.calls import head_logits
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import State

# One limit on the relative RMS of a difference, per layer, position, T and tensor. Both
# sides sum the same terms in another order. Rounding n partial sums by 2^-24 each moves
# a sum of n random terms by about sqrt(n) * 2^-24 of itself, 4e-6 for the n = 5,000 of
# an MLP; what cancels further is what the floor below is for.
LIMIT = 1e-5
# The floor, in steps of 2^-23 of the stream: about 16 roundings follow each other in a
# layer, on both sides, each of 0.29 steps RMS, together sqrt(32) * 0.29 = 1.6, hence 2.
# What a step becomes is measured: what Hugging Face's own model makes of inputs that
# are one step off (`Stretch.nudged`), or the step itself where that is larger.
STEP, STEPS = 2.0**-23, 2
BLOCKED = 2.0**-24  # softmax weight of a blocked column that float32 takes for none


def exact_runtime(bundle: Bundle) -> str:
    """The runtime that runs a bundle's programs in `exact` arithmetic.

    Raises:
        InputError: fp16 programs of Core AI, which no runtime here runs in fp32.
    """
    options = bundle.manifest.options
    if options.target == "coreai" and options.program_dtype == "fp16":
        raise InputError(
            f"bundle {bundle.root.name}",
            "fp16 programs of Core AI",
            "fp32 programs, whose arithmetic is exact",
            "export with --program-dtype fp32, or run crosscheck on the Core ML bundle",
        )
    return "coreai" if options.target == "coreai" else "portable"


def program_gates(
    decoder: Decoder,
    checkpoint: Checkpoint,
    *,
    Ts: Sequence[int] | None = None,
    progress: bool = False,
) -> list[Gate]:
    """Gates `program` and `scores` of a portable decoder in `exact` arithmetic;
    arguments as those of `program_errors`."""
    errors, scores = program_errors(decoder, checkpoint, Ts=Ts, progress=progress)
    worst = errors.loc[errors["error"].idxmax()]
    place = f"{worst['mode']}, sequence {worst['seq']}, position {worst['position']}"
    if worst["layer"] >= 0:
        place = f"layer {worst['layer']}, {place}"
    reason = (
        "relative RMS against Hugging Face's model with the stored weights, "
        f"worst of {len(errors)}: "
        f"{worst['tensor']}, {place}, T = {worst['T']}"
    )
    return [
        gates.at_most("program", float(worst["error"]), LIMIT, reason),
        scores.gate(),
    ]


def program_errors(
    decoder: Decoder,
    checkpoint: Checkpoint,
    *,
    Ts: Sequence[int] | None = None,
    progress: bool = False,
) -> tuple[pd.DataFrame, "Scores"]:
    """(error of every layer, position, T, tensor, mode and sequence, as a multiple of
    what it is compared with; the scores).

    Isolated, every layer is fed Hugging Face's input: all positions in calls of the
    smallest T, in calls of the largest, and in calls of the others in turn; scaled
    inputs in calls of the largest. Chained, each layer is fed the one before, in calls
    of every T in turn. Where T alternates, sequences of a batch take different ones if
    the bundle allows it.

    Args:
        Ts: tokens a call (default: as `validate`).
    """
    from tqdm.auto import tqdm

    options = decoder.options
    plan = positions.plan_reach(decoder.manifest)
    Ts = list(Ts or fidelity.default_ts(options))
    *places, scaled = positions.reach_stretches(decoder.bundle, checkpoint, plan)
    ends = sorted({min(Ts), max(Ts)})
    between = sorted(Ts)[1:-1]
    runs = [(scaled, ends[-1:], True)]
    for place in places:
        runs += [(place, [T], True) for T in ends]
        if between:
            runs.append((place, between, True))
        runs.append((place, Ts, False))
    scores = Scores()
    passes = []
    head_calls = []
    for sequences, sizes, isolated in runs:
        one = ProgramPass(decoder, sequences, isolated, scores)
        one.begin(sizes, ragged=options.kv_write == "mask")
        passes.append(one)
        if isolated:
            head_calls += [(sequences, size) for size in sizes]
    shards = tqdm(
        decoder.layers, desc=f"program, {plan}", unit="shard", disable=not progress
    )
    with decoder.set_aside():
        decoder.begin()
        for index, model in enumerate(shards):
            states = [positions.state_before(model, one.stretches) for one in passes]
            fidelity.run_shard(decoder, index, passes, states)
        parts = head_errors(decoder, head_calls)
        for one in passes:
            one.finish()
            for seq in range(options.batch):
                parts += one.errors(seq)
    return fidelity.table(parts), scores


@dataclass
class Scores:
    """Largest softmax weight of a blocked column, and where it was; `count`: softmaxes
    looked at."""

    weight: float = 0.0
    place: str = ""
    count: int = 0

    def gate(self) -> Gate:
        if not self.count:
            reason = "no softmax over a cache was seen in the program"
            return gates.not_run("scores", reason)
        reason = (
            f"largest softmax weight of a blocked column, of {self.count} softmaxes"
        )
        return gates.at_most("scores", self.weight, BLOCKED, reason + self.place)

    def add(
        self, layer: int, weights: np.ndarray, blocked: np.ndarray, scores: np.ndarray
    ) -> None:
        """weights [H, T, S] of one sequence, blocked [1, T, S], scores [H, T, S] before
        the mask was added."""
        self.count += 1
        largest = np.max(weights, where=blocked, initial=0.0)
        if not largest <= self.weight:
            self.weight = float(np.nan_to_num(largest, nan=np.inf))
            self.place = f": layer {layer}, scores up to {np.abs(scores).max():.3g}"


class ProgramPass(fidelity.Pass):
    """A pass over one stretch per sequence that also looks at the scores."""

    def __init__(
        self, decoder: Decoder, stretches: Sequence[Stretch], isolated: bool, scores
    ):
        starts = [stretch.start for stretch in stretches]
        super().__init__(decoder, [s.golden for s in stretches], isolated, True, starts)
        self.stretches = stretches
        self.scores = scores
        self.mode = "isolated" if isolated else "chained"
        self.state_parts = [[] for _ in stretches]

    def hook(self, shard, spans, io):
        replaced = super().hook(shard, spans, io)
        last_sum = {}

        def look(op, outputs):
            if op.kind == "add":
                last_sum["masked"] = outputs[0]
            elif op.kind == "softmax":
                self.look(shard, op, spans, io, outputs[0], last_sum.get("masked"))
            return replaced(op, outputs) if replaced else None

        if shard.kind in ("layers", "router"):
            return look
        return None

    def after(self, shard, ios, state) -> None:
        super().after(shard, ios, state)
        for seq, (parts, trace) in enumerate(
            zip(self.state_parts, self.traces, strict=True)
        ):
            for name, *values in self.state_values(state, seq):
                layer, leaf = split_layer(name)
                errors = _state_errors(*values, self.end(seq))
                parts.append(_rows(leaf, layer, *errors, trace.T.max()))

    def look(self, shard, op, spans, io, weights, masked) -> None:
        layer = split_layer(shard.modules.get(op.outputs[0][0], ""))[0]
        if layer is None:
            layer = shard.layers[0]
        mask = io[ATTN_MASK + self.decoder.manifest.layers[layer].suffix]
        if weights.shape[-2:] != mask.shape[-2:]:
            return  # a softmax over experts
        if masked is None or masked.shape != weights.shape:
            masked = weights
        for seq, span in enumerate(spans):
            columns = slice(span.stop - span.start)
            if columns.stop:
                own = mask[seq, :, columns]
                scores = masked[seq, :, columns].numpy() - own
                self.scores.add(
                    layer, weights[seq, :, columns].numpy(), own < 0, scores
                )

    def errors(self, seq: int) -> list[dict[str, object]]:
        """Errors of everything that one sequence computed, parts of a `fidelity.table`;
        chained ones per layer that they come from."""
        golden = self.goldens[seq]
        trace = self.traces[seq]
        stretch = self.stretches[seq]
        nudged = stretch.nudged[self.mode]
        again = nudged.golden
        positions = stretch.start + np.arange(len(trace.T))
        parts = list(self.state_parts[seq])

        def add(name: str, layer: int, error: np.ndarray) -> None:
            parts.append(_rows(name, layer, error, positions, trace.T))

        for layer, hidden in trace.hidden.items():
            name = "hidden"
            expected = golden.hidden[layer]
            floor = _floor(expected, again.hidden[layer])
            if self.isolated:
                name = "update"
                expected = golden.update[layer]
                hidden = hidden - trace.x[layer]
            add(name, layer, _errors(expected, hidden, floor))
        for layer, router in trace.router.items():
            expected = golden.router[layer]
            floor = _floor(expected, again.router[layer])
            add("router", layer, _errors(expected, router, floor))
        for layer, experts in trace.experts.items():
            differs = experts[:, 0] != golden.expert[layer]
            add("expert", layer, differs * golden.margin[layer])
        if trace.logits is not None:
            floor = _logit_floor(stretch) + _floor(stretch.logits, nudged.logits)
            add("logits", -1, _errors(stretch.logits, trace.logits, floor))
        if not self.isolated:
            # errors of the layers before, and of the layer itself, add up
            for part in parts:
                layers = len(golden.x) if part["layer"] == -1 else part["layer"]
                part["error"] = part["error"] / (layers + 1)
        return [part | {"seq": seq, "mode": self.mode} for part in parts]

    def end(self, seq: int) -> int:
        """Tokens in the cache after the pass."""
        return int(self.starts[seq]) + len(self.traces[seq].T)

    def state_values(self, state: State, seq: int) -> Iterator[tuple]:
        """(name, expected, actual, nudged value) of every logical state of a shard, of
        one sequence."""
        options = self.decoder.options
        stretch = self.stretches[seq]
        for name in state.shard.states:
            kind = state.shard.kind_of(name)
            if kind is PENDING or name.endswith(REMAINDER_STATE):
                continue  # is in the matrix, which is compared
            actual = np.asarray(state.read(name)[seq], np.float32)
            if options.undo and kind is TAIL:
                # rows for undoing, which no reference has
                actual = actual[options.t_max :]
            if options.state_pair and kind is MATRIX:
                other = name.replace(MATRIX_STATE, REMAINDER_STATE)
                remainder = state.read(other)[seq]
                actual = actual + np.asarray(remainder, np.float32)
            if options.undo and kind is MATRIX:
                other = name.replace(MATRIX_STATE, PENDING_STATE)
                pending = np.asarray(state.read(other)[seq], np.float32)
                actual = positions.with_pending(actual, pending)
            expected, again = [
                positions.expected_value(actual.shape, name, s.after, self.end(seq))
                for s in (stretch, stretch.nudged[self.mode])
            ]
            yield name, expected, actual, again


def head_errors(
    decoder: Decoder, calls: Sequence[tuple[Sequence[Stretch], int]]
) -> list[dict[str, object]]:
    """Errors of the logits of calls of the head, each over the last T positions of a
    stretch of every sequence, from Hugging Face's hidden state; parts as of
    `ProgramPass.errors`."""
    scale = decoder.manifest.stream_scale
    hidden = []
    for stretches, T in calls:
        hidden.append(np.stack([s.last[-T:].T / scale for s in stretches]))
    parts = []
    calls_logits, _ = head_logits(decoder, hidden)
    for (stretches, T), all_logits in zip(calls, calls_logits, strict=True):
        for seq, (stretch, logits) in enumerate(
            zip(stretches, all_logits, strict=True)
        ):
            floor = _logit_floor(stretch)[-T:]
            error = _errors(stretch.logits[-T:], logits, floor)
            position = stretch.start + np.arange(len(stretch.last))[-T:]
            rows = _rows("logits", -1, error, position, len(position))
            parts.append(rows | {"seq": seq, "mode": "isolated"})
    return parts


def _rows(tensor: str, layer: int, error: np.ndarray, position, T) -> dict[str, object]:
    """One row per position."""
    return {
        "tensor": tensor,
        "layer": layer,
        "position": position,
        "T": T,
        "error": error,
    }


def _state_errors(
    expected: np.ndarray, actual: np.ndarray, again: np.ndarray, end: int
):
    """(error, position) of every row of a state [.., rows, D] after `end` tokens; rows
    without a token must be zeros."""
    rows = expected.shape[-2]
    expected, actual, again = (
        np.moveaxis(a, -2, 0).reshape(rows, -1) for a in (expected, actual, again)
    )
    floor = np.where(expected.any(1), _floor(expected, again), rms(expected.ravel()))
    return _errors(expected, actual, floor), end - 1 - (
        end - 1 - np.arange(rows)
    ) % rows


def _errors(reference: np.ndarray, actual: np.ndarray, floor: np.ndarray):
    """RMS of the difference over that of the reference plus `floor`, along the last
    axis; inf where it is no number."""
    ratio = over(rms(actual - reference), rms(reference) + floor)
    return np.nan_to_num(ratio, nan=np.inf)


def _floor(reference: np.ndarray, nudged: np.ndarray) -> np.ndarray:
    """What `_errors` adds to the scale so that rounding of the stream is no error."""
    step = np.maximum(rms(nudged - reference), STEP * rms(reference))
    return STEPS / LIMIT * step


def _logit_floor(stretch: Stretch) -> np.ndarray:
    """The same of logits that are smaller than their rows of the head can make them;
    see `Stretch`."""
    return np.maximum(stretch.logit_rms - rms(stretch.logits), 0.0)
