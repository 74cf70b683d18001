"""The executor: precision modes, the hook, scopes and lifetimes, and refusals that name what is
wrong."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from one_op import Op, Ref, Type, given, program, run, tensor
from refusal import refused

from miltorch import PRECISIONS, Executable, constants, fuse
from miltorch.ops import FUSED
from miltorch.program import Block

F16, F32 = (Type(dtype, (None,)) for dtype in ("FLOAT16", "FLOAT32"))
X, ONES = Ref("x"), torch.ones(2)


def op(kind, inputs, *outputs, blocks=()):
    """Results are fp16 unless they are pairs with a type."""
    typed = [out if isinstance(out, tuple) else (out, F16) for out in outputs]
    return Op(kind, typed[0][0] if typed else kind, inputs, typed, list(blocks))


def const(name, value):
    return Op("const", name, {"val": np.asarray(value)}, [(name, Type("FLOAT32"))])


def executable(*ops, outputs=("y",), precision="declared", **inputs):
    return Executable(program([*ops], inputs or {"x": F16}, [*outputs]), precision)


def chain(precision="declared"):
    """y = (x + x) * x, all fp16"""
    double = op("add", {"x": X, "y": X}, "double")
    product = op("mul", {"x": Ref("double"), "y": X}, "y")
    return executable(double, product, precision=precision)


def branches(then: Op, otherwise: Op) -> Op:
    """y is the result of `then`; the condition is a constant."""
    blocks = [Block([], [inner], [inner.name]) for inner in (then, otherwise)]
    return op("cond", {"pred": np.asarray(True)}, "y", blocks=blocks)


def rounded(x):
    return np.asarray(x, np.float16).astype(np.float32)


def in_parts(terms):
    """The sum of `terms`, rounded to fp16 after every 32 of them."""
    total = np.float32(0)
    for start in range(0, len(terms), 32):
        part = np.float32(np.sum(terms[start : start + 32].astype(np.float64)))
        total = rounded(total + part)
    return total


@given(length=st.integers(1, 100), scale=st.sampled_from([1.0, 100.0]))
def test_narrow_rounds_sums_after_every_32_terms(length, scale):
    random = np.random.default_rng(length)
    x, y = (
        random.integers(0, 16, size).astype(np.float16) * np.float16(scale)
        for size in [(1, length), (length, 1)]
    )
    products = (x.astype(np.float32) * y.T.astype(np.float32))[0]
    with np.errstate(over="ignore"):
        total, sums = in_parts(products), in_parts(x[0].astype(np.float32))
    rows, equation = np.ascontiguousarray(y.T), "bik,bkj->bij"
    for kind, arguments, expected in (
        ("matmul", {"x": x, "y": y}, total),
        ("linear", {"x": x, "weight": rows}, total),
        ("einsum", {"values": [x[None], y[None]], "equation": equation}, total),
        ("conv", {"x": x[:, :, None], "weight": rows[:, :, None]}, total),
        ("reduce_sum", {"x": x, "axes": [1]}, sums),
        ("reduce_mean", {"x": x, "axes": [1]}, rounded(sums / np.float32(length))),
    ):
        result = run(kind, out="FLOAT16", precision="narrow", **arguments)
        assert result.item() == expected, kind


def test_precision_modes_round_results_or_do_not():
    x = np.array([1 / 3], np.float32)
    exact, once = (x + x) * x, rounded(x)
    results = {mode: chain(mode).run({"x": tensor(x)}, {})["y"] for mode in PRECISIONS}
    assert results["exact"].numpy() == exact
    expected = rounded(rounded(once + once) * once)
    assert results["declared"] == results["narrow"] == torch.tensor(expected)
    assert expected != exact
    with refused("'bf16'.*declared, exact, narrow"):
        chain("bf16")
    copied = op("copy_state", {"input": Ref("s")}, "copy")
    with refused("fused steps: found 'exact'.*declared"):
        fused = replace(program([copied], {}, [], {"s": F16}), unfused={})
        Executable(fused, "exact")


def test_narrow_leaves_sums_alone_that_a_block_declares_float32():
    inner = op("reduce_sum", {"x": X}, ("sum", F32))
    bound = executable(branches(inner, inner), precision="narrow", x=F32)
    assert bound.run({"x": torch.full((4096,), 1.003)}, {})["y"] == 4108


def test_the_hook_sees_results_those_of_nested_blocks_too_and_may_replace_them():
    x, seen = torch.tensor([3.0]), {}

    def look(op, results):
        seen[op.name] = [r.clone() for r in results]
        return [torch.tensor([5.0])] if op.name == "double" else None

    assert chain().run({"x": x}, {}, look)["y"] == 15
    inside = op("add", {"x": X, "y": X}, "inside")
    nested = branches(inside, op("identity", {"x": X}, "outside"))
    executable(nested).run({"x": x}, {}, look)
    assert seen == {"double": [6], "inside": [6], "y": [6]}


def test_unsupported_ops_are_all_named_at_once():
    hidden = op("hidden_op", {}, "z")
    with refused("first_op, hidden_op"):
        executable(op("first_op", {}, "a"), branches(hidden, hidden))


def test_operations_that_only_fusion_makes_are_no_operations_of_a_package():
    for kind in sorted(FUSED):
        with refused(f"operations without a rule: {kind}"):
            executable(op(kind, {"x": X}, "y"))


def test_a_loop_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("miltorch.ops.control.MAX_ITERATIONS", 50)
    blocks = Block([("n", F16)], [], ["on"]), Block([("n", F16)], [], ["n"])
    loop_vars = {"loop_vars": [X]}
    endless = op("while_loop", loop_vars, "y", blocks=blocks)
    with refused("a loop of more than 50 iterations"):
        executable(const("on", True), endless).run({"x": ONES}, {})


def test_values_that_a_block_reads_live_until_its_op():
    squares = [op("square", {"x": X}, name) for name in ("v", "unused")]
    inner = op("square", {"x": Ref("v")}, "w")
    bound = executable(*squares, branches(inner, inner))
    assert bound.run({"x": torch.tensor([2.0])}, {})["y"] == 16


def test_a_block_that_writes_a_state_runs_though_nothing_reads_its_result():
    write = op("coreml_update_state", {"state": Ref("s"), "value": X}, "written")
    writing = replace(branches(write, write), outputs=[("unread", F16)])
    ops, states = [writing, op("square", {"x": X}, "y")], {"s": Type("FLOAT16", (2,))}
    bound = Executable(fuse(program(ops, {"x": F16}, ["y"], states)))
    state = bound.make_state()
    bound.run({"x": ONES}, state)
    assert state["s"].value.tolist() == [1, 1]


def test_literals_and_values_mix_in_a_list():
    values = {"values": [X, np.array([7], np.float16)], "axis": np.asarray(0)}
    bound = executable(op("concat", values, "y"))
    assert bound.run({"x": ONES}, {})["y"].tolist() == [1, 1, 7]


def test_a_result_may_be_larger_than_declared():
    """coremltools declares `torch.where` of sizes that vary too small; Core ML broadcasts."""
    one, parts = Type("FLOAT16", (1, 1)), {"cond": Ref("c"), "a": X, "b": Ref("y")}
    ops = [
        op("select", parts, ("z", one)),
        op("add", {"x": Ref("z"), "y": Ref("z")}, ("twice", one)),
    ]
    inputs = {"c": Type("BOOL", (None, None)), "x": F16, "y": F16}
    values = {"c": torch.eye(2, 5) > 0, "x": torch.ones(1, 1), "y": torch.zeros(())}
    results = executable(*ops, outputs=["twice"], **inputs).run(values, {})
    assert torch.equal(results["twice"], 2 * torch.eye(2, 5))


def test_names_inputs_and_operands_that_do_not_fit_are_named():
    with refused("values \\['nowhere'\\]"):
        executable(op("relu", {"x": Ref("nowhere")}, "y"))
    with refused("values \\['y'\\]"):
        executable()
    with refused("values \\['x'\\] that are computed twice"):
        executable(op("relu", {"x": X}, "x"), outputs=["x"], x=F16)
    bound = executable(op("relu", {"x": X}, "y"), x=Type("FLOAT16", (2, 3)))
    with refused("constant that names another"):
        executable(Op("const", "y", {"val": X}, [("y", F16)]))
    with refused("no x"):
        bound.run({}, {})
    with refused("input 'x'.*\\[2\\] where \\[2, 3\\]"):
        bound.run({"x": ONES}, {})
    bound = executable(op("add", {"x": X, "y": Ref("z")}, "y"), x=F16, z=F16)
    with refused("add 'y'.*RuntimeError.*size"):
        bound.run({"x": ONES, "z": torch.ones(3)}, {})


@pytest.mark.parametrize("shape", [(1, None), (1 << 20, 1 << 20)])
def test_states_without_a_sane_size_are_refused(shape):
    states = {"memory": Type("FLOAT16", shape, "state")}
    bound = Executable(program([], {}, [], states))
    with refused("state 'memory'.*known sizes"):
        bound.make_state()


HUGE, IMAGE = 1 << 30, np.ones((1, 2, 2), np.float32)
LINE = {"x": np.ones((1, 1, 4), np.float32)}
ROW = np.ones(4, np.float32)
KERNEL = LINE | {"weight": LINE["x"]}
PADDED = {"pad_type": "custom", "pad": [0, HUGE]}
ABSURD = [
    ("fill", {"shape": [1 << 20, 1 << 20]}),
    ("tile", LINE | {"reps": [1, 1, HUGE]}),
    ("pad", LINE | {"pad": [0, HUGE]}),
    ("random_uniform", {"shape": [HUGE]}),
    ("range_1d", {"start": 0, "end": HUGE, "step": 1}),
    ("one_hot", {"indices": np.zeros(4, np.int32), "one_hot_vector_size": HUGE}),
    ("resize_bilinear", {"x": IMAGE, "target_size_height": HUGE}),
    ("upsample_nearest_neighbor", {"x": IMAGE, "scale_factor_height": HUGE}),
    ("make_list", {"init_length": 1 << 20, "elem_shape": 1 << 20, "dtype": "fp32"}),
    ("conv", KERNEL | PADDED),
    ("conv_transpose", KERNEL | {"strides": [HUGE]}),
    ("max_pool", LINE | PADDED | {"kernel_sizes": [2]}),
    *((kind, KERNEL | {"pad_type": "other"}) for kind in ("conv", "conv_transpose")),
    ("scatter", {"data": ROW, "updates": ROW, "indices": np.zeros(3, np.int32)}),
]


@pytest.mark.parametrize("kind, arguments", ABSURD)
def test_absurd_arguments_are_refused_before_memory_is_taken(kind, arguments):
    words = r"over 268435456 elements|pad_type 'other'|updates of shape \[4\]"
    with refused(words):
        run(kind, **arguments)


def test_a_constant_is_no_view_of_the_file_of_weights(tmp_path):
    (tmp_path / "weight.bin").write_bytes(bytes(64))
    stored = np.memmap(tmp_path / "weight.bin", np.float32, mode="c")
    assert not np.shares_memory(constants.to_tensor(stored).numpy(), stored)
