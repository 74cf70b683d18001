"""Figures of choices and predictions: every configuration a point, the fastest that passes ringed,
misfit in the title."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from workbench import plots


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def configurations(verdicts) -> pd.DataFrame:
    count = len(verdicts)
    return pd.DataFrame(
        {
            "tokens_per_s": np.arange(count, 0, -1) * 10.0,
            "worst_cosine": 1 - 10.0 ** -np.arange(2, 2 + count),
            "verdict": verdicts,
        }
    )


def lines(ax) -> dict[str, np.ndarray]:
    return {line.get_label(): np.column_stack(line.get_data()) for line in ax.lines}


def test_every_configuration_is_a_point_and_the_fastest_that_passes_is_ringed():
    found = lines(
        plots.speed_against_fidelity(
            configurations(["RED", "GREEN", "GREEN", "not_run"])
        )
    )
    assert {name: len(points) for name, points in found.items()} == {
        "GREEN": 2,
        "RED": 1,
        "not_run": 1,
        "best that pass": 2,
        "fastest that passes": 1,
    }
    assert np.allclose(found["fastest that passes"], [[1e-3, 30]])
    assert np.allclose(found["best that pass"], [[1e-4, 20], [1e-3, 30]])
    assert np.allclose(found["RED"], [[1e-2, 40]])


def test_what_another_beats_in_speed_and_cost_is_not_on_the_line_of_the_best():
    rows = configurations(["GREEN"] * 3).assign(
        kl_mean=[0.01, 0.02, 0.005], name=["a", "b", "c"]
    )
    ax = plots.speed_against_fidelity(rows, max_kl=0.05)
    assert np.allclose(lines(ax)["best that pass"], [[0.005, 10], [0.01, 30]])
    assert [text.get_text() for text in ax.texts] == ["c", "a"]
    assert lines(ax)["your limit, 0.05"][:, 0].tolist() == [0.05, 0.05]
    assert "KL" in ax.get_xlabel()


def test_the_fastest_of_every_compression_is_named_and_runs_have_a_range():
    rows = configurations(["GREEN"] * 4).assign(
        kl_mean=[0.01, 0.01, 0.02, 0.02],
        name=["a", "b", "c", "d"],
        compress=["fp16", "fp16", "lut4", "lut4"],
        slowest=[39.0, 29.0, 19.0, 9.0],
        fastest=[41.0, 31.0, 21.0, 11.0],
        n=3,
    )
    ax = plots.speed_against_fidelity(rows)
    assert [text.get_text() for text in ax.texts] == ["a", "c"]
    (ranges,) = (c.get_segments() for c in ax.collections)
    assert [[y for _, y in ends] for ends in ranges] == [
        [v - 1, v + 1] for v in (40, 30, 20, 10)
    ]
    assert "median and range; runs: 3" in ax.get_title("left")


def test_where_none_passes_none_is_ringed():
    assert set(lines(plots.speed_against_fidelity(configurations(["RED", "RED"])))) == {
        "RED"
    }


def test_the_roofline_shows_every_figure_by_model_and_its_median_misfit():
    judged = pd.DataFrame(
        {
            "figure": ["A, x", "A, y", "B, z"],
            "published_ms": [1.0, 10.0, 100.0],
            "predicted_ms": [1.1, 5.0, 100.0],
        }
    )
    ax = plots.roofline(judged)
    assert {n: len(points) for n, points in lines(ax).items()} == {
        "equal": 2,
        "A": 2,
        "B": 1,
    }
    assert ax.get_title("left") == "roofline, median misfit 10%"
    named = judged.assign(chip="M1", weights="int8-tensor streamed as fp16")
    assert "A, M1, int8-tensor streamed as fp16" in lines(plots.roofline(named))
