"""Lookup tables of groups of rows: miltorch has the values of coremltools' own
decompression, to the bit, in the plain operation and in the compiled kernels."""

import numpy as np
import pytest
import torch

from miltorch.ops import OPERATIONS
from miltorch.stored import PACKED, TableWeight, table_weight

# rows, columns, group: groups of one row, of a number that is no power of two, of all
# rows, and more rows than share a buffer; odd columns have one code a byte
SHAPES = [(12, 10, 1), (12, 10, 3), (12, 7, 3), (144, 32, 8), (96, 66, 16), (70, 6, 70)]
BITS = [1, 2, 3, 4, 6, 8]


def stored_table(bits: int, rows: int, columns: int, group: int):
    """Random indices [rows, columns, 1, 1] and tables of every group."""
    rng = np.random.default_rng(bits)
    shape = rows // group, 1, 1, 1, 1 << bits, 1
    lut = np.sort(rng.normal(size=shape).astype(np.float16), axis=4)
    return rng.integers(0, 1 << bits, (rows, columns, 1, 1)).astype(np.uint8), lut


def decompressed(indices: np.ndarray, lut: np.ndarray) -> np.ndarray:
    """The values by coremltools' own code."""
    from coremltools.converters.mil.mil.ops.defs.iOS18 import compression

    return compression.constexpr_lut_to_dense.decompress(indices, lut, None)


@pytest.mark.slow("numba compiles the kernels")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_tables_of_groups_have_coremltools_values_to_the_bit(
    ct, bits, rows, columns, group
):
    indices, lut = stored_table(bits, rows, columns, group)
    expected = decompressed(indices, lut)
    plain = OPERATIONS["constexpr_lut_to_dense"].function(
        torch.from_numpy(indices), torch.from_numpy(lut)
    )
    np.testing.assert_array_equal(plain.numpy(), expected)
    weight = table_weight(indices, lut)
    expected = expected.reshape(rows, columns)
    assert weight.columns == columns
    np.testing.assert_array_equal(weight[:].numpy(), expected)
    np.testing.assert_array_equal(weight[5:11].numpy(), expected[5:11])
    joined = TableWeight.concatenated([weight, weight])
    np.testing.assert_array_equal(joined[:].numpy(), np.tile(expected, (2, 1)))


@pytest.mark.parametrize("count", [1, 4, 20])
@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_products_read_the_table_of_every_group(bits, rows, columns, group, count):
    """Activations that select one column leave the sums exact."""
    indices, lut = stored_table(bits, rows, columns, group)
    weight = table_weight(indices, lut)
    x = torch.zeros(count, columns, dtype=torch.float16)
    chosen = torch.arange(count) % columns
    x[torch.arange(count), chosen] = 1
    product = weight.product(x, np.zeros(rows, np.float32))
    np.testing.assert_array_equal(product.float(), weight[:][:, chosen].T)


def test_tables_take_the_bytes_of_their_entries_alone():
    """Pairs of all groups of 8 rows would take as many bytes as the codes."""
    four = table_weight(*stored_table(4, 64, 576, 8))
    six = table_weight(*stored_table(6, 64, 576, 16))
    assert four.codes.nbytes == 64 * 288 and four.tables.shape == (8, PACKED)
    assert six.codes.nbytes == 64 * 576 and six.tables.shape == (4, 64)


@pytest.mark.parametrize(("bits", "group"), [(4, 2), (6, 2), (6, 1)])
def test_a_package_of_grouped_tables_is_coremltools_own(
    models, ct, tmp_path, bits, group
):
    from coremltools.optimize import coreml as cto

    import miltorch
    from miltorch.constants import Constants
    from miltorch.quiet import quiet

    config = cto.OptimizationConfig(
        global_config=cto.OpPalettizerConfig(
            mode="uniform",
            nbits=bits,
            granularity="per_grouped_channel",
            group_size=group,
            weight_threshold=0,
        )
    )

    def constants(model, name):
        path = tmp_path / f"{name}.mlpackage"
        model.save(str(path))
        program = miltorch.read(path)
        return Constants(program), program

    with quiet():
        grouped = cto.palettize_weights(models["fp16"], config)
        stored, program = constants(grouped, "grouped")
        dense, _ = constants(cto.decompress_weights(grouped), "dense")
    tables = [op for op in program.block.walk() if op.kind == "constexpr_lut_to_dense"]
    assert tables
    for op in tables:
        np.testing.assert_array_equal(stored[op.key], dense[op.key])
