"""Core AI bundles: bits, identity, refusals, every family on Apple's interpreter, crosscheck."""

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from in_process import invoke

import miltorch
from workbench import Bundle, Decoder, InputError
from workbench.bundle.names import ATTN_MASK, KV_WRITE_MASK, X
from workbench.bundle.presets import PRESETS
from workbench.check.program import program_gate
from workbench.exporter import export, make_options
from workbench.models.checkpoint import Checkpoint
from workbench.models.layers import CachedAttention, Heads

aimodel = pytest.importorskip("workbench_coreai.aimodel", reason="needs plugins/coreai")
pytestmark = [
    pytest.mark.wide,
    pytest.mark.slow("Apple's packages are imported, convert a model and interpret it"),
    pytest.mark.filterwarnings("ignore"),
]
TINY = Path(__file__).parents[3] / "data" / "tiny-llama"
IDS = [1, 42, 90, 7, 9, 3, 5, 8, 77, 20]
PROMPT = "--prompt-ids", ",".join(map(str, IDS))


@pytest.mark.parametrize(
    "chosen, message",
    [
        ({"target": "coreai", "kv_write": "slice"}, "kv_write = mask"),
        ({"target": "coreai-fp32", "tokens": "1,4"}, "one range"),
    ],
)
def test_options_that_core_ai_lacks_are_refused_by_name(chosen, message):
    with pytest.raises(InputError, match=message):
        make_options(**chosen)


class Product(torch.nn.Module):
    """w[1,1,64,1] @ x.reshape(1,2,32,T).transpose(2,3), the smallest module that shows it."""

    def forward(self, w, x):
        return w @ x.reshape(1, 2, 32, -1).transpose(2, 3)


def test_a_fixed_t_of_1_is_miscompiled(tmp_path):
    """Apple's conversion makes reshape(w @ x) of it. Where this fails, the defect is gone, and
    `workbench_coreai.aimodel.fixed_t` may be 1."""
    from coreai_torch import get_decomp_table

    from workbench_coreai.asset import save
    from workbench_coreai.runtime import call_function, load_function, ndarray, wait

    w, x = torch.randn(1, 1, 64, 1), torch.randn(1, 64, 1, 1)
    program = torch.export.export(Product(), (w, x))
    program = program.run_decompositions(get_decomp_table())
    spec = SimpleNamespace(inputs=["w", "x"], outputs=["y"], states={})
    save(program, spec, {}, tmp_path / "p.aimodel")
    function = wait(load_function(tmp_path / "p.aimodel"))
    inputs = {"w": ndarray(w, np.float32), "x": ndarray(x, np.float32)}
    y = wait(call_function(function, inputs, {}))["y"].numpy()
    assert tiny.relative(y, Product()(w, x).numpy()) > 0.5


def test_a_bundle_of_one_token_a_call_has_a_free_t_and_is_right(exports, small):
    bundle = exports.bundle(small, target="coreai-fp32", tokens="1")
    exact = exports.decoder(small, tokens="1")
    logits = [decoder.prefill(IDS) for decoder in (Decoder(bundle), exact)]
    assert tiny.relative(*logits) < 1e-5


@pytest.mark.matrix(0, wide=5)
@pytest.mark.parametrize(
    "family, preset",
    [
        *(("llama", preset) for preset in PRESETS),
        # Apple's passes would fold scales into convolutions, into a norm
        ("zaya", "fp16"),
        ("zaya", "int8-channel"),
        ("hunyuan_v1_dense", "fp16"),
        ("qwen3_5_text", "fp16"),
    ],
)
def test_stored_bits_are_those_of_the_core_ml_bundle(family, preset, exports):
    export_options = {"compress": preset, "max_seq_len": 32}
    path = exports.checkpoint(family)
    bundle = exports.bundle(path, target="coreai", **export_options)
    portable = exports.bundle(path, **export_options)
    for shard, other in zip(bundle.manifest.shards, portable.manifest.shards):
        constants = miltorch.Executable(miltorch.read(portable.package(other)), "exact")
        assert shard.weights.keys() == other.weights.keys()
        for tensor, text in shard.weights.items():
            stored = np.float32(
                aimodel.dense(aimodel.read_weight(bundle.package(shard), text))
            )
            theirs = constants.constants[other.weights[tensor]].float().numpy()
            assert np.array_equal(stored.reshape(theirs.shape), theirs), tensor


def test_two_processes_make_the_same_bytes(exports, tmp_path):
    checkpoint = exports.checkpoint("zaya")  # of which Apple's passes fold a weight
    export_options = {"max_seq_len": 32, "target": "coreai-fp32", "compress": "fp16"}
    apple = exports.bundle(checkpoint, **export_options)
    code = f"""from workbench.exporter import export
export({str(checkpoint)!r}, {str(tmp_path / "b")!r}, **{export_options!r})"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert Bundle.open(tmp_path / "b").identity == apple.identity
    shards = apple.manifest.shards
    assert len({shard.template for shard in shards}) < len(shards)


def test_inputs_that_are_missing_misshapen_or_too_many_are_refused_by_name(apple):
    decoder = Decoder(apple)
    model, T = decoder.layer_shards[0], np.array([8])
    state, C = model.make_state(), apple.manifest.dims.C
    io = decoder.host.inputs(0 * T, T, 8)
    io[X] = decoder.to_layout(np.zeros((1, C, 8)))
    for inputs, message in [
        (io, r"found \[.*8, 1\].*T from 1 to 4"),
        ({name: io[name] for name in io if name != X}, "'x': found nothing"),
        (io | {X: io[X][:, :-1, :4]}, rf"'x'.*found \[1, {C - 1}, 4, 1\]"),
        (io | {X: io[X][0]}, f"'x'.*{C}, 8, 1"),
    ]:
        with pytest.raises(InputError, match=message):
            model.predict(inputs, state)


VARIANTS = [{}, {"layers_per_shard": 9}, {"layout": "bc1t"}, {"batch": 2}]


def every_family():
    """Each with one variant and preset in turn; rings and routed experts where there are any."""
    for i, (family, dims) in enumerate(tiny.DIMS.items()):
        ring = {"sliding": "ring"} if "sliding_window" in dims else {}
        preset = {"compress": [*PRESETS][i % len(PRESETS)]}
        yield family, VARIANTS[i % len(VARIANTS)] | preset | ring
    yield "zaya", {"moe": "routed"}


@pytest.mark.matrix(0, wide=5)
@pytest.mark.parametrize("family, chosen", list(every_family()))
def test_every_family_computes_what_hugging_face_does(family, chosen, exports):
    """Updates, states, routers and logits, isolated and chained, with dummy columns."""
    path = exports.checkpoint(family)
    bundle = exports.bundle(path, target="coreai-fp32", **chosen)
    gate = program_gate(Decoder(bundle), Checkpoint(path))
    assert gate.verdict == "GREEN", gate


def rows_shifted(self, cache, rows, io, append=CachedAttention.append_to_cache):
    """Every token is written one row too far."""
    mask = io[KV_WRITE_MASK]
    shifted = torch.cat([mask[:, :, -1:], mask[:, :, :-1]], 2)
    return append(self, cache, rows, io | {KV_WRITE_MASK: shifted})


def merged_without_transpose(self, x):
    """Heads and tokens are exchanged, which has no effect at T = 1."""
    return self.plane(x, self.width)


def mask_of_ones_and_zeros(self, q, k, v, cache, io, attend=CachedAttention.attend):
    name = ATTN_MASK + self.suffix
    return attend(self, q, k, v, cache, io | {name: (io[name] > -1).to(io[name].dtype)})


@pytest.mark.parametrize(
    "target, name, fault",
    [
        (CachedAttention, "append_to_cache", rows_shifted),
        (Heads, "merge", merged_without_transpose),
        (CachedAttention, "attend", mask_of_ones_and_zeros),
    ],
)
def test_a_fault_in_a_module_is_red(target, name, fault, small, tmp_path, monkeypatch):
    export_options = {"max_seq_len": 32, "target": "coreai-fp32", "compress": "fp16"}
    with monkeypatch.context() as planted:
        planted.setattr(target, name, fault)
        bundle = export(small, tmp_path / "b", **export_options)
    assert program_gate(Decoder(bundle), Checkpoint(small)).verdict == "RED"


def test_snapshots_go_on_as_if_nothing_had_been_inside_an_event_loop_too(apple):
    async def inside():
        return Decoder(apple).prefill(IDS)

    whole = asyncio.run(inside())
    decoder = Decoder(apple)
    decoder.prefill(IDS[:6])
    snapshot = decoder.snapshot()
    decoder.begin(snapshot)
    continued = decoder.prefill(IDS[6:])
    other = Decoder(apple)
    other.begin(snapshot)
    assert np.array_equal(continued, other.prefill(IDS[6:]))
    assert tiny.relative(continued, whole) < 1e-5


def test_commands_take_its_bundles(exports, tmp_path):
    apple = exports.bundle(TINY, target="coreai-fp32")
    checkpoint = "--checkpoint", TINY
    result = invoke("validate", apple.root, *checkpoint, *PROMPT)
    gates = {gate["name"]: gate["verdict"] for gate in result["gates"]}
    assert result["verdict"] == gates["program"] == gates["weights"] == "GREEN"
    result = invoke("explain", apple.root, *PROMPT, *checkpoint)
    assert all(0 < layer["reauthoring"] < 1e-5 for layer in result["parts"])
    assert result["fits"] and "ranges" not in result
    assert invoke("doctor")["plugins"]["workbench-coreai"]
    assert invoke("sweep", apple.root, "--log", tmp_path / "log")["done"] == 1


def test_what_core_ai_cannot_answer_is_refused_with_the_next_step(exports, small):
    half = exports.bundle(small, target="coreai").root
    checkpoint = "--checkpoint", small
    on_portable = "--runtime", "portable"
    for command, message in [
        (("explain", "parts", half, *checkpoint), "fp16 programs.*coreai.*export it"),
        (
            ("explain", "variant", half, *checkpoint),
            "fp16 programs.*coreai.*export it for",
        ),
        (("explain", "ranges", half), "portable.*run on coreai"),
        (("validate", half, *checkpoint, *on_portable), "portable.*run on coreai"),
    ]:
        with pytest.raises(InputError, match=message):
            invoke(*command)


def test_crosscheck_sets_three_witnesses_side_by_side(exports, tmp_path):
    result = invoke(
        *("crosscheck", exports.bundle(TINY).root, "--checkpoint", TINY),
        *(*PROMPT, "--folder", tmp_path),
    )
    assert result["verdict"] == "GREEN", result["gates"]
    limits = {gate["name"]: gate["threshold"] for gate in result["gates"]}
    assert limits["portable exact: update"] == limits["Apple exact: update"] == 1e-11
    rows = {(row["name"], row["precision"]): row for row in result["runtimes"]}
    assert len(rows) == 4 and ("Apple", "declared") in rows
