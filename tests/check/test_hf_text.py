"""A bundle is compared with Hugging Face's own text at every position; differences are told
from ties, and a lost end token from another text."""

import json
import shutil

import numpy as np
import pytest
import tiny
from in_process import cli, invoke
from refusal import refused
from tiny import checkpoint_that_knows

import miltorch
from workbench import Decoder
from workbench.check import end_tokens, gates, greedy, transcript
from workbench.check.greedy import ComparedText, RankedText
from workbench.check.hf import Reference, round_stream
from workbench.check.transcript import Transcript
from workbench.decode.tokenizer import unknown_share
from workbench.models.checkpoint import Checkpoint
from workbench.progress import plain_stage_lines

TASKS = ["set garden carrot ; get", "set palace onion ; get", "1 0 + 9 9 ="]
TASKS += ["the cow near the happy pigs"]
PROMPTS = ["The keeper of the light", "A ferry leaves", "Bread", "Who repairs boilers?"]


@pytest.fixture
def decoder(tiny_llama, exports):
    """tiny-llama in fp16."""
    bundle = exports.bundle(tiny_llama.path, max_seq_len=64, compress="fp16")
    return Decoder(bundle, "portable")


@pytest.fixture(scope="module")
def expected(tiny_llama, exports):
    """tiny-llama's texts."""
    bundle = exports.bundle(tiny_llama.path, max_seq_len=64, compress="fp16")
    return transcript.expect_texts(bundle, tiny_llama, PROMPTS, 12)


@pytest.fixture
def english(checkpoint_copy):
    """A checkpoint whose tokenizer knows the words of the prompts."""
    words = " ".join(transcript.load_prompts()).split()
    return checkpoint_that_knows(words, checkpoint_copy)


def change_logits(monkeypatch, change) -> None:
    """Plants a change of the logits of every decoder."""
    sound_logits = Decoder.logits
    monkeypatch.setattr(
        Decoder, "logits", lambda self, outputs: change(sound_logits(self, outputs))
    )


def words(results) -> dict[str, str]:
    return {gate.name: gate.verdict for gate in results}


def test_a_sound_export_agrees_and_its_error_is_that_of_rounding(decoder, expected):
    result = transcript.compare_texts(decoder, expected)
    assert [text.prompt for text in result.texts] == PROMPTS
    assert result.agreed == 1 and result.interval == [1, 1]
    assert 0 < result.sigma < 0.1 and result.error_ratio < transcript.ERROR_LIMIT
    verdicts = words(result.judge())
    assert verdicts["text_budget"] == "GREEN" and verdicts["transcript"] == "WITHIN"
    figures, stop = result.json(decoder)
    assert figures["agreed"] == 1 and stop["ends"] == result.stops.ends
    assert {row["cause"] for row in figures["prompts"]} == {None}


def test_the_text_is_hugging_face_s_greedy_one_however_it_is_batched(tiny_llama):
    encoded = [
        (text, transcript.encode(tiny_llama.tokenizer, text)) for text in PROMPTS
    ]
    together = greedy.write_texts(tiny_llama, encoded, 12, batched=True)
    one_by_one = greedy.write_texts(tiny_llama, encoded, 12, batched=False)
    assert [text.tokens for text in together] == [text.tokens for text in one_by_one]
    reference = Reference(tiny_llama)
    for text in one_by_one:
        logits = reference.run(text.input_ids).logits[text.predicting_positions]
        assert logits.argmax(-1).tolist() == text.tokens


def test_the_rounding_of_sums_is_no_error_of_the_export(tiny_llama, exports, tmp_path):
    """A template without BOS: rounding inside the first layers then has more effect
    than rounding of the stream between them."""
    folder = shutil.copytree(tiny_llama.path, tmp_path / "model")
    template = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    checkpoint = Checkpoint(folder)
    bundle = exports.bundle(folder, max_seq_len=128, compress="fp16")
    expected = transcript.expect_texts(bundle, checkpoint, TASKS, 48)
    rounded = transcript.compare_texts(
        tiny.as_device(Decoder(bundle, "portable")), expected
    )
    assert rounded.error_ratio > transcript.ERROR_LIMIT
    sound = transcript.compare_texts(Decoder(bundle, "portable"), expected)
    assert words(sound.judge())["text_budget"] == "GREEN" and sound.error_ratio < 0.01


def test_logits_that_are_larger_everywhere_change_no_text_and_are_red(
    decoder, expected, monkeypatch
):
    """Planted: the bundle's logits × 1.05, which no greedy text shows."""
    change_logits(monkeypatch, lambda logits: 1.05 * logits)
    result = transcript.compare_texts(decoder, expected)
    assert result.agreed == 1
    assert words(result.judge())["text_budget"] == "RED"


def test_rotary_frequencies_two_percent_off_are_red_after_three_prompts(
    exports, tmp_path
):
    """Planted: every rotary frequency of the manifest × 1.02, which changes no token of
    these texts."""
    checkpoint = Checkpoint(tiny.DATA / "tiny-lfm2")
    options = {"max_seq_len": 160, "compress": "int8-channel"}
    bundle = exports.bundle(checkpoint.path, **options)
    (rope,) = bundle.manifest.rope
    frequencies = [1.02 * frequency for frequency in rope.inv_freq]
    change = ("rope/0/inv_freq", frequencies)
    turned = Decoder(tiny.edited_copy(bundle, tmp_path / "turned", change), "portable")
    prompts = transcript.default_prompts(checkpoint, 9, 112)[6:]
    result = transcript.transcribe(turned, checkpoint, prompts)
    assert words(result.judge())["text_budget"] == "RED"
    assert result.agreed == 1 and result.error_ratio > 5


def test_the_exact_program_reads_the_inputs_of_a_host_that_was_changed(
    decoder, expected
):
    """Planted: every token after the first of a call is written one row late."""
    inputs = decoder.host.inputs

    def late_inputs(*call):
        values = inputs(*call)
        columns = values["kv_write_mask"]
        columns[..., 1:] = np.roll(columns[..., 1:], 1, axis=2)
        return values

    decoder.host.inputs = late_inputs
    assert decoder.precision == "declared"
    result = transcript.compare_texts(decoder, expected)
    assert words(result.judge())["text_budget"] == "RED"


def test_the_exact_program_reads_its_head_once_for_all_texts(
    decoder, expected, monkeypatch
):
    read, paths = miltorch.read, []

    def counted(path, *arguments):
        paths.append(str(path))
        return read(path, *arguments)

    monkeypatch.setattr(miltorch, "read", counted)
    transcript.compare_texts(decoder, expected)
    assert len(expected.texts) > 1
    assert sum("head" in path for path in paths) == 1


def test_logits_that_are_not_finite_are_red(decoder, expected, monkeypatch):
    """Planted: the logit of the last token, which no text has, is nan."""

    def change(logits):
        logits[..., -1] = np.nan
        return logits

    change_logits(monkeypatch, change)
    monkeypatch.setattr(transcript, "_pick", lambda _, logits: np.nanargmax(logits, -1))
    gate, *_ = transcript.compare_texts(decoder, expected).judge()
    assert gate.verdict == "RED" and np.isnan(gate.value)


def test_two_exchanged_rows_of_the_head_are_red_and_named(
    decoder, expected, monkeypatch
):
    """Planted: the logits of two tokens that no text contains."""
    used = {token for text in expected.texts for token in [*text.ids, *text.tokens]}
    a, b = [n for n in range(decoder.manifest.dims.V) if n not in used][-2:]

    def exchange(logits):
        logits[..., [a, b]] = logits[..., [b, a]]
        return logits

    change_logits(monkeypatch, exchange)
    result = transcript.compare_texts(decoder, expected)
    gate, *_ = result.judge()
    assert gate.verdict == "RED" and result.worst_token in (a, b)
    assert f"token {result.worst_token}" in gate.reason


def transcript_of(bundle_tokens, gap, ended=(), tokens=4) -> Transcript:
    """A transcript of texts of which every token is 1. The stored weights explain every token of the
    texts with even numbers, and none of the others.

    Args:
        bundle_tokens: for each text, the tokens of the bundle.
        gap: for each text, the gaps of its tokens.
        ended: numbers of the texts whose last token is the end token, 0.
        tokens: of each text.
    """
    texts = []
    for number, (row, gaps) in enumerate(zip(bundle_tokens, gap)):
        ids = [1] * (tokens - 1) + [0 if number in ended else 1]
        text = ComparedText(
            str(number),
            [5],
            ids,
            number in ended,
            best_tokens=np.array([[1, 2]] * tokens),
            best_logits=np.zeros((tokens, 2)),
            bundle_tokens=np.array(row),
            gap=np.array(gaps, float),
            weights_explain=np.full(tokens, number % 2 == 0),
        )
        texts.append(text)
    return Transcript(
        texts,
        sigma=0.01,
        error_ratio=1.0,
        token_error_ratio=1.0,
        worst_token=0,
        end_tokens=frozenset({0}),
    )


def test_a_small_gap_is_a_tie_and_later_positions_count():
    result = transcript_of(
        [[2, 1, 1, 1], [1, 1, 1, 3]], [[0.29, 0, 0, 0], [0, 0, 0, 0.31]]
    )
    assert result.agreed == 7 / 8
    assert [int(result.is_tie(text).sum()) for text in result.texts] == [1, 0]
    assert words(result.judge(min_agreed=0.8))["transcript"] == "WITHIN"
    assert words(result.judge(min_agreed=0.9))["transcript"] == "OVER"


def test_a_stop_is_judged_with_four_ends_and_at_those_places_alone():
    ends = [[1, 1, 1, 0]] * 4
    zero = [[0.0] * 4] * 4
    assert words(transcript_of(ends, zero, ended=range(3)).judge())["stop"] == "not_run"
    assert words(transcript_of(ends, zero, ended=range(4)).judge())["stop"] == "WITHIN"
    lost = transcript_of([[1, 1, 1, 2]] * 4, zero, ended=range(4)).judge()
    assert words(lost)["stop"] == "OVER" and "never ends" in lost[-1].reason
    three = transcript_of([*ends[:3], [1, 1, 1, 2]], zero, ended=range(4)).judge()
    assert words(three)["stop"] == "WITHIN"


def test_rounding_of_the_stream_needs_no_bundle(tiny_llama):
    reference = Reference(tiny_llama)
    ids = np.array([[1, 5, 9, 30], [1, 7, 7, 7]])
    rounded = reference.perturbed_hidden(ids, round_stream(1.0))
    for row, hidden in zip(ids, rounded):
        expected = reference.run(row, perturb=round_stream(1.0)).normed
        np.testing.assert_allclose(hidden.numpy(), expected, rtol=1e-5, atol=1e-6)
    plain = reference.last_hidden(ids, use_cache=False)
    assert not np.array_equal(plain.numpy(), rounded.numpy())


def test_validate_adds_the_transcript_and_its_limits(
    tiny_llama, exports, tmp_path, monkeypatch
):
    bundle = exports.bundle(tiny_llama.path, max_seq_len=96, compress="fp16")
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in PROMPTS[:2]))
    command = "validate", bundle.root, "--checkpoint", tiny_llama.path
    command += "--prompt-ids", "1,69,142,4", "--transcript", "--prompts", file
    validation = invoke(*command)
    named = {gate["name"]: gate["verdict"] for gate in validation["gates"]}
    assert named["transcript"] == "WITHIN" and named["text_budget"] == "GREEN"
    assert named["stop"] in ("not_run", "WITHIN")
    assert (validation["verdict"], validation["quality"]) == ("GREEN", "WITHIN")
    assert len(validation["transcript"]["prompts"]) == 2
    monkeypatch.setattr(Transcript, "agreed", 0.97)
    assert cli(*command).exit_code == 0
    strict = cli(*command, "--min-agreed", "0.98")
    assert strict.exit_code == 4 and "OVER" in strict.stdout


def test_a_bundle_whose_tokenizer_makes_other_ids_is_red(tiny_llama, exports, tmp_path):
    """Planted: the bundle's tokenizer has another text for two of its tokens."""
    bundle = exports.bundle(tiny_llama.path, max_seq_len=64, compress="fp16")
    decoder = Decoder(bundle, "portable")
    expected = transcript.encode_prompts(tiny_llama, PROMPTS)
    assert transcript.differing_ids(decoder, expected) is None
    path = bundle.root / "tokenizer" / "tokenizer.json"
    original = path.read_text()
    fields = json.loads(original)
    vocabulary = fields["model"]["vocab"]
    used = transcript.encode(tiny_llama.tokenizer, PROMPTS[0])
    texts = {number: text for text, number in vocabulary.items()}
    a, b = texts[used[-1]], texts[next(n for n in texts if n not in used and n > 10)]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    try:
        path.write_text(json.dumps(fields))
        gate = transcript.differing_ids(decoder, expected)
    finally:
        path.write_text(original)
    assert (gate.name, gate.verdict) == ("interface", gates.RED)


def test_default_prompts_are_ones_that_the_tokenizer_knows_and_that_fit(
    tiny_llama, exports, english
):
    prompts = transcript.default_prompts(tiny_llama, 3, 60)
    assert len(prompts) == 3
    for prompt in prompts:
        ids = transcript.encode(tiny_llama.tokenizer, prompt)
        assert len(ids) <= 60 and not unknown_share(tiny_llama.tokenizer, ids)
    assert transcript.default_prompts(tiny_llama, 3, 5) == []
    without_tokenizer = Checkpoint(exports.checkpoint("llama"))
    assert transcript.default_prompts(without_tokenizer, 3, 60) == []
    assert transcript.default_prompts(english, 2, 60) == transcript.load_prompts()[:2]


def test_words_outside_the_model_s_vocabulary_are_unknown(english):
    """Planted: a tokenizer of more tokens than the model has."""
    V = english.config.vocab_size
    file = english.path / "tokenizer.json"
    fields = json.loads(file.read_text())
    vocabulary = fields["model"]["vocab"]
    for word in vocabulary.keys() - {"<unk>"}:
        vocabulary[word] += V
    file.write_text(json.dumps(fields))
    other = Checkpoint(english.path)
    ids = transcript.encode(file.parent, transcript.load_prompts()[0])
    assert min(ids) > V and not unknown_share(other.tokenizer, ids)
    assert transcript.default_prompts(other, 2, 60) == []


@pytest.mark.parametrize(
    ("contents", "reason"),
    [("", "no line"), ("{}", "line 1 without one"), ('{"prompt": " "}', "line 1 with")],
)
def test_a_file_without_prompts_is_refused(tmp_path, contents, reason):
    file = tmp_path / "prompts.jsonl"
    file.write_text(contents)
    with refused(reason):
        transcript.load_prompts(file)


def test_options_of_the_transcript_are_refused_without_it(tmp_path, llama_bundle):
    with refused("--min-agreed"):
        invoke("validate", llama_bundle.root, "--min-agreed", "0.9")
    with refused("--transcript"):
        invoke("validate", llama_bundle.root, "--transcript")


def test_the_error_on_a_device_is_reported_and_gate_device_judges_it(
    decoder, expected, monkeypatch
):
    """Planted: a device's logits × 1.05."""
    change_logits(monkeypatch, lambda logits: 1.05 * logits)
    result = transcript.compare_texts(tiny.as_device(decoder), expected)
    gate, *_ = result.judge()
    assert result.error_ratio > transcript.ERROR_LIMIT
    assert gate.verdict == "not_run" and f"{result.error_ratio:.3g}" in gate.reason
    assert "gate device" in gate.reason


def test_the_error_of_a_target_without_exact_arithmetic_is_reported(
    decoder, expected, monkeypatch
):
    """The interpreter of such a target runs its programs in one arithmetic."""
    monkeypatch.setattr(
        transcript, "exact_decoder", lambda _, decoder, **options: decoder
    )
    gate, *_ = transcript.compare_texts(decoder, expected).judge()
    assert gate.verdict == "not_run" and "lacks" in gate.reason


def test_a_golden_with_texts_judges_transcript_and_stop_without_a_checkpoint(
    tiny_llama, exports, tmp_path, monkeypatch
):
    bundle = exports.bundle(tiny_llama.path, max_seq_len=96, compress="fp16")
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in PROMPTS))
    out = tmp_path / "golden"
    ids = "--prompt-ids", "1,69,142,4"
    command = "golden", tiny_llama.path, "--out", out, *ids
    written = invoke(*command, "--transcript", "--prompts", file)
    assert written["prompts"] == 4 and 0 < written["sigma"] < 0.1
    validation = invoke("validate", bundle.root, "--golden", out, "--transcript")
    named = {gate["name"]: gate["verdict"] for gate in validation["gates"]}
    assert named["transcript"] == "WITHIN" and named["text_budget"] == "not_run"
    assert named["stop"] in ("not_run", "WITHIN")
    assert validation["transcript"]["sigma"] == written["sigma"]
    assert {row["cause"] for row in validation["transcript"]["prompts"]} == {None}
    monkeypatch.setattr(Transcript, "agreed", 0.97)
    strict = cli(
        *("validate", bundle.root, "--golden", out, "--transcript"),
        *("--min-agreed", "0.98"),
    )
    assert strict.exit_code == 4
    invoke(*command)
    with refused("no texts"):
        invoke("validate", bundle.root, "--golden", out, "--transcript")


def test_a_third_token_is_a_difference_where_its_logit_is_not_stored():
    best = {"best_tokens": [[5, 6]] * 3, "best_logits": [[2.0, 1.5]] * 3}
    best = {name: np.array(values) for name, values in best.items()}
    text = RankedText("", [1], [5, 5, 5], False, **best)
    gap = transcript.gaps(text, np.array([5, 6, 7]))
    assert gap.tolist() == [0.0, 0.5, np.inf]


TEMPLATE = "{% for turn in messages %}{{ turn.content }} {{ END }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "generation", "clause"),
    [
        ("{{ eos_token }}", None, ""),
        ("", None, "ends an answer without an end token"),
        ("{{ bos_token }}", None, "at which generation does not stop"),
        ("{{ eos_token }}", [7], "generation_config.json does not"),
    ],
)
def test_end_tokens_that_contradict_each_other_are_named(
    tiny_llama, tmp_path, template, generation, clause
):
    """Planted: a chat template without the end token, and other end tokens."""
    folder = shutil.copytree(tiny_llama.path, tmp_path / "model")
    file = folder / "chat_template.jinja"
    file.write_text(TEMPLATE.replace("{{ END }}", template))
    if generation:
        fields = json.dumps({"eos_token_id": generation})
        (folder / "generation_config.json").write_text(fields)
    checkpoint = Checkpoint(folder)
    ends = end_tokens.read_end_tokens(checkpoint)
    assert ends.has_template and ends.configuration == tiny_llama.tokens.configured_eos
    sentence = end_tokens.describe_contradictions(ends, checkpoint)
    assert clause in sentence and bool(sentence) == bool(clause)


def test_texts_are_counted_token_by_token_where_no_bar_is_shown(
    tiny_llama, monkeypatch, capsys
):
    monkeypatch.setattr("workbench.progress.TICK_S", 0.0)
    encoded = [
        (text, transcript.encode(tiny_llama.tokenizer, text)) for text in PROMPTS
    ]
    with plain_stage_lines():
        greedy.write_texts(tiny_llama, encoded, 3, batched=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"Hugging Face's text: 0 of {len(PROMPTS)} texts written, token {count} of 3"
        for count in (1, 2, 3)
    ]
