"""Fused operations against the groups of plain operations that `miltorch.fuse` replaces by them.

Results have the same bits where values only move. A fused product rounds to fp16 once, where the
group rounds several times. Caches are [B, heads, S, D] with a row per position S; a call adds T
rows."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
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

# --- whole bundles ------------------------------------------------------------------------

FAMILIES = """llama qwen2 qwen3 gemma3_text zaya lfm2 qwen3_5_text granitemoehybrid phi3
mistral smollm3""".split()
LONG = {"max_seq_len": 256, "tokens": "1-64", "batch": 2}
# (family, options of its export)
BUNDLES = [
    ("llama", {}),
    ("llama", {"kv_write": "slice"}),
    ("qwen2", {"compress": "int8-channel", "layout": "bc1t"}),
    ("qwen2", LONG),
    ("gemma3_text", {"sliding": "ring", "batch": 2}),
    ("zaya", {"moe": "routed", "compress": "int8-channel"}),
    *((family, {"compress": preset}) for family in FAMILIES for preset in PRESETS),
]
# every logit within this share of the largest; docs/runtime.md derives it
LIMIT = 1e-2


@pytest.mark.slow("exports a bundle of any family and preset")
@pytest.mark.matrix(2, wide=10)
@pytest.mark.parametrize("reads", ["used", "all"])
@pytest.mark.parametrize("family, options", BUNDLES, ids=tiny.case_id)
def test_fused_programs_stay_close_to_the_plain_ones(exports, family, options, reads):
    bundle = exports.bundle(family, **options)
    fast = Decoder(bundle, "portable", fast=True, reads=reads)
    plain = Decoder(bundle, "portable")
    V, batch = bundle.manifest.dims.V, bundle.manifest.options.batch
    token_counts = (1, 64, 4, 64, 3, 1) if options is LONG else (1, 4, 3, 1)
    for T in token_counts:
        ids = np.random.default_rng(T).integers(0, V, (batch, T)).tolist()
        hidden, _ = fast.seqs.advance(ids, min_columns=T)
        expected_hidden, _ = plain.seqs.advance(ids, min_columns=T)
        logits, expected = fast.logits(hidden), plain.logits(expected_hidden)
        assert tiny.relative(logits, expected) < LIMIT
    states = zip(fast.seqs.named_states, plain.seqs.named_states, strict=True)
    for (state, name), (expected_state, expected_name) in states:
        values = state.read(name).astype(float)
        expected = expected_state.read(expected_name).astype(float)
        assert tiny.relative(values, expected) < LIMIT, name
    for model in fast.layer_shards + fast.heads:
        assert all(is_fused for _, is_fused in model.executables)


# --- which groups are fused ---------------------------------------------------------------


def fused_layers(
    exports, family: str, change: Callable[[Op], None] | None = None, **options
) -> miltorch.Program:
    """The fused program of a bundle's first layers. `change` edits each operation before the
    fusion."""
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


@dataclass(frozen=True)
class Unfusable:
    """A change of operands that keeps groups of llama's first layers from being fused.

    Attributes:
        kind: of the operations that get the operands.
        operands: which replace theirs.
        count: groups that are not fused, at least one for each operation.
        reason: beginning of what the program says about each of them.
    """

    kind: str
    operands: dict[str, np.ndarray]
    count: int
    reason: str


UNFUSABLE = [
    Unfusable(
        "conv", {"groups": np.array(2)}, 7, "conv: it has strides, pads or groups"
    ),
    Unfusable(
        "concat", {"interleave": np.array(True)}, 2, "concat: a rotation of another"
    ),
    # a shape that no result of the group has
    Unfusable(
        "reshape", {"shape": np.array([1, 2, -1, 99], np.int32)}, 1, "matmul: no att"
    ),
]


@pytest.mark.parametrize("case", UNFUSABLE, ids=lambda case: case.kind)
def test_operations_of_no_group_stay_and_the_program_says_why(exports, case):
    def change(op: Op) -> None:
        if op.kind == case.kind:
            op.inputs |= case.operands

    program = fused_layers(exports, "llama", change)
    assert len(program.unfused) == case.count
    assert all(text.startswith(case.reason) for text in program.unfused.values())
    assert [op.kind for op in program.block.ops].count(case.kind) >= case.count


# Programs as text: each line is the name of a result, the kind of its operation, and operands. A
# write of a cache and attention over what it wrote; {} is the axis of the softmax.
CACHE = 1, 1, 6, 4  # [B, heads, S, D]
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
CACHE_TYPE = Type("FLOAT16", CACHE)
MASK_TYPE = Type("FLOAT16", (1, 1, 3, 6))
ADDRESS_TYPE = Type("INT32", (4,))


def parse(text: str, dtypes: dict[str, str]) -> list[Op]:
    """The operations of a program in the form above. An operand is the name of a value, or JSON. A
    result is fp16 unless `dtypes` has another dtype for its name; only q has a known shape."""
    ops = []
    for line in text.splitlines():
        name, kind, *operands = line.split()
        inputs = {}
        for operand in operands:
            parameter, value = operand.split("=")
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
        # these only resemble the group
        (-1, {"q": "FLOAT32"}, ["y"]),
        (-1, {"y": "FLOAT32"}, ["y"]),
        (3, {}, ["y"]),
    ],
)
def test_two_calls_on_one_state_compute_the_same_fused_and_plain(axis, dtypes, unfused):
    ops = parse(f"{WRITE}\n{ATTENTION.format(axis)}", dtypes)
    inputs = {"mask": MASK_TYPE, "at": ADDRESS_TYPE, "x": CACHE_TYPE}
    plain_program = program(ops, inputs, ["y"], {"cache": CACHE_TYPE})
    fused_program = miltorch.fuse(plain_program)
    assert list(fused_program.unfused) == unfused
    calls = [
        {name: torch.full(declared.shape, i / 9) for name, declared in inputs.items()}
        for i in (1, 2)
    ]

    def run_both_calls(program: miltorch.Program) -> torch.Tensor:
        executable = Executable(program)
        state = executable.make_state()
        outputs = miltorch.run_calls(executable, calls, [state, state], [None, None])
        return torch.cat([output["y"] for output in outputs])

    assert torch.equal(run_both_calls(plain_program), run_both_calls(fused_program))


def test_a_read_that_others_use_is_copied_before_the_state_is_written_in_place():
    text = f"{WRITE}\nafter read_state input=cache\ny relu x=after"
    inputs = {"x": CACHE_TYPE, "at": ADDRESS_TYPE}
    outputs = ["after", "y"]
    plain = program(parse(text, {}), inputs, outputs, {"cache": CACHE_TYPE})
    kinds = [op.kind for op in miltorch.fuse(plain).block.ops]
    assert kinds == ["write_cache_slice", "copy_state", "relu"]


def test_attention_is_not_fused_where_the_name_of_its_new_value_is_in_use():
    # fuse would give this name to the range of columns that the mask shows
    name = "mask.visible_columns"
    text = ATTENTION.format(-1).replace("w softmax", f"{name} softmax")
    ops = parse(text.replace("x=w", f"x={name}"), {})
    inputs = {"mask": MASK_TYPE, "x": CACHE_TYPE}
    plain = program(ops, inputs, ["y"], {"cache": CACHE_TYPE})
    fused_program = miltorch.fuse(plain)
    assert name in fused_program.unfused["y"]
    assert [op.kind for op in fused_program.block.ops] == [op.kind for op in ops]


# --- products with stored weights ---------------------------------------------------------


class WeightCase(NamedTuple):
    """A weight [rows, columns] in one stored form, and its float32 values."""

    weight: stored.StoredWeight
    values: np.ndarray


def weights(rng: np.random.Generator, rows: int, columns: int) -> list[WeightCase]:
    """Random weights [rows, columns], one in every form: fp16, int8 with a scale for each row,
    int4 with a scale for each 32 columns, then tables of 16 and of 64 values, first one for all
    rows and then one for each row. `columns` is a multiple of 32."""

    def draw_halves(*shape: int, low: float = -1.0) -> np.ndarray:
        return rng.uniform(low, 1, shape).astype(np.float16)

    def draw_codes(low: int, high: int, dtype: type) -> np.ndarray:
        return rng.integers(low, high, (rows, columns, 1, 1)).astype(dtype)

    blocks = columns // 32
    half = draw_halves(rows, columns)
    int8 = draw_codes(-128, 128, np.int8)
    int4 = draw_codes(-8, 8, np.int8)
    row_scale = draw_halves(rows, 1, 1, 1, low=1e-3)
    block_scale = draw_halves(rows, blocks, 1, 1, low=1e-3)
    # [rows, columns, 1, 1]
    scale_of_column = np.repeat(np.float32(block_scale), 32, axis=1)
    cases = [
        (stored.HalfWeight(half.view(np.uint16)), np.float32(half)),
        (stored.integer_weight(int8, row_scale), int8 * np.float32(row_scale)),
        (stored.integer_weight(int4, block_scale), int4 * scale_of_column),
    ]
    for entries, tables in ((16, 1), (64, 1), (16, rows), (64, rows)):
        lut = draw_halves(tables, 1, 1, 1, entries, 1)
        codes = draw_codes(0, entries, np.uint8)
        table = np.float32(lut.reshape(tables, entries))
        table_of_row = np.repeat(table, rows // tables, axis=0)  # [rows, entries]
        indices = codes.reshape(rows, columns).astype(int)
        values = np.take_along_axis(table_of_row, indices, axis=1)
        cases.append((stored.table_weight(codes, lut), values))
    return [WeightCase(weight, dense.reshape(rows, columns)) for weight, dense in cases]


@pytest.mark.slow("numba compiles the kernels")
@given(
    rows=st.integers(1, 9),
    half=st.integers(1, 4),
    count=st.sampled_from([1, 3, 20]),
    seed=st.integers(0, 99),
)
# small panels: the kernels take two rows of 64 columns at a time, and of wider weights one
@mock.patch.object(sums, "PANEL", 131)
def test_products_with_stored_weights_are_those_of_dense_ones(rows, half, count, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 64 * half)).astype(np.float16)
    bias = rng.normal(size=2 * rows).astype(np.float32)
    # two weights of each form, and both as the rows of one
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
    for case in weights(np.random.default_rng(0), rows=2, columns=64):
        with pytest.raises(ValueError, match="32 channels"):
            fused.stored_linear(x, bias, weight=case.weight, sizes=[2])


def test_codes_past_a_table_are_left_to_the_plain_operation():
    table_of_4 = np.ones((1, 1, 1, 1, 4, 1), np.float16)
    codes = np.full((1, 2, 1, 1), 4)
    assert stored.table_weight(codes, table_of_4) is None


def test_packed_weights_stay_packed(exports):
    program = fused_layers(exports, "qwen2", compress="lut6-g16")
    executable = Executable(program).release()
    constants = [step.constants.get("weight") for step in executable.body.steps]
    packed = [weight for weight in constants if weight is not None]
    assert packed
    assert all(isinstance(weight, stored.TableWeight) for weight in packed)
    assert all(weight.codes.dtype == np.uint8 for weight in packed)
    assert executable.constants is None and executable.program.block is None


# --- caches -------------------------------------------------------------------------------

# For each sequence and each of its T new rows, the column of the write mask: S = 3 weights of the
# new row in the rows of the cache. Only columns with at most a single 1, no two alike, address
# places that can be written in place.
IN_PLACE = {
    "a row each": [[[0, 1, 0]], [[1, 0, 0]]],
    "a ring": [[[0, 0, 1], [1, 0, 0]], [[0, 1, 0], [0, 0, 1]]],
    "a dummy": [[[0, 0, 0], [0, 1, 0]], [[0, 0, 0], [0, 0, 1]]],
}
BY_FORMULA = {
    "one row twice": [[[1, 0, 0], [1, 0, 0]]],
    "a half": [[[0.5, 0, 0], [0, 0, 1]]],
    "two rows": [[[1, 1, 0], [0, 0, 0]]],
}
MASKS = IN_PLACE | BY_FORMULA


@pytest.mark.parametrize("old", [1, np.nan, np.inf])
@pytest.mark.parametrize("new", [1, np.nan, np.inf])
@pytest.mark.parametrize("mask_name", MASKS)
def test_rows_are_written_as_the_formula_of_the_mask_writes_them(mask_name, new, old):
    """cache · (1 - the sum of the mask over T) + mask · rows, also where a value of the new rows
    or of the old cache is not finite, which the formula spreads over the cache."""
    columns = torch.tensor(MASKS[mask_name])  # [B, T, S]
    mask = columns.mT[:, None].half().contiguous()  # [B, 1, S, T]
    B, _, S, T = mask.shape
    rows = torch.from_numpy(numbers(B, 2, T, 4)).half()
    cache = torch.from_numpy(numbers(B, 2, S, 4)).half()
    rows[0, 0, 0, 1], cache[0, 1, 0, 0] = new, old
    places = fused.one_hot_places(mask)
    assert (places is not None) == (mask_name in IN_PLACE)
    cell = StateCell(cache.clone())
    fused.write_cache_rows(cell, rows, mask, places)
    rest = cache.float() * (1 - mask.float().sum(-1, keepdim=True))
    expected = rest.half() + (mask.float() @ rows.float()).half()
    np.testing.assert_array_equal(cell.value.numpy(), expected.numpy())


def test_visible_columns_reach_from_the_first_that_a_query_sees_to_the_last():
    mask = torch.full((1, 1, 2, 6), fused.BLOCKED).half()
    mask[..., 0, 1:3] = mask[..., 1, 2:4] = 0
    assert fused.visible_columns(mask) == [1, 4]
    # a query that sees nothing attends to all columns alike
    mask[..., 1, :] = fused.BLOCKED
    assert fused.visible_columns(mask) == [0, 6]


def test_an_unknown_choice_of_columns_to_read_is_refused(exports):
    bundle = exports.bundle(exports.checkpoint("llama"))
    with refused("reads.*'some'.*all, used"):
        Decoder(bundle, "portable", fast=True, reads="some")


@pytest.mark.parametrize("T", [1, 2, 12])
def test_scores_as_low_as_the_mask_attend_to_blocked_columns_as_the_formula_does(T):
    def draw_halves(count: int) -> torch.Tensor:
        return torch.from_numpy(numbers(1, 1, count, 4, seed=count + T)).half()

    q, key, value = draw_halves(T), draw_halves(6), draw_halves(7)[:, :, :6]
    # the score of a visible column is near -15,000, that of a blocked one near 0 - 10,000
    q[..., 0] = 150
    key[..., :3, 0], key[..., 3:, 0] = -100, 0
    mask = torch.full((1, 1, T, 6), fused.BLOCKED).half()
    mask[..., :3] = 0
    columns = fused.visible_columns(mask)
    result = fused.cached_attention(q, mask, StateCell(key), StateCell(value), columns)
    scores = (q.float() @ key.float().mT).half() + mask
    weights = torch.softmax(scores, -1)
    expected = weights.float() @ value.float()
    np.testing.assert_allclose(result.float(), expected, atol=2e-3)
    assert columns == [0, 3] and weights[..., :3].max() < 1e-3


def test_a_cache_write_refuses_rows_of_another_batch():
    cell, mask = StateCell(torch.zeros(1, 2, 6, 4)), torch.zeros(1, 1, 6, 1)
    with pytest.raises(ValueError, match=r"rows \[2, 2, 1, 4\] for a state"):
        fused.write_cache_rows(cell, torch.ones(2, 2, 1, 4), mask, None)
    assert not cell.value.any()
