from itertools import product

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from workbench import plots


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def marks(ax) -> list[str]:
    return [t.get_text() for t in ax.texts]


def test_the_matrix_marks_every_cell_and_leaves_out_what_cannot_exist():
    axes = product((1, 2), ("cold", "warm"), (True, False), ("fp16", "q4"), (31, 32))
    rows = [
        dict(
            batch=b,
            cache=c,
            streaming=s,
            format=f,
            context=n,
            verdict="not_run"
            if n == 32
            else "RED"
            if (b, c) == (2, "warm")
            else "GREEN",
        )
        for b, c, s, f, n in axes
    ]
    ax = plots.reuse_matrix(pd.DataFrame(rows))
    found = marks(ax)
    # two batches, cold in fp16 and warm in both formats; a cell stands for both paths
    assert len(found) == 2 * 3 * 2 and found.count("") == 6
    assert found.count("✓") == 4 and found.count("✗ stream\n✗ generate") == 2
    assert "batch 2, warm, q4" in [t.get_text() for t in ax.get_yticklabels()]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["not measured"]
    assert ax.get_title("left").startswith("restored caches: 8 of 24 sessions")


def test_patterns_have_a_panel_per_context_and_one_mark_per_configuration():
    rows = [
        {
            "hypothesis": name,
            "context": n,
            "cache": c,
            "path": p,
            "result": "FAIL" if name == "the report" else "ok",
        }
        for name, n, c, p in product(
            ("the report", "none"),
            (1024, 2048),
            ("hot", "warm"),
            ("stream", "generate"),
        )
    ]
    figure = plots.failure_patterns(pd.DataFrame(rows))
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "context 1024",
        "context 2048",
    ]
    assert all(marks(ax) == ["✗"] * 4 + ["✓"] * 4 for ax in figure.axes)


def test_first_token_draws_medians_with_their_range():
    rows = [
        {"temperature": t, "context": n, "ms": n / div + extra}
        for t, div in (("cold", 1), ("hot", 20))
        for n in (256, 512)
        for extra in (0, 2, 1)
    ]
    ax = plots.first_token(pd.DataFrame(rows))
    assert {
        line.get_label(): list(line.lines[0].get_ydata()) for line in ax.containers
    } == {"cold": [257, 513], "hot": [13.8, 26.6]}
    assert [t.get_text() for t in ax.get_xticklabels()] == ["256", "512"]
