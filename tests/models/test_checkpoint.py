"""Damaged, partial and foreign checkpoints end in one message; whole ones are read tensor by
tensor."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from refusal import refused
from tiny import WEIGHTS

from workbench import checkpoint_checks
from workbench.check import hf
from workbench.decode.tokenizer import encode_text
from workbench.models import FAMILIES, layerwise
from workbench.models.checkpoint import Checkpoint

IDS = [1, 4, 9, 13, 4]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


# --- damages ---------------------------------------------------------------------------------------
#
# A damage is a function of a checkpoint's folder. Those with parameters are made by functions whose
# arguments are the parameters.

Damage = Callable[[Path], object]


def change_weight_bytes(change: Callable[[bytes], bytes]) -> Damage:
    def damage(path):
        data = (path / WEIGHTS).read_bytes()
        (path / WEIGHTS).write_bytes(change(data))

    return damage


def write_index(*names: str) -> Damage:
    """An index of these files of weights in place of the one file."""

    def damage(path):
        (path / WEIGHTS).unlink(missing_ok=True)
        index = {"weight_map": dict(enumerate(names))}
        (path / f"{WEIGHTS}.index.json").write_text(json.dumps(index))

    return damage


def keep_first_of_two_files(path: Path) -> None:
    (path / WEIGHTS).rename(path / "model-00001.safetensors")
    write_index("model-00001.safetensors", "model-00002.safetensors")(path)


def write_config(text: str) -> Damage:
    return lambda path: (path / "config.json").write_text(text)


def set_config(name: str, value: object) -> Damage:
    return lambda path: tiny.edit_json(path / "config.json", (name, value))


def delete(name: str) -> Damage:
    return lambda path: (path / name).unlink()


@pytest.mark.parametrize(
    "damage, message",
    [
        (change_weight_bytes(lambda data: POINTER), "Git LFS pointer"),
        (change_weight_bytes(lambda data: data[:-100]), "no whole safetensors file"),
        (change_weight_bytes(lambda data: b"\xff" * 4096), "no whole safetensors file"),
        (keep_first_of_two_files, "model-00002.*half a download"),
        (write_index(f"../{WEIGHTS}"), "folder in it"),
        (write_config('{"model_type": "no-such-model"}'), "no-such-model"),
        (set_config("head_dim", 33), "head_dim.*33.*transformers accepts"),
        (write_config("{"), "no JSON object"),
        (delete(WEIGHTS), "no such file"),
        (delete("config.json"), "no config.json"),
        (shutil.rmtree, "nothing there"),
    ],
)
def test_damage_is_named(checkpoint_copy, damage, message):
    damage(checkpoint_copy)
    with refused(message):
        Checkpoint(checkpoint_copy).config  # noqa: B018


def replace_by_pipe(name: str) -> Damage:
    """Puts a pipe in the place of a file: a read of it never returns."""

    def damage(path):
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return damage


def replace_by_device(name: str) -> Damage:
    """Puts a link to /dev/zero in the place of a file: a read of it never ends."""

    def damage(path):
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to("/dev/zero")

    return damage


def enlarge_to_terabyte(name: str) -> Damage:
    """Enlarges a file to 2^40 bytes; it is sparse and takes no room on the disk."""

    def damage(path):
        with (path / name).open("ab") as file:
            file.truncate(1 << 40)

    return damage


BILLION = 10**9


@pytest.mark.parametrize(
    "damage, message",
    [
        (replace_by_pipe(WEIGHTS), "found a pipe"),
        (replace_by_pipe("tokenizer_config.json"), "found a pipe"),
        (replace_by_pipe("chat_template.jinja"), "found a pipe"),
        (replace_by_device("generation_config.json"), "found a device"),
        (replace_by_device(WEIGHTS), "found a device"),
        (enlarge_to_terabyte("config.json"), "1,099,511,627,776 bytes"),
        (enlarge_to_terabyte("tokenizer.json"), "1,099,511,627,776 bytes"),
        (set_config("num_hidden_layers", BILLION), "num_hidden_layers 1,000,000,000"),
        (set_config("vocab_size", BILLION), "vocab_size 1,000,000,000"),
        (set_config("hidden_size", BILLION), "hidden_size 1,000,000,000"),
        (
            set_config("num_key_value_heads", BILLION),
            "num_key_value_heads 1,000,000,000",
        ),
        (write_config("[" * 100_000), "no JSON object"),
        (write_config('{"a":' * 100_000), "no JSON object"),
    ],
)
def test_what_has_no_end_or_no_measure_is_refused_at_once(
    checkpoint_copy, damage, message
):
    damage(checkpoint_copy)
    with refused(message):
        Checkpoint(checkpoint_copy).config  # noqa: B018


UNKNOWN_FAMILY = "model_type of no family of transformers"
AUTO_CLASSES = "AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"


@pytest.mark.parametrize("model_type", [UNKNOWN_FAMILY, "llama"])
def test_code_in_a_checkpoint_never_runs_and_is_never_offered(
    checkpoint_copy, monkeypatch, model_type
):
    trace = checkpoint_copy / "trace"  # the file that the code would write
    (checkpoint_copy / "code.py").write_text(f"open({str(trace)!r}, 'w')\n")
    code = dict.fromkeys(AUTO_CLASSES, "code.Anything")
    for file in ("config.json", "tokenizer_config.json"):
        fields = {"auto_map": code}
        if file == "config.json":
            fields["model_type"] = model_type
        old = (
            json.loads((checkpoint_copy / file).read_text())
            if (checkpoint_copy / file).exists()
            else {}
        )
        (checkpoint_copy / file).write_text(json.dumps(old | fields))
    questions = []
    monkeypatch.setattr("builtins.input", lambda text: questions.append(text) or "y")
    if model_type == UNKNOWN_FAMILY:
        with refused("auto_map.*never run"):
            Checkpoint(checkpoint_copy).config  # noqa: B018
    else:  # transformers' own class is there
        hf.whole_model(Checkpoint(checkpoint_copy))
        layerwise.empty_model(Checkpoint(checkpoint_copy).config)
    assert not questions and not trace.exists()


@pytest.mark.parametrize(
    "damaged",
    [
        "{",
        "[1]",
        '{"eos_token_id": "</s>"}',
        '{"eos_token_id": [1.5]}',
        '{"eos_token_id": true}',
    ],
)
def test_a_damaged_generation_configuration_is_refused(checkpoint_copy, damaged):
    (checkpoint_copy / "generation_config.json").write_text(damaged)
    with refused("no JSON object|eos_token_id .*a token id"):
        Checkpoint(checkpoint_copy).tokens.eos  # noqa: B018


def test_one_file_is_preferred_to_an_index_as_in_transformers(checkpoint_copy):
    whole = (checkpoint_copy / WEIGHTS).read_bytes()
    write_index("old.safetensors")(checkpoint_copy)
    (checkpoint_copy / WEIGHTS).write_bytes(whole)
    assert [file.name for file in Checkpoint(checkpoint_copy).files] == [WEIGHTS]


def test_where_texts_end_is_part_of_the_identity(checkpoint_copy):
    (checkpoint_copy / "generation_config.json").unlink(missing_ok=True)
    plain = Checkpoint(checkpoint_copy)
    for eos, same in ((plain.config.eos_token_id, True), ([3, 5], False)):
        (checkpoint_copy / "generation_config.json").write_text(
            json.dumps({"eos_token_id": eos})
        )
        assert (Checkpoint(checkpoint_copy).sha256 == plain.sha256) == same


def test_a_random_checkpoint_is_the_same_whole_and_sharded_and_loads_in_transformers(
    tmp_path,
):
    def checkpoint(name, seed=3, **options):
        options = {"seed": seed, "dtype": "bfloat16"} | options
        return Checkpoint(tiny.random_checkpoint(tmp_path / name, "llama", **options))

    a, b = checkpoint("one"), checkpoint("many", shard_bytes=20_000)
    assert len(list(b.path.glob("*.safetensors"))) > 2
    assert a.manifest_entry["dtype"] == "BF16" and a.header.keys() == b.header.keys()
    assert all(torch.equal(a.tensor(n), b.tensor(n)) for n in a.header)
    assert checkpoint("again").sha256 == a.sha256
    assert len({a.sha256, b.sha256, checkpoint("other", 4).sha256}) == 3
    loaded = tiny.hf(b.path)
    assert torch.equal(loaded.model.norm.weight, a.tensor("model.norm.weight"))


def rename_tensors(path, change) -> None:
    """Stores every tensor under another name, `change` of its name."""
    with tiny.edited_weights(path) as tensors:
        stored = dict(tensors)
        tensors.clear()
        tensors.update({change(name): tensor for name, tensor in stored.items()})


def logits_of_hugging_face(path, ids) -> torch.Tensor:
    """transformers' own loader and model, whatever the names in the file."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return model.eval()(torch.tensor([ids])).logits[0]


def reference_logits(path, ids) -> torch.Tensor:
    return torch.from_numpy(hf.Reference(Checkpoint(path)).run(ids).logits)


def test_names_without_the_base_model_s_prefix_are_loaded_as_transformers_loads_them(
    checkpoint_copy,
):
    expected = logits_of_hugging_face(checkpoint_copy, IDS)
    rename_tensors(checkpoint_copy, lambda name: name.removeprefix("model."))
    assert Checkpoint(checkpoint_copy).prefix == ""
    assert torch.equal(logits_of_hugging_face(checkpoint_copy, IDS), expected)
    assert torch.allclose(reference_logits(checkpoint_copy, IDS), expected, atol=1e-4)


def test_a_wrapper_s_own_head_is_the_head(checkpoint_copy):
    """LLaVA-like wrappers store `language_model.model.…` and `language_model.lm_head`."""
    rename_tensors(checkpoint_copy, lambda name: f"language_model.{name}")
    with tiny.edited_weights(checkpoint_copy) as tensors:
        table = tensors["language_model.model.embed_tokens.weight"]
        tensors["language_model.lm_head.weight"] = 2 * table
    checkpoint = Checkpoint(checkpoint_copy)
    assert checkpoint.prefix == "language_model.model."
    assert checkpoint.head == "language_model.lm_head.weight"
    assert checkpoint.head in checkpoint.matrices


def test_names_that_transformers_would_not_load_are_named(checkpoint_copy):
    rename_tensors(checkpoint_copy, lambda name: f"student.{name}")
    with refused(r"tensors named like 'student\.model\..*save_pretrained"):
        Checkpoint(checkpoint_copy).prefix  # noqa: B018


QUANTIZED = r"{}.*plain weights.*base model.*cast alone would lose the scales"


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "fp8"])
@pytest.mark.parametrize("place", ["quantization_config", "text_config"])
def test_a_quantization_is_named_before_weights_are_looked_for(
    checkpoint_copy, method, place
):
    settings = {"quant_method": method}
    if place == "text_config":
        settings = {"quantization_config": settings}
    tiny.edit_json(checkpoint_copy / "config.json", (place, settings))
    (checkpoint_copy / WEIGHTS).unlink()
    with refused(QUANTIZED.format(f"quantized by {method}")):
        Checkpoint(checkpoint_copy)


@pytest.mark.parametrize("ending", ["qweight", "weight_packed", "weight_scale_inv"])
def test_packed_tensors_are_named(checkpoint_copy, ending):
    name = f"model.layers.0.self_attn.q_proj.{ending}"
    with tiny.edited_weights(checkpoint_copy) as tensors:
        tensors[name] = torch.zeros(4, 4)
    with refused(QUANTIZED.format(f"tensor '{name}'")):
        Checkpoint(checkpoint_copy)


def test_eight_bits_are_not_advised_to_be_cast(checkpoint_copy):
    with tiny.edited_weights(checkpoint_copy) as tensors:
        name = next(iter(tensors))
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    with refused(QUANTIZED.format("dtype F8_E4M3")):
        Checkpoint(checkpoint_copy).tensor(name)


def replace_by_adapter(path: Path) -> None:
    (path / WEIGHTS).unlink()
    fields = json.dumps({"base_model_name_or_path": "org/Base"})
    (path / "adapter_config.json").write_text(fields)
    (path / "adapter_model.safetensors").write_bytes(b"")


def rename_weights(name: str) -> Damage:
    return lambda path: (path / WEIGHTS).rename(path / name)


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize(
    "change, kind",
    [
        (replace_by_adapter, "an adapter of org/Base.*merge"),
        (rename_weights("model-q4.gguf"), r"GGUF weights, model-q4\.gguf.*gguf_file"),
        (
            rename_weights("pytorch_model.bin"),
            "only pytorch_model.bin.*save_pretrained",
        ),
    ],
)
def test_another_kind_of_folder_is_named_whatever_its_configuration(
    checkpoint_copy, change, kind, with_config
):
    change(checkpoint_copy)
    if not with_config:
        (checkpoint_copy / "config.json").unlink()
    with refused(kind):
        Checkpoint(checkpoint_copy)


def test_the_light_list_of_families_is_that_of_the_models():
    assert set(checkpoint_checks.FAMILIES) == set(FAMILIES)


def test_an_unknown_family_is_refused_without_weights_and_heavy_imports(
    checkpoint_copy,
):
    tiny.edit_json(checkpoint_copy / "config.json", ("model_type", "gpt_neox"))
    (checkpoint_copy / WEIGHTS).unlink()
    code = (
        "import sys; from workbench import paths; from workbench.cli import main\n"
        f"sys.argv = ['workbench', 'export', {str(checkpoint_copy)!r}, {str(checkpoint_copy / 'out')!r}]\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert "model_type 'gpt_neox'; needs one of" in ended.stderr
    assert ended.returncode == 2 and ended.stdout == "[]\n"


def test_an_older_tokenizer_is_converted_as_transformers_reads_it(checkpoint_copy):
    letters = [chr(33 + i) for i in range(94)] + ["Ġ"]
    words = [*letters, "th", "the"]
    (checkpoint_copy / "vocab.json").write_text(
        json.dumps({w: i for i, w in enumerate(words)})
    )
    (checkpoint_copy / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    (checkpoint_copy / "tokenizer.json").unlink(missing_ok=True)
    fields = {"tokenizer_class": "GPT2Tokenizer", "unk_token": "!"}
    fields |= {"bos_token": "!", "eos_token": "!"}
    (checkpoint_copy / "tokenizer_config.json").write_text(json.dumps(fields))
    checkpoint = Checkpoint(checkpoint_copy)
    ids = encode_text(checkpoint.tokenizer, "the cat")
    expected = transformers.AutoTokenizer.from_pretrained(checkpoint_copy)(
        "the cat"
    ).input_ids
    assert ids == expected and len(ids) == 5
    assert "tokenizer.json" in {file.name for file in checkpoint.tokens.files()}
    assert not (checkpoint_copy / "tokenizer.json").exists()
