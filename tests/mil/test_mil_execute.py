"""The executor: precision modes, the hook, scopes and lifetimes, and refusals that name what is
wrong."""

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from one_op import Op, Ref, Type, given, program, run, tensor

from miltorch import PRECISIONS, Executable, steps
from miltorch.program import Block
from workbench.errors import InputError

F16, I32, BOOL = Type("FLOAT16", (None,)), Type("INT32", ()), Type("BOOL", ())


def op(kind, inputs, *outputs, blocks=()):
    return Op(
        kind, outputs[0][0] if outputs else kind, inputs, list(outputs), list(blocks)
    )


def const(name, value):
    return Op("const", name, {"val": np.asarray(value)}, [(name, Type("FLOAT32"))])


def chain():
    """y = (x + x) * x, all fp16"""
    ops = [
        op("add", {"x": Ref("x"), "y": Ref("x")}, ("double", F16)),
        op("mul", {"x": Ref("double"), "y": Ref("x")}, ("y", F16)),
    ]
    return program(ops, {"x": F16}, ["y"])


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
        random.integers(-8, 8, size).astype(np.float16) * np.float16(scale)
        for size in [(1, length), (length, 1)]
    )
    products = (x.astype(np.float32) * y.T.astype(np.float32))[0]
    with np.errstate(over="ignore"):
        total, sums = in_parts(products), in_parts(x[0].astype(np.float32))
    narrow = dict(out="FLOAT16", precision="narrow")
    assert run("matmul", x=x, y=y, **narrow).item() == total
    assert run("linear", x=x, weight=y.T.copy(), **narrow).item() == total
    assert (
        run(
            "einsum", values=[x[None], y[None]], equation="bik,bkj->bij", **narrow
        ).item()
        == total
    )
    assert (
        run("conv", x=x[:, :, None], weight=y.T[:, :, None].copy(), **narrow).item()
        == total
    )
    assert run("reduce_sum", x=x, axes=[1], **narrow).item() == sums
    assert run("reduce_mean", x=x, axes=[1], **narrow).item() == rounded(
        sums / np.float32(length)
    )


def test_narrow_overflows_where_declared_does_not():
    x = np.concatenate([np.full(64, 2000), np.full(64, -2000)]).astype(np.float16)[None]
    assert run("reduce_sum", x=x, axes=[1], out="FLOAT16").item() == 0
    assert not np.isfinite(
        run("reduce_sum", x=x, axes=[1], out="FLOAT16", precision="narrow").item()
    )


def test_precision_modes_round_results_or_do_not():
    x = np.array([1 / 3], np.float32)
    exact = (x + x) * x
    once = rounded(x)
    found = {
        mode: Executable(chain(), mode).run({"x": tensor(x)}, {})["y"].numpy()
        for mode in PRECISIONS
    }
    assert found["exact"] == exact
    assert (
        found["declared"]
        == found["narrow"]
        == rounded(rounded(once + once) * once)
        != exact
    )


def test_an_unknown_precision_is_refused():
    with pytest.raises(InputError, match="'bf16'.*declared, exact, narrow"):
        Executable(chain(), "bf16")


def test_the_hook_sees_every_result_and_may_replace_it():
    x, seen = torch.tensor([3.0]), {}

    def look(op, results):
        seen[op.name] = [r.clone() for r in results]

    executable = Executable(chain())
    assert executable.run({"x": x}, {}, look)["y"] == 18
    assert seen == {"double": [6], "y": [18]}
    swapped = executable.run(
        {"x": x},
        {},
        lambda op, results: [torch.tensor([5.0])] if op.name == "double" else None,
    )
    assert swapped["y"] == 15


def test_the_hook_reaches_into_nested_blocks():
    inner = Block(
        [], [op("add", {"x": Ref("x"), "y": Ref("x")}, ("inside", F16))], ["inside"]
    )
    other = Block([], [op("identity", {"x": Ref("x")}, ("outside", F16))], ["outside"])
    ops = [op("cond", {"pred": np.asarray(True)}, ("y", F16), blocks=[inner, other])]
    seen = []
    Executable(program(ops, {"x": F16}, ["y"])).run(
        {"x": torch.ones(1)}, {}, lambda op, results: seen.append(op.name)
    )
    assert seen == ["inside", "y"]


def test_unsupported_ops_are_all_named_at_once():
    inner = Block([], [op("hidden_op", {}, ("z", F16))], ["z"])
    ops = [
        op("first_op", {}, ("a", F16)),
        op("cond", {"pred": np.asarray(True)}, ("y", F16), blocks=[inner, inner]),
    ]
    with pytest.raises(InputError, match="first_op, hidden_op"):
        Executable(program(ops, {}, ["y"]))


def loop(limit):
    """while n < limit: n, x = n + 1, x + step; `step` is a constant of the block, `x` enters from
    outside."""
    going = Block(
        [("n", I32), ("x", F16)],
        [op("less", {"x": Ref("n"), "y": np.asarray(limit, np.int32)}, ("go", BOOL))],
        ["go"],
    )
    body = Block(
        [("n", I32), ("x", F16)],
        [
            const("step", np.float32(0.5)),
            op("add", {"x": Ref("n"), "y": np.asarray(1, np.int32)}, ("n2", I32)),
            op("add", {"x": Ref("x"), "y": Ref("step")}, ("x2", F16)),
        ],
        ["n2", "x2"],
    )
    zero = const("zero", np.int32(0))
    ops = [
        zero,
        op(
            "while_loop",
            {"loop_vars": [Ref("zero"), Ref("x")]},
            ("count", I32),
            ("y", F16),
            blocks=[going, body],
        ),
    ]
    return Executable(program(ops, {"x": F16}, ["count", "y"]))


def test_loops_carry_their_variables():
    found = loop(5).run({"x": torch.ones(2)}, {})
    assert found["count"] == 5 and found["y"].tolist() == [3.5, 3.5]
    assert loop(0).run({"x": torch.ones(2)}, {})["y"].tolist() == [1, 1]


def test_a_loop_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("miltorch.ops.control.MAX_ITERATIONS", 50)
    with pytest.raises(InputError, match="a loop of more than 50 iterations"):
        loop(2**31 - 1).run({"x": torch.ones(2)}, {})


def test_values_that_a_block_reads_live_until_its_op():
    inner = Block([], [op("square", {"x": Ref("v")}, ("w", F16))], ["w"])
    ops = [
        op("square", {"x": Ref("x")}, ("v", F16)),
        op("square", {"x": Ref("x")}, ("unused", F16)),
        op("cond", {"pred": np.asarray(True)}, ("y", F16), blocks=[inner, inner]),
    ]
    made = Executable(program(ops, {"x": F16}, ["y"]))
    assert made.run({"x": torch.tensor([2.0])}, {})["y"] == 16


def test_literals_and_values_mix_in_a_list():
    ops = [
        op(
            "concat",
            {"values": [Ref("x"), np.array([7], np.float16)], "axis": np.asarray(0)},
            ("y", F16),
        )
    ]
    assert Executable(program(ops, {"x": F16}, ["y"])).run({"x": torch.ones(2)}, {})[
        "y"
    ].tolist() == [1, 1, 7]


def test_a_result_may_be_larger_than_declared():
    """coremltools declares `torch.where` of sizes that vary too small; Core ML broadcasts."""
    branches = {"cond": Ref("c"), "a": Ref("x"), "b": Ref("y")}
    ops = [
        op("select", branches, ("z", Type("FLOAT16", (1, 1)))),
        op("add", {"x": Ref("z"), "y": Ref("z")}, ("twice", Type("FLOAT16", (1, 1)))),
    ]
    inputs = {"c": Type("BOOL", (None, None)), "x": F16, "y": F16}
    values = {"c": torch.eye(2, 5) > 0, "x": torch.ones(1, 1), "y": torch.zeros(())}
    found = Executable(program(ops, inputs, ["twice"])).run(values, {})
    assert torch.equal(found["twice"], 2 * torch.eye(2, 5))


def test_a_name_that_nothing_computes_is_refused():
    with pytest.raises(InputError, match="values \\['nowhere'\\]"):
        Executable(program([op("relu", {"x": Ref("nowhere")}, ("y", F16))], {}, ["y"]))
    with pytest.raises(InputError, match="values \\['y'\\]"):
        Executable(program([], {}, ["y"]))


def test_missing_and_misshapen_inputs_are_named():
    made = Executable(
        program(
            [op("relu", {"x": Ref("x")}, ("y", F16))],
            {"x": Type("FLOAT16", (2, 3))},
            ["y"],
        )
    )
    with pytest.raises(InputError, match="no x"):
        made.run({}, {})
    with pytest.raises(InputError, match="input 'x'.*\\[2\\] where \\[2, 3\\]"):
        made.run({"x": torch.ones(2)}, {})


@pytest.mark.parametrize("shape", [(1, None), (1 << 20, 1 << 20)])
def test_states_without_a_sane_size_are_refused(shape):
    made = Executable(
        program([], {}, [], states={"memory": Type("FLOAT16", shape, "state")})
    )
    with pytest.raises(InputError, match="state 'memory'.*known sizes"):
        made.make_state()


def test_a_failing_op_is_named_with_what_torch_says():
    made = Executable(
        program(
            [op("add", {"x": Ref("x"), "y": Ref("z")}, ("y", F16))],
            {"x": F16, "z": F16},
            ["y"],
        )
    )
    with pytest.raises(InputError, match="add 'y'.*RuntimeError.*size"):
        made.run({"x": torch.ones(2), "z": torch.ones(3)}, {})


HUGE, IMAGE, LINE = (
    1 << 30,
    np.ones((1, 2, 2), np.float32),
    np.ones((1, 1, 4), np.float32),
)
ABSURD = [
    ("fill", {"shape": [1 << 20, 1 << 20]}),
    ("tile", {"x": LINE, "reps": [1, 1, HUGE]}),
    ("pad", {"x": LINE, "pad": [0, HUGE]}),
    ("random_uniform", {"shape": [HUGE]}),
    ("range_1d", {"start": 0, "end": HUGE, "step": 1}),
    ("one_hot", {"indices": np.zeros(4, np.int32), "one_hot_vector_size": HUGE}),
    (
        "resize_bilinear",
        {"x": IMAGE, "target_size_height": HUGE, "target_size_width": 4},
    ),
    ("upsample_nearest_neighbor", {"x": IMAGE, "scale_factor_height": HUGE}),
    ("make_list", {"init_length": 1 << 20, "elem_shape": 1 << 20, "dtype": "fp32"}),
    ("conv", {"x": LINE, "weight": LINE, "pad_type": "custom", "pad": [0, HUGE]}),
    ("conv_transpose", {"x": LINE, "weight": LINE, "strides": [HUGE]}),
    (
        "max_pool",
        {"x": LINE, "kernel_sizes": [2], "pad_type": "custom", "pad": [HUGE, 0]},
    ),
]


@pytest.mark.parametrize("kind, arguments", ABSURD)
def test_absurd_sizes_are_refused_before_memory_is_taken(kind, arguments):
    with pytest.raises(InputError, match="over 268435456 elements"):
        run(kind, **arguments)


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.bool_, np.int32, np.float16, np.float32]
)
def test_a_constant_is_no_view_of_the_file_of_weights(dtype, tmp_path):
    (tmp_path / "weight.bin").write_bytes(bytes(64))
    stored = np.memmap(tmp_path / "weight.bin", np.uint8, mode="c").view(dtype)
    assert not np.shares_memory(steps.to_tensor(stored[:1]).numpy(), stored)
