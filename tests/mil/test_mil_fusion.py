"""Fused operations against the groups they stand for: the same bits where values only move, one
rounding of fp16 per product where sums are scaled once."""

import json
from collections import Counter
from unittest import mock

import numpy as np
import pytest
import tiny
import torch
from hypothesis import strategies as st
from one_op import Op, Ref, Type, given, literal, numbers, program
from refusal import refused

import miltorch
from miltorch import Executable, stored
from miltorch.ops import fused, sums
from miltorch.ops.state import StateCell
from workbench import Decoder
from workbench.bundle.presets import PRESETS

FAMILIES = """llama qwen2 qwen3 gemma3_text zaya lfm2 qwen3_5_text granitemoehybrid phi3
mistral smollm3""".split()
LONG = {"max_seq_len": 256, "tokens": "1-64", "batch": 2}
BUNDLES = [
    ("llama", {}),
    ("llama", {"kv_write": "slice"}),
    ("qwen2", {"compress": "int8-channel", "layout": "bc1t"}),
    ("qwen2", LONG),
    ("gemma3_text", {"sliding": "ring", "batch": 2}),
    ("zaya", {"moe": "routed", "compress": "int8-channel"}),
    *((f, {"compress": preset}) for f in FAMILIES for preset in PRESETS),
]
# every logit within this share of the largest; docs/runtime.md derives it
LIMIT = 1e-2


@pytest.mark.slow("exports a bundle of any family and preset")
@pytest.mark.matrix(3, wide=9)
@pytest.mark.parametrize("reads", ["used", "all"])
@pytest.mark.parametrize("family, options", BUNDLES, ids=tiny.label)
def test_fused_programs_stay_close_to_the_plain_ones(exports, family, options, reads):
    bundle = exports.bundle(exports.checkpoint(family), **options)
    fast = Decoder(bundle, "portable", fast=True, reads=reads)
    plain = Decoder(bundle, "portable")
    V, batch = bundle.manifest.dims.V, bundle.manifest.options.batch
    for T in (1, 64, 4, 64, 3, 1) if options is LONG else (1, 4, 3, 1):
        ids = np.random.default_rng(T).integers(0, V, (batch, T)).tolist()
        logits, expected = (
            decoder.logits(decoder.seqs.advance(ids, T=T)[0])
            for decoder in (fast, plain)
        )
        assert tiny.relative(logits, expected) < LIMIT
    pairs = zip(fast.seqs.named_states, plain.seqs.named_states, strict=True)
    for (state, name), (expected_state, expected_name) in pairs:
        values = state.read(name).astype(float)
        expected = expected_state.read(expected_name).astype(float)
        assert tiny.relative(values, expected) < LIMIT, name
    for model in fast.layer_shards + fast.heads:
        assert all(is_fused for _, is_fused in model.executables)


# --- which groups -----------------------------------------------------------------------------


def fused_layers(exports, family: str, change=None, **options) -> miltorch.Program:
    """The fused program of a bundle's first layers, after `change(op)` of each operation."""
    bundle = exports.bundle(exports.checkpoint(family), **options)
    program = miltorch.read(bundle.package(bundle.shards("layers")[0]))
    if change:
        for op in program.block.ops:
            change(op)
    return miltorch.fuse(program)


@pytest.mark.matrix(1, wide=4)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "zaya"])
def test_groups_of_every_family_are_recognised(exports, family):
    kinds = Counter(op.kind for op in fused_layers(exports, family).block.ops)
    assert kinds["write_cache_rows"] == 2 and kinds["one_hot_places"] == 1
    assert kinds["cached_attention"] == kinds["visible_columns"] == 1
    assert kinds["rotary_embedding"] == 2 and kinds["rms_norm"] >= 2
    assert kinds["stored_linear"] == (4 if family != "zaya" else 6)


@pytest.mark.parametrize(
    "kind, attribute, count, reason",
    [
        ("conv", {"groups": np.array(2)}, 7, "conv: it has strides, pads or groups"),
        ("concat", {"interleave": np.array(True)}, 2, "concat: a rotation of another"),
        # the shape that another result would have
        ("reshape", {"shape": np.array([1, 2, -1, 99], np.int32)}, 1, "matmul: no att"),
    ],
)
def test_operations_of_no_group_stay_and_the_program_says_why(
    exports, kind, attribute, count, reason
):
    def change(op):
        if op.kind == kind:
            op.inputs |= attribute

    program = fused_layers(exports, "llama", change)
    assert len(program.unfused) == count
    assert all(text.startswith(reason) for text in program.unfused.values())
    assert [op.kind for op in program.block.ops].count(kind) >= count


CACHE = 1, 1, 6, 4
WRITE = """old read_state input=cache
new slice_update x=old update=x begin=at end=[1,1,6,4]
write write_state input=cache data=new"""
ATTENTION = """k read_state input=cache
q mul x=x y=x
s matmul x=q y=k transpose_y=1
r reshape x=s shape=[1,1,2,3,6]
a add x=r y=mask
w softmax x=a axis={}
f reshape x=w shape=[1,1,6,6]
y matmul x=f y=k"""
HALF = Type("FLOAT16", CACHE)


def parse(text: str, dtypes: dict[str, str]) -> list[Op]:
    """Operations from lines of a name, a kind and operands; results are fp16 but for those of
    `dtypes`."""
    ops = []
    for line in text.splitlines():
        name, kind, *operands = line.split()
        inputs = dict(operand.split("=") for operand in operands)
        for parameter, value in inputs.items():
            is_name = value[0].isalpha()
            inputs[parameter] = Ref(value) if is_name else literal(json.loads(value))
        declared = Type(dtypes.get(name, "FLOAT16"), CACHE if name == "q" else (None,))
        outputs = [] if kind == "write_state" else [(name, declared)]
        ops.append(Op(kind, name, inputs, outputs))
    return ops


@pytest.mark.parametrize(
    "axis, dtypes, unfused",
    [
        (-1, {}, []),
        (-1, {"q": "FLOAT32"}, ["y"]),
        (-1, {"y": "FLOAT32"}, ["y"]),
        (3, {}, ["y"]),
    ],
)
def test_calls_on_one_state_compute_what_plain_steps_do(axis, dtypes, unfused):
    """Whether attention over what was just written is a group, or resembles one."""
    ops = parse(f"{WRITE}\n{ATTENTION.format(axis)}", dtypes)
    shapes = {"mask": Type("FLOAT16", (1, 1, 3, 6)), "at": Type("INT32", (4,))}
    inputs = shapes | {"x": HALF}
    plain = program(ops, inputs, ["y"], {"cache": HALF})
    calls = [
        {name: torch.full(declared.shape, i / 9) for name, declared in inputs.items()}
        for i in (1, 2)
    ]
    fused_program, results = miltorch.fuse(plain), []
    for each_program in (plain, fused_program):
        executable = Executable(each_program)
        states = [executable.make_state()] * 2
        outputs = miltorch.run_calls(executable, calls, states, [None] * 2)
        results.append(torch.cat([output["y"] for output in outputs]))
    assert torch.equal(*results) and list(fused_program.unfused) == unfused


def test_a_read_that_others_use_is_copied_before_the_state_is_written_in_place():
    text = f"{WRITE}\nafter read_state input=cache\ny relu x=after"
    shapes = {"x": HALF, "at": Type("INT32", (4,))}
    ops = parse(text, {})
    plain = program(ops, shapes, ["after", "y"], {"cache": HALF})
    kinds = [op.kind for op in miltorch.fuse(plain).block.ops]
    assert kinds == ["write_cache_slice", "copy_state", "relu"]


def test_a_program_may_have_a_value_of_the_name_that_fuse_would_give_one():
    name = "mask.visible_columns"
    text = ATTENTION.format(-1).replace("w softmax", f"{name} softmax")
    ops = parse(text.replace("x=w", f"x={name}"), {})
    inputs = {"mask": Type("FLOAT16", (1, 1, 3, 6)), "x": HALF}
    plain = program(ops, inputs, ["y"], {"cache": HALF})
    fused_program = miltorch.fuse(plain)
    assert name in fused_program.unfused["y"]
    assert [op.kind for op in fused_program.block.ops] == [op.kind for op in ops]


# --- products ---------------------------------------------------------------------------------


def weights(
    rng, rows: int, columns: int
) -> list[tuple[stored.StoredWeight, np.ndarray]]:
    """A weight [rows, columns] of every form, with its values."""

    def halves(*shape, low=-1.0):
        return rng.uniform(low, 1, shape).astype(np.float16)

    def codes(low, high, dtype):
        return rng.integers(low, high, (rows, columns, 1, 1)).astype(dtype)

    half, eight = halves(rows, columns), codes(-128, 128, np.int8)
    four, count = codes(-8, 8, np.int8), columns // 32
    scale, blocks = (halves(rows, n, 1, 1, low=1e-3) for n in (1, count))
    pairs = [
        (stored.HalfWeight(half.view(np.uint16)), np.float32(half)),
        (stored.integer_weight(eight, scale), eight * np.float32(scale)),
        (
            stored.integer_weight(four, blocks),
            four * np.repeat(np.float32(blocks), 32, 1),
        ),
    ]
    for entries, parts in ((16, 1), (64, 1), (16, rows), (64, rows)):
        lut, indices = halves(parts, 1, 1, 1, entries, 1), codes(0, entries, np.uint8)
        tables = np.repeat(np.float32(lut.reshape(parts, entries)), rows // parts, 0)
        dense = np.take_along_axis(tables, indices.reshape(rows, -1).astype(int), 1)
        pairs.append((stored.table_weight(indices, lut), dense))
    return [(weight, dense.reshape(rows, columns)) for weight, dense in pairs]


@pytest.mark.slow("numba compiles the kernels")
@given(
    rows=st.integers(1, 9),
    half=st.integers(1, 4),
    count=st.sampled_from([1, 3, 20]),
    seed=st.integers(0, 99),
)
@mock.patch.object(sums, "PANEL", 131)  # two rows at a time, or one
def test_products_with_stored_weights_are_those_of_dense_ones(rows, half, count, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 64 * half)).astype(np.float16)
    bias = rng.normal(size=2 * rows).astype(np.float32)
    for pair in zip(*(weights(rng, rows, 64 * half) for _ in range(2))):
        (first, _), (second, _) = pair
        dense = np.concatenate([values for _, values in pair]).astype(float)
        joined = first.concatenated([first, second])
        product = joined.product(torch.from_numpy(x), bias)
        expected = x.astype(float) @ dense.T + bias
        tolerance = {"rtol": 2**-11 + 1e-5, "atol": 1e-3}
        np.testing.assert_allclose(product.float(), expected, **tolerance)


def test_a_product_refuses_activations_of_other_channels():
    x, bias = torch.zeros(1, 32, 1, 1).half(), torch.zeros(2)
    for weight, _ in weights(np.random.default_rng(0), 2, 64):
        with pytest.raises(ValueError, match="32 channels"):
            fused.stored_linear(x, bias, weight=weight, sizes=[2])


def test_codes_past_a_table_are_left_to_the_plain_operation():
    lut = np.ones((1, 1, 1, 1, 4, 1), np.float16)
    assert stored.table_weight(np.full((1, 2, 1, 1), 4), lut) is None


def test_packed_weights_stay_packed(exports):
    program = fused_layers(exports, "qwen2", compress="lut6-g16")
    executable = Executable(program).release()
    constants = [step.constants.get("weight") for step in executable.body.steps]
    packed = [weight for weight in constants if weight is not None]
    assert packed and all(isinstance(w, stored.TableWeight) for w in packed)
    assert all(weight.codes.dtype == np.uint8 for weight in packed)
    assert executable.constants is None and executable.program.block is None


# --- caches -----------------------------------------------------------------------------------

# columns of a mask [S, T], of each sequence, and whether rows are written in place
MASKS = {
    "a row each": ([[[0, 1, 0]], [[1, 0, 0]]], True),
    "a ring": ([[[0, 0, 1], [1, 0, 0]], [[0, 1, 0], [0, 0, 1]]], True),
    "a dummy": ([[[0, 0, 0], [0, 1, 0]], [[0, 0, 0], [0, 0, 1]]], True),
    "one row twice": ([[[1, 0, 0], [1, 0, 0]]], False),
    "a half": ([[[0.5, 0, 0], [0, 0, 1]]], False),
    "two rows": ([[[1, 1, 0], [0, 0, 0]]], False),
}


@pytest.mark.parametrize("old", [1, np.nan, np.inf])
@pytest.mark.parametrize("new", [1, np.nan, np.inf])
@pytest.mark.parametrize("columns, in_place", MASKS.values(), ids=MASKS)
def test_rows_are_written_as_the_formula_of_the_mask_writes_them(
    columns, in_place, new, old
):
    """Values that are not finite spread over the cache, too."""
    mask = torch.tensor(columns).mT[:, None].half().contiguous()
    B, _, S, T = mask.shape
    rows, before = (torch.from_numpy(numbers(B, 2, n, 4)).half() for n in (T, S))
    rows[0, 0, 0, 1], before[0, 1, 0, 0] = new, old
    places = fused.one_hot_places(mask)
    assert (places is not None) == in_place
    cell = StateCell(before.clone())
    fused.write_cache_rows(cell, rows, mask, places)
    rest = before.float() * (1 - mask.float().sum(-1, keepdim=True))
    expected = rest.half() + (mask.float() @ rows.float()).half()
    np.testing.assert_array_equal(cell.value.numpy(), expected.numpy())


def test_a_cache_is_read_from_the_first_column_that_a_query_sees_to_the_last(exports):
    mask = torch.full((1, 1, 2, 6), fused.BLOCKED).half()
    mask[..., 0, 1:3] = mask[..., 1, 2:4] = 0
    assert fused.visible_columns(mask) == [1, 4]
    mask[..., 1, :] = fused.BLOCKED
    # a query that sees nothing attends to everything alike
    assert fused.visible_columns(mask) == [0, 6]
    bundle = exports.bundle(exports.checkpoint("llama"))
    with refused("reads.*'some'.*all, used"):
        Decoder(bundle, "portable", fast=True, reads="some")


@pytest.mark.parametrize("T", [1, 2, 12])
def test_scores_as_low_as_the_mask_attend_to_blocked_columns_as_the_formula_does(T):
    q, key, value = (
        torch.from_numpy(numbers(1, 1, n, 4, seed=n + T)).half() for n in (T, 6, 7)
    )
    value = value[:, :, :6]
    # visible scores near -15,000, blocked ones near 0 - 10,000
    q[..., 0], key[..., :3, 0], key[..., 3:, 0] = (150, -100, 0)
    mask = torch.full((1, 1, T, 6), fused.BLOCKED).half()
    mask[..., :3] = 0
    scores = (q.float() @ key.float().mT).half() + mask
    weights = torch.softmax(scores, -1)
    cells, columns = (StateCell(key), StateCell(value)), fused.visible_columns(mask)
    result = fused.cached_attention(q, mask, *cells, columns)
    expected = weights.float() @ value.float()
    np.testing.assert_allclose(result.float(), expected, atol=2e-3)
    assert columns == [0, 3] and weights[..., :3].max() < 1e-3


def test_a_cache_write_refuses_rows_of_another_batch():
    cell, mask = StateCell(torch.zeros(1, 2, 6, 4)), torch.zeros(1, 1, 6, 1)
    with pytest.raises(ValueError, match=r"rows \[2, 2, 1, 4\] for a state"):
        fused.write_cache_rows(cell, torch.ones(2, 2, 1, 4), mask, None)
    assert not cell.value.any()
