"""Validates one bundle on every compute unit, each in its own process, which may crash,
and names the cause of a failure.

The result has one row per unit. Off a Mac the rows are the arithmetics of the portable
runtime, and their names say so."""

import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from miltorch import PRECISIONS
from workbench import process
from workbench.bundle import Bundle
from workbench.check import gates
from workbench.check.compare import kl
from workbench.check.device import device_reference
from workbench.check.golden import Golden, check_fits
from workbench.check.validate import validate
from workbench.decode import Decoder
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import COMPUTE_UNITS, resolve

SECONDS = 3600
DIED = "DIED"  # the verdict of a unit whose process ended without a result
COLUMNS = [
    "unit",
    "runtime",
    "verdict",
    "quality",
    "over_rounding",
    "min_cosine",
    "kl_mean",
    "kl_max",
    "kl_portable",
    "blame",
    "reason",
]


def validate_units(
    bundle: Bundle,
    golden: Golden,
    *,
    runtime: str = "auto",
    compute_units: Sequence[str] = COMPUTE_UNITS,
    single_copy: bool = False,
    Ts: Sequence[int] | None = None,
    max_kl: float = gates.MAX_KL,
) -> pd.DataFrame:
    """Validates `bundle` once per unit: portable arithmetics, and Core ML's compute
    units on a Mac. With the golden's `source` the first of them runs and stores the bug
    gates that the bundle's verdict.json lacks.

    Args:
        runtime: the runtime of the compute units: `coreml` or a stand-in; `portable`:
            none is tried; `auto`: Core ML if this machine has it.
        compute_units: the units to try.
        single_copy: leave out the portable arithmetics, so that no process loads a second
            copy of the bundle.
        Ts, max_kl: see `validate`.

    Returns:
        One row per unit: `verdict` on the export (GREEN, RED, not_run or DIED), its
        `quality`, the largest error over what rounding alone causes and the worst
        update cosine, the mean and the largest KL of chained logits in nats against
        Hugging Face's golden, `kl_portable` against the portable runtime's `declared`
        arithmetic, `blame` (null where the export is neither RED nor DIED), and the
        first `reason`, a fault's before the user's limit. With `single_copy`, `kl_portable`
        and `blame` are null.

    Raises:
        InputError: see `check_fits`.
    """
    check_fits(golden, bundle)
    runtime = resolve() if runtime == "auto" else runtime
    units = [] if single_copy else [("portable", precision) for precision in PRECISIONS]
    if runtime != "portable":
        units += [(runtime, unit) for unit in compute_units]
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        golden_file = golden.file or golden.save(Path(folder) / "golden.safetensors")
        source = None if golden.source is None else golden.source.path
        options = {"single_copy": single_copy, "Ts": Ts, "max_kl": max_kl}
        for runs_on, unit in units:
            arguments = bundle.root, golden_file, source, runs_on, unit, options
            outcome = process.call(validate_unit, *arguments, timeout_s=SECONDS)
            row = outcome.value or {"verdict": DIED, "reason": outcome.failure}
            invalid_reason = outcome.invalid_reason
            if invalid_reason and not outcome.failure:  # it ran on another unit
                row |= {"verdict": gates.RED, "quality": gates.NOT_RUN}
                row["reason"] = invalid_reason
            name = f"portable {unit}" if runs_on == "portable" else unit
            rows[name] = {"unit": name, "runtime": runs_on} | row
    faulty = {gates.RED, DIED}
    sound = {name for name, row in rows.items() if row["verdict"] not in faulty}
    declared = rows.get("portable declared", {}).get("logits")
    for row in rows.values():
        logits = row.get("logits")
        if declared is not None and logits is not None:
            row["kl_portable"] = float(kl(declared, logits).max())
        if row["unit"] not in sound and not single_copy:
            row["blame"] = diagnose(row["runtime"], sound)
    return pd.DataFrame(list(rows.values()), columns=COLUMNS)


def validate_unit(
    root: Path,
    golden_file: Path,
    source: Path | None,
    runtime: str,
    unit: str,
    options: dict,
) -> dict:
    """Runs in a child process. Returns the columns of one unit that follow from it alone,
    and `logits` [n, V].

    Args:
        root: the folder of the bundle.
        source: the folder of the golden's checkpoint.
        options: the arguments of `validate`.
    """
    bundle = Bundle.open(root)
    checkpoint = None if source is None else Checkpoint(source)
    golden = replace(Golden.load(golden_file), source=checkpoint)
    execution = {"precision": unit}
    if runtime != "portable":
        execution = {"compute_units": unit}
        # before the decoder, so that one copy of the bundle is in memory
        device_reference(bundle, golden, options["single_copy"])
    result = validate(Decoder(bundle, runtime, **execution), golden, **options)
    figures = result.json()
    over = [gate for gate in result.gates if gate.verdict == gates.OVER]
    worst = [*gates.red_gates(result.gates), *over]
    reasons = [f"{gate.name}: {gate.reason}" for gate in worst]
    return {
        "verdict": result.verdict,
        "quality": result.quality,
        "over_rounding": figures["worst"]["over_rounding"],
        "min_cosine": figures["min_cosine"],
        "kl_mean": figures["cost"]["kl"]["mean"],
        "kl_max": figures["cost"]["kl"]["max"],
        "reason": reasons[0] if reasons else "every gate passes",
        "logits": result.cost.logits,
    }


def diagnose(runtime: str, sound: Collection[str]) -> str:
    """The cause of a fault: the program or the weights if exact arithmetic is not among
    the `sound` units, the precision if only rounded arithmetic is not, the unit if its
    program is sound on the portable runtime."""
    if "portable exact" not in sound:
        return "program or weights"
    if runtime == "portable" or "portable declared" not in sound:
        return "precision"
    if "portable narrow" not in sound:
        return "the unit's arithmetic, within what narrow sums would do"
    return "runtime"


def units_verdict(table: pd.DataFrame) -> str:
    """RED if any unit is RED, else DIED if any died, else not_run if a required gate did
    not run, else GREEN. `portable narrow` is a bound and no unit; only `diagnose` reads
    it."""
    verdicts = set(table.loc[table["unit"] != "portable narrow", "verdict"])
    order = gates.RED, DIED, gates.NOT_RUN, gates.GREEN
    return next(verdict for verdict in order if verdict in verdicts)


def units_quality(table: pd.DataFrame) -> str:
    """OVER where a unit is OVER, else WITHIN where one is WITHIN; not_run where the
    verdict on the export is RED or a unit died, and for units without limits."""
    if units_verdict(table) in (gates.RED, DIED):
        return gates.NOT_RUN
    words = set(table.loc[table["unit"] != "portable narrow", "quality"])
    return next((w for w in (gates.OVER, gates.WITHIN) if w in words), gates.NOT_RUN)
