"""A bundle beside Hugging Face's own greedy text, and where both end.

Hugging Face's model writes a text after each prompt. The bundle is fed that text, so
that every position is compared, also those after a difference. Three figures say what a
difference is:

gap          how far the logit of the bundle's token is below the best one, by Hugging
             Face's logits.
σ            the RMS, over all positions, of what fp16 rounding of the stream does to the
             difference between the two best logits of Hugging Face's model with the
             checkpoint's own weights. No bundle has a part in it.
error ratio  the RMS of what the bundle's program does to that difference, where Hugging
             Face's model has the bundle's *stored* weights, over √(σ² + r²). r is the RMS
             of what rounding those logits to fp16, as packages output them, does to it.
             The program runs in `exact` arithmetic, so that the error is the program's
             and not that of fp16 sums.

With the texts that a golden stored (`workbench golden --transcript`) in place of the
checkpoint there are gaps alone: no error, and no cause of a difference. A token that is
neither of the two best counts as a difference there, whatever its logit.

A gap of at most `TIE` σ is a tie, every other one a difference. The share of tokens that
agree, ties included, is the check of quality `transcript`, and the share of Hugging
Face's ends at which the bundle ends too is the check `stop`. The gate `text_budget` on
the export limits the error ratio: greedy text alone hides a program that is wrong
everywhere by the same factor. Tokens, gaps and ends are those of the runtime and the
precision of the decoder that is compared.

Data: prompts (`load_prompts`, `default_prompts`) → `write_texts` → `rank_tokens` →
`ExpectedTexts` → `compare_texts` → `Transcript`, which judges. `transcribe` and
`transcribe_golden` run all of it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from workbench import paths
from workbench.bundle import Bundle
from workbench.bundle.names import is_cache
from workbench.check import gates
from workbench.check.compare import resampled_means
from workbench.check.end_tokens import (
    EndTokens,
    describe_contradictions,
    read_end_tokens,
)
from workbench.check.evaluate import fill_batch, last_outputs, open_reference
from workbench.check.gates import Gate
from workbench.check.golden import stored_weights
from workbench.check.greedy import (
    ComparedText,
    GreedyTexts,
    RankedText,
    logit_differences,
    padded_inputs,
    rank_tokens,
    rms_of_all,
    write_texts,
)
from workbench.check.hf import Reference
from workbench.check.program import exact_decoder
from workbench.check.text import first_known_texts, held_out_tasks
from workbench.decode import Decoder
from workbench.decode.sampling import suppress
from workbench.decode.tokenizer import encode_chat, encode_text, text_of
from workbench.errors import InputError, one_line
from workbench.models.checkpoint import Checkpoint
from workbench.progress import bar, stage, tick

PROMPTS = "data/prompts.jsonl"
NEW_TOKENS = 48
LEAST_ENDS = 4  # fewer say nothing about the bundle's
# Errors of sound bundles reach 17 σ at single positions in fp16 and 21 σ with sums
# rounded to fp16, on SmolLM2-135M-Instruct and Gemma 3 270M; 20 σ would be exceeded.
TIE = 30.0
# Over √(σ² + r²), in fp16 and int8-channel, along three texts of 48 tokens. Sound programs
# err by at most 0.003: SmolLM2-135M-Instruct and Gemma 3 270M, also along 16 texts, and 23
# small models of 17 families. The mildest planted faults: rotary frequencies × 1.02 in all
# layers 4.7, logits × 1.05 12.5, two exchanged rows of the head 5.5 (6000 pairs in each
# model; SmolLM2 also has rows that are equal, whose exchange changes nothing).
ERROR_LIMIT = 1.0
# Constants of other exporters' programs (rope tables in fp16) are not in the manifest:
# 0.47 in the worst of four sound bundles, 38 for the mildest of three faults.
FOREIGN_ERROR_LIMIT = 8.0
PAST_DIFFERENCE = 8  # tokens of the bundle's own text that are shown behind one


class Stops(NamedTuple):
    """How many of Hugging Face's texts end, and at how many of these ends the bundle takes
    an end token."""

    bundle_ends: int
    ends: int


@dataclass
class Transcript:
    """Every prompt's text, and the figures of all of them.

    Attributes:
        sigma: in logits, see the module.
        error_ratio: see the module.
        token_error_ratio: the largest RMS error of the logits of one token of the
            vocabulary, over the same rounding.
        worst_token: the token of `token_error_ratio`. All three are None where a
            golden's texts stand for the checkpoint.
        end_tokens: those of the bundle.
        limit: on both ratios.
        not_judged_because: why the ratios are only reported: they are then those of the
            bundle as it ran, since no exact arithmetic runs its program. None where they
            are judged.
        checkpoint_ends: the end tokens that the checkpoint names; None where a golden's
            texts stand for it.
        contradiction: what these contradict, in a sentence; empty for nothing.
    """

    texts: list[ComparedText]
    sigma: float
    error_ratio: float | None
    token_error_ratio: float | None
    worst_token: int | None
    end_tokens: frozenset[int]
    limit: float = ERROR_LIMIT
    not_judged_because: str | None = None
    checkpoint_ends: EndTokens | None = None
    contradiction: str = ""

    def agrees(self, text: ComparedText) -> np.ndarray:
        """Where the bundle's token is Hugging Face's, or tied with it."""
        return text.gap <= TIE * self.sigma

    def is_tie(self, text: ComparedText) -> np.ndarray:
        """Where the bundle's token is another one than Hugging Face's, and tied with it."""
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
        return resampled_interval(right, count)

    @property
    def judged_ratio(self) -> float:
        """The ratio that `limit` judges: `error_ratio`, or where that one is within the
        limit and `token_error_ratio` is not, or is nan, the latter."""
        is_within = self.error_ratio <= self.limit
        token_is_within = self.token_error_ratio <= self.limit  # False for nan
        if is_within and not token_is_within:
            return self.token_error_ratio
        return self.error_ratio

    @property
    def stops(self) -> Stops:
        """Over the texts that Hugging Face ended."""
        ended = [text for text in self.texts if text.ended]
        return Stops(sum(map(self._bundle_ends, ended)), len(ended))

    def _bundle_ends(self, text: ComparedText) -> bool:
        """Whether the bundle takes an end token where a text ends."""
        return text.ended and int(text.bundle_tokens[-1]) in self.end_tokens

    def judge(
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
        agreed = gates.quality_at_least("transcript", self.agreed, min_agreed, reason)
        return [self._text_budget_gate(), agreed, self._stop_gate(min_stops)]

    def _text_budget_gate(self) -> Gate:
        if self.error_ratio is None:
            reason = "needs --checkpoint, whose model runs with the stored weights"
            return gates.not_run("text_budget", reason)
        reason = (
            "RMS error against Hugging Face's model with the stored weights over what "
            f"rounding of stream and logits alone causes: {self.error_ratio:.3g} for the "
            "difference between Hugging Face's two best logits, at most "
            f"{self.token_error_ratio:.3g} for the logits of one token, token "
            f"{self.worst_token}"
        )
        if self.not_judged_because:
            return gates.not_run("text_budget", f"{self.not_judged_because}; {reason}")
        return gates.at_most("text_budget", self.judged_ratio, self.limit, reason)

    def _stop_gate(self, min_stops: float) -> Gate:
        bundle_ends, ends = self.stops
        contradiction = f"; {self.contradiction}" if self.contradiction else ""
        if ends < LEAST_ENDS:
            reason = (
                f"Hugging Face ended after {ends} of {len(self.texts)} prompts, and "
                f"{LEAST_ENDS} are needed{contradiction}"
            )
            return gates.not_run("stop", reason)
        never = "" if bundle_ends else ": it never ends"
        reason = (
            f"the bundle ends at {bundle_ends} of the {ends} places where Hugging Face "
            f"ends{never}{contradiction}"
        )
        return gates.quality_at_least("stop", bundle_ends / ends, min_stops, reason)

    def json(self, decoder: Decoder) -> tuple[dict, dict]:
        """The objects `transcript` and `stop` of a validation's JSON."""
        prompts = [self._prompt_json(decoder, text) for text in self.texts]
        transcript = {
            "agreed": self.agreed,
            "interval": self.interval,
            "ties": sum(row["ties"] for row in prompts),
            "sigma": self.sigma,
            "error": self.error_ratio,
            "prompts": prompts,
        }
        bundle_ends, ends = self.stops
        stop = {
            "ends": ends,
            "bundle_ends": bundle_ends,
            "end_tokens": self.checkpoint_ends and self.checkpoint_ends.json(),
            "contradiction": self.contradiction or None,
        }
        return transcript, stop

    def _prompt_json(self, decoder: Decoder, text: ComparedText) -> dict:
        """One object of `prompts`."""
        folder = decoder.bundle.root / "tokenizer"
        differs = np.flatnonzero(~self.agrees(text))
        bundle_text = cause = None
        if len(differs):
            bundle_text = text_of(folder, _bundle_text(decoder, text, differs[0]))
            if text.weights_explain is not None:
                is_program = not text.weights_explain[differs].all()
                cause = "the program" if is_program else "the weights"
        return {
            "prompt": text.prompt,
            "text": text_of(folder, text.tokens),
            "agreed": float(self.agrees(text).mean()),
            "ties": int(self.is_tie(text).sum()),
            "first_difference": int(differs[0]) if len(differs) else None,
            "bundle_text": bundle_text,
            "cause": cause,
            "ended": text.ended,
            "bundle_ends": self._bundle_ends(text),
        }


def resampled_interval(sums: np.ndarray, counts: np.ndarray) -> list[float]:
    """95% interval of the mean of values in groups; see `resampled_means`."""
    return np.percentile(resampled_means(sums, counts), [2.5, 97.5]).tolist()


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


def default_prompts(checkpoint: Checkpoint, count: int, max_tokens: int) -> list[str]:
    """At most `count` prompts for a checkpoint, each of at most `max_tokens` tokens: those
    of `PROMPTS`, or, where its tokenizer does not know their words, those of the
    held-out tasks of the small trained models. None without a tokenizer, or with one
    that knows neither."""
    questions = [task["prompt"] for task in held_out_tasks()]
    encoded = first_known_texts(checkpoint, [load_prompts(), questions], encode)
    return [prompt for prompt, ids in encoded.items() if len(ids) <= max_tokens][:count]


def encode(folder: str | Path, prompt: str) -> list[int]:
    """Token ids of a prompt by the tokenizer in a folder: in its chat template where it
    has one, else as the opening of a text."""
    try:
        return encode_chat(folder, prompt)
    except InputError:
        return encode_text(folder, prompt)


def differing_ids(
    decoder: Decoder, expected: Mapping[str, Sequence[int]]
) -> Gate | None:
    """Gate `interface` as RED where the bundle's tokenizer makes other ids of a prompt
    than the checkpoint's; otherwise None.

    Args:
        expected: prompt → the checkpoint's ids.
    """
    folder = decoder.bundle.root / "tokenizer"
    for prompt, ids_of_checkpoint in expected.items():
        ids = encode(folder, prompt)
        if ids != list(ids_of_checkpoint):
            count = f"{len(ids)} ids, the checkpoint's {len(ids_of_checkpoint)}"
            reason = (
                "the bundle's tokenizer or chat template makes other ids of the prompt "
                f"{prompt!r} than the checkpoint's ({count})"
            )
            return gates.holds("interface", False, reason)
    return None


def encode_prompts(
    checkpoint: Checkpoint, prompts: Sequence[str]
) -> dict[str, list[int]]:
    """Prompt → the ids that the checkpoint's tokenizer makes of it."""
    return {prompt: encode(checkpoint.tokenizer, prompt) for prompt in prompts}


@dataclass(frozen=True)
class ExpectedTexts:
    """Hugging Face's texts after prompts, and what the logits of a bundle are compared
    with. The decoders of one bundle share them, also those of copies with the same
    weights.

    Attributes:
        texts: with their two best tokens and `hidden`.
        sigma: in logits, see the module.
        checkpoint: of the model.
        reference: Hugging Face's model on the checkpoint's own weights.
        stored: the same model with the weights that the bundle stores.
        stored_hidden: [texts, n, C], what the head of `stored` reads.
    """

    texts: list[RankedText]
    sigma: float
    checkpoint: Checkpoint
    reference: Reference
    stored: Reference
    stored_hidden: torch.Tensor


def expect_texts(
    bundle: Bundle,
    checkpoint: Checkpoint,
    prompts: Sequence[str],
    new_tokens: int = NEW_TOKENS,
) -> ExpectedTexts:
    """Hugging Face's text after each prompt, beside the weights that a bundle stores.

    Prompts whose text does not fit max_seq_len are left out.

    Raises:
        InputError: no prompt fits.
    """
    S = bundle.manifest.options.max_seq_len
    encoded = encode_prompts(checkpoint, prompts)
    fitting = [(p, ids) for p, ids in encoded.items() if len(ids) + new_tokens <= S]
    _check_any_fits(fitting, new_tokens, S)
    stage("validate: Hugging Face's text")
    states = [name for shard in bundle.manifest.shards for name in shard.states]
    is_recurrent = not all(map(is_cache, states))
    written = write_texts(checkpoint, fitting, new_tokens, not is_recurrent)
    reference = open_reference(checkpoint)
    ranked = rank_tokens(reference, written, bundle.manifest.stream_scale)
    stored = Reference(checkpoint, stored_weights(checkpoint, bundle))
    hidden = stored.last_hidden(np.array(padded_inputs(written)), use_cache=False)
    return ExpectedTexts(
        ranked.texts, ranked.sigma, checkpoint, reference, stored, hidden
    )


def transcribe(
    decoder: Decoder,
    checkpoint: Checkpoint,
    prompts: Sequence[str],
    new_tokens: int = NEW_TOKENS,
) -> Transcript:
    """Compares a bundle with Hugging Face's own text after each prompt; see
    `expect_texts`.

    Raises:
        InputError: no prompt fits; packages that output no logits.
    """
    _check_logits(decoder)
    expected = expect_texts(decoder.bundle, checkpoint, prompts, new_tokens)
    return compare_texts(decoder, expected)


def transcribe_golden(decoder: Decoder, golden: GreedyTexts) -> Transcript:
    """Compares a bundle with the texts that a golden stored; see the module for what
    needs the checkpoint.

    Raises:
        InputError: no text fits; packages that output no logits.
    """
    _check_logits(decoder)
    S = decoder.options.max_seq_len
    texts = [text for text in golden.texts if len(text.ids) + len(text.tokens) <= S]
    _check_any_fits(texts, max(len(text.tokens) for text in golden.texts), S)
    stage("validate: transcript")
    outputs = _bundle_outputs(decoder, padded_inputs(texts))
    compared = []
    for text, output in zip(bar(texts, "transcript", unit="prompt"), outputs):
        logits = _logits_at(decoder, output, text.predicting_positions)
        tokens = _pick(decoder, logits)
        compared.append(
            ComparedText(**vars(text), bundle_tokens=tokens, gap=gaps(text, tokens))
        )
    return Transcript(
        compared,
        sigma=golden.sigma,
        error_ratio=None,  # it needs the checkpoint
        token_error_ratio=None,
        worst_token=None,
        end_tokens=frozenset(decoder.manifest.tokens.eos),
    )


def greedy_texts(
    checkpoint: Checkpoint,
    prompts: Sequence[str],
    stream_scale: float,
    *,
    batched: bool,
    new_tokens: int = NEW_TOKENS,
) -> GreedyTexts:
    """Hugging Face's texts after prompts, with what a golden stores of them; no bundle
    has a part in it.

    Args:
        stream_scale: exports store the stream divided by this number.
        batched: see `write_texts`.
    """
    encoded = list(encode_prompts(checkpoint, prompts).items())
    stage("golden: Hugging Face's text")
    written = write_texts(checkpoint, encoded, new_tokens, batched)
    return rank_tokens(open_reference(checkpoint), written, stream_scale)


def _check_logits(decoder: Decoder) -> None:
    """Raises an InputError for packages that output the top token alone."""
    if not decoder.manifest.gives_logits:
        needed = "packages that output logits"
        step = "leave --transcript out"
        raise InputError("bundle", "the argmax is inside", needed, step)


def _check_any_fits(fitting: Sequence, new_tokens: int, S: int) -> None:
    """Raises an InputError where no prompt fits max_seq_len with its text."""
    if not fitting:
        needed = f"prompts with {new_tokens} new tokens within max_seq_len = {S}"
        step = "export with a larger --max-seq-len"
        raise InputError("prompts", "none that fits", needed, step)


def gaps(
    text: RankedText, tokens: np.ndarray, reference: Reference | None = None
) -> np.ndarray:
    """[n]: how far the logit of a token at each position is below the best one, by
    Hugging Face's logits.

    Args:
        tokens: [n].
        reference: computes the logits of tokens that are neither of the two best; None:
            their gap is inf.
    """
    margin = text.best_logits[:, 0] - text.best_logits[:, 1]
    gap = np.where(tokens == text.best_tokens[:, 0], 0.0, margin)
    others = np.flatnonzero((tokens[:, None] != text.best_tokens).all(1))
    gap[others] = np.inf
    if reference is not None and len(others):
        logits = reference.logits(text.hidden[others]).numpy()
        # a suppressed token's logit may be above the best one that may be picked
        logits = suppress(logits, reference.checkpoint.tokens.suppressed)
        of_tokens = logits[np.arange(len(others)), tokens[others]]
        gap[others] = text.best_logits[others, 0] - of_tokens
    return gap


def compare_texts(decoder: Decoder, expected: ExpectedTexts) -> Transcript:
    """Feeds Hugging Face's texts to a bundle, and to the same program in `exact`
    arithmetic. On a device, and where no runtime has this arithmetic, the error is that
    of the bundle as it ran, and is not judged.

    Args:
        decoder: its host may have been changed; see `exact_decoder`.

    Raises:
        InputError: packages that output no logits.
    """
    _check_logits(decoder)
    stage("validate: transcript")
    exact = decoder
    if not decoder.is_device:
        exact = exact_decoder(decoder.bundle, decoder, keeps_head=True)
    errors = _ErrorSums(expected.sigma, decoder.manifest.dims.V)
    compared = []
    for text, logits in _logits_of_texts(decoder, exact, expected):
        errors.add(text, logits)
        compared.append(_compare_text(decoder, text, logits, expected))
    ends = read_end_tokens(expected.checkpoint)
    token_errors = errors.token_errors()
    worst_token = int(token_errors.argmax())
    return Transcript(
        compared,
        sigma=expected.sigma,
        error_ratio=errors.error_ratio(),
        token_error_ratio=float(token_errors[worst_token]) / errors.rounding,
        worst_token=worst_token,
        end_tokens=frozenset(decoder.manifest.tokens.eos),
        limit=FOREIGN_ERROR_LIMIT if decoder.manifest.foreign else ERROR_LIMIT,
        not_judged_because=_why_not_judged(decoder, exact),
        checkpoint_ends=ends,
        contradiction=describe_contradictions(ends, expected.checkpoint),
    )


@dataclass(frozen=True)
class _TextLogits:
    """Logits [n, V] at the new tokens of one text.

    Attributes:
        bundle: of the bundle as it runs.
        exact: of its program in exact arithmetic.
        stored: of Hugging Face's model with the stored weights.
    """

    bundle: np.ndarray
    exact: np.ndarray
    stored: np.ndarray


def _logits_of_texts(
    decoder: Decoder, exact: Decoder, expected: ExpectedTexts
) -> Iterator[tuple[RankedText, _TextLogits]]:
    """Every text with its logits, with a bar. `exact` may be `decoder` itself."""
    padded = padded_inputs(expected.texts)
    outputs = exact_outputs = _bundle_outputs(decoder, padded)
    if exact is not decoder:
        exact_outputs = _bundle_outputs(exact, padded, "exact arithmetic")
    for number, text in enumerate(bar(expected.texts, "transcript", unit="prompt")):
        at = text.predicting_positions
        logits = exact_logits = _logits_at(decoder, outputs[number], at)
        if exact is not decoder:
            exact_logits = _logits_at(exact, exact_outputs[number], at)
        hidden = expected.stored_hidden[number, at]
        stored_logits = expected.stored.logits(hidden).numpy()
        yield text, _TextLogits(logits, exact_logits, stored_logits)


def _compare_text(
    decoder: Decoder, text: RankedText, logits: _TextLogits, expected: ExpectedTexts
) -> ComparedText:
    """A text with the bundle's tokens, their gaps, and whether the weights explain
    them."""
    tokens = _pick(decoder, logits.bundle)
    of_tokens = logits.stored[np.arange(len(tokens)), tokens]
    largest = suppress(logits.stored, expected.checkpoint.tokens.suppressed).max(-1)
    return ComparedText(
        **vars(text),
        bundle_tokens=tokens,
        gap=gaps(text, tokens, expected.reference),
        weights_explain=largest - of_tokens <= TIE * expected.sigma,
    )


@dataclass
class _ErrorSums:
    """The errors of a program along texts, in logits, from which the ratios of a
    `Transcript` follow.

    Attributes:
        errors: of each text [n], of the difference between its two best logits.
        roundings: of each text [n], what rounding to fp16 does to that difference.
        squares: [V], of the errors of each token's logits, summed over all positions.
        count: of these positions.
    """

    sigma: float
    V: int
    errors: list[np.ndarray] = field(default_factory=list)
    roundings: list[np.ndarray] = field(default_factory=list)
    squares: np.ndarray = field(init=False)
    count: int = 0

    def __post_init__(self):
        self.squares = np.zeros(self.V)

    def add(self, text: RankedText, logits: _TextLogits) -> None:
        """Adds the errors along one text."""
        stored, best = logits.stored, text.best_tokens
        stored_difference = logit_differences(stored, best)
        self.errors.append(logit_differences(logits.exact, best) - stored_difference)
        fp16_logits = stored.astype(np.float16)
        self.roundings.append(logit_differences(fp16_logits, best) - stored_difference)
        self.squares += np.square(logits.exact - stored, dtype=np.float64).sum(0)
        self.count += len(text.tokens)

    @property
    def rounding(self) -> float:
        """√(σ² + r²) of the module's text, in logits."""
        of_logits = rms_of_all(np.concatenate(self.roundings))  # r
        return max(
            np.hypot(self.sigma, of_logits), 1e-30
        )  # never 0: errors are divided by it

    def error_ratio(self) -> float:
        """See the module's text."""
        return rms_of_all(np.concatenate(self.errors)) / self.rounding

    def token_errors(self) -> np.ndarray:
        """[V]: the RMS error of the logits of each token, in logits."""
        return np.sqrt(self.squares / self.count)


def _why_not_judged(decoder: Decoder, exact: Decoder) -> str | None:
    """See `Transcript.not_judged_because`; `exact`: what ran in the place of exact
    arithmetic."""
    if decoder.is_device:
        return "gate device judges the arithmetic of a device"
    if exact.precision != "exact":
        target = decoder.options.target
        return f"needs fp32 arithmetic, which target {target} lacks"
    return None


def _bundle_outputs(
    decoder: Decoder, padded: list[list[int]], title: str = "bundle"
) -> list[np.ndarray]:
    """What the head reads [C, n] of each sequence, in batches of the bundle; `title` is
    that of the bar."""
    B, count = decoder.options.batch, len(padded[0])
    outputs = []
    for start in bar(range(0, len(padded), B), title, unit="batch"):
        tick(f"transcript, {title}: {start} of {len(padded)} prompts")
        batch = padded[start : start + B]
        filled = fill_batch(batch, B)
        outputs += list(last_outputs(decoder, filled, count))[: len(batch)]
    return outputs


def _pick(decoder: Decoder, logits: np.ndarray) -> np.ndarray:
    """The greedy tokens [n] of logits [n, V], as `Decoder.generate` takes them."""
    return suppress(logits, decoder.manifest.tokens.suppressed).argmax(-1)


def _logits_at(decoder: Decoder, output: np.ndarray, positions: slice) -> np.ndarray:
    """The logits [n, V] at some positions of one sequence's output [C, positions]. The
    head reads it in every sequence of the bundle's batch."""
    batch = np.tile(output[:, positions], (decoder.options.batch, 1, 1))
    return decoder.logits(batch)[0]


def _bundle_text(decoder: Decoder, text: ComparedText, place: int) -> list[int]:
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
