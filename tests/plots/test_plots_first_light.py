"""The figures of a first light: a word in every cell, a line through every setting, and gaps that
say so."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from workbench import plots


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def texts(ax) -> list[str]:
    return [t.get_text() for t in ax.texts]


def test_a_rung_s_cells_say_how_it_ran_and_what_was_not_measured_is_hatched():
    cells = pd.DataFrame(
        [
            ("no state", "CPU_ONLY", "✓", 1.0),
            ("no state", "CPU_AND_NE", "✓", 1.0),
            ("state", "CPU_ONLY", "✗", 0.0),
            ("state", "CPU_AND_NE", None, None),
        ],
        columns=["rung", "column", "text", "good"],
    ).assign(machine="simulated Mac")
    ax = plots.placement_ladder(cells)
    assert texts(ax) == ["✓", "✓", "✗"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["no state", "state"]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["not measured"]
    assert "simulated Mac" in ax.get_title("left")


def test_a_line_goes_from_no_layer_through_the_points_of_its_setting():
    points = pd.DataFrame(
        {"setting": "CPU_AND_NE, T = 1", "layers": [1, 2, 4], "ms": [2.5, 3.0, 4.0]}
    ).assign(fit_ms=[2.5, 3.0, 4.0], dispatch_ms=2.0)
    ax = plots.dispatch(points)
    line = next(line for line in ax.lines if len(line.get_xdata()) == 4)
    assert line.get_xdata().tolist() == [0, 1, 2, 4]
    assert np.allclose(line.get_ydata(), [2.0, 2.5, 3.0, 4.0])
    assert [t.get_text() for t in ax.get_legend().get_texts()] == [
        "CPU_AND_NE, T = 1: 2 ms"
    ]


def test_the_host_s_bar_begins_where_core_ml_s_ends():
    parts = pd.DataFrame(
        [("one", "Core ML", 2.0), ("one", "host", 0.5)],
        columns=["setting", "part", "ms"],
    )
    device, host = plots.host_device(parts).patches
    assert (device.get_width(), host.get_x(), host.get_width()) == (2.0, 2.0, 0.5)
    assert host.get_hatch() and not device.get_hatch()


@pytest.mark.parametrize(
    ("draw", "columns"),
    [
        (plots.dispatch, ["setting", "layers", "ms", "fit_ms", "dispatch_ms"]),
        (plots.host_device, ["setting", "part", "ms"]),
    ],
)
def test_without_a_row_a_figure_says_that_nothing_was_measured(draw, columns):
    assert texts(draw(pd.DataFrame(columns=columns))) == ["not measured"]
