"""The text of `explain` answers first and says what its tables mean."""

from workbench.cli.explaining_text import (
    MAX_VARIANTS,
    WRONG_WEIGHTS,
    format_explanation,
)
from workbench.cli.output import format_table

PART = {"layer": 0, "storage": 0.0, "quantization": 0.01, "total": 0.01}
ROW = {
    "shard": "layers_00_00",
    "op": "op_1",
    "kind": "add",
    "module": "layers.0",
    "max_abs": 120.0,
    "headroom_bits": 9.1,
}
RESULT = {
    "verdict": "GREEN",
    "gates": [],
    "parts": [PART],
    "chained": [PART],
    "fits": "as configured",
    "conclusion": "Layers compute it.",
    "variants": [{"name": f"v{i}", "relative_rms": 0.1} for i in range(12)],
    "ranges": {
        "ops": 3,
        "first_inf": None,
        "first_nan": {"shard": "head_00", "op": "op_2"},
        "min_headroom_bits": 9.1,
        "worst": [ROW],
    },
}


def test_the_conclusion_comes_before_every_table():
    lines = format_explanation(RESULT)
    assert lines[0].split() == ["export", "GREEN"]
    conclusion = next(
        i for i, line in enumerate(lines) if line.startswith("conclusion")
    )
    assert conclusion < lines.index(
        "error by part, each layer fed Hugging Face's input"
    )


def test_every_table_says_what_its_columns_mean():
    text = "\n".join(format_explanation(RESULT))
    for name in ("storage", "quantization", "total", "relative_rms", "max_abs"):
        assert f"{name}: " in text
    assert "65504" in text and "bits below fp16's overflow" in text
    assert "first nan" in text and "first inf" not in text


def test_wrong_weights_are_said_to_be_among_the_errors_of_quantization():
    gate = {"name": "weights", "value": 9.0, "threshold": 1.0, "reason": "a tensor"}
    red = RESULT | {"verdict": "RED", "gates": [gate | {"verdict": "RED"}]}
    green = RESULT | {"gates": [gate | {"verdict": "GREEN"}]}
    assert WRONG_WEIGHTS in "\n".join(format_explanation(red))
    assert WRONG_WEIGHTS not in "\n".join(format_explanation(green))


def test_a_cut_table_of_variants_says_where_the_rest_is():
    text = "\n".join(format_explanation(RESULT))
    assert f"({MAX_VARIANTS} of 12; --json prints all)" in text
    assert f"v{MAX_VARIANTS - 1}" in text and f"v{MAX_VARIANTS} " not in text


def test_what_was_not_asked_is_left_out():
    (title, *rows) = format_explanation({"ranges": RESULT["ranges"]})[1:3]
    assert title.startswith("operations") and "error by part" not in "".join(rows)


def test_texts_of_a_table_begin_at_the_left_and_numbers_end_at_the_right():
    rows = [{"name": "a", "n": 1.5}, {"name": "longer", "n": 20.25}]
    first, second, third = format_table(rows)
    assert first.startswith("name ") and second.startswith("a ")
    assert len(first) == len(second) == len(third)
