"""Advice on the verdicts of a bundle: whether the export is faulty, whether its cost exceeds
the user's limits, and which preset keeps them.

A preset is judged by Hugging Face's model with the weights that an export in it would
store. For sound bundles of SmolLM2-135M-Instruct that KL was within 0.4% of the bundle's
own. Every figure has a 95% interval, and a limit is kept only where the whole interval
keeps it: neighbouring tokens are alike, so that prompts are resampled, or blocks of a
text."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from workbench.bundle import Bundle
from workbench.check import gates
from workbench.check.compare import kl
from workbench.check.evaluate import open_reference
from workbench.check.gates import Gate
from workbench.check.greedy import padded_inputs
from workbench.check.hf import Reference
from workbench.check.text import check_held_out, default_ids
from workbench.check.transcript import TIE, Transcript, resampled_interval
from workbench.decode.sampling import suppress
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.progress import bar, stage
from workbench.sweep.candidates import Candidate, candidates

# The tokens of plain text that judge a preset where there is no transcript.
TEXT_TOKENS = 512
# The neighbouring tokens of a text that are resampled together.
BLOCK = 16
# A transcript of fewer prompts says too little of how prompts differ for an interval.
LEAST_PROMPTS = 8
KEPT = "within"
ON_LIMIT = "on the limit"
EXCEEDED = "over"
NOT_MEASURED = "not measured"
COLUMNS = """compress outcome kl kl_low kl_high agreed agreed_low agreed_high stops
stops_low stops_high MiB bundle_MiB seconds export_seconds command""".split()


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, sums: np.ndarray, counts: np.ndarray) -> "Estimate":
        """The mean of values in groups [g], by each group's sum and count."""
        low, high = resampled_interval(sums, counts)
        return cls(float(sums.sum() / counts.sum()), low, high)

    def at_most(self, limit: float) -> str:
        """Whether the whole interval lies at or below a limit: `KEPT`, `ON_LIMIT` or
        `EXCEEDED`."""
        if self.high <= limit:
            return KEPT
        return ON_LIMIT if self.low <= limit else EXCEEDED

    def at_least(self, limit: float) -> str:
        return Estimate(-self.value, -self.high, -self.low).at_most(-limit)

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class Figures:
    """The cost of a preset: how far Hugging Face's model with its weights is from the same
    model with the checkpoint's own.

    Attributes:
        kl: nats from the logits of the checkpoint's own weights.
        agreed: share of the tokens of Hugging Face's text; None for a plain text.
        stops: share of the ends of Hugging Face's text; None for a plain text, and
            where it has no end.
    """

    kl: Estimate
    agreed: Estimate | None = None
    stops: Estimate | None = None


@dataclass(frozen=True)
class Limits:
    """The user's limits. One is None where its check of quality did not run."""

    max_kl: float | None
    min_agreed: float | None
    min_stops: float | None

    @classmethod
    def of(cls, results: Sequence[Gate]) -> "Limits":
        limits = {
            gate.name: gate.threshold
            for gate in results
            if gate.verdict in (gates.WITHIN, gates.OVER)
        }
        names = gates.MAX_KL_GATE, "transcript", "stop"
        return cls(*(limits.get(name) for name in names))

    def outcome(self, figures: Figures) -> str:
        """`KEPT` where every figure keeps its limit, otherwise the worst outcome of a
        figure."""
        outcomes = [KEPT]
        if self.max_kl is not None:
            outcomes.append(figures.kl.at_most(self.max_kl))
        if self.min_agreed is not None and figures.agreed:
            outcomes.append(figures.agreed.at_least(self.min_agreed))
        if self.min_stops is not None and figures.stops:
            outcomes.append(figures.stops.at_least(self.min_stops))
        return max(outcomes, key=[KEPT, ON_LIMIT, EXCEEDED].index)


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
        row["export_seconds"] = self.candidate.seconds
        row["command"] = self.candidate.command
        return row


@dataclass(frozen=True)
class Recommendation:
    """The presets that were tried for a bundle whose quality is OVER, the smallest
    first, up to the first one that keeps the limits.

    Attributes:
        text: what the presets were judged on.
        bundle_bytes: of the bundle that is OVER.
        seconds: of everything.
        cpu_seconds: of everything, by all threads of this process.
    """

    trials: list[Trial] = field(default_factory=list)
    text: str = ""
    bundle_bytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def chosen(self) -> Trial | None:
        """The trial that keeps the limits."""
        return next((t for t in self.trials if t.outcome == KEPT), None)

    def table(self) -> pd.DataFrame:
        """A row per trial. Those of `COLUMNS` that no trial has a value for are left
        out."""
        rows = [trial.row(self.bundle_bytes) for trial in self.trials]
        frame = pd.DataFrame(rows, columns=COLUMNS)
        return frame.dropna(axis="columns", how="all") if rows else frame

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
            "text": self.text,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
        }
        tried["presets"] = gates.records(self.table().astype(object))
        return {"recommendation": recommendation, "tried": tried}

    def sentences(self) -> list[str]:
        """The recommendation, the presets that were tried, and the seconds."""
        text = (
            f"Presets were judged by Hugging Face's model with their weights on "
            f"{self.text}, in {self.seconds:.0f} s."
        )
        return [*describe_presets(self.table()), text]


def recommend(
    checkpoint: Checkpoint | None,
    bundle: Bundle,
    results: Sequence[Gate],
    transcript: Transcript | None = None,
) -> Recommendation | None:
    """Tries presets for a bundle, the smallest first, until one keeps the user's limits.

    The check `answers` has no part in it.

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
    judged = {gates.MAX_KL_GATE}
    if has_texts:
        judged |= {"transcript", "stop"}
    over = {gate.name for gate in results if gate.verdict == gates.OVER}
    # a preset that keeps the other limits would be no answer to the one that is exceeded
    if not over & judged or bundle.manifest.foreign:
        return None
    stage("validate: presets that keep the limits")
    start, cpu_start = time.perf_counter(), time.process_time()
    original = open_reference(checkpoint)
    if has_texts:
        scored = _TranscriptText(original, transcript)
    else:
        scored = _PlainText.of(original)
    trials = _try_candidates(checkpoint, bundle, scored, Limits.of(results))
    return Recommendation(
        trials,
        str(scored),
        bundle.bytes,
        seconds=time.perf_counter() - start,
        cpu_seconds=time.process_time() - cpu_start,
    )


def _try_candidates(
    checkpoint: Checkpoint,
    bundle: Bundle,
    scored: "_TranscriptText | _PlainText",
    limits: Limits,
) -> list[Trial]:
    """Measures candidates, the smallest first, up to the first one that keeps the
    limits."""
    trials = []
    for candidate in bar(candidates(checkpoint, bundle), "presets", unit="preset"):
        start = time.perf_counter()
        figures = _measure(checkpoint, candidate, scored)
        seconds = time.perf_counter() - start
        outcome = limits.outcome(figures) if figures else NOT_MEASURED
        trials.append(Trial(candidate, outcome, figures, seconds))
        if outcome == KEPT:
            break
    return trials


def _measure(
    checkpoint: Checkpoint, candidate: Candidate, scored: "_TranscriptText | _PlainText"
) -> Figures | None:
    """A candidate's figures; None where its weights are not known, and where they were
    fitted to the text that would judge them."""
    if candidate.weights is None:
        return None
    if candidate.finished:
        try:
            for ids in scored.sequences:
                check_held_out(candidate.finished, ids)
        except InputError:
            return None
    return scored.figures(Reference(checkpoint, candidate.weights))


@dataclass(frozen=True)
class _TranscriptText:
    """The texts of a transcript, which judge presets.

    Attributes:
        original: Hugging Face's model on the checkpoint's own weights.
    """

    original: Reference
    transcript: Transcript

    def __str__(self) -> str:
        texts = self.transcript.texts
        count = sum(len(text.tokens) for text in texts)
        return f"the {count} tokens of the transcript's {len(texts)} prompts"

    @property
    def sequences(self) -> list[list[int]]:
        return padded_inputs(self.transcript.texts)

    def figures(self, model: Reference) -> Figures:
        """The figures of Hugging Face's model with other weights; prompts are
        resampled."""
        transcript = self.transcript
        suppressed = self.original.checkpoint.tokens.suppressed
        hidden = model.last_hidden(
            np.array(padded_inputs(transcript.texts)), use_cache=False
        )
        nats, agreed, counts, stops = [], [], [], []
        for number, text in enumerate(transcript.texts):
            golden = self.original.logits(text.hidden).numpy()
            actual = model.logits(hidden[number, text.predicting_positions]).numpy()
            tokens = suppress(actual, suppressed).argmax(-1)
            best = suppress(golden, suppressed).max(-1)
            gap = best - golden[np.arange(len(golden)), tokens]
            nats.append(kl(golden, actual).sum())
            agreed.append((gap <= TIE * transcript.sigma).sum())
            counts.append(len(text.tokens))
            if text.ended:
                stops.append(int(tokens[-1]) in transcript.end_tokens)
        counts = np.array(counts)
        ends = None
        if stops:
            ends = Estimate.of(np.array(stops, float), np.ones(len(stops)))
        return Figures(
            Estimate.of(np.array(nats), counts),
            Estimate.of(np.array(agreed, float), counts),
            ends,
        )


@dataclass(frozen=True)
class _PlainText:
    """Tokens of a text, which judge presets.

    Attributes:
        original: Hugging Face's model on the checkpoint's own weights.
        hidden: [n, C], what its head reads.
    """

    original: Reference
    ids: np.ndarray
    hidden: np.ndarray

    @classmethod
    def of(cls, original: Reference) -> "_PlainText":
        """The default text of the checkpoint of a model, as far as its positions
        reach."""
        checkpoint = original.checkpoint
        most = getattr(checkpoint.config, "max_position_embeddings", None)
        ids = default_ids(checkpoint, min(TEXT_TOKENS, most or TEXT_TOKENS))
        return cls(
            original,
            np.array(ids),
            original.last_hidden(np.array([ids]), use_cache=False)[0],
        )

    def __str__(self) -> str:
        return f"{len(self.ids)} tokens of text"

    @property
    def sequences(self) -> list[list[int]]:
        return [self.ids.tolist()]

    def figures(self, model: Reference) -> Figures:
        """The KL of Hugging Face's model with other weights; blocks are resampled."""
        hidden = model.last_hidden(self.ids[None], use_cache=False)[0]
        nats, counts = [], []
        for start in range(0, len(self.ids), BLOCK):
            rows = slice(start, start + BLOCK)
            golden = self.original.logits(self.hidden[rows]).numpy()
            block = kl(golden, model.logits(hidden[rows]).numpy())
            nats.append(block.sum())
            counts.append(len(block))
        return Figures(Estimate.of(np.array(nats), np.array(counts)))


def describe_presets(presets: pd.DataFrame) -> list[str]:
    """Sentences on the presets that were tried, the recommendation first.

    Args:
        presets: see `Recommendation.table`.
    """
    rows = presets.to_dict("records")
    chosen = [row for row in rows if row["outcome"] == KEPT]
    sentences = [
        f"Recommended: {_describe_figures(row)}, {row['MiB']:,.1f} MiB instead of "
        f"{row['bundle_MiB']:,.1f}. Next step: {row['command']}"
        for row in chosen
    ]
    if rows and not chosen:
        sentences.append(
            "No preset that was measured keeps the limits. Next step: raise them."
        )
    others = [row for row in rows if row["outcome"] != KEPT]
    return sentences + [_describe_rejected(row) for row in others]


def _describe_rejected(row: dict) -> str:
    """A sentence on a preset that is not recommended, from its row of
    `Recommendation.table`."""
    size, command = f"{row['MiB']:,.1f} MiB", row["command"]
    if row["outcome"] == ON_LIMIT:
        return f"On the limit: {_describe_figures(row)}, {size}."
    if row["outcome"] == EXCEEDED:
        return f"Over the limit: {_describe_figures(row)}, {size}."
    if pd.isna(row.get("export_seconds")):  # a finished bundle
        return (
            f"{row['compress']}, {size}: not measured, since its weights were fitted "
            f"to a part of the text that would judge it. To validate it: {command}"
        )
    seconds = max(1, row["export_seconds"])
    return (
        f"{row['compress']}, {size}: not measured, since a calibration chooses "
        f"its values. To export it, about {seconds:.0f} s: {command}"
    )


def _describe_figures(row: dict) -> str:
    """The figures of a preset with their intervals."""
    names = {"kl": "KL", "agreed": "tokens agreed", "stops": "ends"}
    parts = [
        f"{label} {Estimate(row[name], row[f'{name}_low'], row[f'{name}_high'])}"
        for name, label in names.items()
        if not pd.isna(row.get(name))
    ]
    return f"{row['compress']}: {', '.join(parts)}"


def describe_verdict(results: Sequence[Gate], presets: pd.DataFrame) -> list[str]:
    """Sentences that tell a fault of the export from a cost above the user's limit, and
    name the next step.

    Args:
        results: the gates of a bundle.
        presets: see `Recommendation.table`; without rows where none was tried.
    """
    sentences = [_describe_export(results), *_describe_quality(results)]
    return sentences + describe_presets(presets)


def _describe_export(results: Sequence[Gate]) -> str:
    """Whether the export is faulty, by how many gates, and which gates did not run."""
    gates_that_ran = [
        gate for gate in results if gate.verdict in (gates.GREEN, gates.RED)
    ]
    count = len(gates_that_ran)
    if faults := gates.faults(results):
        names = ", ".join(gate.name for gate in faults)
        return (
            f"Export RED: {len(faults)} of {count} gates on it are RED ({names}). "
            "Next step: workbench explain names the cause."
        )
    not_run_note = ""
    names_not_run = [gate.name for gate in results if gate.verdict == gates.NOT_RUN]
    if names_not_run:
        not_run_note = f"; not run: {', '.join(names_not_run)}"
    word = "not run" if gates.missing(results) else "GREEN"
    return f"Export {word}: {count} gates on it are GREEN{not_run_note}."


def _describe_quality(results: Sequence[Gate]) -> list[str]:
    """The mean KL beside its limit, and each other check that is OVER. A faulty export is
    not judged."""
    has_fault = bool(gates.faults(results))
    other_checks_over = [
        gate
        for gate in results
        if gate.name != gates.MAX_KL_GATE and gate.verdict == gates.OVER
    ]
    sentences = []
    for limit in results:
        if limit.name != gates.MAX_KL_GATE or limit.verdict == gates.NOT_RUN:
            continue
        cost = f"a mean KL of {limit.value:.3g} nats from Hugging Face's model"
        if has_fault:
            sentences.append(
                f"Quality not judged: {cost} is measured, and the fault has a part in it."
            )
        elif limit.verdict == gates.WITHIN:
            # the quality is OVER where another check is
            subject = "It" if other_checks_over else "Quality WITHIN: it"
            sentences.append(
                f"{subject} costs {cost}, at most your limit of {limit.threshold:g}."
            )
        else:
            sentences.append(
                f"Quality OVER: it costs {cost}, more than your limit of "
                f"{limit.threshold:g}. This is the cost of compression and no fault."
            )
    if has_fault:
        return sentences
    for gate in other_checks_over:
        sentences.append(
            f"Quality OVER: {gate.name} is {gate.value:.3g}, less than your limit of "
            f"{gate.threshold:.3g} ({gate.reason})."
        )
    return sentences


def as_table(recommendation: Recommendation | None) -> pd.DataFrame:
    """The presets that were tried, by `COLUMNS`; without rows where none was."""
    return (recommendation or Recommendation()).table()
