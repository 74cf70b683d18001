"""A bundle beside Hugging Face's own greedy text, and where both end.

Hugging Face's model writes a text after each prompt. The bundle is fed that text, so
that every position is compared, also those after a difference. Three figures say what a
difference is:

gap    what the bundle's token lacks to Hugging Face's best, by Hugging Face's logits.
σ      the RMS, over all positions, of what fp16 rounding of the stream does to the
       difference between the two best logits of Hugging Face's model with the
       checkpoint's own weights. No bundle has a part in it.
error  the RMS of what the bundle does to that difference, where Hugging Face's model
       has the bundle's *stored* weights, over √(σ² + r²). r is the RMS of what rounding
       those logits to fp16, as packages output them, does to it.

A gap of at most `TIE` σ is a tie, every other one a difference. The share of tokens that
agree, ties included, is the check of quality `transcript`, and the share of Hugging
Face's ends at which the bundle ends too is the check `stop`. The gate `text_budget` on
the export limits the error: greedy text alone hides a program that is wrong
everywhere by the same factor."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from workbench import paths
from workbench.bundle.names import is_cache
from workbench.check import gates
from workbench.check.evaluate import last_outputs, open_reference
from workbench.check.gates import Gate
from workbench.check.golden import stored_weights
from workbench.check.hf import Reference, half, whole_model
from workbench.decode import Decoder
from workbench.decode.transcript import encode_chat, encode_text, text_of
from workbench.errors import InputError, one_line
from workbench.models.checkpoint import Checkpoint
from workbench.progress import bar, stage

PROMPTS = "data/prompts.jsonl"
NEW_TOKENS = 48
LEAST_ENDS = 4  # fewer say nothing about the bundle's
# Errors of sound bundles reach 17 σ at single positions in fp16 and 21 σ with sums
# rounded to fp16, on SmolLM2-135M-Instruct and Gemma 3 270M; 20 σ would be exceeded.
TIE = 30.0
# Over σ alone: 3.4 in the worst sound bundle of SmolLM2-135M-Instruct and Gemma 3 270M,
# 5.5 with sums rounded to fp16, 15 for the mildest planted fault. √(σ² + r²) is 1.6 σ on
# SmolLM2; on small models, whose σ is far below a unit of their logits, r is most of it.
ERROR_LIMIT = 8.0
# RMS error of one row of the vocabulary over that of the median row: 3.8 in the worst
# sound bundle, about 700 for two exchanged rows.
ROW_LIMIT = 10.0
PAST_DIFFERENCE = 8  # tokens of the bundle's own text that are shown behind one
RESAMPLES = 1000


@dataclass
class Text:
    """Hugging Face's text after one prompt.

    Attributes:
        ids: of the prompt.
        tokens: the new ones, an end token included.
        ended: whether the last token is an end token.
        bundle_tokens: the bundle's token at each position, fed Hugging Face's text.
        gap: of the bundle's token at each position, in logits.
        weights_explain: whether Hugging Face's model with the stored weights takes the
            bundle's token too, or is tied with it.
    """

    prompt: str
    ids: list[int]
    tokens: list[int]
    ended: bool
    bundle_tokens: np.ndarray = field(default_factory=lambda: np.empty(0, int))
    gap: np.ndarray = field(default_factory=lambda: np.empty(0))
    weights_explain: np.ndarray = field(default_factory=lambda: np.empty(0, bool))

    @property
    def input_ids(self) -> list[int]:
        """What a model reads to predict every new token."""
        return self.ids + self.tokens[:-1]

    @property
    def predicting_positions(self) -> slice:
        """The positions of `input_ids` whose logits predict the new tokens."""
        return slice(len(self.ids) - 1, len(self.input_ids))


@dataclass
class Transcript:
    """Every prompt's text, and the figures of all of them.

    Attributes:
        sigma: in logits, see the module.
        error: over what rounding causes, see the module.
        row_error: the largest RMS error of one row of the vocabulary, over the median
            row's, and that row.
        worst_row: the row of `row_error`.
        is_device: whether a device ran the bundle: then gate `device` judges its
            arithmetic, and the error is only reported.
    """

    texts: list[Text]
    sigma: float
    error: float
    row_error: float
    worst_row: int
    end_tokens: frozenset[int]
    is_device: bool = False

    def agrees(self, text: Text) -> np.ndarray:
        """Where the bundle's token is Hugging Face's, or tied with it."""
        return text.gap <= TIE * self.sigma

    def is_tie(self, text: Text) -> np.ndarray:
        return self.agrees(text) & (text.bundle_tokens != np.array(text.tokens))

    @property
    def agreed(self) -> float:
        """The share of all tokens that agree."""
        return float(np.concatenate([self.agrees(text) for text in self.texts]).mean())

    @property
    def interval(self) -> list[float]:
        """95% interval of `agreed`, prompts resampled: neighbours are alike."""
        right = np.array([self.agrees(text).sum() for text in self.texts])
        count = np.array([len(text.tokens) for text in self.texts])
        draws = np.random.default_rng(0).integers(
            0, len(right), (RESAMPLES, len(right))
        )
        shares = right[draws].sum(1) / count[draws].sum(1)
        return np.percentile(shares, [2.5, 97.5]).tolist()

    @property
    def stops(self) -> tuple[int, int]:
        """At how many of Hugging Face's ends the bundle takes an end token, and the
        number of these ends."""
        ends = [text for text in self.texts if text.ended]
        return sum(
            int(text.bundle_tokens[-1]) in self.end_tokens for text in ends
        ), len(ends)

    def gates(
        self, min_agreed: float = gates.MIN_AGREED, min_stops: float = gates.MIN_STOPS
    ) -> list[Gate]:
        """Gate `text_budget` on the export, and the checks of quality `transcript` and
        `stop`."""
        low, high = self.interval
        ties = sum(int(self.is_tie(text).sum()) for text in self.texts)
        count = sum(len(text.tokens) for text in self.texts)
        reason = (
            f"share of {count} tokens of Hugging Face's own text, {len(self.texts)} "
            f"prompts, at which the bundle takes the same, {ties} ties included; 95% "
            f"interval {low:.3f} to {high:.3f}"
        )
        agreed = gates.reached("transcript", self.agreed, min_agreed, reason)
        return [self._budget(), agreed, self._stop(min_stops)]

    def _budget(self) -> Gate:
        value, limit = self.error, ERROR_LIMIT
        reason = (
            "RMS error of the difference between Hugging Face's two best logits, with "
            "the stored weights, over what rounding of stream and logits alone causes"
        )
        if not self.row_error <= ROW_LIMIT:  # nan too
            value, limit = self.row_error, ROW_LIMIT
            reason = (
                f"RMS error of the logits of token {self.worst_row} over the median "
                "token's, against Hugging Face's model with the stored weights"
            )
        if self.is_device:
            note = (
                f"gate device judges the arithmetic of a device; measured {value:.3g}: "
                f"{reason}"
            )
            return gates.not_run("text_budget", note)
        return gates.at_most("text_budget", value, limit, reason)

    def _stop(self, min_stops: float) -> Gate:
        right, ends = self.stops
        if ends < LEAST_ENDS:
            reason = (
                f"Hugging Face ended after {ends} of {len(self.texts)} prompts, and "
                f"{LEAST_ENDS} are needed"
            )
            return gates.not_run("stop", reason)
        reason = (
            f"the bundle ends at {right} of the {ends} places where Hugging Face ends"
        )
        if not right:
            reason += ": it never ends"
        return gates.reached("stop", right / ends, min_stops, reason)

    def json(self, decoder: Decoder) -> tuple[dict, dict]:
        """The objects `transcript` and `stop` of a validation's JSON."""
        folder = decoder.bundle.root / "tokenizer"
        prompts = []
        for text in self.texts:
            differs = np.flatnonzero(~self.agrees(text))
            row = {
                "prompt": text.prompt,
                "text": text_of(folder, text.tokens),
                "agreed": float(self.agrees(text).mean()),
                "ties": int(self.is_tie(text).sum()),
                "first_difference": int(differs[0]) if len(differs) else None,
                "bundle_text": None,
                "cause": None,
                "ended": text.ended,
                "bundle_ends": text.ended
                and int(text.bundle_tokens[-1]) in self.end_tokens,
            }
            if len(differs):
                tokens = _bundle_text(decoder, text, differs[0])
                row["bundle_text"] = text_of(folder, tokens)
                is_program = not text.weights_explain[differs].all()
                row["cause"] = "the program" if is_program else "the weights"
            prompts.append(row)
        right, ends = self.stops
        transcript = {
            "agreed": self.agreed,
            "interval": self.interval,
            "ties": sum(row["ties"] for row in prompts),
            "sigma": self.sigma,
            "error": self.error,
            "prompts": prompts,
        }
        return transcript, {"ends": ends, "bundle_ends": right}


def load_prompts(path: str | Path = "") -> list[str]:
    """The prompts of a JSON-lines file whose objects have `prompt`; without a path
    those of `PROMPTS`.

    Raises:
        InputError: a file that cannot be read, or a line without a prompt, by its
            number.
    """
    file = Path(path) if path else paths.find(PROMPTS)
    needed, step = "JSON lines with a text `prompt`", f"see {PROMPTS}"
    prompts = []
    for number, line in enumerate(paths.read_text(file, "prompts").splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompts.append(json.loads(line)["prompt"])
        except (ValueError, KeyError, TypeError, RecursionError) as problem:
            actual = f"line {number} without one ({one_line(problem)})"
            raise InputError(f"prompts {file}", actual, needed, step) from None
        if not isinstance(prompts[-1], str) or not prompts[-1].strip():
            actual = f"line {number} with {prompts[-1]!r}"
            raise InputError(f"prompts {file}", actual, needed, step)
    if not prompts:
        raise InputError(f"prompts {file}", "no line", needed, step)
    return prompts


def encode(folder: str | Path, prompt: str) -> list[int]:
    """Token ids of a prompt by the tokenizer in a folder: in its chat template where it
    has one, else as the opening of a text."""
    try:
        return encode_chat(folder, prompt)
    except InputError:
        return encode_text(folder, prompt)


def differing_ids(
    decoder: Decoder, checkpoint: Checkpoint, prompts: Sequence[str]
) -> Gate | None:
    """Gate `interface` as RED where the bundle's tokenizer makes other ids of a prompt
    than the checkpoint's; otherwise None."""
    folder = decoder.bundle.root / "tokenizer"
    for prompt in prompts:
        ids, expected = encode(folder, prompt), encode(checkpoint.tokenizer, prompt)
        if ids != expected:
            count = f"{len(ids)} ids, the checkpoint's {len(expected)}"
            reason = (
                "the bundle's tokenizer or chat template makes other ids of the prompt "
                f"{prompt!r} than the checkpoint's ({count})"
            )
            return gates.holds("interface", False, reason)
    return None


def transcribe(
    decoder: Decoder,
    checkpoint: Checkpoint,
    prompts: Sequence[str],
    new_tokens: int = NEW_TOKENS,
) -> Transcript:
    """Compares a bundle with Hugging Face's own text after each prompt.

    Prompts whose text does not fit max_seq_len are left out.

    Raises:
        InputError: no prompt fits; packages that output no logits.
    """
    if not decoder.manifest.gives_logits:
        needed = "packages that output logits"
        step = "leave --transcript out"
        raise InputError("bundle", "the argmax is inside", needed, step)
    S = decoder.options.max_seq_len
    encoded = [(prompt, encode(checkpoint.tokenizer, prompt)) for prompt in prompts]
    encoded = [(prompt, ids) for prompt, ids in encoded if len(ids) + new_tokens <= S]
    if not encoded:
        needed = f"prompts with {new_tokens} new tokens within max_seq_len = {S}"
        step = "export with a larger --max-seq-len"
        raise InputError("prompts", "none that fits", needed, step)
    stage("validate: Hugging Face's text")
    states = [name for shard in decoder.manifest.shards for name in shard.states]
    is_recurrent = not all(map(is_cache, states))
    texts = write_texts(checkpoint, encoded, new_tokens, not is_recurrent)
    stage("validate: transcript")
    return compare_texts(decoder, checkpoint, texts)


def write_texts(
    checkpoint: Checkpoint,
    encoded: Sequence[tuple[str, list[int]]],
    new_tokens: int,
    batched: bool,
) -> list[Text]:
    """Hugging Face's greedy texts after prompts (text, ids).

    Args:
        batched: all prompts at once, padded on the left, where padding changes nothing
            but the order of sums; otherwise one after another, as recurrent layers
            need it.
    """
    model = whole_model(checkpoint)
    ends = set(checkpoint.eos)
    size = len(encoded) if batched else 1
    texts = []
    with bar(total=len(encoded), desc="text", unit="prompt") as progress:
        for start in range(0, len(encoded), size):
            group = encoded[start : start + size]
            for (prompt, ids), row in zip(
                group, _generate(model, group, ends, new_tokens)
            ):
                end = next((i for i, token in enumerate(row) if token in ends), None)
                tokens = row if end is None else row[: end + 1]
                texts.append(Text(prompt, ids, tokens, end is not None))
            progress.update(len(group))
    return texts


def _generate(
    model, group: Sequence[tuple[str, list[int]]], ends: set[int], new_tokens: int
) -> list[list[int]]:
    """The greedy tokens after each prompt, all of one count."""
    longest = max(len(ids) for _, ids in group)
    padding = [longest - len(ids) for _, ids in group]
    ids = torch.tensor([[0] * n + ids for n, (_, ids) in zip(padding, group)])
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            num_beams=1,
            eos_token_id=sorted(ends) or None,
            pad_token_id=0,
        )
    return output[:, longest:].tolist()


def compare_texts(
    decoder: Decoder, checkpoint: Checkpoint, texts: list[Text]
) -> Transcript:
    """Feeds the texts to the bundle, to Hugging Face's model, to that model with a
    rounded stream, and to it with the stored weights."""
    length = max(len(text.input_ids) for text in texts)
    # behind a text stand tokens that no causal model reads before them
    padded = [
        text.input_ids + [text.input_ids[-1]] * (length - len(text.input_ids))
        for text in texts
    ]
    reference = open_reference(checkpoint)
    expected = reference.last_hidden(np.array(padded), use_cache=False)
    perturb = half(decoder.manifest.stream_scale)
    rounded = reference.perturbed_hidden(np.array(padded), perturb)
    stored = Reference(checkpoint, stored_weights(checkpoint, decoder.bundle))
    explained = stored.last_hidden(np.array(padded), use_cache=False)
    outputs = _bundle_outputs(decoder, padded)
    sigmas, errors, roundings = [], [], []
    rows = np.zeros(decoder.manifest.dims.V)
    stored_gaps = []
    for number, text in enumerate(bar(texts, "transcript", unit="prompt")):
        at = text.predicting_positions
        golden = reference.logits(expected[number, at]).numpy()
        actual = decoder.logits(_tiled(outputs[number][:, at], decoder))[0]
        by_stored = stored.logits(explained[number, at]).numpy()
        nudged = reference.logits(rounded[number, at]).numpy()
        best = np.argpartition(golden, -2)[:, -2:]
        sigmas.append(_difference(nudged, best) - _difference(golden, best))
        stored_difference = _difference(by_stored, best)
        errors.append(_difference(actual, best) - stored_difference)
        as_fp16 = by_stored.astype(np.float16)
        roundings.append(_difference(as_fp16, best) - stored_difference)
        rows += np.square(actual - by_stored, dtype=np.float64).sum(0)
        text.bundle_tokens = actual.argmax(-1)
        place = np.arange(len(golden))
        text.gap = golden.max(-1) - golden[place, text.bundle_tokens]
        stored_gaps.append(by_stored.max(-1) - by_stored[place, text.bundle_tokens])
    sigma = _rms(np.concatenate(sigmas))
    rounding = np.hypot(sigma, _rms(np.concatenate(roundings)))
    for text, gap in zip(texts, stored_gaps):
        text.weights_explain = gap <= TIE * sigma
    rows = np.sqrt(rows)
    worst_row = int(rows.argmax())
    median = float(np.median(rows))
    return Transcript(
        texts,
        sigma,
        _rms(np.concatenate(errors)) / max(rounding, 1e-30),
        float(rows[worst_row]) / max(median, 1e-30),
        worst_row,
        frozenset(decoder.manifest.tokens.eos),
        decoder.is_device,
    )


def _bundle_outputs(decoder: Decoder, padded: list[list[int]]) -> list[np.ndarray]:
    """What the head reads [C, n] of each sequence, in batches of the bundle."""
    B, count = decoder.options.batch, len(padded[0])
    outputs = []
    for start in bar(range(0, len(padded), B), "bundle", unit="batch"):
        batch = padded[start : start + B]
        filled = batch + [batch[-1]] * (B - len(batch))
        outputs += list(last_outputs(decoder, filled, count))[: len(batch)]
    return outputs


def _tiled(output: np.ndarray, decoder: Decoder) -> np.ndarray:
    """One sequence's output [C, n] for every sequence of the batch."""
    return np.tile(output, (decoder.options.batch, 1, 1))


def _difference(logits: np.ndarray, best: np.ndarray) -> np.ndarray:
    """[n]: the logit of the second of two tokens [n, 2] less that of the first."""
    first, second = np.take_along_axis(logits, best, 1).T
    return np.float64(second) - np.float64(first)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def _bundle_text(decoder: Decoder, text: Text, place: int) -> list[int]:
    """The bundle's own greedy tokens: Hugging Face's up to `place`, where the bundle
    takes another one, and what it writes behind that."""
    before = text.tokens[:place] + [int(text.bundle_tokens[place])]
    rows_left = decoder.options.max_seq_len - len(text.ids) - len(before)
    count = min(PAST_DIFFERENCE, rows_left)
    if count < 1 or before[-1] in decoder.manifest.tokens.eos:
        return before
    prompts = [text.ids + before] * decoder.options.batch
    records = decoder.stream(prompts, count)
    return before + [record.token for record in records if record.seq == 0]
