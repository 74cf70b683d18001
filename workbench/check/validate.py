"""Validates a bundle: whether it is faulty, and what it costs. The limits of the bug
gates follow from arithmetic and do not depend on the compression; the price is measured
against a golden and has the user's limit. Results that need the checkpoint are stored
in the bundle's verdict.json."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from workbench.bundle import Bundle
from workbench.check import (
    causality,
    device,
    fidelity,
    gates,
    host,
    interface,
    metrics,
    program,
    rangedim,
    undo,
    verdict,
    weights,
)
from workbench.check.gates import Gate
from workbench.check.golden import Golden
from workbench.check.price import (
    HALF_ULP,
    Budget,
    Price,
    measure_budget,
    measure_price,
    price_gates,
)
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint

NEED_DECODER = ("host", "program", "scores", "causality", "undo")
BUG_GATES = ("interface", "weights", *NEED_DECODER)
# Times what rounding moves the scores by. They are rounded inside the router too, which
# the budget leaves out; docs/verdict.md has the worst sound bundle.
ROUTING_FACTOR = 2.0


@dataclass
class Validation:
    """Rows of the `fidelity` table, all gates, the `bug_gates` among them, the
    comparison of `chained_logits` [n, V] with the golden's, and the price. Where
    experts are routed and choices are recorded, layers continue with the golden's
    expert, and `free_logits` compares the logits of a chained run that continues with
    the program's own choice (else None)."""

    rows: pd.DataFrame
    gates: list[Gate]
    logits: dict[str, float]
    chained_logits: np.ndarray
    bug_gates: list[Gate]
    price: Price
    free_logits: dict[str, float] | None = None

    @property
    def verdict(self) -> str:
        return gates.verdict(self.gates)

    @property
    def worst(self) -> dict:
        """The isolated update or cache row that is furthest from the golden."""
        rows = _isolated(self.rows, "update", "k", "v")
        row = rows.loc[rows["cosine"].fillna(-2).idxmin()]  # nan is below any cosine
        about = ["layer", "position", "T", "tensor", "mode"]
        return row[[*about, "cosine", "psnr_db", "max_abs"]].to_dict()

    def json(self) -> dict:
        updates = _isolated(self.rows, "update")["cosine"].fillna(-1.0)
        return {
            "verdict": self.verdict,
            "gates": [g.json() for g in self.gates],
            "worst": self.worst,
            "min_cosine": float(updates.min()),
            "mean_cosine": float(updates.mean()),
            "rows": len(self.rows),
            "logits": self.logits,
            "free_logits": self.free_logits,
            "price": self.price.json(),
        }


def bug_gates(
    bundle: Bundle,
    checkpoint: Checkpoint,
    *,
    exact: Decoder | None = None,
    decoder: Decoder | None = None,
    Ts: Sequence[int] | None = None,
    progress: bool = False,
) -> list[Gate]:
    """Runs the bug gates, which are the same for every compression: interface, weights,
    host, program, scores, causality and undo.

    Args:
        exact: a portable decoder in `exact` arithmetic that runs the bundle, or one of
            Core AI programs (default: a new one).
        decoder: the decoder whose host and calls are checked (default: `exact`).

    Where the bundle's interface is RED and no decoder opens or runs it, the gates that
    need one are not_run. A program that stops with an error is RED."""
    results = [interface.interface_gate(bundle, checkpoint)]
    try:
        results.append(weights.weights_gate(bundle, checkpoint, progress=progress))
        if exact is None and decoder is not None:
            own = (decoder.runtime, decoder.precision) == ("portable", "exact")
            if own or decoder.runtime == "coreai":
                exact = decoder
        if exact is None:
            coreai = bundle.manifest.options.target == "coreai"
            exact = Decoder(bundle, "coreai" if coreai else "portable", "exact")
        tried = exact
        if decoder is not None and decoder.runtime == "portable":
            tried = decoder
        results.append(host.host_gate(tried, checkpoint))
        if exact.precision == "exact":
            how = {"Ts": Ts, "progress": progress}
            results += program.program_gates(exact, checkpoint, **how)
        else:
            reason = "asks for fp32 arithmetic: export with --program-dtype fp32"
            results += [gates.not_run(name, reason) for name in ("program", "scores")]
        results.append(causality.causality_gate(tried))
        results.append(undo.undo_gate(tried))
    except InputError as problem:
        names = BUG_GATES[len(results) :]
        if results[0].verdict != gates.RED:
            if names[0] not in ("program", "causality", "undo"):
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


def validate_stored(
    decoder: Decoder,
    golden: Golden,
    checkpoint: Checkpoint | None = None,
    Ts: Sequence[int] | None = None,
    *,
    path: Path | None = None,
    max_kl: float = gates.MAX_KL,
) -> Validation:
    """`validate` with the results that are stored in files: given the checkpoint, the
    bug gates in the bundle's verdict.json and the budget; given the golden's file at
    `path`, the device gate's reference beside it."""
    bundle = decoder.bundle
    budget = None
    portable = None
    if checkpoint:
        if verdict.load(bundle) is None:
            verdict.save(bundle, bug_gates(bundle, checkpoint))
        budget = measure_budget(bundle, checkpoint, golden)
    if path and decoder.runtime not in ("portable", "coreai"):
        portable = device.stored_reference(bundle, golden, path)
    return validate(
        decoder, golden, Ts, budget=budget, reference=portable, max_kl=max_kl
    )


def stored_gates(bundle: Bundle) -> list[Gate]:
    """The bug gates without the checkpoint: those of verdict.json, else the interface
    alone."""
    if stored := verdict.load(bundle):
        return stored
    old = (bundle.root / verdict.NAME).is_file()
    of = "is of another bundle or by other gates" if old else "is missing"
    reason = f"needs --checkpoint: the bundle's {verdict.NAME} {of}"
    unasked = [gates.not_run(name, reason) for name in BUG_GATES[1:]]
    return [interface.interface_gate(bundle), *unasked]


def validate(
    decoder: Decoder,
    golden: Golden,
    Ts: Sequence[int] | None = None,
    *,
    checkpoint: Checkpoint | None = None,
    exact: Decoder | None = None,
    budget: Budget | None = None,
    reference: device.Reference | None = None,
    only: bool = False,
    max_kl: float = gates.MAX_KL,
    progress: bool = False,
) -> Validation:
    """Validates a bundle: bug gates, every layer × position × T against `golden`, and
    the price.

    Args:
        checkpoint: what the bundle was exported from; without it the bug gates are
            those of the bundle's verdict.json.
        exact: as in `bug_gates`.
        budget: as in `measure_price`; measured where there is a checkpoint.
        reference: what the device gate compares another runtime with (default: made
            now).
        only: no second copy of the bundle is loaded as portable: what needs one is
            not_run without a `reference`.
        max_kl: the user's limit on the mean KL of the chained logits, in nats.
    """
    bundle = decoder.bundle
    foreign = "the bundle was exported from another checkpoint"
    if checkpoint is None:
        bugs = stored_gates(bundle)
    elif checkpoint.sha256 != decoder.manifest.checkpoint["sha256"]:
        bugs = [gates.not_run(name, foreign) for name in BUG_GATES]
        checkpoint = None
    else:
        bugs = bug_gates(
            bundle, checkpoint, exact=exact, decoder=decoder, Ts=Ts, progress=progress
        )
    rows, traces, chained = fidelity.measure_fidelity(decoder, golden, Ts, progress)
    if checkpoint and budget is None:
        budget = measure_budget(bundle, checkpoint, golden)
    price = measure_price(decoder, golden, passes=(traces, chained), budget=budget)
    checks = [*bugs, fidelity.of_this_checkpoint(decoder, golden), _finite(rows)]
    runs = {f"isolated at T = {T}": trace for T, trace in traces.items()}
    free_logits = None
    choices = fidelity.choices(runs | {"chained": chained}, golden)
    if len(choices):
        free = fidelity.run_golden(
            decoder, golden, list(traces), "chained", forced=False
        )
        free_logits = metrics.compare_logits(golden.logits, free.logits)
        checks.append(routing(choices, golden, budget, free_logits))
    drifts = {} if only else None
    if reference:
        drifts = reference.drift
    checks.append(rangedim.drift_gate(decoder, traces, golden, drifts))
    checks += [_device(decoder, golden, reference, only), *price_gates(price, max_kl)]
    logits = metrics.compare_logits(golden.logits, chained.logits, price.kl)
    rows = _with_errors(rows, price.rows)
    return Validation(rows, checks, logits, chained.logits, bugs, price, free_logits)


def _with_errors(rows: pd.DataFrame, errors: pd.DataFrame) -> pd.DataFrame:
    """Fidelity rows with the `error` and `budget` of `Price.rows`, null on rows that
    have none."""
    keys = ["layer", "position", "T", "tensor", "mode"]
    errors = errors.drop(columns="ratio").assign(mode="isolated")
    return rows.merge(errors, how="left", on=keys)


def _device(
    decoder: Decoder, golden: Golden, reference: device.Reference | None, only: bool
) -> Gate:
    if decoder.runtime == "portable":
        reason = "the portable runtime is what devices are compared with"
        return gates.not_run("device", reason)
    if decoder.runtime == "coreai":
        reason = "the portable runtime cannot run Core AI programs: run crosscheck"
        return gates.not_run("device", reason)
    if reference is None and only:
        reason = "needs a reference beside the golden: workbench golden CHECKPOINT --out G --for"
        return gates.not_run("device", f"{reason} {decoder.bundle.root.name}")
    reference = reference or device.make_reference(decoder.bundle, golden)
    return device.device_gate(decoder, golden, reference)


def routing(
    choices: pd.DataFrame, golden: Golden, budget: Budget | None, free: dict[str, float]
) -> Gate:
    """Gate `routing`: other experts are picked only where rounding can change the
    choice. No other gate covers another expert's update: they all read layers that
    continued with the golden's choice.

    Rounding of weights and stream moves the difference of the best two scores in
    Hugging Face's own model by so much; where the golden's lie further apart than
    `ROUTING_FACTOR` times the layer's largest move, no other choice is a rounding's. In
    a chained run errors of the layers before add up, in the budget's as well."""
    differ = choices[choices["differs"]]
    reason = (
        f"{len(differ)} of {len(choices)} choices of an expert differ from the golden's"
    )
    if budget is None:
        return gates.not_run("routing", f"needs --checkpoint; {reason}")
    moves = []  # of the differing choices, by rounding: chained, isolated
    for again in (budget.chained, budget.isolated):
        after = np.where(again.expert == golden.expert, again.margin, -again.margin)
        of_layer = np.abs(golden.margin - after).max(axis=1) + HALF_ULP
        moves.append(of_layer[differ["layer"]])
    ratios = differ["margin"] / np.where(differ["run"] == "chained", *moves)
    value = 0.0
    if len(differ):
        value = float(ratios.max())
        worst = differ.loc[ratios.idxmax()]
        place = "layer {layer}, position {position}, {run}".format(**worst)
        reason += f"; largest margin relative to its move by rounding: {place}"
    reason += f"; with these choices the worst cosine of the logits is {free['cosine_min']:.4f}"
    return gates.at_most("routing", value, ROUTING_FACTOR, reason)


def _isolated(rows: pd.DataFrame, *tensors: str) -> pd.DataFrame:
    """Isolated rows that gates read: updates where the router had a clear choice, and
    all cache rows."""
    isolated = rows[(rows["mode"] == "isolated") & rows["tensor"].isin(tensors)]
    # updates that may be another expert's, where the runtime does not show the choice
    return isolated[
        ~(isolated.get("routing_tie", False) & (isolated["tensor"] == "update"))
    ]


def _finite(rows: pd.DataFrame) -> Gate:
    bad = rows[~rows["finite"]]
    reason = "every value is finite"
    if len(bad):
        place = "layer {layer}, position {position}, T = {T}, {tensor}".format(
            **bad.iloc[0]
        )
        reason = f"{len(bad)} rows hold inf or nan, first: {place}"
    return gates.holds("finite", not len(bad), reason)
