"""Records of Hugging Face's own greedy texts, and how the file of a golden stores them.

A text is written (`GreedyText`), its two best tokens are ranked at every position
(`RankedText`), and a bundle is compared with it (`ComparedText`). Each record has all
fields of the one before."""

import json
from dataclasses import dataclass

import numpy as np
import torch

METADATA = "workbench-transcript"  # the texts' JSON in a golden's metadata
ARRAYS = tuple(
    f"transcript.{name}" for name in ("ids", "tokens", "best_tokens", "best_logits")
)


@dataclass(frozen=True, eq=False)
class GreedyText:
    """Hugging Face's text after one prompt.

    Attributes:
        ids: of the prompt.
        tokens: the n new ones, an end token included.
        ended: whether the last token is an end token.
    """

    prompt: str
    ids: list[int]
    tokens: list[int]
    ended: bool

    @property
    def input_ids(self) -> list[int]:
        """What a model reads to predict every new token."""
        return self.ids + self.tokens[:-1]

    @property
    def predicting_positions(self) -> slice:
        """The positions of `input_ids` whose logits predict the new tokens."""
        return slice(len(self.ids) - 1, len(self.input_ids))


@dataclass(frozen=True, eq=False, kw_only=True)
class RankedText(GreedyText):
    """A text with Hugging Face's two best tokens at each position.

    Attributes:
        best_tokens: [n, 2], the best one first; suppressed tokens are left out.
        best_logits: [n, 2] float32, their logits.
        hidden: [n, C], what Hugging Face's head reads at each position; None where a
            golden stored the text.
    """

    best_tokens: np.ndarray
    best_logits: np.ndarray
    hidden: torch.Tensor | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class ComparedText(RankedText):
    """A text that a bundle was fed.

    Attributes:
        bundle_tokens: [n], the bundle's token at each position.
        gap: [n], how far the logit of the bundle's token is below the best one, by
            Hugging Face's logits.
        weights_explain: [n], whether Hugging Face's model with the stored weights takes
            the bundle's token too, or is tied with it; None without a checkpoint.
    """

    bundle_tokens: np.ndarray
    gap: np.ndarray
    weights_explain: np.ndarray | None = None


@dataclass(frozen=True)
class GreedyTexts:
    """Hugging Face's texts after prompts.

    Attributes:
        sigma: RMS over all positions of what fp16 rounding of the stream does to the
            difference between the two best logits.
    """

    texts: list[RankedText]
    sigma: float

    def arrays(self) -> dict[str, np.ndarray]:
        """The texts one behind the other, by the names `ARRAYS`."""
        texts = self.texts
        values = (
            np.concatenate([np.array(text.ids, np.int64) for text in texts]),
            np.concatenate([np.array(text.tokens, np.int64) for text in texts]),
            np.concatenate([np.int64(text.best_tokens) for text in texts]),
            np.concatenate([np.float32(text.best_logits) for text in texts]),
        )
        return dict(zip(ARRAYS, values))

    def metadata(self) -> str:
        """σ, and for every text its prompt, its sizes and whether it ended, as JSON."""
        rows = [
            {
                "prompt": text.prompt,
                "ids": len(text.ids),
                "tokens": len(text.tokens),
                "ended": text.ended,
            }
            for text in self.texts
        ]
        return json.dumps({"sigma": self.sigma, "texts": rows})

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray], metadata: str) -> "GreedyTexts":
        """The texts that `arrays` and `metadata` stored.

        Raises:
            ValueError, KeyError, TypeError: arrays that do not fit the metadata.
        """
        fields = json.loads(metadata)
        ids, tokens, best_tokens, best_logits = (arrays[name] for name in ARRAYS)
        rows = fields["texts"]
        if not rows:
            raise ValueError("no text")
        texts = []
        id_end = token_end = 0  # of the texts so far, in `ids` and in the other arrays
        for row in rows:
            id_start, token_start = id_end, token_end
            id_end += int(row["ids"])
            token_end += int(row["tokens"])
            if id_end <= id_start or token_end <= token_start:
                raise ValueError("an empty text")
            text = RankedText(
                prompt=str(row["prompt"]),
                ids=ids[id_start:id_end].tolist(),
                tokens=tokens[token_start:token_end].tolist(),
                ended=bool(row["ended"]),
                best_tokens=best_tokens[token_start:token_end],
                best_logits=best_logits[token_start:token_end],
            )
            texts.append(text)
        sigma = float(fields["sigma"])
        fits = len(ids) == id_end and len(tokens) == token_end
        fits = fits and best_tokens.shape == best_logits.shape == (token_end, 2)
        are_integers = all(a.dtype.kind == "i" for a in (ids, tokens, best_tokens))
        are_finite = np.isfinite(best_logits).all() and np.isfinite(sigma)
        if not (fits and are_integers and are_finite):
            raise ValueError("other sizes than its texts have")
        return cls(texts, sigma)
