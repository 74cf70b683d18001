"""Shards with the same program are found, and nothing that differs in one shard alone is
hidden by the shards that are tested in its place."""

from dataclasses import replace

import cases
import numpy as np
import pytest
from circle import wide
from faults import find_fault
from faults.copies import Copy, find_source
from faults.programs import scale_constants, scale_scores, set_softmax_axis

from workbench import Bundle, Decoder
from workbench.check.bug_gates import bug_gates
from workbench.check.distinct import representatives
from workbench.check.interface import interface_gate
from workbench.check.program import program_gate
from workbench.check.weights import weights_gate

FIRST, MIDDLE, LAST = 0, 2, 3  # layers of the llama, one a shard
NAME = "layers_02_02"  # of the shard in the middle


@pytest.mark.slow("exports a bundle of every family")
@pytest.mark.parametrize(
    ("base", "count"),
    [
        ("llama", 1),
        ("pairs", 1),
        ("ring", 2),
        wide("functions", 1),
        wide("slice", 1),
        wide("gemma", 2),
        wide("zaya", 2),
        wide("lfm2", 2),
        wide("qwen3_5", 2),
    ],
)
def test_shards_of_one_shape_are_one_program(exports, base, count):
    """Layers of other kinds (a window, no attention, the first layer's router) are others."""
    case = cases.Case("base", base, "int8-channel")
    folder, checkpoint = cases.export_sound(exports, case)
    assert len(representatives(Bundle.open(folder), checkpoint)) == count


# --- plants against the comparison of programs, in the shard in the middle --------------------------


def change_constant(copy):
    scale_scores(1.05)(copy, MIDDLE)


def change_axis(copy):
    set_softmax_axis(2)(copy, MIDDLE)


def change_epsilon(copy):
    scale_constants(copy, copy.shard(MIDDLE), "input_layernorm_eps0", 10)


def change_index(copy):
    """The second half of the queries begins one element early."""
    shard = copy.shard(MIDDLE)
    op = copy.operations(shard, "slice_by_index", "self_attn")[1]
    begin = copy.constant(shard, find_source(op, "begin")).arrays["val"]
    begin.write(begin.read() - (begin.read() > 0))


def swap_operands(copy):
    op = copy.operations(copy.shard(MIDDLE), "sub", "self_attn")[0]
    x, y = find_source(op, "x"), find_source(op, "y")
    copy.feed(op, "x", y)
    copy.feed(op, "y", x)


def swap_state_names(copy):
    """The manifest takes the keys for the values."""
    states = copy.shard(MIDDLE)["states"]
    k, v = (states[f"layers.{MIDDLE}.{name}_state"] for name in "kv")
    k["tensor"], v["tensor"] = v["tensor"], k["tensor"]


def change_function_T(copy):
    copy.shard(MIDDLE)["functions"] = {"t1": 1, "t4": 3}


def transpose_weight(copy):
    weight = copy.weight(f"layers.{MIDDLE}.self_attn.q_proj.weight")
    weight.write(weight.read().transpose(1, 0, 2, 3))


def call_constant_a_weight(copy):
    """An epsilon is changed, and the manifest calls it the weight of a norm."""
    change_epsilon(copy)
    weights = copy.shard(MIDDLE)["weights"]
    weights[f"model.layers.{MIDDLE}.input_layernorm.weight"] = next(
        op.outputs[0].name
        for op in copy.block(copy.shard(MIDDLE)).operations
        if op.outputs and "input_layernorm_eps0" in op.outputs[0].name
    )


def swap_weights(copy):
    shard = copy.shard(MIDDLE)
    copy.move_first(shard)
    gate, up = (copy.operations(shard, "conv", f"{n}_proj")[0] for n in ("gate", "up"))
    names = find_source(gate, "weight"), find_source(up, "weight")
    copy.feed(gate, "weight", names[1])
    copy.feed(up, "weight", names[0])


@pytest.mark.parametrize(
    ("plant", "base", "seen"),
    [
        (change_constant, "llama", "distinct"),
        (change_axis, "llama", "distinct"),
        (change_epsilon, "llama", "distinct"),
        (change_index, "llama", "distinct"),
        (swap_operands, "llama", "distinct"),
        (swap_state_names, "llama", "distinct"),
        (change_function_T, "functions", "interface"),
        (transpose_weight, "llama", "weights"),
        (call_constant_a_weight, "llama", "weights"),
        (swap_weights, "llama", "distinct"),
    ],
)
def test_another_program_in_one_shard_is_distinct_or_red(broken, plant, base, seen):
    folder, checkpoint = broken(plant, base=base)
    bundle = Bundle.open(folder)
    if seen == "distinct":
        assert representatives(bundle, checkpoint) == {"layers_00_00", NAME}
        assert weights_gate(bundle, checkpoint).verdict == "GREEN"
    else:
        gate = interface_gate if seen == "interface" else weights_gate
        assert gate(bundle, checkpoint).verdict == "RED"


# --- faults in one shard, and those that only the weights of one show ------------------------------


@pytest.mark.slow("exports a bundle and runs every bug gate")
@pytest.mark.matrix(4, wide=18)
@pytest.mark.parametrize("layer", [FIRST, MIDDLE, LAST])
@pytest.mark.parametrize(
    "name",
    [
        "silu become relu",
        "one row in the middle of the cache damaged",
        "the last row of the cache is lost",
        "mask a thousand times too weak",
        "softmax over the queries",
        "states exchanged",
    ],
)
def test_a_fault_in_any_one_shard_is_red(exports, tmp_path, name, layer):
    case = cases.Case("base", "llama", "int8-channel")
    folder, checkpoint = cases.export_sound(exports, case)
    copy = Copy(folder, tmp_path / "copy")
    replace(find_fault("disk", name), layer=layer).plant_in(copy)
    results = bug_gates(Bundle.open(copy.seal()), checkpoint)
    assert "RED" in {gate.verdict for gate in results}


@pytest.mark.slow("exports a bundle of two functions")
@pytest.mark.parametrize("bound", [wide(8), wide(9), wide(10), 12])
def test_a_bound_in_one_function_that_one_shard_s_weights_reach_is_red(broken, bound):
    """Every shard has the same program, and tokens of T = 1 alone pass the bound."""

    def clip(copy):
        copy.function = "t1"
        for layer in range(4):
            shard = copy.shard(layer)
            up = copy.operations(shard, "conv", "up_proj")[0]
            copy.insert(shard, up, "minimum", y=np.float16(bound))

    folder, checkpoint = broken(clip, base="functions")
    bundle = Bundle.open(folder)
    names = representatives(bundle, checkpoint)
    assert names == {"layers_00_00"}
    exact = Decoder(bundle, "portable", "exact")
    assert program_gate(exact, checkpoint, names).verdict == "RED"
