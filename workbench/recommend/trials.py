"""Tries presets for a bundle whose quality is OVER, the smallest first, until one keeps the
user's limits."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd

from workbench.bundle import Bundle
from workbench.check import gates
from workbench.check.evaluate import open_reference
from workbench.check.gates import Gate
from workbench.check.golden import check_exported_from
from workbench.check.hf import Reference
from workbench.check.text import check_held_out
from workbench.check.transcript import Transcript
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.progress import bar, end_stage, stage
from workbench.recommend.candidates import Candidate, list_candidates
from workbench.recommend.scores import (
    KEPT,
    LEAST_PROMPTS,
    NOT_MEASURED,
    Figures,
    Limits,
    PlainText,
    TranscriptText,
)

COLUMNS = [
    "compress",
    "outcome",
    "kl",
    "kl_low",
    "kl_high",
    "agreed",
    "agreed_low",
    "agreed_high",
    "stops",
    "stops_low",
    "stops_high",
    "MiB",  # of the preset's bundle
    "bundle_MiB",  # of the bundle that is OVER
    "seconds",  # of the trial
    "export_seconds",  # of an export that needs a calibration
    "command",  # the next step
]
"""Columns of the table of trials, which notebooks store. The figures and the ends of their
intervals are those of `Figures`."""


@dataclass(frozen=True)
class Trial:
    """A candidate and its measured cost."""

    candidate: Candidate
    outcome: str
    """`KEPT`, `ON_LIMIT`, `EXCEEDED` or `NOT_MEASURED`."""
    figures: Figures | None = None
    """None where they were not measured."""
    seconds: float = 0.0
    """The time of the measurement."""

    def row(self, bundle_bytes: int) -> dict:
        """The trial by `COLUMNS`."""
        row = dict.fromkeys(COLUMNS)
        row |= {"compress": self.candidate.compress, "outcome": self.outcome}
        for name in ("kl", "agreed", "stops"):
            estimate = getattr(self.figures, name, None)
            if estimate is not None:
                row[name] = estimate.value
                row[f"{name}_low"] = estimate.low
                row[f"{name}_high"] = estimate.high
        row["MiB"] = self.candidate.bytes / 2**20
        row["bundle_MiB"] = bundle_bytes / 2**20
        row["seconds"] = self.seconds
        row["export_seconds"] = self.candidate.export_seconds
        row["command"] = self.candidate.command
        return row


@dataclass(frozen=True)
class Recommendation:
    """The presets that were tried for a bundle whose quality is OVER, the smallest
    first, up to the first one that keeps the limits.

    Attributes:
        judged_on: the text that judged the presets in words, such as "512 tokens of
            the workbench's default text".
        bundle_bytes: of the bundle that is OVER.
        seconds: of everything.
        cpu_seconds: of everything, by all threads of this process.
    """

    trials: list[Trial] = field(default_factory=list)
    judged_on: str = ""
    bundle_bytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def chosen(self) -> Trial | None:
        """The trial that keeps the limits."""
        return next((t for t in self.trials if t.outcome == KEPT), None)

    def table(self) -> pd.DataFrame:
        """A row per trial. Those of `COLUMNS` that no trial has a value for are left
        out. `attrs`, which a Parquet file keeps, has `judged_on`."""
        rows = [trial.row(self.bundle_bytes) for trial in self.trials]
        frame = pd.DataFrame(rows, columns=COLUMNS)
        if rows:
            frame = frame.dropna(axis="columns", how="all")
        frame.attrs = {"judged_on": self.judged_on}
        return frame

    def json(self) -> dict:
        """The keys `recommendation` and `tried` of a validation's JSON."""
        chosen = self.chosen
        recommendation = None
        if chosen:
            estimate = chosen.figures.kl
            recommendation = {
                "compress": chosen.candidate.compress,
                "kl": estimate.value,
                "interval": [estimate.low, estimate.high],
                "bytes": chosen.candidate.bytes,
                "bundle_bytes": self.bundle_bytes,
                "command": chosen.candidate.command,
            }
        tried = {
            "text": self.judged_on,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
        }
        tried["presets"] = gates.records(self.table().astype(object))
        return {"recommendation": recommendation, "tried": tried}


def as_table(recommendation: Recommendation | None) -> pd.DataFrame:
    """`Recommendation.table`; without rows where there is no recommendation."""
    return (recommendation or Recommendation()).table()


def recommend(
    checkpoint: Checkpoint | None,
    bundle: Bundle,
    results: Sequence[Gate],
    transcript: Transcript | None = None,
) -> Recommendation | None:
    """Tries presets for a bundle, the smallest first, until one keeps the user's limits.

    Presets are not judged by the check `answers`.

    Args:
        checkpoint: of the bundle.
        results: the gates of the bundle, which have the limits.
        transcript: of the bundle; its texts judge the presets where it has
            `LEAST_PROMPTS`, else `TEXT_TOKENS` tokens of plain text do.

    Returns:
        None without a checkpoint, where the quality is not OVER, where the weights of a
        preset can judge none of the checks that are OVER, and for packages of another
        exporter.
    """
    if checkpoint is None or gates.quality(results) != gates.OVER:
        return None
    has_texts = transcript is not None and len(transcript.texts) >= LEAST_PROMPTS
    judged_gates = {gates.MAX_KL_GATE}
    if has_texts:
        judged_gates |= {"transcript", "stop"}
    over = {gate.name for gate in results if gate.verdict == gates.OVER}
    # Where presets cannot be judged by a check that is OVER, none is tried: a preset that
    # keeps the other limits may still exceed that one.
    if not over & judged_gates or bundle.manifest.foreign:
        return None
    check_exported_from(checkpoint, bundle)
    stage("validate: presets that keep the limits")
    start, cpu_start = time.perf_counter(), time.process_time()
    original = open_reference(checkpoint)
    if has_texts:
        text = TranscriptText(original, transcript)
    else:
        text = PlainText.of(original)
    trials = _try_candidates(checkpoint, bundle, text, Limits.of(results))
    return Recommendation(
        trials=trials,
        judged_on=str(text),
        bundle_bytes=bundle.bytes,
        seconds=time.perf_counter() - start,
        cpu_seconds=time.process_time() - cpu_start,
    )


def _try_candidates(
    checkpoint: Checkpoint,
    bundle: Bundle,
    text: TranscriptText | PlainText,
    limits: Limits,
) -> list[Trial]:
    """Measures candidates, the smallest first, up to the first one that keeps the
    limits."""
    trials = []
    candidates = list_candidates(checkpoint, bundle)
    presets = bar(candidates, "presets", unit="preset")
    for number, candidate in enumerate(presets, 1):
        # A trial may take a minute; where no bar is shown, only the stage says which runs.
        place = f"{number} of at most {len(candidates)}"
        stage(f"validate: presets that keep the limits: {candidate.compress}, {place}")
        start = time.perf_counter()
        figures = _measure(checkpoint, candidate, text)
        seconds = time.perf_counter() - start
        outcome = limits.outcome(figures) if figures else NOT_MEASURED
        trials.append(Trial(candidate, outcome, figures, seconds))
        if outcome == KEPT:
            break
    end_stage()
    return trials


def _measure(
    checkpoint: Checkpoint, candidate: Candidate, text: TranscriptText | PlainText
) -> Figures | None:
    """A candidate's figures; None where its weights are not known, and where they were
    fitted to the text that would judge them."""
    if candidate.weights is None:
        return None
    if candidate.finished and not _is_held_out(text, candidate.finished):
        return None
    return text.figures(Reference(checkpoint, candidate.weights))


def _is_held_out(text: TranscriptText | PlainText, bundle: Bundle) -> bool:
    """Whether a bundle was fitted to no part of a text."""
    try:
        for ids in text.sequences:
            check_held_out(bundle, ids)
    except InputError:  # raised only for a text that the bundle was fitted to
        return False
    return True
