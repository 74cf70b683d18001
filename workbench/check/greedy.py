"""Hugging Face's own greedy texts: their records, how they are written, and how the file
of a golden stores them.

A text is written (`write_texts`: `GreedyText`), its two best tokens are ranked at every
position (`rank_tokens`: `RankedText`), and a bundle is compared with it (`transcript`:
`ComparedText`). Each record has all fields of the one before."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workbench.check.hf import Reference, round_stream, whole_model
from workbench.decode.sampling import suppress
from workbench.models.checkpoint import Checkpoint
from workbench.progress import bar, tick

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
    def from_arrays(cls, arrays: dict[str, np.ndarray], metadata: str) -> "GreedyTexts":
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


def write_texts(
    checkpoint: Checkpoint,
    encoded: Sequence[tuple[str, list[int]]],
    new_tokens: int,
    batched: bool,
) -> list[GreedyText]:
    """Hugging Face's greedy texts after prompts (text, ids).

    Args:
        batched: all prompts at once, padded on the left, where padding changes nothing
            but the order of sums; otherwise one after another, as recurrent layers
            need it.
    """
    model = whole_model(checkpoint)
    ends = set(checkpoint.tokens.eos)
    size = len(encoded) if batched else 1
    texts = []
    with bar(total=len(encoded), desc="text", unit="prompt") as progress:

        def report(count: int) -> None:
            progress.set_postfix_str(f"token {count} of {new_tokens}")
            written = f"{len(texts)} of {len(encoded)} texts written"
            tick(f"Hugging Face's text: {written}, token {count} of {new_tokens}")

        for start in range(0, len(encoded), size):
            group = encoded[start : start + size]
            suppressed = checkpoint.tokens.suppressed
            rows = _generate(model, group, ends, suppressed, new_tokens, report)
            for (prompt, ids), row in zip(group, rows):
                end = next((i for i, token in enumerate(row) if token in ends), None)
                tokens = row if end is None else row[: end + 1]
                texts.append(GreedyText(prompt, ids, tokens, end is not None))
            progress.update(len(group))
    return texts


def _generate(
    model,
    group: Sequence[tuple[str, list[int]]],
    ends: set[int],
    suppressed: list[int],
    new_tokens: int,
    report: Callable[[int], None],
) -> list[list[int]]:
    """The greedy tokens after each prompt, all of one count. `report` is called with the
    count of new tokens behind each of them."""
    longest = max(len(ids) for _, ids in group)
    padding = [longest - len(ids) for _, ids in group]
    ids = torch.tensor([[0] * n + ids for n, (_, ids) in zip(padding, group)])
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding])

    def count_token(ids: torch.Tensor, _) -> torch.Tensor:
        report(ids.shape[1] - longest)
        return torch.zeros(len(ids), dtype=torch.bool)  # no sequence ends here

    with torch.inference_mode():
        output = model.generate(
            ids,
            stopping_criteria=[count_token],
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            num_beams=1,
            eos_token_id=sorted(ends) or None,
            suppress_tokens=suppressed or None,
            pad_token_id=0,
        )
    return output[:, longest:].tolist()


def rank_tokens(
    reference: Reference, texts: Sequence[GreedyText], stream_scale: float
) -> GreedyTexts:
    """The texts with their two best tokens at each position, and σ.

    Args:
        reference: Hugging Face's model on the checkpoint's own weights.
        stream_scale: a bundle stores the stream divided by this number.
    """
    padded = np.array(padded_inputs(texts))
    expected = reference.last_hidden(padded, use_cache=False)
    rounded = reference.perturbed_hidden(padded, round_stream(stream_scale))
    ranked, changes = [], []
    for number, text in enumerate(texts):
        at = text.predicting_positions
        hidden = expected[number, at].clone()
        logits = reference.logits(hidden).numpy()  # [n, V]
        logits = suppress(logits, reference.checkpoint.tokens.suppressed)
        rounded_logits = reference.logits(rounded[number, at]).numpy()
        top_two = np.argpartition(logits, -2)[:, -2:]  # in any order
        top_logits = np.take_along_axis(logits, top_two, 1)
        order = np.argsort(-top_logits, axis=1, kind="stable")
        best_tokens = np.take_along_axis(top_two, order, 1)
        best_logits = np.take_along_axis(top_logits, order, 1)
        ranked.append(
            RankedText(
                **vars(text),
                best_tokens=best_tokens,
                best_logits=best_logits,
                hidden=hidden,
            )
        )
        changes.append(
            logit_differences(rounded_logits, best_tokens)
            - logit_differences(logits, best_tokens)
        )
    return GreedyTexts(ranked, rms_of_all(np.concatenate(changes)))


def padded_inputs(texts: Sequence[GreedyText]) -> list[list[int]]:
    """What a model reads of each text, in one length: behind a text stand tokens that
    no causal model reads before them."""
    length = max(len(text.input_ids) for text in texts)
    return [
        text.input_ids + [text.input_ids[-1]] * (length - len(text.input_ids))
        for text in texts
    ]


def logit_differences(logits: np.ndarray, best: np.ndarray) -> np.ndarray:
    """[n]: the logit of the second of two tokens [n, 2] less that of the first."""
    first, second = np.take_along_axis(logits, best, 1).T
    return np.float64(second) - np.float64(first)


def rms_of_all(values: np.ndarray) -> float:
    """The root mean square of all elements, in logits."""
    return float(np.sqrt(np.mean(np.square(values))))
