"""Validates one bundle on every compute unit, each in a process of its own that may
crash, and names the cause of a failure.

A golden goes in, one row per unit comes out. Off a Mac the rows are those of the
portable runtime's arithmetics, labelled so."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from miltorch import PRECISIONS
from workbench import process
from workbench.bundle import Bundle
from workbench.check import gates, metrics
from workbench.check.device import stored_reference
from workbench.check.golden import Golden
from workbench.check.validate import validate
from workbench.decode import Decoder
from workbench.runtime import COMPUTE_UNITS, resolve

SECONDS = 3600
COLUMNS = [
    "unit",
    "runtime",
    "verdict",
    "min_cosine",
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
    path: Path | None = None,
    only: bool = False,
    Ts: Sequence[int] = (),
) -> pd.DataFrame:
    """Validates `bundle` once per unit: portable arithmetics, and Core ML's compute
    units on a Mac.

    Args:
        runtime: where compute units are tried: `coreml` or a stand-in; `portable`:
            nowhere; `auto`: on Core ML where there is one.
        compute_units: those that are tried.
        path: where the golden is stored, with the reference of the device gate beside
            it.
        only: the portable arithmetics are left out, and no process loads a second copy
            of the bundle.
        Ts: tokens a call (default: as `validate`).

    Returns:
        One row per unit: `verdict` GREEN, RED or DIED, the worst update cosine and KL of
        chained logits in nats against Hugging Face's golden, `kl_portable` against the
        portable runtime's `declared` arithmetic, `blame` (null where GREEN), and the
        first `reason`. `kl_portable` and `blame` are null with `only`.
    """
    if runtime == "auto":
        runtime = resolve()
    units = [] if only else [("portable", precision) for precision in PRECISIONS]
    if runtime != "portable":
        units += [(runtime, unit) for unit in compute_units]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = path or golden.save(Path(folder) / "golden.safetensors")
        for how in units:
            rows.append(_row(bundle.root, path, *how, only, Ts))
    verdicts = {row["unit"]: row["verdict"] for row in rows}
    logits = {row["unit"]: row["logits"] for row in rows}
    declared = logits.get("portable declared")
    for row in rows:
        row["kl_portable"] = row["blame"] = None
        if declared is not None and row["logits"] is not None:
            row["kl_portable"] = float(metrics.kl(declared, row["logits"]).max())
        if row["verdict"] != gates.GREEN and not only:
            row["blame"] = blame(row["runtime"], verdicts)
    return pd.DataFrame(rows, columns=COLUMNS)


def _row(
    root: Path, golden: Path, runtime: str, unit: str, only: bool, Ts: Sequence[int]
) -> dict:
    """One unit's row without the comparisons with others, and its logits."""
    row = {
        "unit": f"portable {unit}" if runtime == "portable" else unit,
        "runtime": runtime,
    }
    arguments = root, golden, runtime, unit, only, Ts
    outcome = process.call(validate_unit, *arguments, timeout_s=SECONDS)
    if outcome.failure is None:
        return row | outcome.value
    row |= dict.fromkeys(("min_cosine", "kl_max", "logits"))
    return row | {"verdict": "DIED", "reason": outcome.failure}


def validate_unit(
    root: Path, golden: Path, runtime: str, unit: str, only: bool, Ts: Sequence[int]
) -> dict:
    """In a child: the columns of one unit that need no other, and `logits` [n, V]."""
    bundle, values = Bundle.open(root), Golden.load(golden)
    reference, option = None, {"precision": unit}
    if runtime != "portable":
        option = {"compute_units": unit}
        # before the decoder, so that one copy of the bundle is in memory
        reference = stored_reference(bundle, values, golden, only)
    decoder = Decoder(bundle, runtime, **option)
    result = validate(decoder, values, list(Ts) or None, reference=reference, only=only)
    figures = result.json()
    red = [gate for gate in result.gates if gate.verdict == gates.RED]
    reasons = [f"{gate.name}: {gate.reason}" for gate in red]
    return {
        "verdict": result.verdict,
        "min_cosine": figures["min_cosine"],
        "kl_max": figures["logits"]["kl_max"],
        "reason": reasons[0] if reasons else "every gate passes",
        "logits": result.chained_logits,
    }


def blame(runtime: str, verdicts: dict[str, str]) -> str:
    """The cause of a failure: the program or the weights if exact arithmetic fails, the
    precision if only rounded arithmetic does, the unit if its program passes on the
    portable runtime."""
    if verdicts["portable exact"] != gates.GREEN:
        return "program or weights"
    if runtime == "portable" or verdicts["portable declared"] != gates.GREEN:
        return "precision"
    if verdicts["portable narrow"] != gates.GREEN:
        return "the unit's arithmetic, within what narrow sums would do"
    return "runtime"


def units_verdict(table: pd.DataFrame) -> str:
    """RED where a unit is RED or died. `portable narrow` is a bound, not a unit: it
    only serves `blame`."""
    verdicts = table.loc[table["unit"] != "portable narrow", "verdict"]
    return gates.GREEN if (verdicts == gates.GREEN).all() else gates.RED
