"""The verdicts on a bundle and the presets that were tried for it, in sentences.

Presets are read from a table (`Recommendation.table`), which a notebook may have stored."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from workbench.bundle.presets import FP16
from workbench.check import gates
from workbench.check.cost import STORAGE_ALONE
from workbench.check.gates import Gate
from workbench.recommend.scores import EXCEEDED, KEPT, ON_LIMIT, Estimate
from workbench.recommend.trials import Recommendation

# The interval is that of resampled parts of one text, which vary less than texts do.
INTERVAL_NOTE = (
    "The interval holds for this text alone: the KL on another text may lie outside it "
    "and above the limit, which `workbench evaluate` with --text shows."
)


@dataclass(frozen=True)
class TriedPreset:
    """A row of the table of trials (see `trials.COLUMNS`)."""

    compress: str
    outcome: str
    kl: Estimate | None
    agreed: Estimate | None
    stops: Estimate | None
    mib: float
    bundle_mib: float
    export_seconds: float | None
    command: str

    @property
    def needs_calibration(self) -> bool:
        """Whether it was not measured because a calibration has to choose its values first.
        Only such a preset has `export_seconds`."""
        return self.export_seconds is not None

    @classmethod
    def of(cls, row: dict) -> "TriedPreset":
        """The preset of a row, whose columns may be null or absent."""

        def read_estimate(name: str) -> Estimate | None:
            value = row.get(name)
            if pd.isna(value):
                return None
            return Estimate(value, row.get(f"{name}_low"), row.get(f"{name}_high"))

        seconds = row.get("export_seconds")
        return cls(
            compress=row["compress"],
            outcome=row["outcome"],
            kl=read_estimate("kl"),
            agreed=read_estimate("agreed"),
            stops=read_estimate("stops"),
            mib=row["MiB"],
            bundle_mib=row["bundle_MiB"],
            export_seconds=None if pd.isna(seconds) else seconds,
            command=row["command"],
        )

    def figures(self) -> str:
        """The preset and its figures with their intervals."""
        labels = {"KL": self.kl, "tokens agreed": self.agreed, "ends": self.stops}
        parts = [f"{label} {value}" for label, value in labels.items() if value]
        if self.compress == FP16.name and self.kl:
            # about all that an export in fp16 costs is in its arithmetic
            parts[0] += f" ({STORAGE_ALONE})"
        return f"{self.compress}: {', '.join(parts)}"


def describe_verdict(results: Sequence[Gate], presets: pd.DataFrame) -> list[str]:
    """Sentences that tell a fault of the export from a cost above the user's limit, and
    name the next step.

    Args:
        results: the gates of a bundle.
        presets: see `Recommendation.table`; without rows where none was tried.
    """
    sentences = [_describe_export(results), *_describe_quality(results)]
    return sentences + _describe_presets(presets)


def describe_recommendation(recommendation: Recommendation) -> list[str]:
    """The recommendation, the presets that were tried, and the seconds."""
    judgement = (
        f"Presets were judged by Hugging Face's model with their weights on "
        f"{recommendation.judged_on}, in {recommendation.seconds:.0f} s. Their KL is "
        f"{STORAGE_ALONE}."
    )
    return [*_describe_presets(recommendation.table()), judgement]


def _describe_presets(table: pd.DataFrame) -> list[str]:
    """Sentences on the presets that were tried, the recommendation first."""
    presets = [TriedPreset.of(row) for row in table.to_dict("records")]
    chosen = [preset for preset in presets if preset.outcome == KEPT]
    # a table that was stored by an earlier version does not name the text
    text = table.attrs.get("judged_on") or "one text"
    sentences = [
        f"Recommended: {preset.figures()} on {text}, {preset.mib:,.1f} MiB instead of "
        f"{preset.bundle_mib:,.1f}. {INTERVAL_NOTE} Next step: {preset.command}"
        for preset in chosen
    ]
    if presets and not chosen:
        sentences.append(
            "No preset that was measured keeps the limits. Next step: raise them."
        )
    others = [preset for preset in presets if preset.outcome != KEPT]
    return sentences + [_describe_rejected(preset) for preset in others]


def _describe_rejected(preset: TriedPreset) -> str:
    """A sentence on a preset that is not recommended."""
    size = f"{preset.mib:,.1f} MiB"
    if preset.outcome == ON_LIMIT:
        return f"On the limit: {preset.figures()}, {size}."
    if preset.outcome == EXCEEDED:
        return f"Over the limit: {preset.figures()}, {size}."
    if preset.needs_calibration:
        seconds = max(1, preset.export_seconds)
        return (
            f"{preset.compress}, {size}: not measured, since a calibration chooses "
            f"its values. To export it, about {seconds:.0f} s: {preset.command}"
        )
    # a finished bundle, which `trials._measure` did not judge by its calibration text
    return (
        f"{preset.compress}, {size}: not measured, since its weights were fitted "
        f"to a part of the text that would judge it. To validate it: "
        f"{preset.command}"
    )


def _describe_export(results: Sequence[Gate]) -> str:
    """Whether the export is faulty, by how many gates, and which gates on it did not
    run."""
    gates_that_ran = [
        gate for gate in results if gate.verdict in (gates.GREEN, gates.RED)
    ]
    count = len(gates_that_ran)
    if faults := gates.red_gates(results):
        names = [gate.name for gate in faults]
        return (
            f"Export RED: {len(faults)} of {count} gates on it are RED "
            f"({', '.join(names)}). Next step: {_step_after_red(names)}."
        )
    not_run_note = ""
    not_run = [
        gate for gate in _not_run(results) if gate.name not in gates.QUALITY_CHECKS
    ]
    if not_run:
        noun = "gate" if len(not_run) == 1 else "gates"
        not_run_note = f"; {noun} not run: {_with_reasons(not_run)}"
    word = "not run" if gates.missing_gates(results) else "GREEN"
    return f"Export {word}: {count} gates on it are GREEN{not_run_note}."


def _not_run(results: Sequence[Gate]) -> list[Gate]:
    """The gates and checks that did not run."""
    return [gate for gate in results if gate.verdict == gates.NOT_RUN]


def _with_reasons(not_run: Sequence[Gate]) -> str:
    """The names of gates or checks, each with the reason why it did not run."""
    return ", ".join(
        f"{gate.name} ({gate.reason})" if gate.reason else gate.name for gate in not_run
    )


def _step_after_red(names: list[str]) -> str:
    """What finds the cause of RED gates of these names."""
    if gates.names_cause(names):
        return "their reasons name what is wrong; then export again"
    if names == ["device"]:
        return "workbench explain op names the operation"
    return "workbench explain names the cause"


def _describe_quality(results: Sequence[Gate]) -> list[str]:
    """The mean KL beside its limit, each other check that is OVER, and the checks that did
    not run. A faulty export is not judged."""
    max_kl = None
    others_over = []
    for gate in results:
        if gate.name == gates.MAX_KL_GATE:
            max_kl = gate if gate.verdict != gates.NOT_RUN else None
        elif gate.verdict == gates.OVER:
            others_over.append(gate)
    if gates.red_gates(results):
        return [_describe_unjudged(max_kl)] if max_kl else []
    # the quality is OVER where another check is: WITHIN must not stand beside it
    sentences = [_describe_max_kl(max_kl, bool(others_over))] if max_kl else []
    for gate in others_over:
        sentences.append(
            f"Quality OVER: {gate.name} is {gate.value:.3g}, less than your limit of "
            f"{gate.threshold:.3g} ({gate.reason})."
        )
    if not_run := [
        gate for gate in _not_run(results) if gate.name in gates.QUALITY_CHECKS
    ]:
        noun = "Check" if len(not_run) == 1 else "Checks"
        sentences.append(f"{noun} of quality not run: {_with_reasons(not_run)}.")
    return sentences


def _describe_unjudged(max_kl: Gate) -> str:
    """The mean KL of a faulty export."""
    return (
        f"Quality not judged: {_kl_in_words(max_kl)} is measured, and the fault has a "
        "part in it."
    )


def _describe_max_kl(max_kl: Gate, is_over_elsewhere: bool) -> str:
    """The mean KL of a sound export beside its limit."""
    if max_kl.verdict == gates.OVER:
        return (
            f"Quality OVER: it costs {_kl_in_words(max_kl)}, more than your limit of "
            f"{max_kl.threshold:g}. This is the cost of compression and no fault."
        )
    subject = "It" if is_over_elsewhere else "Quality WITHIN: it"
    return (
        f"{subject} costs {_kl_in_words(max_kl)}, at most your limit of "
        f"{max_kl.threshold:g}."
    )


def _kl_in_words(max_kl: Gate) -> str:
    return f"a mean KL of {max_kl.value:.3g} nats from Hugging Face's model"
