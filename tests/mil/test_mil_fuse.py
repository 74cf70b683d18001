"""Fused steps against the plain ones: the same bits where values only move, one rounding of
fp16 per product where sums are scaled once."""

import itertools
from collections import Counter
from unittest import mock

import numpy as np
import pytest
import tiny
import torch
from hypothesis import strategies as st
from one_op import Op, Ref, Type, given, program, tensor

import miltorch
from miltorch import Executable, execute, fused, stored
from miltorch.ops import sums
from miltorch.ops.state import StateCell
from workbench import Decoder
from workbench.bundle.presets import PRESETS
from workbench.errors import InputError

F16 = "FLOAT16"
SHAPE = (2, 3, 1, 5)
ATTRIBUTES = {
    "clip": {"alpha": -1.0, "beta": 0.5},
    "reduce_max": {"axes": [1], "keep_dims": True},
    "reduce_min": {"axes": [1], "keep_dims": False},
    "reshape": {"shape": [3, -1]},
    "transpose": {"perm": [1, 0, 3, 2]},
    "softmax": {"axis": 3},
    "split": {"axis": 3, "split_sizes": [2, 3]},
    "squeeze": {"axes": [2]},
    "expand_dims": {"axes": [0]},
    "tile": {"reps": [1, 2, 1, 1]},
    "cast": {"dtype": "fp16"},
    "slice_by_index": {"begin": [0, 0, 0, 1], "end": [2, 3, 1, 4]},
    "concat": {"axis": 1},
    "stack": {"axis": 0},
}
COMPARISONS = ("greater", "less", "greater_equal", "less_equal", "equal")
BINARY = "add sub mul real_div maximum minimum concat stack".split() + [*COMPARISONS]
# vectorised, so not bit-equal, but within a unit in the last place
ULPS = "exp sin cos sigmoid silu tanh softmax".split()
OTHERS = {"gather", "read_state", "write_state", "coreml_update_state", "slice_update"}
BUNDLES = [
    ("llama", {}),
    ("llama", {"kv_write": "slice"}),
    ("qwen2", {"compress": "int8-channel", "layout": "bc1t"}),
    ("gemma3_text", {"sliding": "ring", "batch": 2}),
    ("zaya", {"moe": "routed", "compress": "int8-channel"}),
]
FAMILIES = """llama qwen2 qwen3 gemma3_text zaya lfm2 qwen3_5_text granitemoehybrid phi3
mistral smollm3""".split()
BUNDLES += [(f, {"compress": p}) for f, p in itertools.product(FAMILIES, PRESETS)]
# every logit within this share of the largest; docs/runtime.md derives it
LIMIT = 1e-2


def ids_of(value):
    return value if isinstance(value, str) else "-".join(map(str, value.values()))


def one(kind: str):
    """A program of one operation on fp16 tensors of `SHAPE`."""
    names = dict.fromkeys("xy" if kind in BINARY else "x")
    if kind == "select":
        names = dict.fromkeys(("cond", "a", "b"))
    operands = {name: Ref(name) for name in names}
    if kind in ("concat", "stack"):
        operands = {"values": list(operands.values())}
    for name, value in ATTRIBUTES.get(kind, {}).items():
        operands[name] = value if isinstance(value, str) else np.asarray(value)
    result = Type("BOOL" if kind in COMPARISONS else F16, (None,))
    outputs = [(name, result) for name in ("y", "z")[: 1 + (kind == "split")]]
    op = Op(kind, kind, operands, outputs)
    inputs = dict.fromkeys(names, Type(F16, SHAPE))
    return program([op], inputs, [name for name, _ in outputs])


@pytest.mark.matrix(20, wide=200)
@pytest.mark.parametrize("kind", sorted(execute.NATIVE - OTHERS))
@given(seed=st.integers(0, 99), scale=st.sampled_from([1e-4, 1.0, 300.0]))
def test_an_operation_on_fp16_equals_its_rule_in_float32_rounded_once(
    kind, seed, scale
):
    made, rng = one(kind), np.random.default_rng(seed)
    values = {
        name: tensor((rng.normal(size=SHAPE) * scale).astype(np.float16))
        for name in made.inputs
    }
    if kind == "sqrt":
        values = {name: value.abs() for name, value in values.items()}
    found, wanted = (
        Executable(made, precision).run(dict(values), {})
        for precision in ("declared", "exact")
    )
    for name, value in wanted.items():
        rounded = value.half().float() if value.is_floating_point() else value
        if kind in ULPS:
            bits = (v.half().view(torch.int16).int() for v in (rounded, found[name]))
            assert int(torch.sub(*bits).abs().max()) <= 1
        else:
            assert torch.equal(rounded, found[name])


@pytest.mark.matrix(4, wide=32)
@pytest.mark.parametrize("family, options", BUNDLES, ids=ids_of)
def test_fused_steps_stay_close_to_the_plain_ones(exports, family, options):
    bundle = exports.bundle(exports.checkpoint(family), **options)
    pair = [Decoder(bundle, "portable", fast=f) for f in (True, False)]
    seqs = [d.fresh() for d in pair]
    rng = np.random.default_rng(0)
    shape, worst = (bundle.manifest.options.batch, 4), 0
    for T in (1, 4, 3, 1):
        ids = rng.integers(0, bundle.manifest.dims.V, shape)[:, :T].tolist()
        hidden = [d.advance(own, ids, T=T)[0] for d, own in zip(pair, seqs)]
        found, wanted = (d.logits(each) for d, each in zip(pair, hidden))
        worst = max(worst, tiny.relative(found, wanted))
    assert worst < LIMIT
    for own, other in zip(*(each.states for each in seqs), strict=True):
        for name in own.shard.states:
            rows = own.read(name).astype(float), other.read(name).astype(float)
            assert tiny.relative(*rows) < LIMIT, name
    models = pair[0].layers + pair[0].heads
    assert all(fast for m in models for _, fast in m.executables)


@pytest.mark.matrix(2, wide=4)
@pytest.mark.parametrize("reads", ["used", "all"])
@pytest.mark.parametrize("T", [1, 4, 64])
def test_calls_of_up_to_64_tokens_stay_close(exports, T, reads):
    options = dict(max_seq_len=256, tokens="1-64", batch=2)
    bundle = exports.bundle(exports.checkpoint("qwen2"), **options)
    fused = Decoder(bundle, "portable", fast=True, reads=reads)
    plain = Decoder(bundle, "portable")
    ids = np.random.default_rng(T).integers(0, 90, (2, T)).tolist()
    for _ in range(3):
        found, wanted = (d.logits(d.advance(d.seqs, ids)[0]) for d in (fused, plain))
        assert tiny.relative(found, wanted) < LIMIT


def test_a_cache_reads_all_its_rows_or_those_that_hold_tokens(exports):
    bundle = exports.bundle(exports.checkpoint("llama"))
    mask = torch.full((1, 1, 1, 6), fused.BLOCKED).half()
    mask[..., :2] = 0
    assert fused.visible("used", mask) == slice(0, 2)
    assert fused.visible("all", mask) == slice(0, 6)
    with pytest.raises(InputError, match="reads.*'some'.*all, used"):
        Decoder(bundle, "portable", fast=True, reads="some")


def layers(exports, family: str, change=None, **options):
    """The program of a bundle's first layers, after `change(op)` of each operation."""
    bundle = exports.bundle(exports.checkpoint(family), **options)
    made = miltorch.read(bundle.package(bundle.shards("layers")[0]))
    for op in made.block.ops if change else ():
        change(op)
    return made


@pytest.mark.matrix(2, wide=9)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "zaya"])
def test_groups_of_every_family_are_recognised(exports, family):
    made = Executable(layers(exports, family), fuse=True)
    functions = [getattr(s.function, "func", s.function) for s in made.body.steps]
    count = Counter(getattr(f, "__name__", type(f).__name__) for f in functions)
    assert count["write_rows"] == 2 and count["written"] == count["attend"] == 1
    assert count["rotated"] == 2 and count["normed"] >= 2
    assert count["Linear"] == (4 if family != "zaya" else 6)


@pytest.mark.parametrize(
    "kind, attribute, count, why",
    [
        ("conv", {"groups": np.array(2)}, 7, "conv: it has strides, pads or groups"),
        ("concat", {"interleave": np.array(True)}, 2, "concat: a rotation of another"),
    ],
)
def test_what_is_not_fused_keeps_its_steps_and_says_so(
    exports, kind, attribute, count, why
):
    def change(op):
        if op.kind == kind:
            op.inputs |= attribute

    made = Executable(layers(exports, "llama", change), fuse=True)
    assert len(made.unfused) == count
    assert all(reason.startswith(why) for reason in made.unfused.values())
    assert [step.op.kind for step in made.body.steps].count(kind) >= count


@given(
    rows=st.integers(1, 9),
    half=st.integers(1, 4),
    count=st.sampled_from([1, 3, 20]),
    seed=st.integers(0, 99),
)
@mock.patch.object(sums, "PANEL", 131)  # two rows at a time, or one
def test_products_with_stored_weights_are_those_of_dense_ones(rows, half, count, seed):
    rng, columns = np.random.default_rng(seed), 64 * half
    x = torch.from_numpy(rng.normal(size=(count, columns)).astype(np.float16))
    eight = rng.integers(-128, 128, (rows, columns, 1, 1)).astype(np.int8)
    four = rng.integers(-8, 8, (rows, columns, 1, 1)).astype(np.int8)
    scale = rng.uniform(1e-3, 1e-1, (rows, 1, 1, 1)).astype(np.float16)
    blocks = rng.uniform(1e-3, 1, (rows, 2 * half, 1, 1)).astype(np.float16)
    half = rng.normal(size=(rows, columns)).astype(np.float16)
    cases = [
        (stored.Stored("fp16", half.view(np.uint16)), np.float32(half)),
        (stored.integers(eight, scale), eight * np.float32(scale)),
        (stored.integers(four, blocks), four * np.repeat(np.float32(blocks), 32, 1)),
    ]
    for bits in (4, 6):
        lut = rng.normal(size=(1, 1, 1, 1, 1 << bits, 1)).astype(np.float16)
        own = rng.integers(0, 1 << bits, (rows, columns, 1, 1)).astype(np.uint8)
        cases.append((stored.indices(own, lut), np.float32(lut.flatten()[own])))
    for weight, dense in cases:
        bias = rng.normal(size=rows).astype(np.float32)
        wanted = x.double().numpy() @ dense.reshape(rows, -1).T.astype(float) + bias
        found = weight.joined([weight]).product(x, bias).float().numpy()
        np.testing.assert_allclose(found, wanted, rtol=2**-11 + 1e-5, atol=1e-3)
        joined = weight.joined([weight, weight]).product(x, np.tile(bias, 2))
        np.testing.assert_array_equal(joined.float(), np.tile(found, 2))


def test_packed_weights_stay_packed(exports):
    made = Executable(layers(exports, "qwen2", compress="lut4"), fuse=True).release()
    functions = [step.function for step in made.body.steps]
    linears = [each for each in functions if isinstance(each, stored.Linear)]
    assert linears and all(isinstance(each.weight, stored.Codes) for each in linears)
    assert all(each.weight.arrays[0].dtype == np.uint8 for each in linears)
    assert made.constants is None and made.program.block is None


def written(mask, rows, cell):
    return fused.write_rows(False, rows, mask, cell, fused.written(mask))


@pytest.mark.parametrize(
    "columns", [[[1, 0, 0]] * 2, [[0.5, 0, 0], [0, 0, 1]], [[1, 1, 0], [0] * 3]]
)
def test_a_write_mask_that_is_not_one_hot_takes_the_formula(columns):
    mask = torch.tensor([[columns]]).mT.half().contiguous()
    rows = torch.arange(8.0).reshape(1, 2, 2, 2).half()
    cell = StateCell(torch.ones(1, 2, 3, 2).half())
    assert fused.written(mask) is None
    written(mask, rows, cell)
    expected = 1 - mask.float().sum(-1, keepdim=True) + mask.float() @ rows.float()
    assert torch.equal(cell.value.float(), expected)


def check_as_formula(mask, rows, before) -> None:
    """Rows are written as the formula writes them."""
    cells = [StateCell(before.clone()) for _ in range(2)]
    written(mask, rows, cells[0])
    fused.write_rows(False, rows, mask, cells[1], None)
    np.testing.assert_array_equal(*(cell.value.numpy() for cell in cells))


def test_rows_of_each_sequence_are_written_in_place():
    mask = torch.zeros(2, 1, 6, 4).half()
    for b, s, t in ((0, 4, 0), (0, 5, 1), (0, 0, 2), (1, 2, 0)):  # a ring, a dummy
        mask[b, 0, s, t] = 1
    assert fused.written(mask) is not None
    check_as_formula(
        mask, torch.randn(2, 3, 4, 2).half(), torch.ones(2, 3, 6, 2).half()
    )


@pytest.mark.parametrize("T", [1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_spreads_over_the_cache_as_the_formula_spreads_it(T, value):
    mask, rows = torch.eye(3, T)[None, None].half(), torch.ones(1, 2, T, 2).half()
    before = torch.ones(1, 2, 3, 2).half()
    for bad, old in itertools.product((1.0, value), (1.0, value)):
        rows[0, 0, 0, 1], before[0, 1, 0, 0] = bad, old
        check_as_formula(mask, rows, before)


def test_columns_blocked_for_some_queries_only_are_kept():
    blocked = torch.full((1, 1, 2, 6), fused.BLOCKED).half()
    blocked[..., 0, 1:3] = blocked[..., 1, 2:4] = 0
    assert fused.visible("used", blocked) == slice(1, 4)
    blocked[..., 1, :] = fused.BLOCKED
    # a query that sees nothing attends to everything alike
    assert fused.visible("used", blocked) == slice(0, 6)


@pytest.mark.parametrize("T", [1, 2, 12])
def test_scores_as_low_as_the_mask_attend_to_blocked_columns_as_the_formula_does(T):
    rng = np.random.default_rng(T)
    q, key, value = (
        torch.from_numpy(rng.normal(size=shape).astype(np.float16))
        for shape in ((1, 1, T, 4), (1, 1, 6, 4), (1, 1, 6, 4))
    )
    # visible scores near -15,000, blocked ones near 0 - 10,000
    q[..., 0], key[..., :3, 0], key[..., 3:, 0] = (150, -100, 0)
    mask = torch.full((1, 1, T, 6), fused.BLOCKED).half()
    mask[..., :3] = 0
    weights = torch.softmax(
        (q.float() @ key.float().transpose(-1, -2)).half() + mask, -1
    )
    cells = [StateCell(v) for v in (key, value)]
    found = fused.attend(q, mask, *cells, fused.visible("used", mask))
    np.testing.assert_allclose(
        found.float(), weights.float() @ value.float(), atol=2e-3
    )
    assert weights[..., :3].max() < 1e-3
