"""Figures: what is broken or was not measured is marked, nothing overlaps at the widths
of a column and of a page, equal data give equal bytes."""

import json
from itertools import product

import matplotlib
import numpy as np
import pandas as pd
import pytest
from circle import wide
from matplotlib.collections import PolyCollection, QuadMesh
from tiny import ROOT

from workbench import plots
from workbench.check import compare, validate

TOKENS = ["set", "·garden", "↵", "a\\$b", "carrot", "Ωmega", "7", "to", "the", "end"]


def fidelity(fault=(), *, names=("sound", "faulty")) -> pd.DataFrame:
    """Rows of two bundles, the second with a fault at T = 4 at the positions `fault`."""
    errors = 0.003 * np.exp(np.random.default_rng(0).normal(size=(3, len(TOKENS))) / 4)
    rows = []
    for (layer, position), error in np.ndenumerate(errors):
        for name, T in product(names, (1, 4)):
            wrong = name == "faulty" and T == 4 and position in fault
            own = error * 60 if wrong else error
            rows.append((f"{name}, T = {T}", T, layer, position, own))
    table = pd.DataFrame(rows, columns=["panel", "T", "layer", "position", "error"])
    table = table.assign(tensor="update", mode="isolated", budget=0.003, finite=True)
    return table.assign(cosine=1 - table["error"] ** 2 / 2)


def drawn(figure, kind):
    return [c for ax in figure.axes for c in ax.collections if isinstance(c, kind)]


def texts(figure) -> str:
    found = figure.findobj(matplotlib.text.Text)
    return "\n".join(text.get_text() for text in found)


def test_a_planted_fault_differs_from_sound_cells_by_two_decades_and_is_hatched():
    rows = fidelity(fault=range(1, 10))
    figure = plots.heatmap(rows, by="panel", tokens=TOKENS)
    *sound, faulty = (mesh.get_array() for mesh in drawn(figure, QuadMesh)[:4])
    assert faulty[:, 1:].min() > 100 * max(cells.max() for cells in sound)
    assert (faulty[:, 0] == sound[0][:, 0]).all()
    hatched = [len(c.get_paths()) for c in drawn(figure, PolyCollection)]
    assert sum(hatched) == faulty[:, 1:].size
    assert f"{validate.BUDGET_FACTOR:g} × what rounding alone" in texts(figure)


def test_a_cell_is_hatched_where_its_gate_would_be_red():
    assert plots.LIMIT_FACTOR == validate.BUDGET_FACTOR
    assert plots.HALF_ULP == compare.HALF_ULP
    limit = plots.LIMIT_FACTOR * np.hypot(0.003, plots.HALF_ULP)
    rows = fidelity(names=["sound"]).query("T == 1").head(10)
    rows = rows.assign(error=np.r_[[limit * 1.001] * 3, [limit * 0.999] * 7])
    figure = plots.heatmap(rows, metric="error")
    assert sum(len(c.get_paths()) for c in drawn(figure, PolyCollection)) == 3


def test_equal_values_at_all_T_are_drawn_once_and_said():
    figure = plots.heatmap(fidelity(names=["sound"]))
    assert len(figure.axes) == 2  # a panel and the bar
    assert "T = 1 and T = 4: equal bit for bit" in texts(figure)
    assert "equal" not in texts(plots.heatmap(fidelity([3], names=["faulty"])))


def test_what_is_not_finite_or_not_measured_is_named():
    rows = fidelity([1])
    broken = rows["layer"].eq(1) & rows["position"].eq(2)
    rows.loc[broken, ["finite", "cosine", "error"]] = [False, np.nan, np.nan]
    missing = rows["panel"].eq("faulty, T = 4") & rows["position"].eq(4)
    figure = plots.heatmap(rows[~missing], by="panel")
    assert "not finite" in texts(figure) and "not measured" in texts(figure)
    only_broken = plots.heatmap(rows[broken & rows["T"].eq(1)])
    assert "not finite" in texts(only_broken)
    bars = plots.bars(pd.DataFrame({"ms": [2.0, np.nan]}, index=["a", "b"]))
    assert texts(bars).count("not measured") == 1 and "nan" not in texts(bars)


SHIPPED = {
    f"{path.parts[-3][:2]}_{path.stem}": path
    for path in sorted((ROOT / "experiments").glob("[0-9]*/figures/*.json"))
}


def draw(name, **more):
    """A shipped figure from its data."""
    part = json.loads(SHIPPED[name].read_text())
    data = pd.read_parquet(SHIPPED[name].with_suffix(".parquet"))
    return getattr(plots, part["plot"])(data, **part["options"], **more)


@pytest.mark.parametrize("width", [plots.COLUMN, wide(plots.PAGE)])
@pytest.mark.parametrize("name", SHIPPED)
def test_no_text_overlaps_another_or_leaves_the_figure(name, width):
    """And a log scale has labels of one kind."""
    figure = draw(name, width=width)
    figure.draw_without_rendering()
    whole = figure.bbox.padded(1)
    # labels of ticks beyond the ends of their axis, which are not drawn
    outside = set()
    for axis in figure.findobj(matplotlib.axis.Axis):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low <= tick.get_loc() <= high:
                outside |= {tick.label1, tick.label2}
        if axis.get_scale() == "log" and axis.get_label_text():
            labels = [text.get_text() for text in axis.get_ticklabels(which="both")]
            powers = ["10^" in label for label in labels if label]
            plain = 0.01 <= low and high < 1e4
            assert len(powers) >= 2 and {*powers} == {not plain}
    boxes = []
    for text in figure.findobj(matplotlib.text.Text):
        if text.get_visible() and text.get_text().strip() and text not in outside:
            box = text.get_window_extent()
            if box.width and box.height:
                assert whole.x0 <= box.x0 and box.x1 <= whole.x1, text
                assert whole.y0 <= box.y0 and box.y1 <= whole.y1, text
                boxes.append((text.get_text(), box.padded(-0.75)))
    for i, (first, box) in enumerate(boxes):
        for second, other in boxes[i + 1 :]:
            assert not box.overlaps(other), (first, second)


@pytest.mark.matrix(1, wide=6)
@pytest.mark.parametrize("name", SHIPPED)
def test_equal_data_give_equal_bytes(name, tmp_path):
    written = []
    for folder in ("a", "b"):
        stem = tmp_path / folder / name
        paths = plots.save(draw(name), stem, about="tiny-llama · fp16")
        written.append([path.read_bytes() for path in paths])
        assert [path.suffix for path in paths] == [".svg", ".pdf", ".png"]
    assert written[0] == written[1]
    assert b"tiny-llama \xc2\xb7 fp16" in written[0][0]


def test_the_front_of_a_tradeoff_passes_and_is_numbered_by_its_cost():
    rows = [
        ("cheap", "GREEN", 0.001, 10.0),
        ("slower", "GREEN", 0.002, 5.0),
        ("faster", "GREEN", 0.01, 20.0),
        ("red", "RED", 0.06, 90.0),
    ]
    names = ["name", "verdict", "kl_mean", "tokens_per_s"]
    words = texts(plots.tradeoff(pd.DataFrame(rows, columns=names)))
    assert "1: cheap" in words and "2: faster" in words
    assert "slower" not in words and ": red" not in words


def test_each_of_twenty_names_is_drawn_and_lines_have_looks_of_their_own():
    data = pd.DataFrame({"name": map(str, range(20)), "kl_mean": 0.1, "verdict": "RED"})
    data["tokens_per_s"] = 1.0
    (legend,) = plots.lines(data, x="kl_mean", y="tokens_per_s", hue="name").legends
    looks = {(key.get_color(), key.get_marker()) for key in legend.legend_handles}
    (legend,) = plots.tradeoff(data, hue="name").legends
    assert len(looks) == len(legend.get_texts()) == 20


def test_cache_rows_show_missed_and_stray_rows_of_any_layer():
    call = {"T": 2, "pos": 5, "expected": [5, 6]}
    rows = [call | {"changed": [5, 6]}, call | {"changed": [5, 7]}]
    (axes,) = plots.cache_rows(pd.DataFrame(rows)).axes
    marks = {line.get_label(): line.get_xdata().tolist() for line in axes.lines}
    assert marks == {"written as addressed": [5], "missed": [6], "stray": [7]}
