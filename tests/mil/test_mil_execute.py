"""The executor, `miltorch.Executable`: its precision modes, its hook, nested blocks, and refusals
that name what is wrong. The programs are built in Python, of a few operations each."""

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

F16, F32 = Type("FLOAT16", (None,)), Type("FLOAT32", (None,))
X = Ref("x")
ONES = torch.ones(2)


# --- programs -----------------------------------------------------------------------------


def op(kind: str, inputs: dict, *outputs: str | tuple[str, Type], blocks=()) -> Op:
    """An operation with the name of its first result. A result is a name, which is declared fp16,
    or a name with its type."""
    typed = [out if isinstance(out, tuple) else (out, F16) for out in outputs]
    name = typed[0][0] if typed else kind
    return Op(kind, name, inputs, typed, list(blocks))


def const(name: str, value) -> Op:
    return Op("const", name, {"val": np.asarray(value)}, [(name, Type("FLOAT32"))])


def executable(
    *ops: Op, outputs=("y",), precision="declared", **inputs: Type
) -> Executable:
    """A program of these operations; without `inputs`, it has the fp16 input x."""
    return Executable(program([*ops], inputs or {"x": F16}, [*outputs]), precision)


def chain(precision="declared") -> Executable:
    """y = (x + x) * x, with every result in fp16; the sum is named `double`."""
    double = op("add", {"x": X, "y": X}, "double")
    product = op("mul", {"x": Ref("double"), "y": X}, "y")
    return executable(double, product, precision=precision)


def branches(then: Op, otherwise: Op) -> Op:
    """An operation `cond` with a block for each branch. Its condition is the constant True, so
    that its result y is the result of `then`."""
    blocks = [Block([], [inner], [inner.name]) for inner in (then, otherwise)]
    return op("cond", {"pred": np.asarray(True)}, "y", blocks=blocks)


# --- precision ----------------------------------------------------------------------------


def rounded(x) -> np.ndarray:
    """x rounded to fp16, in float32."""
    return np.asarray(x, np.float16).astype(np.float32)


def in_parts(terms: np.ndarray) -> np.float32:
    """The sum of `terms` [n], rounded to fp16 after every 32 of them."""
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
    results = {mode: chain(mode).run({"x": tensor(x)}, {})["y"] for mode in PRECISIONS}
    unrounded = (x + x) * x
    assert results["exact"].numpy() == unrounded
    half = rounded(x)
    expected = rounded(rounded(half + half) * half)
    assert results["declared"] == results["narrow"] == torch.tensor(expected)
    assert expected != unrounded


def test_an_unknown_precision_is_refused():
    with refused("'bf16'.*declared, exact, narrow"):
        chain("bf16")


def test_a_fused_program_is_refused_in_another_precision_than_declared():
    copied = op("copy_state", {"input": Ref("s")}, "copy")
    fused = replace(program([copied], {}, [], {"s": F16}), is_fused=True)
    with refused("fused steps: found 'exact'.*declared"):
        Executable(fused, "exact")


def test_narrow_does_not_round_sums_that_a_block_declares_float32():
    """Partial sums that are rounded to fp16 add up to something else than 4108."""
    inner = op("reduce_sum", {"x": X}, ("sum", F32))
    summed = executable(branches(inner, inner), precision="narrow", x=F32)
    assert summed.run({"x": torch.full((4096,), 1.003)}, {})["y"] == 4108


# --- the hook -----------------------------------------------------------------------------


def test_the_hook_sees_results_and_may_replace_them():
    results_seen = {}

    def replace_double(op, results):
        results_seen[op.name] = [result.clone() for result in results]
        return [torch.tensor([5.0])] if op.name == "double" else None

    outputs = chain().run({"x": torch.tensor([3.0])}, {}, replace_double)
    assert outputs["y"] == 15
    assert results_seen == {"double": [6], "y": [15]}


def test_the_hook_sees_results_of_the_block_that_runs():
    results_seen = {}

    def record(op, results):
        results_seen[op.name] = [result.clone() for result in results]

    then = op("add", {"x": X, "y": X}, "then")
    otherwise = op("identity", {"x": X}, "otherwise")
    nested = executable(branches(then, otherwise))
    nested.run({"x": torch.tensor([3.0])}, {}, record)
    assert results_seen == {"then": [6], "y": [6]}


# --- operations, blocks and shapes --------------------------------------------------------


def test_operations_without_a_rule_are_all_named_at_once():
    nested = op("nested_op", {}, "z")
    with refused("first_op, nested_op"):
        executable(op("first_op", {}, "a"), branches(nested, nested))


def test_fused_operations_in_a_package_are_refused():
    for kind in sorted(FUSED):
        with refused(f"operations without a rule: {kind}"):
            executable(op(kind, {"x": X}, "y"))


def test_a_loop_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("miltorch.ops.control.MAX_ITERATIONS", 50)
    condition = Block([("n", F16)], [], ["on"])
    body = Block([("n", F16)], [], ["n"])
    operands = {"loop_vars": [X]}
    endless = op("while_loop", operands, "y", blocks=(condition, body))
    with refused("a loop of more than 50 iterations"):
        executable(const("on", True), endless).run({"x": ONES}, {})


def test_values_that_a_block_reads_live_until_its_op():
    squares = [op("square", {"x": X}, name) for name in ("v", "unused")]
    inner = op("square", {"x": Ref("v")}, "w")
    nested = executable(*squares, branches(inner, inner))
    assert nested.run({"x": torch.tensor([2.0])}, {})["y"] == 16


def test_a_block_that_writes_a_state_runs_though_nothing_reads_its_result():
    write = op("coreml_update_state", {"state": Ref("s"), "value": X}, "written")
    writing = replace(branches(write, write), outputs=[("unread", F16)])
    ops = [writing, op("square", {"x": X}, "y")]
    states = {"s": Type("FLOAT16", (2,))}
    fused = Executable(fuse(program(ops, {"x": F16}, ["y"], states)))
    state = fused.make_state()
    fused.run({"x": ONES}, state)
    assert state["s"].value.tolist() == [1, 1]


def test_literals_and_values_mix_in_a_list():
    values = {"values": [X, np.array([7], np.float16)], "axis": np.asarray(0)}
    concatenated = executable(op("concat", values, "y"))
    assert concatenated.run({"x": ONES}, {})["y"].tolist() == [1, 1, 7]


def test_a_result_may_be_larger_than_declared():
    """coremltools declares `torch.where` of sizes that vary too small; Core ML broadcasts."""
    too_small = Type("FLOAT16", (1, 1))
    operands = {"cond": Ref("c"), "a": X, "b": Ref("y")}
    ops = [
        op("select", operands, ("z", too_small)),
        op("add", {"x": Ref("z"), "y": Ref("z")}, ("twice", too_small)),
    ]
    inputs = {"c": Type("BOOL", (None, None)), "x": F16, "y": F16}
    values = {"c": torch.eye(2, 5) > 0, "x": torch.ones(1, 1), "y": torch.zeros(())}
    results = executable(*ops, outputs=["twice"], **inputs).run(values, {})
    assert torch.equal(results["twice"], 2 * torch.eye(2, 5))


# --- refusals -----------------------------------------------------------------------------


def test_names_of_values_that_are_missing_or_computed_twice_are_refused():
    with refused("values \\['nowhere'\\]"):
        executable(op("relu", {"x": Ref("nowhere")}, "y"))
    with refused("values \\['y'\\]"):
        executable()  # of its output y
    with refused("values \\['x'\\] that are computed twice"):
        executable(op("relu", {"x": X}, "x"), outputs=["x"], x=F16)


def test_a_constant_that_names_another_value_is_refused():
    with refused("constant that names another"):
        executable(Op("const", "y", {"val": X}, [("y", F16)]))


def test_an_input_that_is_missing_or_of_another_shape_is_refused_by_name():
    relu = executable(op("relu", {"x": X}, "y"), x=Type("FLOAT16", (2, 3)))
    with refused("no x"):
        relu.run({}, {})
    with refused("input 'x'.*\\[2\\] where \\[2, 3\\]"):
        relu.run({"x": ONES}, {})


def test_operands_that_do_not_fit_are_refused_with_the_name_of_their_operation():
    added = executable(op("add", {"x": X, "y": Ref("z")}, "y"), x=F16, z=F16)
    with refused("add 'y'.*RuntimeError.*size"):
        added.run({"x": ONES, "z": torch.ones(3)}, {})


@pytest.mark.parametrize("shape", [(1, None), (1 << 20, 1 << 20)])
def test_states_of_unknown_or_huge_size_are_refused(shape):
    states = {"memory": Type("FLOAT16", shape, "state")}
    with_state = Executable(program([], {}, [], states))
    with refused("state 'memory'.*known sizes"):
        with_state.make_state()


HUGE = 1 << 30
ROW = np.ones(4, np.float32)
LINE = {"x": ROW[None, None]}  # [1, 1, 4]
IMAGE = np.ones((1, 2, 2), np.float32)
KERNEL = LINE | {"weight": LINE["x"]}
PADDED = {"pad_type": "custom", "pad": [0, HUGE]}
TOO_LARGE = [
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
]


@pytest.mark.parametrize("kind, arguments", TOO_LARGE)
def test_a_huge_result_is_refused_before_its_memory_is_allocated(kind, arguments):
    with refused("over 268435456 elements"):
        run(kind, **arguments)


@pytest.mark.parametrize("kind", ["conv", "conv_transpose"])
def test_an_unknown_pad_type_is_refused(kind):
    with refused("pad_type 'other'"):
        run(kind, **KERNEL, pad_type="other")


def test_updates_of_another_shape_than_the_indices_are_refused():
    with refused(r"updates of shape \[4\]"):
        run("scatter", data=ROW, updates=ROW, indices=np.zeros(3, np.int32))


# --- constants ----------------------------------------------------------------------------


def test_a_constant_is_no_view_of_the_file_of_weights(tmp_path):
    (tmp_path / "weight.bin").write_bytes(bytes(64))
    stored = np.memmap(tmp_path / "weight.bin", np.float32, mode="c")
    assert not np.shares_memory(constants.to_tensor(stored).numpy(), stored)
