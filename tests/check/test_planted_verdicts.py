"""Planted faults and costs have the right verdict on the export and on the quality wherever a user
reads them: on the command line, in its JSON, on the page, in the sentences of notebooks 05 and 31,
and in the log."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from bs4 import BeautifulSoup
from experiment import toy
from faults.copies import Copy
from in_process import cli
from tiny import DATA, edited_weights

from workbench import Decoder, Experiment, export, log, recommend
from workbench.check import greedy, text, transcript
from workbench.check.gates import Gate
from workbench.decode.inputs import HostInputs
from workbench.models.checkpoint import Checkpoint

S = 128  # max_seq_len of every bundle: a prompt and 48 tokens
TEXT = "set garden carrot ; set palace onion ; get garden carrot ; 4 3 + 3 8 = 0 8 1"
PROMPTS = [
    "set garden carrot ; get",
    "set palace onion ; get",
    "1 0 + 9 9 =",
    "the cow near the happy pigs",
]
SEMICOLON, LAST = 13, 255  # a frequent token, and one that no text here has
TEMPLATE = "{{ bos_token }}{% for turn in messages %}{{ turn.content }}END{% endfor %}"
EXIT_CODES = {("GREEN", "WITHIN"): 0, ("RED", "not judged"): 1, ("GREEN", "OVER"): 4}


@dataclass(frozen=True)
class Judged:
    """The JSON of a validation with a transcript."""

    json: dict

    def gate(self, name: str) -> dict:
        (gate,) = [gate for gate in self.json["gates"] if gate["name"] == name]
        return gate

    def verdict(self, name: str) -> str:
        return self.gate(name)["verdict"]


@pytest.fixture
def project(checkout, monkeypatch):
    """A checkout with the text that tiny-llama knows, on which presets are judged."""
    toy.write_notebook(checkout)
    monkeypatch.setattr(text, "TASKS", str(DATA / text.TASKS.removeprefix("data/")))
    return checkout


@pytest.fixture
def judge(project, tmp_path):
    """A function that validates a bundle with a transcript, and asserts that the verdicts on export
    and quality are these wherever a user reads them."""
    file = tmp_path / "prompts.jsonl"

    def run(
        folder: Path,
        checkpoint: Checkpoint,
        export: str,
        quality: str,
        prompts: list[str] = PROMPTS,
    ) -> Judged:
        file.write_text("".join(f"{json.dumps({'prompt': p})}\n" for p in prompts))
        command = ["validate", folder, "--checkpoint", checkpoint.path]
        command += ["--prompt", TEXT, "--transcript", "--prompts", file]
        in_words = cli(*command)
        in_json = cli(*command, "--json")
        assert in_words.exit_code == in_json.exit_code == EXIT_CODES[export, quality]
        lines = in_words.stdout.splitlines()
        assert f"{'export':20}{export}" in lines and f"{'quality':20}{quality}" in lines
        result = json.loads(in_json.stdout)
        stored_quality = "not_run" if quality == "not judged" else quality
        assert (result["verdict"], result["quality"]) == (export, stored_quality)
        page = tmp_path / "page.html"
        assert cli("report", folder, "--html", page).exit_code == 0
        cards = BeautifulSoup(page.read_text(), "html.parser")(class_="verdict")
        assert [card.b.text for card in cards] == [export, quality]
        check_notebook([Gate(**gate) for gate in result["gates"]], export, quality)
        return Judged(result)

    return run


def check_notebook(results: list[Gate], export: str, quality: str) -> None:
    """Asserts that a notebook with these gates concludes and logs the same verdicts."""
    presets = recommend.as_table(None)
    first, *others = recommend.describe_verdict(results, presets)
    assert first.startswith(f"Export {export}: ")
    assert any(sentence.startswith(f"Quality {quality}: ") for sentence in others)
    experiment = Experiment(toy.NAME, toy.names(str(DATA / "tiny-llama")))
    experiment.add_gates(results)
    experiment.conclude("\n".join([first, *others]))
    (row,) = log.load("runs").to_dict("records")
    stored_quality = "not_run" if quality == "not judged" else quality
    assert (row["verdict"], row["quality"]) == (export, stored_quality)


def copy_checkpoint(folder: Path) -> Path:
    """A copy of tiny-llama in fp32, which holds what fp16 rounds away."""
    shutil.copytree(DATA / "tiny-llama", folder)
    with edited_weights(folder) as tensors:
        for name, tensor in tensors.items():
            tensors[name] = tensor.float()
    fields = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", fields | {"dtype": "float32"})
    return folder


def write_json(path: Path, fields: dict) -> None:
    path.write_text(json.dumps(fields))


@pytest.fixture
def make_bundle(tmp_path):
    """Exports a checkpoint; returns the bundle's folder and the checkpoint."""

    def make(checkpoint: Path, compress: str = "fp16") -> tuple[Path, Checkpoint]:
        folder = tmp_path / "exported" / "bundle"
        bundle = export(checkpoint, folder, compress=compress, max_seq_len=S)
        return bundle.root, Checkpoint(checkpoint)

    return make


@pytest.fixture
def sound(exports, tiny_llama, tmp_path):
    """A bundle of tiny-llama in fp16, which a test may change."""
    bundle = exports.bundle(tiny_llama.path, max_seq_len=S, compress="fp16")
    return shutil.copytree(bundle.root, tmp_path / "bundle"), tiny_llama


def write_late(monkeypatch) -> None:
    """Plants: every token after the first of a call is written one row late."""
    sound_inputs = HostInputs.inputs

    def late_inputs(self, *call) -> dict[str, np.ndarray]:
        inputs = sound_inputs(self, *call)
        columns = inputs["kv_write_mask"]
        columns[..., 1:] = np.roll(columns[..., 1:], 1, axis=2)
        return inputs

    monkeypatch.setattr(HostInputs, "inputs", late_inputs)


def change_logits(monkeypatch, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Plants a change of the logits of every decoder."""
    sound_logits = Decoder.logits

    def logits(self, outputs) -> np.ndarray:
        return change(sound_logits(self, outputs).copy())

    monkeypatch.setattr(Decoder, "logits", logits)


@pytest.mark.slow("validates a bundle twice")
def test_a_late_write_is_red(judge, sound, monkeypatch):
    write_late(monkeypatch)
    judged = judge(*sound, "RED", "not judged")
    assert judged.verdict("write_address") == "RED"
    assert judged.verdict("text_budget") == "RED"
    assert judged.json["transcript"]["agreed"] < 0.95
    assert judged.json["recommendation"] is None and judged.json["tried"] is None


@pytest.mark.wide
@pytest.mark.slow("validates a bundle twice")
@pytest.mark.parametrize("subject", ["base", "frequencies"])
def test_a_rotary_base_or_frequencies_two_percent_off_are_red(
    judge, sound, tmp_path, subject
):
    folder, checkpoint = sound
    copy = Copy(folder, tmp_path / "copy")
    for rope in copy.manifest["rope"]:
        frequencies = np.array(rope["inv_freq"])
        shares = np.arange(len(frequencies)) / len(frequencies)
        # a base that is larger by 2% lowers the last frequencies most
        factors = 1.02 if subject == "frequencies" else 1.02**-shares
        rope["inv_freq"] = (factors * frequencies).tolist()
    judged = judge(copy.seal(), checkpoint, "RED", "not judged")
    assert judged.verdict("host") == judged.verdict("text_budget") == "RED"
    if subject == "frequencies":
        assert judged.verdict("budget") == "RED"


@pytest.mark.wide
@pytest.mark.slow("validates a bundle twice")
def test_logits_that_are_larger_everywhere_are_red_though_the_text_is_the_same(
    judge, sound, monkeypatch
):
    change_logits(monkeypatch, lambda logits: 1.05 * logits)
    judged = judge(*sound, "RED", "not judged")
    assert judged.verdict("text_budget") == "RED"
    assert judged.json["transcript"]["agreed"] == 1
    assert judged.verdict("transcript") == "WITHIN"


@pytest.mark.wide
@pytest.mark.slow("validates a bundle twice")
def test_exchanged_rows_of_the_head_that_no_text_shows_are_red_and_named(
    judge, sound, monkeypatch
):
    rows = [LAST - 1, LAST]

    def exchange(logits: np.ndarray) -> np.ndarray:
        logits[..., rows] = logits[..., rows[::-1]]
        return logits

    change_logits(monkeypatch, exchange)
    judged = judge(*sound, "RED", "not judged")
    assert judged.json["transcript"]["agreed"] == 1
    reason = judged.gate("text_budget")["reason"]
    assert judged.verdict("text_budget") == "RED"
    assert any(reason.endswith(f"token {row}") for row in rows)


@pytest.mark.wide
@pytest.mark.slow("validates a bundle twice")
def test_an_end_token_whose_row_is_zeros_is_red_and_named(judge, sound, tmp_path):
    folder, checkpoint = sound
    copy = Copy(folder, tmp_path / "copy")
    weight = copy.weight("embed_tokens.weight")
    values = weight.read()
    values[2] = 0
    weight.write(values)
    judged = judge(copy.seal(), checkpoint, "RED", "not judged")
    assert "token 2 '<eos>', an end token" in judged.gate("weights")["reason"]


@pytest.mark.wide
@pytest.mark.slow("exports a bundle, and validates it twice")
def test_a_chat_template_unlike_the_checkpoint_s_is_red(judge, make_bundle, tmp_path):
    source = copy_checkpoint(tmp_path / "model")
    with_end = TEMPLATE.replace("END", "{{ eos_token }}")
    (source / "chat_template.jinja").write_text(with_end)
    folder, checkpoint = make_bundle(source)
    copy = Copy(folder, tmp_path / "copy")
    other = copy.root / "tokenizer" / "chat_template.jinja"
    other.write_text(f"the {with_end}")
    judged = judge(copy.seal(), checkpoint, "RED", "not judged")
    assert "chat template" in judged.gate("interface")["reason"]


def widen_rows(folder: Path) -> None:
    """Plants a row that is 128 times as large as the others of its matrix, and whose output nothing
    reads. With one scale for the whole matrix the other rows are rounded coarsely."""
    with edited_weights(folder) as tensors:
        for layer in range(4):
            mlp = f"model.layers.{layer}.mlp"
            tensors[f"{mlp}.gate_proj.weight"][0] = 0
            tensors[f"{mlp}.up_proj.weight"][0] *= 128


@pytest.mark.slow("exports a bundle, and validates it twice")
def test_int8_tensor_is_over_and_a_preset_is_recommended(judge, make_bundle, tmp_path):
    source = copy_checkpoint(tmp_path / "model")
    widen_rows(source)
    judged = judge(*make_bundle(source, "int8-tensor"), "GREEN", "OVER")
    assert judged.verdict("max_kl") == "OVER"
    chosen = judged.json["recommendation"]
    # a scale for 32 inputs serves them well
    assert chosen["compress"] == "int4-block32" and chosen["interval"][1] < 0.05
    causes = {row["cause"] for row in judged.json["transcript"]["prompts"]}
    assert causes <= {"the weights", None}


@pytest.mark.wide
@pytest.mark.slow("exports a bundle, and validates it twice")
def test_a_late_write_in_int8_tensor_is_red_and_its_cost_is_not_judged(
    judge, make_bundle, tmp_path, monkeypatch
):
    source = copy_checkpoint(tmp_path / "model")
    widen_rows(source)
    bundle = make_bundle(source, "int8-tensor")
    write_late(monkeypatch)
    judged = judge(*bundle, "RED", "not judged")
    assert judged.verdict("max_kl") == "OVER" and judged.gate("max_kl")["value"] > 0.05
    assert judged.json["recommendation"] is None and judged.json["tried"] is None


@pytest.mark.wide
@pytest.mark.slow("exports a bundle, and validates it twice")
def test_a_compression_that_misses_the_end_is_over(judge, make_bundle, tmp_path):
    """Planted: the end token's row is that of a frequent token, and longer by less than
    half a step of int8-tensor."""
    source = copy_checkpoint(tmp_path / "model")
    with edited_weights(source) as tensors:
        rows = tensors["model.embed_tokens.weight"]
        step = rows.abs().max() / 127
        rows[SEMICOLON] = (rows[SEMICOLON] / step).round() * step
        rows[LAST] = rows[SEMICOLON] + 0.4 * step * rows[SEMICOLON].sign()
    set_end(source, LAST)
    judged = judge(*make_bundle(source, "int8-tensor"), "GREEN", "OVER")
    assert judged.json["stop"]["ends"] == 4 and judged.json["stop"]["bundle_ends"] == 0
    assert judged.verdict("stop") == "OVER"
    assert "never ends" in judged.gate("stop")["reason"]


def set_end(folder: Path, token: int) -> None:
    """Names another end token in both configurations."""
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((folder / name).read_text())
        write_json(folder / name, fields | {"eos_token_id": token})


@pytest.mark.slow("exports a bundle, and validates it twice")
def test_a_template_without_an_end_token_is_the_checkpoint_s_contradiction(
    judge, make_bundle, tmp_path
):
    source = copy_checkpoint(tmp_path / "model")
    (source / "chat_template.jinja").write_text(TEMPLATE.replace("END", ""))
    judged = judge(*make_bundle(source), "GREEN", "WITHIN")
    clause = "the chat template ends an answer without an end token"
    assert clause in judged.json["stop"]["contradiction"]
    assert judged.verdict("stop") == "not_run"
    assert clause in judged.gate("stop")["reason"]
    assert judged.verdict("transcript") == judged.verdict("max_kl") == "WITHIN"


@pytest.mark.wide
@pytest.mark.slow("validates a bundle twice")
def test_a_checkpoint_that_never_ends_is_within_on_the_other_checks(judge, sound):
    judged = judge(*sound, "GREEN", "WITHIN")
    assert judged.json["stop"]["ends"] == 0
    assert judged.verdict("stop") == "not_run"
    assert "ended after 0 of 4 prompts" in judged.gate("stop")["reason"]
    assert judged.verdict("transcript") == judged.verdict("max_kl") == "WITHIN"


@pytest.mark.wide
@pytest.mark.slow("exports a bundle, and validates it twice")
def test_a_tie_at_the_first_token_counts_as_agreed(judge, make_bundle, tmp_path):
    """Planted: Hugging Face's first token has a twin, whose row is shorter by less than
    fp16 holds."""
    source = copy_checkpoint(tmp_path / "model")
    encoded = transcript.encode_prompts(Checkpoint(source), PROMPTS[:1])
    (written,) = greedy.write_texts(Checkpoint(source), [*encoded.items()], 1, True)
    (first,) = written.tokens
    with edited_weights(source) as tensors:
        rows = tensors["model.embed_tokens.weight"]
        spacing = np.spacing(rows[first].abs().half().numpy()).astype(np.float32)
        rows[LAST] = rows[first] + 0.25 * torch.from_numpy(spacing) * rows[first].sign()
    judged = judge(*make_bundle(source), "GREEN", "WITHIN")
    row, *_ = judged.json["transcript"]["prompts"]
    assert row["ties"] >= 1 and row["first_difference"] is None
    assert judged.gate("transcript")["value"] == 1
