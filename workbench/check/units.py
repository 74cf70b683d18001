"""Validates one bundle on every compute unit, each in a process of its own that may
crash, and names the cause of a failure.

A golden goes in, one row per unit comes out. Off a Mac the rows are those of the
portable runtime's arithmetics, labelled so."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from miltorch import PRECISIONS
from workbench.bundle import Bundle
from workbench.check import gates, metrics
from workbench.check.device import stored_reference
from workbench.check.golden import Golden
from workbench.check.validate import validate
from workbench.decode import Decoder
from workbench.errors import last_message
from workbench.runtime import COMPUTE_UNITS, named, resolve

SECONDS = 3600
Launch = Callable[[list[str]], subprocess.CompletedProcess]
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


def launch(command: list[str]) -> subprocess.CompletedProcess:
    """Runs a child process to its end and returns how it ended; one that hangs is
    killed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            command, -9, "", f"no result after {SECONDS} s"
        )


def validate_units(
    bundle: Bundle,
    golden: Golden,
    *,
    runtime: str = "auto",
    compute_units: Sequence[str] = COMPUTE_UNITS,
    path: Path | None = None,
    only: bool = False,
    Ts: Sequence[int] = (),
    start: Launch = launch,
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
        start: runs a command; tests give their own.

    Returns:
        One row per unit, three comparisons in each: with Hugging Face's golden
        (`verdict` GREEN, RED or DIED, worst update cosine, worst KL of chained logits
        in nats), with the portable runtime's `declared` arithmetic (`kl_portable`), and
        what both together say of the fault (`blame`, null where GREEN); then the first
        `reason`.
        `kl_portable` and `blame` are null with `only`.
    """
    if runtime == "auto":
        runtime = resolve()
    units = {}
    if not only:
        units["portable"] = PRECISIONS
    if runtime != "portable":
        units[runtime] = compute_units
    with tempfile.TemporaryDirectory() as folder:
        path = path or golden.save(Path(folder) / "golden.safetensors")
        rows = [
            unit_row(bundle, path, runtime, unit, Ts, start, only)
            for runtime, names in units.items()
            for unit in names
        ]
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


def unit_row(
    bundle: Bundle,
    golden: Path,
    runtime: str,
    unit: str,
    Ts: Sequence[int],
    start: Launch,
    only: bool = False,
) -> dict:
    """One unit's row without the comparisons with others: the output of a child
    process, or how it died."""
    name, _ = named(runtime)
    row = {"unit": unit, "runtime": name}
    row |= dict.fromkeys(("min_cosine", "kl_max", "logits"))
    if name == "portable":
        row["unit"] = f"portable {unit}"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npy"
        command = [sys.executable, "-m", "workbench.check.units"]
        arguments = [bundle.root, golden, runtime, unit, out, int(only), *Ts]
        child = start([*command, *map(str, arguments)])
        if out.exists():
            row["logits"] = np.load(out)
    if child.returncode:
        code = child.returncode
        last = last_message((child.stderr or "").splitlines())
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return row | {"verdict": "DIED", "reason": f"{how}: {last}"}
    result = json.loads(child.stdout.splitlines()[-1])
    red = (gate for gate in result["gates"] if gate["verdict"] == gates.RED)
    reason = "every gate passes"
    if gate := next(red, None):
        reason = f"{gate['name']}: {gate['reason']}"
    return row | {
        "verdict": result["verdict"],
        "min_cosine": result["min_cosine"],
        "kl_max": result["logits"]["kl_max"],
        "reason": reason,
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


def units_main(
    root: str, golden: str, runtime: str, unit: str, out: str, only: str = "0", *Ts: str
) -> None:
    """The child: validates on one unit, keeps the logits in `out` and prints one line
    of JSON."""
    bundle = Bundle.open(root)
    alone = bool(int(only))
    values = Golden.load(golden)
    reference = None
    option = {"precision": unit}
    if runtime != "portable":
        option = {"compute_units": unit}
        # before the decoder, so that one copy of the bundle is in memory
        reference = stored_reference(bundle, values, Path(golden), alone)
    decoder = Decoder(bundle, runtime, **option)
    Ts = [int(T) for T in Ts] or None
    result = validate(decoder, values, Ts, reference=reference, only=alone)
    np.save(out, result.chained_logits)
    print(json.dumps(result.json(), default=str))


if __name__ == "__main__":
    units_main(*sys.argv[1:])
