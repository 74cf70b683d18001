"""Packages with the interfaces of five exporters, sound and faulty, and the user's own: adopted,
validated and explained for notebook 37."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from workbench.adopt import propose
from workbench.adopt.folder import Adopted
from workbench.adopt.validate import Cause, Validation, conclusion, explain, validate
from workbench.check import gates
from workbench.models.checkpoint import Checkpoint
from workbench.studies.exporter_model import tiny_checkpoint
from workbench.studies.exporter_styles import FAULTS, STYLES

FACTS = Path("data/sources/other_exporters.csv")


@dataclass
class Finding:
    """What `validate` and `explain` say of packages that were adopted as proposed. `fault` was
    planted ("": none; None: the user's packages), `computes` is the variant that they should
    compute then; `window` is that of the model's sliding layers."""

    validation: Validation
    cause: Cause
    fault: str | None = None
    computes: str = "as configured"
    window: int | None = None


def adopt_packages(packages: list[Path], checkpoint: Checkpoint, folder: Path, **how) -> Finding:
    """Proposes a foreign.yaml in the new `folder`, and validates and explains what it describes;
    `how`: runtime and compute units."""
    foreign, notes = propose.propose(packages, checkpoint, folder)
    propose.write(foreign, notes, propose.target(folder))
    adopted = Adopted.open(folder)
    window = getattr(checkpoint.config, "sliding_window", None)
    return Finding(validate(adopted, **how), explain(adopted), window=window)


def findings(styles: Iterable[str], layers: int, folder: Path, **how) -> dict[str, Finding]:
    """What is found in packages of each style, made in `folder` of random checkpoints: sound ones,
    and the same with the style's fault planted."""
    found = {}
    for name in styles:
        style, sound = STYLES[name], folder / name
        source = tiny_checkpoint(style.family, folder, layers)
        for fault in ("", style.fault):
            packages = folder / f"{name} {fault}" if fault else sound
            copied = {"sound": sound} if fault == "future" else {}
            style.make(packages, source, fault=fault, **copied)
            target = folder / "adopted" / packages.name
            finding = adopt_packages([packages], Checkpoint(source), target, **how)
            finding.fault, finding.computes = fault, style.computes if fault else finding.computes
            found[f"{name}, {'faulty' if fault else 'sound'}"] = finding
    return found


def own_finding(packages: list[Path], checkpoint: Path, folder: Path, **how) -> dict[str, Finding]:
    """What is found in the user's packages, if there are any."""
    if not packages:
        return {}
    return {"yours": adopt_packages(packages, Checkpoint(checkpoint), folder / "yours", **how)}


def finding_table(found: dict[str, Finding]) -> pd.DataFrame:
    """A row for each export: the fault planted in it, its verdict, the gates that are RED or could
    not run, the worst K or V, and what the packages compute."""
    rows = []
    for name, finding in found.items():
        by_verdict = {gates.RED: [], gates.NOT_RUN: []}
        for gate in finding.validation.gates:
            by_verdict.setdefault(gate.verdict, []).append(gate.name)
        worst = finding.validation.json()["worst"]
        rows.append(
            {
                "packages": name,
                "planted": FAULTS.get(finding.fault, ""),
                "verdict": finding.validation.verdict,
                "RED": ", ".join(by_verdict[gates.RED]),
                "not_run": ", ".join(by_verdict[gates.NOT_RUN]),
                "worst K or V, 1 − cosine": 1 - worst["cosine"],
                "computes": conclusion(finding.cause),
            }
        )
    return pd.DataFrame(rows)


def key_rows(found: dict[str, Finding]) -> pd.DataFrame:
    """Rows of the `fidelity` table for K, in calls of the fewest and the most tokens."""
    columns = ["packages", "layer", "position", "T", "tensor", "mode", "cosine", "finite"]
    frames = []
    for name, finding in found.items():
        rows = finding.validation.rows
        ends = rows["T"].isin([rows["T"].min(), rows["T"].max()])
        frames.append(rows[ends & (rows["tensor"] == "k")].assign(packages=name))
    return pd.concat(frames)[columns]


def windows(found: dict[str, Finding]) -> dict[str, int]:
    """The end of the window of every export whose layers slide."""
    return {name: finding.window for name, finding in found.items() if finding.window}


def finding_gates(found: dict[str, Finding]) -> list[gates.Gate]:
    """Sound packages and the user's must be GREEN and compute the model; those with a fault RED,
    and the fault named: the variant that they compute, or calls that see later tokens."""
    checks = []
    for name, finding in found.items():
        verdict = finding.validation.verdict
        cause = finding.cause
        expected = gates.RED if finding.fault else gates.GREEN
        named = cause.fits == finding.computes
        if finding.fault == "future":
            named = any(fault.startswith("causality") for fault in cause.faults)
        reason = f"{verdict}; {conclusion(cause)}"
        slug = name.replace(",", "").replace(" ", "_")
        checks.append(gates.holds(f"{slug}_is_{expected}", verdict == expected and named, reason))
    return checks


def facts(project: Path) -> pd.DataFrame:
    """What was measured of public exporters: `data/sources/other_exporters.csv`."""
    return pd.read_csv(project / FACTS, keep_default_na=False)


def adopt_conclusion(found: dict[str, Finding], measured: pd.DataFrame) -> str:
    """The answer in sentences."""
    exporters = measured["exporter"].nunique()
    faulty = measured[measured["fault"] != ""]
    words = (
        f"Not always: of {len(measured)} kinds of packages of {exporters} exporters {len(faulty)} "
        f"compute something else than the checkpoint ({faulty['exporter'].nunique()} exporters)."
    )
    names = []
    for n, f in found.items():
        names.append(f"- {n}: {f.validation.verdict}. {conclusion(f.cause)}")
    return "\n".join([words + " Packages checked here:", "", *names])
