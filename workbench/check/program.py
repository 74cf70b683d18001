"""Gate `program`: whether a bundle's program computes Hugging Face's
model on the weights that the bundle stores. Both run in float32 and differ only in the
order of sums, so that one limit holds for every compression and family."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from workbench.bundle import Bundle
from workbench.bundle.names import split_layer
from workbench.check import gates, run
from workbench.check import reach as positions
from workbench.check.compare import compare
from workbench.check.gates import Gate
from workbench.check.hf import Values
from workbench.check.metrics import rms
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


def room(moved: np.ndarray, size: np.ndarray) -> np.ndarray:
    """What an error is divided by: what it is relative to and, so that rounding of the
    stream is no error, the floor."""
    return size + STEPS / LIMIT * np.maximum(moved, STEP * size)


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
    worst = errors.loc[errors["ratio"].idxmax()]
    place = f"{worst['mode']}, sequence {worst['seq']}, position {worst['position']}"
    if worst["layer"] >= 0:
        place = f"layer {worst['layer']}, {place}"
    reason = (
        "relative RMS against Hugging Face's model with the stored weights, "
        f"worst of {len(errors)}: "
        f"{worst['tensor']}, {place}, T = {worst['T']}"
    )
    return gates.at_most("program", float(worst["ratio"]), limit(decoder), reason)


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
    """Rows of `compare` with mode and sequence `seq`, for every layer, position, T and
    tensor: updates (chained: hidden states), states, router states, logits, and choices
    of experts, whose `ratio` is the margin of a wrong one.

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
    Ts = list(Ts or run.default_ts(options))
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
    for model in tqdm(decoder.layers, "program", unit="shard", disable=not progress):
        states = [positions.state_before(model, one.stretches) for one in passes]
        run.run_shard(decoder, model, passes, states)
    tables = head_errors(decoder, head_calls)
    for one in passes:
        one.finish()
        tables += [one.errors(seq) for seq in range(options.batch)]
    return pd.concat(tables, ignore_index=True)


class ProgramPass(run.Pass):
    """A pass over one stretch per sequence."""

    def __init__(self, decoder: Decoder, stretches: Sequence[Stretch], isolated: bool):
        starts = [stretch.start for stretch in stretches]
        super().__init__(decoder, [s.golden for s in stretches], isolated, True, starts)
        self.stretches = stretches
        self.mode = "isolated" if isolated else "chained"
        self.states = [[] for _ in stretches]

    def after(self, shard, ios, state) -> None:
        super().after(shard, ios, state)
        for seq, tables in enumerate(self.states):
            tables += [self.state_errors(state, seq, name) for name in shard.states]

    def errors(self, seq: int) -> pd.DataFrame:
        """Errors of everything that one sequence computed; chained ones per layer that
        they come from."""
        stretch, values = self.stretches[seq], self.values[seq]
        golden = stretch.golden
        update = "update" if self.isolated else "hidden"
        rows = compare(
            golden.values,
            values,
            stretch.nudged[self.mode],
            room=room,
            sizes={"logits": stretch.logit_rms},
            tensors=(update, "router", "logits"),
            similar=False,
        )
        tables = list(self.states[seq])
        if len(rows):  # foreign programs may show states alone
            tables.append(rows.assign(position=rows["position"] + stretch.start))
        for layer in range(golden.layers):
            if f"expert.{layer}" in values:
                tables.append(self.choices(seq, layer))
        rows = pd.concat(tables, ignore_index=True)
        if not self.isolated:
            # errors of the layers before, and of the layer itself, add up
            rows["ratio"] /= rows["layer"].where(rows["layer"] >= 0, golden.layers) + 1
        return rows.assign(seq=seq, mode=self.mode)

    def choices(self, seq: int, layer: int) -> pd.DataFrame:
        """The margins of a layer's wrong choices of experts."""
        golden, values = self.stretches[seq].golden, self.values[seq]
        wrong = values[f"expert.{layer}"] != golden[f"expert.{layer}"]
        rows = {"tensor": "expert", "layer": layer, "T": values["T"]}
        rows["position"] = self.stretches[seq].start + np.arange(len(wrong))
        return pd.DataFrame(rows | {"ratio": (wrong * golden[f"margin.{layer}"])[:, 0]})

    def state_errors(self, state: State, seq: int, name: str) -> pd.DataFrame:
        """Errors of the rows of one logical state of a sequence; rows without a token
        must be zeros."""
        stretch = self.stretches[seq]
        layer, leaf = split_layer(name)
        values = np.asarray(state.read(name)[seq], np.float32)
        rows, end = values.shape[-2], stretch.start + len(stretch.golden.ids)

        def by_row(values: np.ndarray) -> Values:
            return {f"{leaf}.{layer}": np.moveaxis(values, -2, 0).reshape(rows, -1)}

        expected, moved = [
            by_row(positions.expected_value(values.shape, name, own, end))
            for own in (stretch.golden.values, stretch.nudged[self.mode])
        ]
        (own,) = expected.values()
        size = np.where(own.any(1), 0, rms(own.ravel()))
        table = compare(
            expected,
            by_row(values) | {"T": np.full(rows, self.values[seq]["T"].max())},
            moved,
            room=room,
            sizes={f"{leaf}.{layer}": size},
            tensors=(leaf,),
            similar=False,
        )
        return table.assign(position=end - 1 - (end - 1 - table["position"]) % rows)


def head_errors(
    decoder: Decoder, calls: Sequence[tuple[Sequence[Stretch], int]]
) -> list[pd.DataFrame]:
    """Errors of the logits of calls of the head, each over the last T positions of a
    stretch of every sequence, from Hugging Face's hidden state."""
    scale = decoder.manifest.stream_scale
    tables = []
    for stretches, T in calls:
        hidden = np.stack([s.last[-T:].T / scale for s in stretches])
        all_logits = decoder.logits(hidden)
        for seq, (stretch, logits) in enumerate(
            zip(stretches, all_logits, strict=True)
        ):
            rows = compare(
                stretch.golden.values,
                {"logits": logits, "T": np.full(len(logits), len(logits))},
                {"logits": stretch.golden["logits"]},
                room=room,
                sizes={"logits": stretch.logit_rms},
                similar=False,
            )
            rows["position"] += stretch.start
            tables.append(rows.assign(seq=seq, mode="isolated"))
    return tables
