"""Figures: what is broken or was not measured is marked, nothing overlaps at the widths
of a column and of a page, equal data give equal bytes."""

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from circle import wide
from matplotlib.collections import PolyCollection, QuadMesh

from workbench import plots
from workbench.check import compare, validate

TOKENS = ["set", "·garden", "↵", "a\\$b", "carrot", "Ωmega", "7", "to", "the", "end"]


def fidelity(fault=(), *, names=("sound", "faulty")) -> pd.DataFrame:
    """Rows of two bundles, the second with a fault at T = 4 at the positions `fault`."""
    random = np.random.default_rng(0)
    rows = []
    for layer in range(3):
        for position in range(len(TOKENS)):
            error = 0.003 * np.exp(random.normal() / 4)
            for name in names:
                for T in (1, 4):
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


def test_a_tensor_that_was_not_measured_is_refused():
    with pytest.raises(ValueError, match="no rows of the k, isolated"):
        plots.heatmap(fidelity(), tensor="k")


CALLS = pd.DataFrame(
    [
        {"bundle": name, "layer": layer, "T": T, "pos": pos}
        | {
            "expected": [*range(pos, pos + T)],
            "changed": [*range(pos + s, pos + T + s)],
        }
        for name, late in (("sound", 0), ("one row late", 1))
        for layer in range(2)
        for T in (1, 2, 4)
        for pos in (0, 5, 17)
        for s in [late if T > 1 and layer else 0]
    ]
)
TABLE = pd.DataFrame(
    [[0.5, 0.99], [np.nan, 0.2]],
    index=pd.Index(["rope", "residual scale"], name="left out"),
    columns=pd.Index(["update", "hidden"], name="tensor"),
)
SPEEDS = pd.DataFrame(
    [
        {"S": S, "T": T, "path": path, "tok/s": 1000.0 * T**0.5 + 10 * S + n}
        for S in (128, 256, 512)
        for T in (1, 4)
        for path in ("all rows of the cache", "rows that hold a token")
        for n in range(3)
    ]
)
CONFIGURATIONS = pd.DataFrame(
    [
        {
            "name": f"{preset}, {n} layers per shard",
            "kv_write": write,
            "verdict": verdict,
        }
        | {"kl_mean": kl * (1 + n / 100), "tokens_per_s": 1500 * n * speed}
        for preset, kl, verdict in (("fp16", 0, "GREEN"), ("lut4", 0.06, "RED"))
        for n in (1, 4)
        for write, speed in (("mask", 1), ("slice", 0.1))
    ]
)
FIGURES = {
    "heatmap": (fidelity([1, 2]), {"by": "panel", "tokens": TOKENS}),
    "heatmap_error": (fidelity([1, 2]), {"metric": "error", "tokens": TOKENS}),
    "grid": (
        TABLE.rename(columns={"update": "attended far lower", "hidden": "all blocked"}),
        {"label": "cosine"},
    ),
    "lines": (
        SPEEDS,
        {"x": "S", "y": "tok/s", "hue": "T", "col": "path", "xlog": 2, "ylog": True}
        | {"marks": {"read speed of the memory": 4000.0}}
        | {"xlabel": "rows of the cache, of which each call reads all"},
    ),
    "bars": (
        np.log10(TABLE).rename({"rope": "earlier tokens in the convolutions"}),
        {"xlabel": "powers of ten above the bundle's worst 1 − cosine"},
    ),
    "tradeoff": (CONFIGURATIONS, {"hue": "kv_write", "max_kl": 0.05}),
    "cache_rows": (CALLS, {"by": "bundle"}),
}


def draw(name, **more):
    data, options = FIGURES[name]
    title = "What each of these shows, said in a title that takes two lines of a column"
    function = getattr(plots, name.removesuffix("_error"))
    return function(data, title=title, **options, **more)


@pytest.mark.parametrize("width", [plots.COLUMN, wide(plots.PAGE)])
@pytest.mark.parametrize("name", FIGURES)
def test_no_text_overlaps_another_or_leaves_the_figure(name, width):
    figure = draw(name, width=width)
    figure.draw_without_rendering()
    whole = figure.bbox.padded(1)
    outside = (
        set()
    )  # labels of ticks beyond the ends of their axis, which are not drawn
    for axis in figure.findobj(matplotlib.axis.Axis):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low <= tick.get_loc() <= high:
                outside |= {tick.label1, tick.label2}
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


@pytest.mark.matrix(2, wide=5)
@pytest.mark.parametrize("name", FIGURES)
def test_equal_data_give_equal_bytes(name, tmp_path):
    written = []
    for folder in ("a", "b"):
        stem = tmp_path / folder / name
        paths = plots.save(draw(name), stem, about="tiny-llama · fp16")
        written.append([path.read_bytes() for path in paths])
        assert [path.suffix for path in paths] == [".svg", ".pdf", ".png"]
    assert written[0] == written[1]
    assert b"tiny-llama \xc2\xb7 fp16" in written[0][0]


def test_bars_mark_failures_and_name_what_is_missing():
    words = texts(draw("bars"))
    assert "residual scale" in words and "not measured" in words


def test_the_front_of_a_tradeoff_passes_and_is_numbered_by_its_cost():
    words = texts(draw("tradeoff"))
    assert "1: fp16, 1 layers per shard" not in words  # slower at an equal KL
    assert "fp16, 4 layers per shard" in words and ": lut4" not in words
    best = CONFIGURATIONS[CONFIGURATIONS["verdict"] == "GREEN"].head(1)
    second = best.assign(kl_mean=0.01, tokens_per_s=1e5, name="second")
    words = texts(plots.tradeoff(pd.concat([best, second])))
    assert f"1: {best['name'].iloc[0]}" in words and "2: second" in words


def test_cache_rows_show_missed_and_stray_rows_of_any_layer():
    sound, late = plots.cache_rows(CALLS, by="bundle").axes
    marks = {line.get_label(): 0 for line in sound.lines}
    for ax, wrong in ((sound, 0), (late, 6)):
        marks = dict.fromkeys(("missed", "stray"), 0)
        for line in ax.lines:
            if line.get_label() in marks:
                marks[line.get_label()] += len(line.get_xdata())
        assert marks == {"missed": wrong, "stray": wrong}


def test_a_figure_can_be_drawn_into_again():
    canvas = plt.figure()
    assert draw("grid", figure=canvas) is canvas
    assert draw("bars", figure=canvas) is canvas and len(canvas.axes) == 1
    plt.close(canvas)


def labels(axis) -> list[str]:
    """The labels that an axis shows, of major and minor ticks."""
    axis.figure.canvas.draw()
    ticks = axis.get_ticklabels(which="both")
    return [text.get_text() for text in ticks if text.get_text()]


@pytest.mark.parametrize(("low", "power"), [(1e-6, True), (10.0, False)])
def test_a_log_scale_has_labels_of_one_kind(low, power):
    data = pd.DataFrame({"x": [1, 2, 3], "y": [low, 3 * low, 300 * low], "part": "a"})
    figure = plots.lines(data, x="x", y="y", hue="part", ylog=True)
    shown = labels(figure.axes[0].yaxis)
    assert len(shown) >= 2
    assert {"10^" in label for label in shown} == {power}
