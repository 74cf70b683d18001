"""The figure of predicted over measured times: every row on logarithmic axes, hollow where no
fit has seen it."""

import pandas as pd
import pytest

from workbench import plots

ROWS = pd.DataFrame(
    {
        "ms": [1.0, 10.0, 100.0, None],
        "predicted_ms": [1.5, 9.0, 80.0, 5.0],
        "low_ms": [1.0, 6.0, 50.0, 3.0],
        "high_ms": [2.0, 12.0, 120.0, 8.0],
        "fitted": [True, False, True, True],
        "source": ["a", "a", "b", "b"],
    }
)


def test_every_row_stands_at_its_times_with_its_interval():
    figure = plots.predictions(ROWS, hue="source", factor=1.6)
    (ax,) = figure.axes
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert ax.get_xlim() == ax.get_ylim()
    marks = [container.lines[0] for container in ax.containers]
    points = {tuple(xy) for mark in marks for xy in mark.get_xydata().tolist()}
    assert points == {(1.0, 1.5), (10.0, 9.0), (100.0, 80.0)}
    hollow = [mark for mark in marks if mark.get_markerfacecolor() == "white"]
    assert [mark.get_xydata().tolist() for mark in hollow] == [[[10.0, 9.0]]]
    bars = [container.lines[2][0].get_segments() for container in ax.containers]
    ends = sorted(bar[:, 1].tolist() for group in bars for bar in group)
    assert ends == [pytest.approx(pair) for pair in ([1, 2], [6, 12], [50, 120])]


def test_the_legend_names_sources_and_counts_what_has_no_time():
    (legend,) = plots.predictions(ROWS, hue="source", factor=1.6).legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert sorted(labels) == ["a", "a factor of 1.60", "b", "equal"]
    notes = legend.get_title().get_text()
    assert "hollow: in no fit" in notes and "1" in notes
    (legend,) = plots.predictions(ROWS, bars="bars: 90% intervals").legends
    assert "bars: 90% intervals" in legend.get_title().get_text()


def test_each_group_has_a_colour_and_a_mark_that_no_other_has():
    rows = pd.concat([ROWS.assign(source=str(number)) for number in range(32)])
    figure = plots.predictions(rows, hue="source")
    groups = [c for c in figure.axes[0].containers if not c.get_label()[0] == "_"]
    marks = [group.lines[0] for group in groups]
    looks = {(mark.get_color(), mark.get_marker()) for mark in marks}
    assert len(groups) == len(looks) == 32
    # neighbours in the legend differ in both
    first, second = marks[:2]
    assert first.get_color() != second.get_color()
    assert first.get_marker() != second.get_marker()
