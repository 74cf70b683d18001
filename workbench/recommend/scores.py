"""The figures of a preset's weights, which a text measures, and the user's limits.

Neighbouring tokens are alike, so that an interval comes from resampled groups of tokens:
the prompts of a transcript (`TranscriptText`), or blocks of a plain text (`PlainText`). It
says how the parts of that text vary, not how other texts differ from it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workbench.check import gates
from workbench.check.compare import kl
from workbench.check.gates import Gate
from workbench.check.greedy import padded_inputs
from workbench.check.hf import Reference
from workbench.check.text import default_ids
from workbench.check.transcript import TIE, ComparedText, Transcript, resampled_interval
from workbench.decode.sampling import suppress

# The tokens of plain text that judge a preset where there is no transcript.
TEXT_TOKENS = 512
# The neighbouring tokens of a text that are resampled together.
BLOCK = 16
# A transcript of fewer prompts says too little of how prompts differ for an interval.
LEAST_PROMPTS = 8
# outcomes of a candidate
KEPT = "within"
ON_LIMIT = "on the limit"
EXCEEDED = "over"
NOT_MEASURED = "not measured"
BEST_TO_WORST = (KEPT, ON_LIMIT, EXCEEDED)


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
        """Whether the whole interval lies at or above a limit: `KEPT`, `ON_LIMIT` or
        `EXCEEDED`."""
        if self.low >= limit:
            return KEPT
        return ON_LIMIT if self.high >= limit else EXCEEDED

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class Figures:
    """The cost of a preset: how far Hugging Face's model with its weights is from the same
    model with the checkpoint's own.

    The arithmetic is that of float32 for both, so that the figures have no rounding of
    fp16 arithmetic. For fp16 this rounding is about all of the cost of an export.

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
    """The user's limits. A limit is None where its check of quality did not run."""

    max_kl: float | None
    min_agreed: float | None
    min_stops: float | None

    @classmethod
    def of(cls, results: Sequence[Gate]) -> "Limits":
        """The limits in the gates of a bundle."""
        limits = {
            gate.name: gate.threshold
            for gate in results
            if gate.verdict in (gates.WITHIN, gates.OVER)
        }
        return cls(
            max_kl=limits.get(gates.MAX_KL_GATE),
            min_agreed=limits.get("transcript"),
            min_stops=limits.get("stop"),
        )

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
        return max(outcomes, key=BEST_TO_WORST.index)


@dataclass(frozen=True)
class _PromptFigures:
    """The figures of a preset on the text of one prompt.

    Attributes:
        nats: the KL, summed over the tokens.
        agreed: number of tokens at which the preset takes Hugging Face's token, or one
            that is tied with it.
        tokens: number of tokens.
        stops: whether the preset ends where the text ends; None: the text has no end.
    """

    nats: float
    agreed: int
    tokens: int
    stops: bool | None


@dataclass(frozen=True)
class TranscriptText:
    """The texts of a transcript, which judge presets.

    Attributes:
        original: Hugging Face's model with the checkpoint's own weights.
    """

    original: Reference
    transcript: Transcript

    def __str__(self) -> str:
        texts = self.transcript.texts
        count = sum(len(text.tokens) for text in texts)
        return f"the {count} tokens of the transcript's {len(texts)} prompts"

    @property
    def sequences(self) -> list[list[int]]:
        """The token ids that a model reads."""
        return padded_inputs(self.transcript.texts)

    def figures(self, model: Reference) -> Figures:
        """The figures of Hugging Face's model with other weights; prompts are
        resampled.

        Args:
            model: reads Hugging Face's tokens, so that every prediction of a preset has
                the same tokens before it.
        """
        texts = self.transcript.texts
        hidden = model.last_hidden(np.array(self.sequences), use_cache=False)
        prompts = [
            self._prompt_figures(model, text, hidden[number])
            for number, text in enumerate(texts)
        ]
        nats = np.array([prompt.nats for prompt in prompts])
        agreed = np.array([prompt.agreed for prompt in prompts], float)
        tokens = np.array([prompt.tokens for prompt in prompts])
        stops = [prompt.stops for prompt in prompts if prompt.stops is not None]
        stopped_share = None
        if stops:
            stopped_share = Estimate.of(np.array(stops, float), np.ones(len(stops)))
        return Figures(
            kl=Estimate.of(nats, tokens),
            agreed=Estimate.of(agreed, tokens),
            stops=stopped_share,
        )

    def _prompt_figures(
        self, model: Reference, text: ComparedText, hidden: torch.Tensor
    ) -> _PromptFigures:
        """The figures on one text.

        Args:
            hidden: the final hidden states [n, C] of `model` for the padded text.
        """
        suppressed = self.original.checkpoint.tokens.suppressed
        golden = self.original.logits(text.hidden).numpy()
        actual = model.logits(hidden[text.predicting_positions]).numpy()
        tokens = suppress(actual, suppressed).argmax(-1)
        # how far below Hugging Face's best token it ranks the preset's, as
        # `Transcript.agrees` compares the tokens of a bundle
        highest = suppress(golden, suppressed).max(-1)
        gap = highest - golden[np.arange(len(golden)), tokens]
        stops = None
        if text.ended:
            stops = int(tokens[-1]) in self.transcript.end_tokens
        return _PromptFigures(
            nats=kl(golden, actual).sum(),
            agreed=(gap <= TIE * self.transcript.sigma).sum(),
            tokens=len(text.tokens),
            stops=stops,
        )


@dataclass(frozen=True)
class PlainText:
    """Tokens of a text, which judge presets.

    Attributes:
        original: Hugging Face's model with the checkpoint's own weights.
        hidden: its final hidden states [n, C], the input of its head.
    """

    original: Reference
    ids: np.ndarray
    hidden: torch.Tensor

    @classmethod
    def of(cls, original: Reference) -> "PlainText":
        """The default text of a model's checkpoint, at most as long as the model's
        positions."""
        checkpoint = original.checkpoint
        most = getattr(checkpoint.config, "max_position_embeddings", None)
        ids = default_ids(checkpoint, min(TEXT_TOKENS, most or TEXT_TOKENS))
        return cls(
            original,
            np.array(ids),
            original.last_hidden(np.array([ids]), use_cache=False)[0],
        )

    def __str__(self) -> str:
        return f"{len(self.ids)} tokens of the workbench's default text"

    @property
    def sequences(self) -> list[list[int]]:
        """The token ids that a model reads."""
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
