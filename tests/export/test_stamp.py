"""Stamped shards are the bytes that converting them gives, and shards whose weights the converter
would look at are converted."""

import shutil

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from workbench import InputError
from workbench.export import export, template

ALL = 99


def how(bundle) -> dict[str, str]:
    return {shard.name: shard.how for shard in bundle.manifest.shards}


def files(bundle) -> dict[str, list]:
    return {shard.name: shard.files for shard in bundle.manifest.shards}


@pytest.mark.parametrize(
    "family, changed, options, stamped",
    [
        (
            "llama",
            {"tie_word_embeddings": False},
            {"compress": "int8-tensor", "kv_write": "slice", "layout": "bc1t"},
            1,
        ),
        ("qwen2", {}, {"compress": "lut4"}, 1),
        (
            "qwen3",
            {"num_hidden_layers": 4},
            {"compress": "int4-block32", "layers_per_shard": 2},
            1,
        ),
        ("qwen3_5_text", {}, {"compress": "int8-channel"}, 1),
        ("granitemoehybrid", {}, {"compress": "lut6", "layout": "bc1t"}, 1),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (
                    "gemma3_text",
                    {
                        "num_hidden_layers": 4,
                        "layer_types": ["sliding_attention", "full_attention"] * 2,
                    },
                    {"compress": "int8-channel", "sliding": "ring"},
                    2,
                ),
                (
                    "zaya",
                    {"num_hidden_layers": 4},
                    {"compress": "lut6", "layers_per_shard": 2, "states": "packed"},
                    1,
                ),
                (
                    "zaya",
                    {"num_experts": 2, "num_hidden_layers": 2},
                    {"compress": "int8-tensor", "moe": "routed"},
                    4,
                ),
                ("phi3", {}, {"compress": "int8-tensor"}, 1),
            )
        ),
    ],
)
def test_every_stamped_shard_is_the_bytes_of_its_conversion(
    exports, tmp_path, family, changed, options, stamped
):
    source = exports.checkpoint(family, **changed)
    made = export(
        source,
        tmp_path / "b",
        progress=False,
        verify_stamps=ALL,
        max_seq_len=16,
        **options,
    )
    assert list(how(made).values()).count("stamped") == stamped


def test_a_vocabulary_of_many_slices_needs_two_conversions(exports, tmp_path):
    source = exports.checkpoint(
        "llama", vocab_size=2 * 16_384 + 50, num_hidden_layers=1, hidden_size=32
    )
    made = export(
        source, tmp_path / "b", progress=False, verify_stamps=ALL, max_seq_len=16
    )
    assert how(made) == {
        "layers_00_00": "converted",
        "head_00": "converted",
        "head_01": "stamped",
        "head_02": "converted",
    }


def ones(t, at):
    t[f"{at}.input_layernorm.weight"][:] = 1


def no_bias(t, at):
    t[f"{at}.self_attn.k_proj.bias"][:] = 0
    t[f"{at}.self_attn.v_proj.bias"][:] = 0


def equal(t, at):
    t[f"{at}.mlp.up_proj.weight"] = t[f"{at}.mlp.gate_proj.weight"].clone()


def nearly_equal(t, at):
    equal(t, at)
    t[f"{at}.mlp.up_proj.weight"][-1, -1] += 6e-8


def double(t, at):
    t[f"{at}.self_attn.v_proj.weight"] = 2 * t[f"{at}.self_attn.k_proj.weight"]


def tiny_values(t, at):
    t[f"{at}.self_attn.q_proj.weight"][0] = torch.tensor(3e-8)
    t[f"{at}.self_attn.k_proj.bias"][:7] = torch.tensor(-2e-8)


def odd(path, *tricks):
    """A float32 checkpoint of as many layers as tricks, which give them what a converter treats
    specially; None: an ordinary layer."""
    tiny.random(path, "qwen2", num_hidden_layers=len(tricks), dtype="float32")
    tensors = load_file(path / "model.safetensors")
    for layer, trick in enumerate(tricks):
        if trick:
            trick(tensors, f"model.layers.{layer}")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


TRICKS = [ones, None, no_bias, equal, nearly_equal, double, tiny_values, ones]
INT8 = {"max_seq_len": 16, "compress": "int8-tensor", "progress": False}


def test_weights_that_a_converter_looks_at_are_converted(tmp_path):
    checkpoint = odd(tmp_path / "c", *TRICKS)
    made = export(checkpoint, tmp_path / "stamped", verify_stamps=ALL, **INT8)
    assert [how(made)[f"layers_{i:02d}_{i:02d}"] for i in range(8)] == [
        *["converted"] * 6,
        "stamped",
        "converted",
    ]


@pytest.mark.exhaustive
def test_weights_that_a_converter_looks_at_give_the_same_bundle(tmp_path):
    checkpoint = odd(tmp_path / "c", *TRICKS)
    made = export(checkpoint, tmp_path / "stamped", **INT8)
    plain = export(checkpoint, tmp_path / "plain", plain=True, **INT8)
    assert set(how(plain).values()) == {"converted"}
    assert files(made) == files(plain) and made.identity == plain.identity
    for a, b in zip(made.manifest.shards, plain.manifest.shards, strict=True):
        assert a.model_copy(update={"how": "converted"}) == b


@pytest.mark.parametrize(
    ("guard", "trick"), [("_refuse_twins", equal), ("_neutral", ones)]
)
def test_without_its_guard_a_stamped_shard_differs_and_verifying_says_so(
    tmp_path, monkeypatch, guard, trick
):
    monkeypatch.setattr(template, guard, lambda *_: None)
    checkpoint = odd(tmp_path / "c", None, trick)
    with pytest.raises(InputError, match="stamped shard layers_01_01.*other bytes"):
        export(checkpoint, tmp_path / "b", verify_stamps=ALL, **INT8)
    assert not (tmp_path / "b").exists()
    assert not (tmp_path / ".b.partial").exists()


def test_a_wrong_byte_in_a_stamped_shard_is_found(exports, tmp_path, monkeypatch):
    real, calls = template.packed, []

    def slips(array, bits):
        calls.append(array)
        # right for the template, wrong later
        return real(array if len(calls) < 20 else array[::-1].copy(), bits)

    monkeypatch.setattr(template, "packed", slips)
    with pytest.raises(InputError, match="other bytes"):
        export(
            exports.checkpoint("llama"),
            tmp_path / "b",
            progress=False,
            verify_stamps=ALL,
            max_seq_len=16,
        )


def test_a_template_that_does_not_give_its_own_shard_back_is_not_used(
    exports, tmp_path, monkeypatch
):
    real = template.packed
    monkeypatch.setattr(
        template, "packed", lambda array, bits: real(array[::-1].copy(), bits)
    )
    made = export(
        exports.checkpoint("llama"), tmp_path / "b", progress=False, max_seq_len=16
    )
    assert set(how(made).values()) == {"converted"}


def test_conversions_of_one_process_do_not_depend_on_what_came_before(
    exports, tmp_path
):
    source = exports.checkpoint("llama", num_hidden_layers=1)
    first, second = (
        export(source, tmp_path / n, progress=False, max_seq_len=16) for n in "ab"
    )
    assert set(how(second).values()) == {"converted"}
    assert files(first) == files(second)


def test_stamping_reads_a_checkpoint_in_small_pieces(exports, tmp_path, monkeypatch):
    from workbench.models.checkpoint import CHUNK_BYTES, Checkpoint

    # nothing asks for a tensor as a whole
    monkeypatch.setattr(Checkpoint, "tensor", None)
    sizes, real = [], Checkpoint.chunks

    def chunks(self, *arguments):
        for chunk in real(self, *arguments):
            sizes.append(chunk.nbytes)
            yield chunk

    monkeypatch.setattr(Checkpoint, "chunks", chunks)
    path = tiny.random(tmp_path / "c", "llama", dtype="bfloat16", vocab_size=5000)
    export(path, tmp_path / "b", progress=False, max_seq_len=16)
    assert max(sizes) == CHUNK_BYTES < 5000 * 64 * 2


def test_a_state_is_renamed_wherever_the_program_names_it():
    from coremltools.proto import Model_pb2

    model = Model_pb2.Model()
    model.description.state.add(name="layers_1_k_state")
    op = (
        model.mlProgram.functions["main"]
        .block_specializations["CoreML8"]
        .operations.add(type="read_state")
    )
    op.inputs["input"].arguments.add(name="layers_1_k_state")
    op.outputs.add(name="layers_1_k_state_read")
    op.outputs.add(name="layers_10_k_state")
    template.rename(model, {"layers_1_k_state": "layers_11_k_state"})
    assert (
        model.description.state[0].name
        == op.inputs["input"].arguments[0].name
        == "layers_11_k_state"
    )
    assert [o.name for o in op.outputs] == [
        "layers_11_k_state_read",
        "layers_10_k_state",
    ]


def test_a_full_tensor_of_zeros_is_stamped_or_converted_alike(exports, tmp_path):
    path = shutil.copytree(exports.checkpoint("llama"), tmp_path / "c")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][:] = 0
    tensors["model.layers.1.mlp.down_proj.weight"][::2] = 0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    made = export(
        path,
        tmp_path / "b",
        progress=False,
        verify_stamps=ALL,
        max_seq_len=16,
        compress="int8-channel",
    )
    assert how(made)["layers_01_01"] == "stamped"
    assert np.isfinite(
        tiny.chained(tiny.Decoder(made, "portable", "exact"), [1, 2], [2])
    ).all()
