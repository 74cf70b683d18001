"""Gate `program`: whether a bundle's program computes Hugging Face's
model on the weights that the bundle stores. Both run in float32 and differ only in the
order of sums, so that one limit holds for every compression and family."""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from workbench.bundle import Bundle
from workbench.bundle.names import split_layer
from workbench.check import fidelity, gates
from workbench.check import reach as positions
from workbench.check.gates import Gate
from workbench.check.metrics import over, rms
from workbench.check.reach import Stretch
from workbench.decode import Decoder
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


def exact_runtime(bundle: Bundle) -> str:
    """The runtime that runs a bundle's programs in `exact` arithmetic.

    Raises:
        InputError: fp16 programs of a plug-in's target, which none runs in fp32.
    """
    options = bundle.manifest.options
    if options.plugin and options.program_dtype == "fp16":
        raise InputError(
            f"bundle {bundle.root.name}",
            f"fp16 programs of target {options.target}",
            "programs that some runtime here runs in exact arithmetic",
            "export it for a target of fp32 programs, or for Core ML",
        )
    return options.interpreter


def program_gate(
    decoder: Decoder,
    checkpoint: Checkpoint,
    *,
    Ts: Sequence[int] | None = None,
    progress: bool = False,
) -> Gate:
    """The gate on a portable decoder in `exact` arithmetic;
    arguments as those of `program_errors`."""
    errors = program_errors(decoder, checkpoint, Ts=Ts, progress=progress)
    worst = errors.loc[errors["error"].idxmax()]
    place = f"{worst['mode']}, sequence {worst['seq']}, position {worst['position']}"
    if worst["layer"] >= 0:
        place = f"layer {worst['layer']}, {place}"
    reason = (
        "relative RMS against Hugging Face's model with the stored weights, "
        f"worst of {len(errors)}: "
        f"{worst['tensor']}, {place}, T = {worst['T']}"
    )
    return gates.at_most("program", float(worst["error"]), limit(decoder), reason)


def limit(decoder: Decoder) -> float:
    """`LIMIT`, or what the constants of programs of another exporter may cost."""
    return max(LIMIT, decoder.manifest.constants_error)


def program_errors(
    decoder: Decoder,
    checkpoint: Checkpoint,
    *,
    Ts: Sequence[int] | None = None,
    progress: bool = False,
) -> pd.DataFrame:
    """The error of every layer, position, T, tensor, mode and sequence, as a multiple
    of what it is compared with.

    Isolated, every layer is fed Hugging Face's input: all positions in calls of the
    smallest T, in calls of the largest, and in calls of the others in turn; scaled
    inputs in calls of the largest. Chained, each layer is fed the one before, in calls
    of every T in turn, and half of t_max tokens in t_max columns; where layers show no
    hidden state, all are chained. Where T alternates, sequences of a batch take
    different ones if the bundle allows it.

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
    isolated = decoder.manifest.shows_hidden
    runs = [(scaled, ends[-1:], True)] if isolated else []
    for place in places:
        runs += [(place, [T], isolated) for T in ends]
        if between:
            runs.append((place, between, isolated))
        runs.append((place, Ts, False))
    ragged = options.kv_write == "mask"  # which takes dummy columns
    if ragged:
        runs.append((places[-1], [max(1, options.t_max // 2)], False))
    passes = []
    head_calls = []
    for number, (sequences, sizes, isolated) in enumerate(runs, 1):
        one = ProgramPass(decoder, sequences, isolated)
        padded = ragged and number == len(runs)
        one.begin(sizes, ragged, options.t_max if padded else 0)
        passes.append(one)
        if isolated:
            head_calls += [(sequences, size) for size in sizes]
    shards = tqdm(
        decoder.layers, desc=f"program, {plan}", unit="shard", disable=not progress
    )
    for model in shards:
        states = [positions.state_before(model, one.stretches) for one in passes]
        fidelity.run_shard(decoder, model, passes, states)
    parts = head_errors(decoder, head_calls)
    for one in passes:
        one.finish()
        for seq in range(options.batch):
            parts += one.errors(seq)
    return fidelity.table(parts)


class ProgramPass(fidelity.Pass):
    """A pass over one stretch per sequence."""

    def __init__(self, decoder: Decoder, stretches: Sequence[Stretch], isolated: bool):
        starts = [stretch.start for stretch in stretches]
        super().__init__(decoder, [s.golden for s in stretches], isolated, True, starts)
        self.stretches = stretches
        self.mode = "isolated" if isolated else "chained"
        self.state_parts = [[] for _ in stretches]

    def after(self, shard, ios, state) -> None:
        super().after(shard, ios, state)
        for seq, (parts, trace) in enumerate(
            zip(self.state_parts, self.traces, strict=True)
        ):
            for name, *values in self.state_values(state, seq):
                layer, leaf = split_layer(name)
                errors = _state_errors(*values, self.end(seq))
                parts.append(_rows(leaf, layer, *errors, trace.T.max()))

    def errors(self, seq: int) -> list[dict[str, object]]:
        """Errors of everything that one sequence computed, parts of a `fidelity.table`;
        chained ones per layer that they come from."""
        golden = self.goldens[seq]
        trace = self.traces[seq]
        stretch = self.stretches[seq]
        again = stretch.nudged[self.mode].golden
        positions = stretch.start + np.arange(len(trace.T))
        parts = list(self.state_parts[seq])

        def add(name: str, layer: int, error: np.ndarray) -> None:
            parts.append(_rows(name, layer, error, positions, trace.T))

        for layer, hidden in trace.hidden.items():
            name = "hidden"
            expected = golden[f"hidden.{layer}"]
            floor = _floor(expected, again[f"hidden.{layer}"])
            if self.isolated:
                name = "update"
                expected = golden.update(layer)
                hidden = hidden - trace.x[layer]
            add(name, layer, _errors(expected, hidden, floor))
        for layer, router in trace.router.items():
            expected = golden[f"router.{layer}"]
            floor = _floor(expected, again[f"router.{layer}"])
            add("router", layer, _errors(expected, router, floor))
        for layer, experts in trace.experts.items():
            differs = experts != golden[f"expert.{layer}"]
            add("expert", layer, (differs * golden[f"margin.{layer}"])[:, 0])
        if trace.logits is not None:
            expected = golden["logits"]
            floor = _logit_floor(stretch) + _floor(expected, again["logits"])
            add("logits", -1, _errors(expected, trace.logits, floor))
        if not self.isolated:
            # errors of the layers before, and of the layer itself, add up
            for part in parts:
                layers = golden.layers if part["layer"] == -1 else part["layer"]
                part["error"] = part["error"] / (layers + 1)
        return [part | {"seq": seq, "mode": self.mode} for part in parts]

    def end(self, seq: int) -> int:
        """Tokens in the cache after the pass."""
        return int(self.starts[seq]) + len(self.traces[seq].T)

    def state_values(self, state: State, seq: int) -> Iterator[tuple]:
        """(name, expected, actual, nudged value) of every logical state of a shard, of
        one sequence."""
        stretch = self.stretches[seq]
        for name in state.shard.states:
            actual = np.asarray(state.read(name)[seq], np.float32)
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
    parts = []
    for stretches, T in calls:
        hidden = np.stack([s.last[-T:].T / scale for s in stretches])
        all_logits = decoder.logits(hidden)
        for seq, (stretch, logits) in enumerate(
            zip(stretches, all_logits, strict=True)
        ):
            floor = _logit_floor(stretch)[-T:]
            error = _errors(stretch.golden["logits"][-T:], logits, floor)
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
    return np.maximum(stretch.logit_rms - rms(stretch.golden["logits"]), 0.0)
