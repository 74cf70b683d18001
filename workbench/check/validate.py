"""Validates a bundle: whether it is faulty, and what it costs. The limits of the bug
gates follow from arithmetic and do not depend on the compression; their results are
stored in the bundle's verdict.json.

The cost is the distance of a bundle from a golden, beside the budget, the distance that
rounding alone causes: Hugging Face's own model in fp32 with the weights that the bundle
stores, its stream rounded to fp16 where it enters and leaves a layer, its cache rows
rounded once. The exported program has no part in it, so that an error far above the
budget is not due to compression.

Another runtime may be as far from portable `declared` arithmetic as `narrow` is, which
rounds sums to fp16 after every 32 products: that distance is measured for each bundle,
not chosen."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError

from workbench.bundle import Bundle
from workbench.check import gates, host, interface, program, states, weights
from workbench.check.compare import HALF_ULP, NEAR_TIE, compare, compared, furthest, kl
from workbench.check.gates import Gate
from workbench.check.golden import Golden, check_exported_from, stored_weights
from workbench.check.hf import Reference, Values, half, updates
from workbench.check.run import run_golden
from workbench.check.states import STATE_GATES, default_ts
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.files import load_arrays, save_arrays, sha256
from workbench.models.checkpoint import Checkpoint
from workbench.progress import stage

BUG_GATES = ("interface", "weights", "host", "program", *STATE_GATES)
# Times √(budget² + 2⁻²²) that an error may be. Inner results of a layer are rounded as well,
# which the budget leaves out: the worst of 688 sound bundles, a random draw in fp16, reaches 3.5,
# the worst trained checkpoint 2.6; tests/check/faults.md has the margins.
BUDGET_FACTOR = 6.0
# Times the distance declared–narrow. `declared` lies one rounding away from exact
# arithmetic, and a device may lie another one away on the other side. Portable `exact`,
# seen as a device, is 2.0 distances away on the worst sound bundle (int4-block32, trained
# ZAYA), and the mildest planted fault 10; tests/check/faults.md has the margins.
DEVICE_FACTOR = 3.0
PRECISIONS = "declared/", "narrow/"  # before the names in that file
REFERENCE_FORMAT = 7  # of the device gate's file: raised when what it holds changes


@dataclass(frozen=True)
class Cost:
    """What compression and fp16 cost: every layer × position × T of a bundle against a
    golden.

    `rows`: those of `compare` with mode, runtime, precision and shard. `logits` [n, V]
    of layers in a row, None where the bundle gives none. `kl` [n] nats from the golden to
    them, and `same_top`, the share of positions with the same top token: nan then.
    `over_rounding`, of each row: its error over what rounding alone causes, which ranks
    the cells of one bundle; null for chained rows. `budget_kl` [n]: of the budget, None
    where none was measured."""

    rows: pd.DataFrame
    logits: np.ndarray | None
    kl: np.ndarray
    same_top: float
    over_rounding: pd.Series
    budget_kl: np.ndarray | None = None

    def summary(self) -> dict[str, float] | None:
        """How near the logits are; None where there are none."""
        if self.logits is None:
            return None
        cosines = self.rows.loc[self.rows["tensor"] == "logits", "cosine"]
        return {
            "top1_agreement": self.same_top,
            "kl_mean": float(np.mean(self.kl)),
            "kl_max": float(np.max(self.kl)),
            "cosine_min": float(cosines.min(skipna=False)),
        }

    def json(self) -> dict:
        budget = None
        if self.budget_kl is not None:
            worst = furthest(compared(self.rows))
            budget = {"kl": summarize_kl(self.budget_kl), "worst": worst}
        kl = summarize_kl(self.kl)
        return {"kl": kl, "same_top": self.same_top, "budget": budget}

    def gates(self, max_kl: float = gates.MAX_KL) -> list[Gate]:
        """`max_kl`: the user's limit on the mean KL; `budget`: errors are what rounding
        alone explains, within a factor."""
        reason = "mean KL from Hugging Face's logits in nats; the limit is the user's"
        if self.budget_kl is not None:
            reason += f"; rounding alone causes {np.mean(self.budget_kl):.2g}"
        limit = gates.at_most("max_kl", float(np.mean(self.kl)), max_kl, reason)
        if self.logits is None:
            reason = "the argmax is inside: no logits come out"
            limit = gates.not_run("max_kl", reason)
        if self.budget_kl is None:
            return [limit, gates.not_run("budget", "needs --checkpoint")]
        worst = furthest(compared(self.rows))
        reason = (
            "error ÷ √(rounding² + 2⁻²²), rounding: the error that rounding of weights "
            "and stream alone causes in Hugging Face's model: layer {layer}, {tensor}, "
            "T = {T}"
        ).format(**worst)
        return [limit, gates.at_most("budget", worst["ratio"], BUDGET_FACTOR, reason)]


@dataclass
class Validation:
    """All gates of a bundle, and its cost."""

    gates: list[Gate]
    cost: Cost

    @property
    def rows(self) -> pd.DataFrame:
        """Rows of the `fidelity` table."""
        return self.cost.rows

    @property
    def verdict(self) -> str:
        return gates.verdict(self.gates)

    @property
    def worst(self) -> dict:
        """The isolated update or cache row whose error is the largest multiple of what
        rounding alone causes there, `over_rounding`. The worst cosine would be that of
        a small update beside a huge residual, which rounding moves far."""
        rows = compared(self.rows.assign(over_rounding=self.cost.over_rounding))
        # a value that is not finite is above any other
        row = rows.loc[rows["over_rounding"].fillna(np.inf).idxmax()]
        names = ["layer", "position", "T", "tensor", "mode"]
        names += ["cosine", "psnr_db", "max_abs", "error", "over_rounding"]
        return row[names].to_dict()

    def json(self) -> dict:
        rows = compared(self.rows)
        cosines = rows["cosine"].fillna(-1.0)
        updates = cosines[rows["tensor"] == "update"]
        if updates.empty:  # the bundle shows caches alone
            updates = cosines
        return {
            "verdict": self.verdict,
            "gates": [g.json() for g in self.gates],
            "worst": self.worst,
            "min_cosine": float(updates.min()),
            "mean_cosine": float(updates.mean()),
            "rows": len(self.rows),
            "logits": self.cost.summary(),
            "cost": self.cost.json(),
        }


def validate(
    decoder: Decoder,
    golden: Golden,
    Ts: Sequence[int] | None = None,
    *,
    max_kl: float = gates.MAX_KL,
    again: bool = False,
    alone: bool = False,
) -> Validation:
    """Validates a bundle: bug gates, every layer × position × T against `golden`, and
    the cost.

    With the golden's `source` the bug gates that the bundle's verdict.json lacks are
    run and stored there, and the budget is measured.

    Args:
        max_kl: the user's limit on the mean KL of the chained logits, in nats.
        again: all bug gates are run, on this decoder where it can.
        alone: no second copy of the bundle is loaded as portable: gate `device` is
            not_run where `device_reference` has no file.
    """
    bundle = decoder.bundle
    source = golden.source
    check_exported_from(golden, bundle)
    bugs = stored_gates(decoder, source, again, named=golden.verdict)
    inner = decoder.shows_inner_layers
    stage("validate: rounding of Hugging Face's model")
    budget = source and measure_budget(bundle, source, golden, inner)
    cost = measure(decoder, golden, Ts, budget)
    device = _device(decoder, golden, alone)
    return Validation([*bugs, device, *cost.gates(max_kl)], cost)


def bug_gates(
    bundle: Bundle, checkpoint: Checkpoint, *, decoder: Decoder | None = None
) -> list[Gate]:
    """Runs the bug gates, which are the same for every compression: `BUG_GATES`.

    `decoder` is the one whose host and states are checked, and whose program is where
    its arithmetic is `exact`; otherwise, and for a device, one of the bundle's
    interpreter is opened.

    Where the bundle's interface is RED and no decoder opens or runs it, the gates that
    need one are not_run. A program that stops with an error is RED.

    Raises:
        InputError: a file whose SHA-256 is not the manifest's.
    """
    check_exported_from(checkpoint, bundle)
    bundle.verify()
    results = [interface.interface_gate(bundle, checkpoint)]
    try:
        results.append(weights.weights_gate(bundle, checkpoint))
        options = bundle.manifest.options
        exact = tried = None if decoder and decoder.is_device else decoder
        if not exact or exact.precision != "exact":
            exact = Decoder(bundle, options.interpreter, "exact")
        tried = tried or exact
        stage("validate: host and program")
        results.append(host.host_gate(tried, checkpoint))
        if exact.precision == "exact":
            results.append(program.program_gate(exact, checkpoint))
        else:
            reason = f"asks for fp32 arithmetic, which target {options.target} lacks"
            results.append(gates.not_run("program", reason))
        stage("validate: states")
        results += states.state_gates(tried)
    except InputError as problem:
        names = BUG_GATES[len(results) :]
        if results[0].verdict != gates.RED:
            if names[0] not in ("program", *STATE_GATES):
                raise  # the checkpoint or the bundle cannot be read
            reason = f"the program does not run: {problem.subject}: {problem.actual}"
            results.append(gates.holds(names[0], False, reason))
        results += unopened_gates(problem, BUG_GATES[len(results) :])
    return results


def unopened_gates(problem: InputError, names: Sequence[str]) -> list[Gate]:
    """Gates `names` as not_run, for a bundle that no decoder runs because of
    `problem`."""
    reason = f"the bundle cannot be run: {problem.subject}: {problem.actual}"
    return [gates.not_run(name, reason) for name in names]


def stored_gates(
    decoder: Decoder,
    source: Checkpoint | None = None,
    again: bool = False,
    named: str | None = None,
) -> list[Gate]:
    """The bug gates of verdict.json, if it counts. With the checkpoint `source` they
    are run and stored where it does not, or `again`; without both, those that need the
    bundle alone are run. Gates on a device's states are asked of the device.

    Args:
        named: the hash of the verdict.json that the user's golden names.

    Raises:
        InputError: see `bug_gates` and `save_verdict`.
    """
    bundle = decoder.bundle
    stored = gates.stored_verdict(bundle, named)
    results = stored.gates if stored and stored.counts else None
    if source and (again or results is None):
        changed = decoder if again else None  # others may have been changed in memory
        results = bug_gates(bundle, source, decoder=changed)
        gates.save_verdict(bundle, results)
        live = states.state_gates(decoder) if decoder.is_device else []
    elif results is None:
        bundle.verify()
        results = _unknown_gates(bundle, stored)
        live = [interface.interface_gate(bundle), *states.state_gates(decoder)]
    else:
        bundle.verify()
        live = states.state_gates(decoder) if decoder.is_device else []
    by_name = {gate.name: gate for gate in live}
    return [g if g.verdict == gates.RED else by_name.get(g.name, g) for g in results]


def _unknown_gates(bundle: Bundle, stored: gates.StoredVerdict | None) -> list[Gate]:
    """The bug gates as not_run, with what the bundle itself states of them and the
    command that runs them."""
    if not stored:
        old = (bundle.root / gates.VERDICT).is_file()
        of = "is of another bundle or by other gates" if old else "is missing"
        reason = f"needs --checkpoint: the bundle's {gates.VERDICT} {of}"
        return [gates.not_run(name, reason) for name in BUG_GATES]
    command = f"workbench validate {bundle.root.name} --checkpoint CHECKPOINT"
    stated = {gate.name: gate.verdict for gate in stored.gates}
    return [
        gates.not_run(
            name,
            f"stated by the bundle, not checked here: {stated.get(name, 'nothing')}; "
            f"run: {command}",
        )
        for name in BUG_GATES
    ]


def measure_budget(
    bundle: Bundle, checkpoint: Checkpoint, golden: Golden, inner: bool = True
) -> Values:
    """Runs Hugging Face's model twice over the golden's tokens with the weights that
    `bundle` stores and a rounded stream: the values of layers that are fed the golden's
    input, and the `logits` of layers in a row. `inner`: layers inside a shard are fed
    too, as on runtimes that show them; else each continues the one before."""
    reference = Reference(checkpoint, stored_weights(checkpoint, bundle, half=True))
    rounded = half(bundle.manifest.stream_scale)
    chained = reference.run(golden.ids, perturb=rounded)
    feed = golden.values
    if not inner:
        firsts = {shard.layers[0] for shard in bundle.manifest.shards}
        fed = {f"x.{i}" for i in firsts} | {f"router.{i - 1}" for i in firsts}
        feed = {name: feed[name] for name in fed & feed.keys()}
    values = reference.run(golden.ids, feed=feed, perturb=rounded, head=False)
    for name, value in values.items():  # as the bundle holds them
        if name.startswith(("x.", "hidden.")):
            value = golden[name] if name[0] == "x" else value
            values[name] = rounded(torch.from_numpy(value)).numpy()
        elif name.startswith(("k.", "v.")):
            values[name] = np.float16(value)
    return values | updates(values) | {"logits": chained["logits"]}


def measure(
    decoder: Decoder,
    golden: Golden,
    Ts: Sequence[int] | None = None,
    budget: Values | None = None,
) -> Cost:
    """Runs every T isolated and all of them chained, and compares with the golden and,
    isolated, with the `budget` of `measure_budget`. Without it the cells are ranked by
    what rounding the stream alone causes."""
    t_max = decoder.options.t_max
    Ts = list(Ts or default_ts(decoder.options))
    if over := [t for t in Ts if not 1 <= t <= t_max]:
        step = "export with more --tokens"
        raise InputError("T", f"{over}", f"1 to t_max = {t_max}", step)
    runs = [*((T, "isolated") for T in Ts), (Ts, "chained")]
    *apart, chained = run_golden(decoder, golden, *runs)
    frames, ratios = [], []
    rounded = None
    if budget is None:
        rounded = round_stream(golden, decoder.manifest.stream_scale)
    for T, values in zip(Ts, apart, strict=True):
        frame = compare(golden.values, values, budget)
        frames.append(frame.assign(T=T, mode="isolated"))
        if rounded is not None:
            frame = compare(golden.values, values, rounded, similar=False)
        ratios.append(frame["ratio"])
    frames.append(compare(golden.values, chained).assign(mode="chained"))
    rows = pd.concat(frames, ignore_index=True)
    over_rounding = pd.concat(ratios, ignore_index=True).reindex(rows.index)
    inner = decoder.shows_inner_layers
    if not inner:
        rows["routing_tie"] |= _tied(decoder, golden, rows)
    precision = decoder.precision if inner else None  # as in `runs`
    rows = rows.assign(runtime=decoder.runtime, precision=precision)
    names = {}
    for model in decoder.layers:
        names |= dict.fromkeys(range(*model.shard.layers), model.shard.name)
    rows["shard"] = rows["layer"].map(names).fillna("head")
    expected, logits = golden["logits"], chained.get("logits")
    nats, same = np.full(len(expected), np.nan), np.nan
    if logits is not None:
        nats = kl(expected, logits)
        same = float(np.mean(expected.argmax(-1) == logits.argmax(-1)))
    budget_kl = budget and kl(expected, budget["logits"])
    return Cost(rows, logits, nats, same, over_rounding, budget_kl)


def chained_kl(
    decoder: Decoder, golden: Golden, Ts: Sequence[int] | None = None
) -> np.ndarray:
    """KL [n] in nats from the golden's logits to those of layers in a row, as in
    `measure`; nan where the bundle gives none."""
    Ts = list(Ts or default_ts(decoder.options))
    (values,) = run_golden(decoder, golden, (Ts, "chained"))
    if "logits" not in values:
        return np.full(len(golden.ids), np.nan)
    return kl(golden["logits"], values["logits"])


def round_stream(golden: Golden, stream_scale: float) -> Values:
    """The golden's values with the stream rounded to fp16 where it enters and leaves a
    layer, and the cache rows once; no layer computes with the rounded values. It needs
    no checkpoint."""
    rounded, values = half(stream_scale), {}
    for name, value in golden.values.items():
        if name.startswith(("x.", "hidden.")):
            values[name] = rounded(torch.from_numpy(value)).numpy()
        elif name.startswith(("k.", "v.")):
            values[name] = np.float16(value)
    with np.errstate(invalid="ignore"):  # inf − inf, beyond fp16's range
        return values | updates(values)


def summarize_kl(nats: Sequence[float]) -> dict[str, float]:
    """Mean, median, 99th percentile and maximum."""
    return {
        "mean": float(np.mean(nats)),
        "median": float(np.median(nats)),
        "p99": float(np.percentile(nats, 99)),
        "max": float(np.max(nats)),
    }


def reference_path(bundle: Bundle, golden: Golden) -> Path:
    """Where `device_reference` has its file: beside the golden's."""
    name = f"{golden.file.stem}-{bundle.identity[:10]}.reference.safetensors"
    return golden.file.with_name(name)


def device_reference(
    bundle: Bundle, golden: Golden, alone: bool = False
) -> Values | None:
    """What a device shows of the golden's tokens in portable `declared` and `narrow`
    arithmetic: "declared/k.3", "narrow/k.3". It is computed once where the golden has a
    file in a folder that can be written; one decoder at a time is in memory. `alone`:
    nothing is computed, None where there is no file of this bundle and golden."""
    path = golden.file and reference_path(bundle, golden)
    key = path and f"{REFERENCE_FORMAT} {bundle.identity} {sha256(golden.file)}"
    if path and path.is_file():
        with suppress(OSError, SafetensorError, AttributeError):
            reference, metadata = load_arrays(path)
            if metadata.get("key") == key and _is_reference(reference, golden):
                return reference
    if alone:
        return None
    reference = {}
    for precision in ("declared", "narrow"):
        for name, value in device_values(_blind(bundle, precision), golden).items():
            reference[f"{precision}/{name}"] = value
    if path:
        with suppress(OSError, SafetensorError):
            save_arrays(path, reference, {"key": key})
    return reference


def _is_reference(reference: Values, golden: Golden) -> bool:
    """Whether arrays have the form of `device_reference`'s for this golden."""
    for name, value in reference.items():
        precision, _, tensor = name.partition("/")
        expected = golden.values.get(tensor, value)
        if precision not in ("declared", "narrow") or value.dtype.kind not in "fi":
            return False
        if not 1 <= value.ndim <= 2 or not 1 <= len(value) <= len(golden.ids):
            return False
        if value.shape[1:] != expected.shape[1:]:
            return False
    names = [{n[len(p) :] for n in reference if n.startswith(p)} for p in PRECISIONS]
    return names[0] == names[1] and "T" in names[0]


def _blind(bundle: Bundle, precision: str) -> Decoder:
    """A portable decoder that shows what a device does: inner layers go on with what
    the shard computed."""
    decoder = Decoder(bundle, "portable", precision)
    decoder.shows_inner_layers = False
    return decoder


def device_values(decoder: Decoder, golden: Golden) -> Values:
    """What a runtime shows of a pass over the golden's tokens: calls of every T in
    turn, each shard fed the golden's input, the head the golden's last hidden state.
    Packages that contain the head show the logits of that pass."""
    (values,) = run_golden(decoder, golden, (default_ts(decoder.options), "isolated"))
    shown = ("hidden.", "k.", "v.", "T")
    found = {name: x for name, x in values.items() if name.startswith(shown)}
    last, scale = golden.layers - 1, decoder.manifest.stream_scale
    if decoder.heads:
        hidden = golden[f"hidden.{last}"].T / scale
        logits = decoder.logits(np.tile(hidden, (decoder.options.batch, 1, 1)))
        found["logits"] = logits[0]
    elif decoder.manifest.gives_logits:
        found["logits"] = values[f"handed.{last}"] / scale
    return found


def device_room(apart: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The distance declared–narrow, at least half a unit of an fp16 result."""
    return np.maximum(apart, HALF_ULP * size)


def device_gate(decoder: Decoder, golden: Golden, reference: Values) -> Gate:
    """GREEN if every layer's output, K, V and the logits are about as near to portable
    `declared` as `narrow` is.

    The value is the worst tensor's distance in units of that distance, at least half a
    unit of an fp16 result, as an RMS over positions."""
    declared, narrow = (
        {name[len(to) :]: x for name, x in reference.items() if name.startswith(to)}
        for to in ("declared/", "narrow/")
    )
    values = device_values(decoder, golden)
    rows = compare(declared, values, narrow, room=device_room, similar=False)
    rows = rows[~_tied(decoder, golden, rows)]
    if rows.empty:  # every choice of an expert was close
        return gates.not_run("device", "nothing is comparable")
    worst = furthest(rows.assign(T=0))
    place = worst["tensor"]
    if worst["layer"] >= 0:
        place += f" of layer {worst['layer']}"
    reason = (
        f"distance from portable declared over that of portable narrow, worst: {place}"
    )
    return gates.at_most("device", worst["ratio"], DEVICE_FACTOR, reason)


def _tied(decoder: Decoder, golden: Golden, rows: pd.DataFrame) -> pd.Series:
    """Rows that a near-tied choice of an expert, in their own shard, can have turned."""
    tied = pd.Series(False, rows.index)
    caches = rows["tensor"].isin(["k", "v"])
    for model in decoder.layers:
        near = np.zeros(len(golden.ids), bool)
        for layer in range(*model.shard.layers):
            before = near
            if f"margin.{layer}" in golden.values:
                near = near | (golden[f"margin.{layer}"][:, 0] < NEAR_TIE)
            places = rows["position"]
            turned = np.where(caches, before[places], near[places])
            tied |= turned & (rows["layer"] == layer)
    return tied


def _device(decoder: Decoder, golden: Golden, alone: bool) -> Gate:
    if not decoder.is_device:
        reason = "needs a Mac: run there with the same bundle and golden"
        if decoder.options.plugin:
            reason = "the portable runtime cannot run the programs of this target"
        return gates.not_run("device", reason)
    reference = device_reference(decoder.bundle, golden, alone)
    if reference is None:
        reason = "needs a reference beside the golden: workbench golden CHECKPOINT --out G --for"
        return gates.not_run("device", f"{reason} {decoder.bundle.root.name}")
    return device_gate(decoder, golden, reference)
