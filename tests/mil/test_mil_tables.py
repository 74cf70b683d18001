"""Weights that are stored as codes into lookup tables, one table for each group of rows: miltorch
has the values of coremltools' own decompression, to the bit, in the plain operation and in the
compiled kernels."""

import numpy as np
import pytest
import torch

from miltorch.ops import OPERATIONS
from miltorch.stored import SMALL_TABLE, TableWeight, table_weight

SHAPES = [  # (rows, columns, rows of a group)
    (12, 10, 1),  # a table for each row
    (12, 10, 3),  # groups of a number of rows that is no power of two
    (12, 7, 3),  # with an odd number of columns, a byte has one code
    (144, 32, 8),
    (96, 66, 16),
    (70, 6, 70),  # one table, for more rows than share a buffer
]
BITS = [1, 2, 3, 4, 6, 8]


def draw_codes_and_tables(
    bits: int, rows: int, columns: int, group: int
) -> tuple[np.ndarray, np.ndarray]:
    """Random uint8 codes [rows, columns, 1, 1] and sorted fp16 tables
    [rows / group, 1, 1, 1, 2^bits, 1]."""
    rng = np.random.default_rng(bits)
    entries = 1 << bits
    shape = rows // group, 1, 1, 1, entries, 1
    lut = np.sort(rng.normal(size=shape).astype(np.float16), axis=4)
    codes = rng.integers(0, entries, (rows, columns, 1, 1)).astype(np.uint8)
    return codes, lut


def decompress_by_coremltools(codes: np.ndarray, lut: np.ndarray) -> np.ndarray:
    """The fp16 values [rows, columns, 1, 1]."""
    from coremltools.converters.mil.mil.ops.defs.iOS18 import compression

    return compression.constexpr_lut_to_dense.decompress(codes, lut, None)


@pytest.mark.slow("numba compiles the kernels")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_tables_of_groups_have_coremltools_values_to_the_bit(
    ct, bits, rows, columns, group
):
    codes, lut = draw_codes_and_tables(bits, rows, columns, group)
    expected = decompress_by_coremltools(codes, lut)
    plain_operation = OPERATIONS["constexpr_lut_to_dense"].function
    plain = plain_operation(torch.from_numpy(codes), torch.from_numpy(lut))
    np.testing.assert_array_equal(plain.numpy(), expected)
    weight = table_weight(codes, lut)
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
    """Each row of x is one-hot, so that the products are columns of the weight, exactly."""
    weight = table_weight(*draw_codes_and_tables(bits, rows, columns, group))
    x = torch.zeros(count, columns, dtype=torch.float16)
    column_of_row = torch.arange(count) % columns
    x[torch.arange(count), column_of_row] = 1
    product = weight.product(x, np.zeros(rows, np.float32))
    np.testing.assert_array_equal(product.float(), weight[:][:, column_of_row].T)


def test_tables_take_the_bytes_of_their_entries_alone():
    """Tables of pairs of entries, for all groups of 8 rows, would take as many bytes as the
    codes."""
    bits4 = table_weight(*draw_codes_and_tables(4, rows=64, columns=576, group=8))
    bits6 = table_weight(*draw_codes_and_tables(6, rows=64, columns=576, group=16))
    assert bits4.codes.nbytes == 64 * 288 and bits4.tables.shape == (8, SMALL_TABLE)
    assert bits6.codes.nbytes == 64 * 576 and bits6.tables.shape == (4, 64)


@pytest.mark.parametrize(("bits", "group"), [(4, 2), (6, 2), (6, 1)])
def test_a_package_of_grouped_tables_has_the_weights_of_coremltools(
    models, ct, tmp_path, bits, group
):
    from coremltools.optimize import coreml as cto

    import miltorch
    from miltorch.constants import Constants
    from miltorch.coremltools_import import quiet

    config = cto.OptimizationConfig(
        global_config=cto.OpPalettizerConfig(
            mode="uniform",
            nbits=bits,
            granularity="per_grouped_channel",
            group_size=group,
            weight_threshold=0,
        )
    )

    def save_and_read(model, name: str) -> miltorch.Program:
        path = tmp_path / f"{name}.mlpackage"
        model.save(str(path))
        return miltorch.read(path)

    with quiet():
        compressed = cto.palettize_weights(models["fp16"], config)
        grouped = save_and_read(compressed, "grouped")
        dense = save_and_read(cto.decompress_weights(compressed), "dense")
    tables = [op for op in grouped.block.walk() if op.kind == "constexpr_lut_to_dense"]
    assert tables
    values, expected = Constants(grouped), Constants(dense)
    for op in tables:
        np.testing.assert_array_equal(values[op.key], expected[op.key])
