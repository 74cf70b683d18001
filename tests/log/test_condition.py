"""A user's condition selects rows and runs nothing."""

import pandas as pd
import pytest
from refusal import refused

from workbench.log.condition import MAX_LENGTH, rows_that_fit

# of the shape of a user's condition, and what pandas would find elsewhere than in columns
UNKNOWN = "depht == 1", "index == 1", "Timestamp == 1"
ROWS = pd.DataFrame(
    {
        "T": pd.array([1, 4, None], "Int64"),
        "compress": pd.array(["fp16", None, "int8-channel"], "str"),
        "cosine": [0.9, float("nan"), -0.5],
        "fast": pd.array([True, False, None], "boolean"),
    }
)


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("T == 4", [1]),
        ("  T == 4 ", [1]),
        ("T >= 1 and T < 4", [0]),
        ("0 < T < 4", [0]),
        ("compress == 'fp16' or T == 4", [0, 1]),
        ("compress in ['fp16', 'int8-channel']", [0, 2]),
        ("compress not in ('fp16',)", [1, 2]),
        ("cosine < -0.1", [2]),
        ("not (T == 1 or T == 4) and cosine < 0", []),
        ("fast == True", [0]),
        ("fast", [0]),
    ],
)
def test_comparisons_of_columns_select_rows(condition, rows):
    assert rows_that_fit(ROWS, condition).index.tolist() == rows


@pytest.mark.parametrize(
    "condition",
    [
        "@pd.io.common.os.system('touch {file}')",
        "@__builtins__.open('{file}', 'w')",
        "compress.str.startswith('fp')",
        "T.__class__",
        "T.to_pickle('{file}')",
        "__import__('os').system('touch {file}')",
        "T == __import__('os').system('touch {file}')",
        "T[0] == 1",
        "[T for T in [1]] == T",
        "T == {{1: 2}}",
        "T + 1 == 2",
        "(T := 4) == 4",
        "T == 'a' * 10 ** 9",
        "f'{{T}}' == '1'",
        "(lambda: 1)() == 1",
        "T == None",
        "T == b'x'",
        "`T` == 1",
        "T == 4; T == 1",
        "compress == 'a\0'and\0",
        "1",
        "'text'",
        "",
        "(" * 300 + "T" + ")" * 300,
        "T == " + "-" * (MAX_LENGTH - 5) + "1",
        "T == 4" + " or T == 4" * MAX_LENGTH,
    ],
)
def test_anything_else_is_refused_with_what_is_allowed_and_nothing_runs(
    condition, tmp_path
):
    file = tmp_path / "written"
    with refused("log filter.*comparisons .*joined by and, or, not.*T == 4 and"):
        rows_that_fit(ROWS, condition.format(file=file))
    assert not file.exists()


@pytest.mark.parametrize("condition", UNKNOWN)
def test_an_unknown_column_is_refused_with_the_columns_of_a_small_table(condition):
    with refused("log filter.*no column.*the name of a column.*T, compress, cosine"):
        rows_that_fit(ROWS, condition)


def test_an_unknown_column_of_a_wide_table_is_refused_with_the_nearest():
    wide = ROWS.assign(**{f"measured_{number}": 1.0 for number in range(20)})
    with refused("did you mean cosine\\? If not, workbench log --json") as problem:
        rows_that_fit(wide, "Cosin == 1")
    assert "measured_7" not in str(problem.value)
