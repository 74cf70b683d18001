"""Adopts, validates and explains packages with the interfaces of five exporters, sound
and faulty, and the user's own, for notebook 37."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
    """The results of `validate` and `explain` for packages adopted as proposed.

    `fault` was planted ("": none; None: the user's packages); `computes` is the
    expected variant; `window` is that of the model's sliding layers."""

    validation: Validation
    cause: Cause
    fault: str | None = None
    computes: str = "as configured"
    window: int | None = None


def adopt_packages(
    packages: list[Path], checkpoint: Checkpoint, folder: Path, **how
) -> Finding:
    """Writes a proposed foreign.yaml to the new `folder`, validates and explains the
    packages; `how`: runtime and compute units."""
    foreign, notes = propose.propose(packages, checkpoint, folder)
    propose.write(foreign, notes, propose.target(folder))
    adopted = Adopted.open(folder)
    window = getattr(checkpoint.config, "sliding_window", None)
    return Finding(validate(adopted, **how), explain(adopted), window=window)


def findings(
    styles: Iterable[str], layers: int, folder: Path, **how
) -> dict[str, Finding]:
    """The findings of packages of each style, made in `folder` from random checkpoints:
    sound ones, and the same with the style's fault planted."""
    results = {}
    for name in styles:
        style = STYLES[name]
        sound = folder / name
        source = tiny_checkpoint(style.family, folder, layers)
        faulty = folder / f"{name} {style.fault}"
        style.make(sound, source, fault="")
        copied = {}
        if style.fault == "future":
            copied["sound"] = sound
        style.make(faulty, source, fault=style.fault, **copied)
        adopted = []
        for packages in (sound, faulty):
            target = folder / "adopted" / packages.name
            adopted.append(
                adopt_packages([packages], Checkpoint(source), target, **how)
            )
        results[f"{name}, sound"] = replace(adopted[0], fault="")
        results[f"{name}, faulty"] = replace(
            adopted[1], fault=style.fault, computes=style.computes
        )
    return results


def own_finding(
    packages: list[Path], checkpoint: Path, folder: Path, **how
) -> dict[str, Finding]:
    """The finding of the user's packages, if there are any."""
    if not packages:
        return {}
    source = Checkpoint(checkpoint)
    return {"yours": adopt_packages(packages, source, folder / "yours", **how)}


def finding_table(results: dict[str, Finding]) -> pd.DataFrame:
    """A row for each export: its planted fault, its verdict, the gates that are RED or
    not_run, the worst K or V, and the variant that the packages compute."""
    rows = []
    for name, finding in results.items():
        by_verdict = defaultdict(list)
        for gate in finding.validation.gates:
            by_verdict[gate.verdict].append(gate.name)
        worst = finding.validation.json()["worst"]
        row = {
            "packages": name,
            "planted": FAULTS.get(finding.fault, ""),
            "verdict": finding.validation.verdict,
            "RED": ", ".join(by_verdict[gates.RED]),
            "not_run": ", ".join(by_verdict[gates.NOT_RUN]),
            "worst K or V, 1 − cosine": 1 - worst["cosine"],
            "computes": conclusion(finding.cause),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def key_rows(results: dict[str, Finding]) -> pd.DataFrame:
    """Rows of the `fidelity` table for K, in calls of the fewest and the most
    tokens."""
    columns = [
        "packages",
        "layer",
        "position",
        "T",
        "tensor",
        "mode",
        "cosine",
        "finite",
    ]
    frames = []
    for name, finding in results.items():
        rows = finding.validation.rows
        ends = rows["T"].isin([rows["T"].min(), rows["T"].max()])
        frames.append(rows[ends & (rows["tensor"] == "k")].assign(packages=name))
    return pd.concat(frames)[columns]


def windows(results: dict[str, Finding]) -> dict[str, int]:
    """The window of every export with sliding layers."""
    return {name: finding.window for name, finding in results.items() if finding.window}


def finding_gates(results: dict[str, Finding]) -> list[gates.Gate]:
    """Gates: sound packages and the user's are GREEN and compute the model; those with
    a fault are RED, and `explain` names the fault: a variant, or calls that attend to
    later tokens."""
    checks = []
    for name, finding in results.items():
        verdict = finding.validation.verdict
        cause = finding.cause
        expected = gates.GREEN
        if finding.fault:
            expected = gates.RED
        named = cause.fits == finding.computes
        if finding.fault == "future":
            named = any(fault.startswith("causality") for fault in cause.faults)
        reason = f"{verdict}; {conclusion(cause)}"
        slug = name.replace(",", "").replace(" ", "_")
        holds = verdict == expected and named
        checks.append(gates.holds(f"{slug}_is_{expected}", holds, reason))
    return checks


def facts(project: Path) -> pd.DataFrame:
    """The measured faults of public exporters: `data/sources/other_exporters.csv`."""
    return pd.read_csv(project / FACTS, keep_default_na=False)


def adopt_conclusion(results: dict[str, Finding], measured: pd.DataFrame) -> str:
    """The conclusion of notebook 37."""
    exporters = measured["exporter"].nunique()
    faulty = measured[measured["fault"] != ""]
    words = (
        f"Not always: of {len(measured)} kinds of packages of {exporters} exporters {len(faulty)} "
        f"compute something else than the checkpoint ({faulty['exporter'].nunique()} exporters)."
    )
    lines = [f"{words} Packages checked here:", ""]
    for name, finding in results.items():
        verdict = finding.validation.verdict
        lines.append(f"- {name}: {verdict}. {conclusion(finding.cause)}")
    return "\n".join(lines)
