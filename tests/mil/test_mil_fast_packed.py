"""Weights of 4 and 6 bits that stay packed: the literal graph's weights bit for bit, float32 sums
in another order."""

from functools import reduce

import mutants
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from llvmlite import binding, ir
from numba import njit
from one_op import Op, Ref, Type, given, program

import miltorch
from miltorch import Executable
from miltorch.fast import lookup, packed, packed_rows, products
from miltorch.fast.lookup import ENTRIES, EXTREME, INT4, LUT4, LUT6
from miltorch.fast.matching import PatternGraph
from miltorch.fast.packed_rows import GROUP
from miltorch.fast.program import FastProgram
from miltorch.ops.convolution import FEW_COLUMNS
from workbench import Decoder

FORMS = (EXTREME, INT4, LUT4, LUT6)
SCALES = np.float16(
    [6e-8, 1e-7, 1e-6, 6e-5, 6.2e-5, 1e-3, 0.11, 1.0, 300.0, 8192.0, 65504.0]
)


def weight(form: int, rows: int, groups: int, tables: int, rng):
    """An operation that makes a weight [rows, K, 1, 1] dense; for EXTREME, its scales go from
    subnormal to overflowing."""
    K = groups * GROUP[form]
    if form <= INT4:
        values = rng.integers(-8, 8, (rows, K, 1, 1)).astype(np.int8)
        scale = rng.choice(SCALES, (rows, groups, 1, 1))
        scale[0, 0] = SCALES[0]
        if form == INT4:
            scale = np.exp(rng.uniform(-9.7, 8.3, scale.shape)).astype(np.float16)
            scale *= rng.choice([-1, 0, 1], scale.shape)
        inputs = {"data": values, "scale": scale}
        kind = "constexpr_blockwise_shift_scale"
    else:
        values = rng.integers(0, ENTRIES[form], (rows, K, 1, 1)).astype(np.uint8)
        lut = rng.normal(size=(tables, 1, 1, 1, ENTRIES[form], 1)).astype(np.float16)
        inputs, kind = {"indices": values, "lut": lut}, "constexpr_lut_to_dense"
    return Op(kind, "w", inputs, [("w", Type("FLOAT16", values.shape))])


def graph_of(op: Op, T: int = 1):
    """A convolution of x [1, K, T, 1] by the weight that `op` makes."""
    rows, K = op.outputs[0][1].shape[:2]
    x, y = Type("FLOAT16", (1, K, T, 1)), Type("FLOAT16", (1, rows, T, 1))
    conv = Op("conv", "y", {"x": Ref("x"), "weight": Ref("w")}, [("y", y)])
    return program([op, conv], {"x": x}, ["y"])


def read_packed(op: Op) -> tuple[packed.Packed, np.ndarray]:
    """The packed weight that the decode path reads, and the literal graph's [R, K]."""
    made = graph_of(op)
    [(linear, _, _)] = PatternGraph(made, (("conv", products.linear_pattern),)).special[
        "y"
    ]
    literal = Executable(program([op], {}, ["w"])).constant("w")
    return linear.weight, literal.float().numpy()[:, :, 0, 0]


@pytest.mark.parametrize("form", FORMS)
@given(
    rows=st.integers(1, 4),
    groups=st.integers(1, 9),
    tables=st.integers(1, 3),
    seed=st.integers(0),
)
def test_weights_are_those_of_the_literal_graph_bit_for_bit(
    form, rows, groups, tables, seed
):
    op = weight(form, rows * tables, groups, tables, np.random.default_rng(seed))
    found, wanted = read_packed(op)
    assert found.form == form and found.shape == wanted.shape
    np.testing.assert_array_equal(packed.dense(found, 0, len(wanted)), wanted)
    np.testing.assert_array_equal(packed.dense(found, 1, len(wanted)), wanted[1:])
    both = packed.dense(packed.joined([found, found]), 0, 2 * len(wanted))
    np.testing.assert_array_equal(both, np.concatenate([wanted, wanted]))


@pytest.mark.parametrize("form", FORMS)
@given(
    count=st.integers(1, 14),
    rows=st.integers(1, 4),
    groups=st.integers(1, 5),
    tables=st.integers(1, 3),
    seed=st.integers(0),
)
def test_products_differ_in_the_order_of_float32_sums_alone(
    form, count, rows, groups, tables, seed
):
    """Within the bound of a float32 sum of K terms in any order: K units of 2^-24 of the sum of
    magnitudes."""
    rng = np.random.default_rng(seed)
    found, dense = read_packed(weight(form, rows * tables, groups, tables, rng))
    dense = np.where(np.isfinite(dense), dense, 0).astype(float)
    if form == EXTREME:  # what overflows has no distance
        found.scale[found.scale.view(np.float16) > 8188] = 0
    x = torch.from_numpy(rng.normal(size=(count, dense.shape[1])).astype(np.float32))
    dense = packed.dense(found, 0, len(dense)).double().numpy()
    bound = np.abs(x.double().numpy()) @ np.abs(dense).T * dense.shape[1] * 2**-24
    product = products._packed_product(found, x).double().numpy()
    assert (np.abs(product - x.double().numpy() @ dense.T) <= bound).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_large_product_on_two_threads_is_the_small_one(form):
    rng = np.random.default_rng(form)
    found, _ = read_packed(weight(form, 96, 9, 2, rng))
    if form == EXTREME:
        found.scale[found.scale.view(np.float16) > 300] = 0
    x = torch.from_numpy(rng.normal(size=(5, found.shape[1])).astype(np.float32))
    assert found.shape[0] * found.shape[1] < packed.SMALL_PRODUCT
    wanted = [packed.product(found, rows) for rows in (x, x[:1])]
    many = packed.joined([found] * 8)
    for rows, part in zip((x, x[:1]), wanted, strict=True):
        assert torch.equal(packed.product(many, rows), part.repeat(1, 8))


@pytest.mark.parametrize("side", [16, 32])
@pytest.mark.parametrize("form", FORMS)
def test_values_of_shuffled_bytes_are_those_of_the_literal_graph(
    form, side, monkeypatch
):
    """What processors without AVX-512 execute; those without 32 bytes in a register take 16."""
    for module in (lookup, packed, packed_rows):
        monkeypatch.setattr(module, "PERMUTES", False, raising=False)
        monkeypatch.setattr(module, "SIDE", side, raising=False)
    # groups of 128 weights, of 64, and of 32
    found, wanted = read_packed(weight(form, 6, 7, 2, np.random.default_rng(form)))
    fill, out = packed_rows._fill(form), np.empty(wanted.shape, np.float32)

    @njit
    def make_dense(codes, scale, out):
        for r in range(len(codes)):
            start = packed_rows._factors(form, scale, r, len(codes), out.shape[1])
            fill(codes, r, scale, start, out, r)

    make_dense(found.codes, found.scale, out)
    np.testing.assert_array_equal(out, wanted)


def test_tables_are_table_instructions_on_arm(monkeypatch):
    """Cross-compiled: one lookup for each of the three planes of four tables, and no call."""
    for name, value in (("PERMUTES", False), ("X86", False), ("SIDE", 16)):
        monkeypatch.setattr(lookup, name, value)
    places = ir.IntType(16).as_pointer(), ir.HalfType().as_pointer()
    vectors = lookup.CODES.as_pointer(), lookup.FLOATS.as_pointer()
    module = ir.Module()
    kind = ir.FunctionType(ir.VoidType(), [*places, *vectors])
    made = ir.Function(module, kind, "lookups")
    builder = ir.IRBuilder(made.append_basic_block())
    scale, values, codes, out = made.args
    tables = [lookup.scaled_table(form, builder, scale) for form in (EXTREME, INT4)]
    tables += [lookup.stored_table(form, builder, values) for form in (LUT4, LUT6)]
    found = [table.lookup(builder.load(codes)) for table in tables]
    builder.store(reduce(builder.fadd, sum(found, [])), out)
    builder.ret_void()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu="apple-m1", opt=3)
    assembly = machine.emit_assembly(binding.parse_assembly(str(module)))
    instructions = [line.split()[0] for line in assembly.splitlines() if line.strip()]
    assert instructions.count("tbl") == 12 and "bl" not in instructions


@pytest.mark.usefixtures("torch_products")
@pytest.mark.parametrize("T", [1, 3, 20])
@pytest.mark.parametrize("form", FORMS)
def test_a_program_gives_what_its_literal_graph_gives(form, T):
    rng = np.random.default_rng(T)
    op = weight(form, 12, 3, 2, rng)
    if form <= INT4:  # 1e-7 is subnormal
        scales = np.full_like(op.inputs["scale"], 0.11)
        scales[0] = 0.11 if form == INT4 else 1e-7
        op.inputs["scale"] = scales
    made = graph_of(op, T)
    x = torch.from_numpy(
        rng.normal(size=(1, 3 * GROUP[form], T, 1)).astype(np.float16)
    ).float()
    path = FastProgram(made)
    for _ in range(2):  # the second call runs the bytecode, where there is one
        found, wanted = (
            runner.run({"x": x}, {})["y"] for runner in (path, Executable(made))
        )
        assert (found - wanted).abs().max() <= 2**-10 * wanted.abs().max()
    assert bool(list(path.bytecodes.values())[0]) == (T < FEW_COLUMNS)


def refused(change) -> bool:
    """Whether a weight is read dense after `change` of its operation."""
    op = weight(INT4, 4, 2, 1, np.random.default_rng(0))
    op = change(op) or op
    [(linear, _, _)] = PatternGraph(
        graph_of(op), (("conv", products.linear_pattern),)
    ).special["y"]
    return linear.form == 2


def with_inputs(**inputs):
    return lambda op: op.inputs.update(inputs)


@pytest.mark.parametrize(
    "change",
    [
        with_inputs(offset=np.ones((4, 2, 1, 1), np.int8)),
        with_inputs(data=np.full((4, 64, 1, 1), 9, np.int8)),
        with_inputs(scale=np.ones((4, 4, 1, 1), np.float16)),
        with_inputs(scale=np.ones((2, 2, 1, 1), np.float16)),
    ],
    ids=["offset", "int8", "blocks of 16", "blocks of rows"],
)
def test_what_is_compressed_otherwise_becomes_dense(change):
    assert refused(change) and not refused(lambda op: None)


@pytest.mark.parametrize(
    "preset, form", [("int4-block32", INT4), ("lut4", LUT4), ("lut6", LUT6)]
)
def test_a_bundle_holds_its_weights_as_they_are_stored(exports, preset, form):
    """Every projection packed; bytes in memory within a table of those in the file."""
    bundle = exports.bundle(
        exports.checkpoint("llama", intermediate_size=128), compress=preset
    )
    made = FastProgram(miltorch.read(bundle.package(bundle.shards("layers")[0])))
    linears = [
        n.function for n in made.nodes if isinstance(n.function, products.Linear)
    ]
    assert len(linears) == 4 and {linear.form for linear in linears} == {form}
    weights = sum(np.prod(linear.weight.shape) for linear in linears)
    held = sum(array.nbytes for linear in linears for array in linear.arrays)
    bits = {INT4: 4.5, LUT4: 4, LUT6: 6}[form]
    rows = sum(linear.weight.shape[0] for linear in linears)
    tables = 7 * 2 * lookup.STORED.get(form, 0)
    assert held == weights * bits / 8 + (2 * rows + tables if tables else 0)


@pytest.mark.usefixtures("torch_products")
@pytest.mark.parametrize("preset", ["int4-block32", "lut4", "lut6"])
def test_decoding_stays_close_to_the_literal_graph(exports, preset):
    """Every logit within 1% of the largest, token by token and for a prompt."""
    bundle = exports.bundle(
        exports.checkpoint("llama", intermediate_size=128), compress=preset
    )
    fast, literal = (Decoder(bundle, "portable", fast=kind) for kind in (True, False))
    prompt = np.random.default_rng(0).integers(0, bundle.manifest.dims.V, 20).tolist()
    pairs = [[decoder.prefill(prompt) for decoder in (fast, literal)]]
    for token in prompt[:4]:
        pairs.append([decoder.decode_one_token([token]) for decoder in (fast, literal)])
    for found, wanted in pairs:
        assert np.abs(found - wanted).max() < 1e-2 * np.abs(wanted).max()
    assert all(any(model.fast.bytecodes.values()) for model in fast.layers + fast.heads)


def test_changed_programs_of_packed_weights_mean_the_same_on_both_paths(exports):
    kinds = [("llama", {"compress": preset}) for preset in ("int4-block32", "lut4")]
    rows = mutants.run(mutants.packages_of(exports, kinds), 30)
    assert [row for row in rows if row[1] not in mutants.GOOD] == []
    assert sum(row[1] == "equal" for row in rows) > 5 and len(rows) == 30


@pytest.mark.parametrize("scale, form", [(511.0, 1), (512.0, 2), (np.nan, 2)])
def test_int8_weights_become_dense_where_a_product_may_not_be_finite(scale, form):
    values = np.arange(-128, 128).astype(np.int8).reshape(4, 64, 1, 1)
    scales = np.full((1, 1, 1, 1), scale, np.float16)
    inputs = {"data": values, "scale": scales}
    kind, result = "constexpr_blockwise_shift_scale", Type("FLOAT16", values.shape)
    graph = PatternGraph(
        graph_of(Op(kind, "w", inputs, [("w", result)])),
        (("conv", products.linear_pattern),),
    )
    [(linear, _, _)] = graph.special["y"]
    assert linear.form == form
