"""The work of a call: read off the exported programs, it is what the configuration says."""

from dataclasses import replace
from math import prod

import pytest
import tiny
from decode import programs
from mil.one_op import program
from refusal import refused

from miltorch import Type
from miltorch.program import Op, Ref
from workbench.ane import memory
from workbench.ane.chips import generation
from workbench.ane.work import call_work, program_work, stored_bits, stored_format
from workbench.bundle import PRESETS
from workbench.exporter import make_options
from workbench.models.checkpoint import Checkpoint

FAMILIES = ["llama", "qwen3_5_text", "zaya"]


def by_name(work) -> dict:
    return {shard.name: replace(shard, name="") for shard in work.shards}


@pytest.mark.slow("each case exports a bundle")
@pytest.mark.matrix(3, wide=15)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_programs_hold_what_the_configuration_says(exports, family, preset):
    """Weights of every format, operands of attention, recurrent bytes, calls."""
    path = exports.checkpoint(family, **tiny.fit_to_blocks(family, {}, preset))
    bundle = exports.bundle(path, compress=preset)
    source = Checkpoint(path)
    planned = call_work(source, bundle.manifest.options)
    read = call_work(bundle)
    assert by_name(read) == by_name(planned)
    assert read == planned
    assert stored_format(PRESETS[preset]) in read.weights


@pytest.mark.parametrize(
    ("family", "export_options"),
    [
        ("gemma3_text", {"sliding": "ring"}),
        ("llama", {"tokens": "1,4", "kv_write": "slice"}),
        ("zaya", {"moe": "routed"}),
        ("lfm2", programs.options("lfm2", 0)),  # a batch, layers without a cache
        ("llama", {"layers_per_shard": 2, "layout": "bc1t"}),
        ("gemma4_text", {}),  # a second table
        ("gemma4_unified_text", {}),  # fewer key heads in some layers
    ],
)
def test_a_checkpoint_is_planned_as_it_is_exported(exports, family, export_options):
    path = exports.checkpoint(family)
    bundle, source = exports.bundle(path, **export_options), Checkpoint(path)
    chosen = bundle.manifest.options
    for T in (1, chosen.t_max):
        assert call_work(bundle, T=T) == call_work(source, chosen, T)
    planned, exported = (
        memory.process_bytes(source, chosen),
        memory.process_bytes(bundle),
    )
    for name in ("kv", "side_states", "buffers"):
        assert planned[name] == exported[name]
    assert planned["embedding"] == pytest.approx(exported["embedding"], rel=0.1)
    files = [file for shard in bundle.manifest.shards for file in shard.files]
    stored = sum(file.bytes for file in files if file.path.endswith(".bin"))
    assert planned["weights"] == pytest.approx(stored, rel=0.15)


def test_the_work_of_a_layer_is_its_matrices_and_its_cache(tiny_llama, llama_bundle):
    d, chosen = llama_bundle.manifest.dims, llama_bundle.manifest.options
    width = tiny_llama.config.intermediate_size
    first, *_, head = call_work(llama_bundle).shards
    matrices = d.C * (2 * d.H + 2 * d.H_kv) * d.D + 3 * d.C * width
    assert first.weights == {"fp16": matrices}
    cache = 2 * d.H_kv * chosen.max_seq_len * d.D * 2
    assert (first.cache_bytes, first.cache_rows) == (cache, chosen.max_seq_len)
    assert first.repeated_cache_bytes == cache * d.H // d.H_kv
    assert (head.name, head.weights) == ("head", {"fp16": d.C * d.V})


def half(*shape, kind="tensor") -> Type:
    return Type("FLOAT16", shape, kind)


def operation(kind: str, out: Type | None, **inputs) -> Op:
    outputs = [(f"{kind}_out", out)] if out else []
    return Op(kind, kind, {k: Ref(name) for k, name in inputs.items()}, outputs)


@pytest.mark.parametrize("heads", [2, 8])
def test_the_operands_of_attention_are_counted_as_the_program_builds_them(heads):
    """Keys of two heads, as they are stored or repeated for eight query heads; the product
    that writes the cache and the scores are no operands of it."""
    cache, keys = half(1, 2, 64, 32), half(1, heads, 64, 32)
    ops = [
        operation("read_state", cache, input="k_state"),
        operation("tile", keys, x="read_state_out"),
        operation("matmul", half(1, heads, 1, 64), x="q", y="tile_out"),
        operation("softmax", half(1, heads, 1, 64), x="matmul_out"),
    ]
    inputs, states = (
        {"q": half(1, heads, 1, 32)},
        {"k_state": half(1, 2, 64, 32, kind="state")},
    )
    repeating = program(ops, inputs, ["softmax_out"], states)
    assert (
        program_work(repeating, {"k_state"}, set()).cache_bytes == 2 * heads * 64 * 32
    )
    assert program_work(repeating, set(), set()).cache_bytes == 0


def test_matrix_states_are_recurrent_bytes_and_no_cache(exports):
    bundle = exports.bundle("qwen3_5_text")
    states = [
        prod(state.shape)
        for shard in bundle.manifest.shards
        for name, state in shard.states.items()
        if name.endswith("matrix_state")
    ]
    work = call_work(bundle)
    assert work.recurrent_bytes == 2 * sum(states) > 0


def test_routed_experts_read_the_largest_of_a_layer_for_each_token(exports):
    source = Checkpoint(exports.checkpoint("zaya"))
    dense, routed = (
        call_work(source, make_options(moe=kind)) for kind in ("dense", "routed")
    )
    assert sum(routed.weights.values()) < sum(dense.weights.values())
    assert (routed.calls, dense.calls) == (2 * 3 + 1, 3 + 1)
    assert dense.ranged_experts and not routed.ranged_experts
    two = call_work(source, make_options(moe="routed"), T=2)
    assert two.calls == 3 * 3 + 1
    fixed = call_work(source, make_options(tokens="1,4"))
    assert not fixed.ranged_experts


def test_bits_as_stored_have_the_scales_of_blocks():
    names = ["fp16", "int8", "lut4", "lut6", "int4-channel", "int4-block32"]
    assert [stored_bits(name) for name in names] == [16, 8, 4, 6, 4, 4.5]
    for preset in PRESETS.values():
        assert stored_bits(stored_format(preset)) == preset.stored_bits


def test_chips_and_sizes_that_do_not_exist_are_refused():
    with refused("M9"):
        generation("M9")
    assert generation("A19 Pro") == generation("M5 Max") == 5
    with refused("memory"):
        memory.parse_bytes("9" * 400)
