"""Fused steps against the plain ones: the same bits where values only move, one rounding of
fp16 per product where sums are scaled once."""

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
from miltorch import Executable, fused, stored
from miltorch.ops import sums
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
def test_fused_steps_stay_close_to_the_plain_ones(exports, family, options, reads):
    bundle = exports.bundle(exports.checkpoint(family), **options)
    fast = Decoder(bundle, "portable", fast=True, reads=reads)
    pair = fast, Decoder(bundle, "portable")
    V, batch = bundle.manifest.dims.V, bundle.manifest.options.batch
    for T in (1, 64, 4, 64, 3, 1) if options is LONG else (1, 4, 3, 1):
        ids = np.random.default_rng(T).integers(0, V, (batch, T)).tolist()
        found, wanted = (d.logits(d.seqs.advance(ids, T=T)[0]) for d in pair)
        assert tiny.relative(found, wanted) < LIMIT
    for (own, name), (other, _) in zip(*(d.seqs.named_states for d in pair)):
        rows = own.read(name).astype(float), other.read(name).astype(float)
        assert tiny.relative(*rows) < LIMIT, name
    assert all(key[1] for m in fast.layers + fast.heads for key in m.executables)


# --- which groups -----------------------------------------------------------------------------


def layers(exports, family: str, change=None, **options) -> Executable:
    """The fused program of a bundle's first layers, after `change(op)` of each operation."""
    bundle = exports.bundle(exports.checkpoint(family), **options)
    made = miltorch.read(bundle.package(bundle.shards("layers")[0]))
    for op in made.block.ops if change else ():
        change(op)
    return Executable(made, fuse=True)


@pytest.mark.matrix(1, wide=4)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "zaya"])
def test_groups_of_every_family_are_recognised(exports, family):
    steps = layers(exports, family).body.steps
    functions = [getattr(step.function, "func", step.function) for step in steps]
    count = Counter(getattr(f, "__name__", type(f).__name__) for f in functions)
    assert count["write_rows"] == 2 and count["written"] == count["attend"] == 1
    assert count["rotated"] == 2 and count["normed"] >= 2
    assert count["Linear"] == (4 if family != "zaya" else 6)


@pytest.mark.parametrize(
    "kind, attribute, count, why",
    [
        ("conv", {"groups": np.array(2)}, 7, "conv: it has strides, pads or groups"),
        ("concat", {"interleave": np.array(True)}, 2, "concat: a rotation of another"),
        # the shape that another result would have
        ("reshape", {"shape": np.array([1, 2, -1, 99], np.int32)}, 1, "matmul: no att"),
    ],
)
def test_what_is_not_fused_keeps_its_steps_and_says_so(
    exports, kind, attribute, count, why
):
    def change(op):
        if op.kind == kind:
            op.inputs |= attribute

    made = layers(exports, "llama", change)
    assert len(made.unfused) == count
    assert all(reason.startswith(why) for reason in made.unfused.values())
    assert [step.op.kind for step in made.body.steps].count(kind) >= count


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


@pytest.mark.parametrize(
    "axis, dtype, unfused", [(-1, "FLOAT16", 0), (-1, "FLOAT32", 1), (3, "FLOAT16", 1)]
)
def test_calls_on_one_state_compute_what_plain_steps_do(axis, dtype, unfused):
    """Whether attention over what was just written is a group, or looks like one."""
    ops, half = [], Type("FLOAT16", CACHE)
    for line in [*WRITE.splitlines(), *ATTENTION.format(axis).splitlines()]:
        name, kind, *operands = line.split()
        named = dict(each.split("=") for each in operands)
        for key, text in named.items():
            named[key] = Ref(text) if text.isalpha() else literal(json.loads(text))
        result = Type(dtype, CACHE) if name == "q" else Type("FLOAT16", (None,))
        ops.append(Op(kind, name, named, [(name, result)][name == "write" :]))
    shapes = {"mask": Type("FLOAT16", (1, 1, 3, 6)), "at": Type("INT32", (4,))}
    inputs, found = shapes | {"x": half}, []
    made = program(ops, inputs, ["y"], {"cache": half})
    calls = [{n: torch.full(t.shape, i / 9) for n, t in inputs.items()} for i in (1, 2)]
    for fuse in False, True:
        executable = Executable(made, fuse=fuse)
        state = executable.make_state()
        results = executable.run_calls(calls, [state] * 2, [None] * 2)
        found.append(torch.cat([each["y"] for each in results]))
    assert torch.equal(*found) and len(executable.unfused) == unfused


# --- products ---------------------------------------------------------------------------------


def weights(rng, rows: int, columns: int) -> list[tuple[stored.Stored, np.ndarray]]:
    """Of every form: a weight [rows, columns], and its values."""

    def halves(*shape, low=-1.0):
        return rng.uniform(low, 1, shape).astype(np.float16)

    def codes(low, high, dtype):
        return rng.integers(low, high, (rows, columns, 1, 1)).astype(dtype)

    plain, eight = halves(rows, columns), codes(-128, 128, np.int8)
    four, count = codes(-8, 8, np.int8), columns // 32
    scale, blocks = (halves(rows, n, 1, 1, low=1e-3) for n in (1, count))
    made = [
        (stored.Stored("fp16", plain.view(np.uint16)), np.float32(plain)),
        (stored.integers(eight, scale), eight * np.float32(scale)),
        (stored.integers(four, blocks), four * np.repeat(np.float32(blocks), 32, 1)),
    ]
    for entries, parts in ((16, 1), (64, 1), (16, rows), (64, rows)):
        lut, own = halves(parts, 1, 1, 1, entries, 1), codes(0, entries, np.uint8)
        tables = np.repeat(np.float32(lut.reshape(parts, entries)), rows // parts, 0)
        dense = np.take_along_axis(tables, own.reshape(rows, -1).astype(int), 1)
        made.append((stored.indices(own, lut), dense))
    return [(weight, dense.reshape(rows, columns)) for weight, dense in made]


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
        (one, _), (other, _) = pair
        dense = np.concatenate([values for _, values in pair]).astype(float)
        found = one.joined([one, other]).product(torch.from_numpy(x), bias)
        expected = x.astype(float) @ dense.T + bias
        close = {"rtol": 2**-11 + 1e-5, "atol": 1e-3}
        np.testing.assert_allclose(found.float(), expected, **close)


def test_a_product_refuses_activations_of_other_channels():
    for weight, _ in weights(np.random.default_rng(0), 2, 64):
        product = stored.Linear([weight], [np.zeros(2, np.float32)])
        with pytest.raises(ValueError, match="32 channels"):
            product(torch.zeros(1, 32, 1, 1).half())


def test_codes_past_a_table_are_left_to_the_plain_operation():
    lut = np.ones((1, 1, 1, 1, 4, 1), np.float16)
    assert stored.indices(np.full((1, 2, 1, 1), 4), lut) is None


def test_packed_weights_stay_packed(exports):
    made = layers(exports, "qwen2", compress="lut4").release()
    functions = [step.function for step in made.body.steps]
    linears = [each for each in functions if isinstance(each, stored.Linear)]
    assert linears and all(isinstance(each.weight, stored.Codes) for each in linears)
    assert all(each.weight.arrays[0].dtype == np.uint8 for each in linears)
    assert made.constants is None and made.program.block is None


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
    """What is not finite spreads over the cache, too."""
    mask = torch.tensor(columns).mT[:, None].half().contiguous()
    B, _, S, T = mask.shape
    rows, before = (torch.from_numpy(numbers(B, 2, n, 4)).half() for n in (T, S))
    rows[0, 0, 0, 1], before[0, 1, 0, 0] = new, old
    places = fused.written(mask)
    assert (places is not None) == in_place
    cell = StateCell(before.clone())
    fused.write_rows(False, rows, mask, cell, places)
    kept = before.float() * (1 - mask.float().sum(-1, keepdim=True))
    expected = kept.half() + (mask.float() @ rows.float()).half()
    np.testing.assert_array_equal(cell.value.numpy(), expected.numpy())


def test_a_cache_is_read_from_the_first_column_that_a_query_sees_to_the_last(exports):
    mask = torch.full((1, 1, 2, 6), fused.BLOCKED).half()
    mask[..., 0, 1:3] = mask[..., 1, 2:4] = 0
    assert fused.visible("used", mask) == slice(1, 4)
    assert fused.visible("all", mask) == slice(0, 6)
    mask[..., 1, :] = fused.BLOCKED
    # a query that sees nothing attends to everything alike
    assert fused.visible("used", mask) == slice(0, 6)
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
    span = fused.visible("used", mask)
    found = fused.attend(q, mask, StateCell(key), StateCell(value), span)
    expected = weights.float() @ value.float()
    np.testing.assert_allclose(found.float(), expected, atol=2e-3)
    assert weights[..., :3].max() < 1e-3


def test_a_cache_write_refuses_rows_of_another_batch():
    cell, mask = StateCell(torch.zeros(1, 2, 6, 4)), torch.zeros(1, 1, 6, 1)
    with pytest.raises(ValueError, match=r"rows \[2, 2, 1, 4\] for a state"):
        fused.write_rows(False, torch.ones(2, 2, 1, 4), mask, cell, None)
    assert not cell.value.any()
