"""Validates a bundle: whether it is faulty, and what it costs. The limits of the bug
gates follow from arithmetic and do not depend on the compression; the price is measured
against a golden and has the user's limit. Results that need the checkpoint are stored
in the bundle's verdict.json."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from workbench.bundle import Bundle
from workbench.check import (
    device,
    gates,
    host,
    interface,
    metrics,
    program,
    states,
    verdict,
    weights,
)
from workbench.check.compare import compared
from workbench.check.gates import Gate
from workbench.check.golden import Golden, check_exported_from
from workbench.check.hf import Values
from workbench.check.price import Price, measure_budget, measure_price, price_gates
from workbench.check.run import measure_fidelity
from workbench.check.states import STATE_GATES
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint

BUG_GATES = ("interface", "weights", "host", "program", *STATE_GATES)


@dataclass
class Validation:
    """Rows of the `fidelity` table, all gates, the `bug_gates` among them, the
    comparison of `chained_logits` [n, V] with the golden's (None where the argmax is
    inside), and the price."""

    rows: pd.DataFrame
    gates: list[Gate]
    logits: dict[str, float] | None
    chained_logits: np.ndarray | None
    bug_gates: list[Gate]
    price: Price

    @property
    def cost(self) -> Price:
        """What compression and fp16 cost: KL from the golden beside rounding's."""
        return self.price

    @property
    def verdict(self) -> str:
        return gates.verdict(self.gates)

    @property
    def worst(self) -> dict:
        """The isolated update or cache row that is furthest from the golden."""
        rows = compared(self.rows)
        row = rows.loc[rows["cosine"].fillna(-2).idxmin()]  # nan is below any cosine
        about = ["layer", "position", "T", "tensor", "mode"]
        return row[[*about, "cosine", "psnr_db", "max_abs"]].to_dict()

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
            "logits": self.logits,
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
    """Runs the bug gates, which are the same for every compression: `BUG_GATES`.

    Args:
        exact: a decoder of the bundle's interpreter, in `exact` arithmetic where it has
            that (default: a new one).
        decoder: the decoder whose host and states are checked (default: `exact`).

    Where the bundle's interface is RED and no decoder opens or runs it, the gates that
    need one are not_run. A program that stops with an error is RED.

    Raises:
        InputError: a file whose SHA-256 is not the manifest's.
    """
    bundle.verify()
    results = [interface.interface_gate(bundle, checkpoint)]
    try:
        results.append(weights.weights_gate(bundle, checkpoint, progress=progress))
        options = bundle.manifest.options
        tried = decoder
        if decoder is None or decoder.is_device:
            tried = None
        if tried and (options.plugin or tried.precision == "exact"):
            exact = exact or tried
        exact = exact or Decoder(bundle, options.interpreter, "exact")
        tried = tried or exact
        results.append(host.host_gate(tried, checkpoint))
        if exact.precision == "exact":
            how = {"Ts": Ts, "progress": progress}
            results.append(program.program_gate(exact, checkpoint, **how))
        else:
            reason = f"asks for fp32 arithmetic, which target {options.target} lacks"
            results.append(gates.not_run("program", reason))
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
    if path and decoder.is_device:
        portable = device.stored_reference(bundle, golden, path)
    return validate(
        decoder, golden, Ts, budget=budget, reference=portable, max_kl=max_kl
    )


def stored_gates(decoder: Decoder) -> list[Gate]:
    """The bug gates without the checkpoint: those of verdict.json; without one, and on
    a device, gates on states are asked of the decoder. Raises an InputError as
    `bug_gates` does."""
    bundle = decoder.bundle
    bundle.verify()
    stored = verdict.load(bundle)
    if stored and decoder.is_device:
        live = {gate.name: gate for gate in states.state_gates(decoder)}
        return [g if g.verdict == gates.RED else live.get(g.name, g) for g in stored]
    if stored:
        return stored
    old = (bundle.root / verdict.NAME).is_file()
    of = "is of another bundle or by other gates" if old else "is missing"
    reason = f"needs --checkpoint: the bundle's {verdict.NAME} {of}"
    needs = [name for name in BUG_GATES[1:] if name not in STATE_GATES]
    unasked = [gates.not_run(name, reason) for name in needs]
    own = states.state_gates(decoder)
    return [interface.interface_gate(bundle), *unasked, *own]


def validate(
    decoder: Decoder,
    golden: Golden,
    Ts: Sequence[int] | None = None,
    *,
    checkpoint: Checkpoint | None = None,
    exact: Decoder | None = None,
    budget: Values | None = None,
    reference: device.Reference | None = None,
    only: bool = False,
    max_kl: float = gates.MAX_KL,
    progress: bool = False,
) -> Validation:
    """Validates a bundle: bug gates, every layer × position × T against `golden`, and
    the price.

    Args:
        checkpoint: what the bundle was exported from; without it and without the
            golden's `source` the bug gates are those of the bundle's verdict.json.
        exact: as in `bug_gates`.
        budget: the result of `measure_budget`; measured where there is a checkpoint.
        reference: what the device gate compares another runtime with (default: made
            now).
        only: no second copy of the bundle is loaded as portable: what needs one is
            not_run without a `reference`.
        max_kl: the user's limit on the mean KL of the chained logits, in nats.
    """
    if golden.source and checkpoint is None:
        own = replace(golden, source=None)
        how = {"path": golden.file, "max_kl": max_kl}
        return validate_stored(decoder, own, golden.source, Ts, **how)
    bundle = decoder.bundle
    check_golden(bundle, golden)
    if checkpoint is None:
        bugs = stored_gates(decoder)
    else:
        check_exported_from(checkpoint, bundle)
        bugs = bug_gates(
            bundle, checkpoint, exact=exact, decoder=decoder, Ts=Ts, progress=progress
        )
    if checkpoint and budget is None:
        budget = measure_budget(bundle, checkpoint, golden)
    rows, _, chained = measure_fidelity(decoder, golden, Ts, budget, progress)
    price = measure_price(golden, rows, chained, budget)
    gate = _device(decoder, golden, reference, only)
    checks = [*bugs, gate, *price_gates(price, max_kl)]
    logits, actual = None, chained.get("logits")
    if actual is not None:
        logits = metrics.compare_logits(golden["logits"], actual, price.kl)
    return Validation(rows, checks, logits, actual, bugs, price)


def check_golden(bundle: Bundle, golden: Golden) -> None:
    """Raises an InputError unless the golden is of the checkpoint that `bundle` was
    exported from; another one may have the same dimensions."""
    ours, theirs = bundle.manifest.checkpoint["sha256"], golden.meta["checkpoint"]
    if theirs != ours:
        raise InputError(
            "golden",
            f"one of checkpoint {theirs[:12]}",
            f"one of {ours[:12]}, which bundle {bundle.root.name} was exported from",
            "run: workbench golden CHECKPOINT --out G with that checkpoint",
        )


def _device(
    decoder: Decoder, golden: Golden, reference: device.Reference | None, only: bool
) -> Gate:
    if not decoder.is_device:
        reason = "needs a Mac: run there with the same bundle and golden"
        if decoder.options.plugin:
            reason = "the portable runtime cannot run the programs of this target"
        return gates.not_run("device", reason)
    if reference is None and only:
        reason = "needs a reference beside the golden: workbench golden CHECKPOINT --out G --for"
        return gates.not_run("device", f"{reason} {decoder.bundle.root.name}")
    reference = reference or device.make_reference(decoder.bundle, golden)
    return device.device_gate(decoder, golden, reference)
