"""Damaged, partial and foreign checkpoints end in one message; whole ones read tensor by tensor."""

import json
import shutil

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from workbench import InputError
from workbench.models.checkpoint import Checkpoint

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(exports):
    return exports.checkpoint("llama")


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def pointer(path):
    (path / WEIGHTS).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )


def truncate(path):
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-100])


def scramble(path):
    (path / WEIGHTS).write_bytes(b"\xff" * 4096)


def half(path):
    index = {
        "weight_map": {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}
    }
    (path / WEIGHTS).rename(path / "model-00001.safetensors")
    (path / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def escape(path):
    (path / f"{WEIGHTS}.index.json").write_text(
        json.dumps({"weight_map": {"a": "../model.safetensors"}})
    )


def foreign(path):
    (path / "config.json").write_text('{"model_type": "no-such-model"}')


def odd(path):
    made = json.loads((path / "config.json").read_text()) | {"head_dim": 33}
    (path / "config.json").write_text(json.dumps(made))


def empty(path):
    (path / WEIGHTS).write_bytes(b"")


@pytest.mark.parametrize(
    "damage, found",
    [
        (pointer, "Git LFS pointer"),
        (truncate, "no whole safetensors file"),
        (scramble, "no whole safetensors file"),
        (empty, "no whole safetensors file"),
        (half, "model-00002.*half a download"),
        (escape, "folder in it"),
        (foreign, "no-such-model"),
        (odd, "head_dim.*33.*transformers accepts"),
        (lambda p: (p / "config.json").write_text("{"), "valid JSON"),
        (lambda p: (p / WEIGHTS).unlink(), "no such file"),
        (lambda p: (p / "config.json").unlink(), "no config.json"),
        (shutil.rmtree, "nothing there"),
    ],
)
def test_damage_is_named(copy, damage, found):
    damage(copy)
    with pytest.raises(InputError, match=found):
        Checkpoint(copy).config  # noqa: B018


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
def test_a_damaged_generation_configuration_is_refused(copy, damaged):
    (copy / "generation_config.json").write_text(damaged)
    with pytest.raises(
        InputError,
        match="generation_config.json.*no JSON object|eos_token_id .*a token id, a list of them",
    ):
        Checkpoint(copy).eos  # noqa: B018


def test_where_texts_end_is_part_of_the_identity(copy):
    (copy / "generation_config.json").unlink(missing_ok=True)
    plain = Checkpoint(copy)
    for eos, same in ((plain.config.eos_token_id, True), ([3, 5], False)):
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert (Checkpoint(copy).sha256 == plain.sha256) == same


def test_a_missing_tensor_and_an_integer_one_are_named(copy):
    weights = load_file(copy / WEIGHTS)
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, copy / WEIGHTS)
    source = Checkpoint(copy)
    with pytest.raises(InputError, match="I8"):
        source.tensor("model.norm.weight")
    with pytest.raises(InputError, match="no tensor 'gone'"):
        source.tensor("gone")


def test_rows_read_what_the_whole_tensor_holds(whole):
    source, name = Checkpoint(whole), "model.embed_tokens.weight"
    full = source.tensor(name)
    assert full.dtype == torch.float32
    assert torch.equal(source.tensor(name, slice(3, 9)), full[3:9])
    assert torch.equal(source.tensor(name, [5, 2]), full[[5, 2]])


def test_a_random_checkpoint_is_the_same_whole_and_sharded_and_loads_in_transformers(
    tmp_path,
):
    one = tiny.random(tmp_path / "one", "llama", seed=3, dtype="bfloat16")
    many = tiny.random(
        tmp_path / "many", "llama", seed=3, dtype="bfloat16", shard_bytes=20_000
    )
    assert len(list(many.glob("*.safetensors"))) > 2
    a, b = Checkpoint(one), Checkpoint(many)
    assert a.facts["dtype"] == "BF16" and a.header.keys() == b.header.keys()
    assert all(torch.equal(a.tensor(n), b.tensor(n)) for n in a.header)
    assert a.sha256 != b.sha256
    for seed, same in ((3, True), (4, False)):
        path = tiny.random(tmp_path / str(seed), "llama", seed=seed, dtype="bfloat16")
        assert (Checkpoint(path).sha256 == a.sha256) == same
    loaded = tiny.hf(many)
    assert torch.equal(loaded.model.norm.weight, a.tensor("model.norm.weight"))
