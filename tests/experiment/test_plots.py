"""Figures: what is broken or was not measured is marked, no row vanishes, nothing overlaps
at the widths of a column and of a page, equal data give equal bytes under any settings of
the user, and files stay small however long the text is."""

import json
import re
import time
import warnings
from base64 import b64decode
from io import BytesIO
from itertools import product

import matplotlib
import matplotlib.pyplot
import numpy as np
import pandas as pd
import pytest
from circle import wide
from matplotlib.collections import LineCollection, PathCollection, QuadMesh
from matplotlib.colors import to_hex, to_rgb
from matplotlib.path import Path
from matplotlib.text import Annotation
from PIL import Image
from tiny import ROOT

from workbench import plots
from workbench.bundle.presets import MIXED, PRESETS
from workbench.check import compare
from workbench.check.fidelity import BUDGET_FACTOR
from workbench.plots import cells
from workbench.plots.styled import (
    CHOSEN_LOOK,
    PALETTE,
    PRESET_LOOKS,
    SPARE_LOOKS,
    TITLE_FONT,
    looks_by_name,
)
from workbench.plots.text import measure_line, wrap_at
from workbench.plots.tradeoff import RED_MARK

LUMINANCE = (0.2126, 0.7152, 0.0722)  # of red, green and blue
TOKENS = ["set", "·garden", "↵", "a\\$b", "carrot", "Ωmega", "7", "to", "the", "end"]


def fidelity(fault=(), *, names=("sound", "faulty")) -> pd.DataFrame:
    """Rows of two bundles, the second with a fault at T = 4 at the positions `fault`."""
    errors = 0.003 * np.exp(np.random.default_rng(0).normal(size=(3, len(TOKENS))) / 4)
    rows = []
    for (layer, position), error in np.ndenumerate(errors):
        for name, T in product(names, (1, 4)):
            wrong = name == "faulty" and T == 4 and position in fault
            value = error * 60 if wrong else error
            rows.append((f"{name}, T = {T}", T, layer, position, value))
    table = pd.DataFrame(rows, columns=["panel", "T", "layer", "position", "error"])
    table = table.assign(tensor="update", mode="isolated", budget=0.003, finite=True)
    return table.assign(cosine=1 - table["error"] ** 2 / 2)


def drawn(figure, kind):
    return [c for ax in figure.axes for c in ax.collections if isinstance(c, kind)]


def hatched_cells(figure) -> int:
    """The number of cells under the hatched shapes of all panels."""
    shapes = [p for ax in figure.axes for p in ax.patches if p.get_hatch()]
    return sum(int((p.get_path().codes == Path.MOVETO).sum()) for p in shapes)


def texts(figure) -> str:
    artists = figure.findobj(matplotlib.text.Text)
    return "\n".join(text.get_text() for text in artists)


def test_a_planted_fault_differs_from_sound_cells_by_two_decades_and_is_hatched():
    rows = fidelity(fault=range(1, 10))
    figure = plots.heatmap(rows, by="panel", tokens=TOKENS)
    sound, faulty = (mesh.get_array() for mesh in drawn(figure, QuadMesh)[:2])
    assert faulty[:, 1:].min() > 100 * sound.max()
    assert (faulty[:, 0] == sound[:, 0]).all()
    assert hatched_cells(figure) == faulty[:, 1:].size
    in_words = f"over {BUDGET_FACTOR:g} times what rounding causes"
    assert in_words in texts(figure)


@pytest.mark.parametrize("metric", ["cosine", "error"])
def test_a_heatmap_says_which_colours_are_worse(metric):
    """In the figure itself, which may be shown beside a text that speaks of the cosine."""
    figure = plots.heatmap(
        fidelity([3]), metric=metric, title="1 − cosine of an update"
    )
    assert texts(figure).count("lighter is worse") == 1
    tall = plots.heatmap(long_text(30, 4), metric=metric, by=None)
    assert tall.axes[-1].get_ylabel().endswith(" (lighter is worse)")
    assert texts(tall).count("lighter is worse") == 1
    mesh = drawn(figure, QuadMesh)[0]
    ends = mesh.norm.vmin, mesh.norm.vmax
    least, largest = (np.dot(mesh.to_rgba(v)[:3], (0.3, 0.6, 0.1)) for v in ends)
    assert least < largest


def test_a_cell_is_hatched_where_its_gate_would_be_red():
    assert plots.TOLERANCE_FACTOR == BUDGET_FACTOR
    assert plots.HALF_ULP == compare.HALF_ULP
    limit = plots.TOLERANCE_FACTOR * np.hypot(0.003, plots.HALF_ULP)
    rows = fidelity(names=["sound"]).query("T == 1").head(10)
    rows = rows.assign(error=np.r_[[limit * 1.001] * 3, [limit * 0.999] * 7])
    figure = plots.heatmap(rows, metric="error")
    assert hatched_cells(figure) == 3


def test_colours_of_cells_have_an_order_in_grey_and_none_is_grey_or_black():
    colours = matplotlib.colormaps[cells.COLOUR_MAP](np.linspace(0, 1, 256))[:, :3]
    # relative luminance by Rec. 709, of linear light
    linear = np.where(
        colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4
    )
    lightness = np.cbrt(linear @ [0.2126, 0.7152, 0.0722])
    assert (np.diff(lightness) > 0).all() and np.ptp(lightness) > 0.6
    assert np.ptp(colours, axis=1).min() > 0.2


@pytest.mark.parametrize("layer", [pd.NA, -1])
def test_logits_are_a_row_of_their_own_in_rows_of_a_validation_and_of_the_log(layer):
    rows = fidelity(names=["sound"]).query("layer == 0")
    rows = rows.assign(layer=pd.array([layer] * len(rows), "Int64"))
    figure = plots.heatmap(rows.assign(tensor="logits"), tensor="logits")
    assert figure.axes[0].get_yticklabels()[0].get_text() == "logits"


def test_equal_tensors_at_all_T_are_drawn_once_and_said():
    rows = fidelity(names=["sound"])
    rows = rows.assign(digest=rows["layer"] * 100 + rows["position"])
    figure = plots.heatmap(rows)
    assert len(figure.axes) == 2  # a panel and the bar
    assert "T = 1 and T = 4: equal bit for bit" in texts(figure)
    assert "equal" not in texts(plots.heatmap(fidelity([3], names=["faulty"])))


def test_panels_are_equal_bit_for_bit_only_where_their_tensors_are():
    """Not where values are equal in the picture, whose floor is 1e-8."""
    rows = fidelity(names=["sound"]).assign(cosine=1.0)
    later = rows["T"] == 4
    near = rows.assign(cosine=np.where(later, 1 - 3e-9, 1 - 1e-9))
    for table in (near, rows.assign(digest=np.where(later, 2, 1))):
        assert "equal bit for bit" not in texts(plots.heatmap(table))
        assert "T = 1 and T = 4: alike in this picture" in texts(plots.heatmap(table))
    # figures that are equal are no proof
    assert "T = 1 and T = 4: equal figures" in texts(plots.heatmap(rows))
    reference = plots.heatmap(rows.assign(max_abs=0.0))
    assert "T = 1 and T = 4: equal bit for bit" in texts(reference)


def test_a_digest_is_equal_where_a_vector_is_equal_bit_for_bit():
    same = np.float32([[1, 2], [1, 2], [1, np.nextafter(np.float32(2), 3)], [-0.0, 0]])
    first, second, *others = compare.digests(same)
    assert first == second and len({first, *others, *compare.digests(-same)}) == 6


def test_panels_that_look_alike_appear_once():
    rows = fidelity(fault=range(1, 10))
    rows = rows.assign(digest=rows["error"].rank(method="dense").astype(int))
    figure = plots.heatmap(rows, by="panel")
    equal_title, faulty_title = (ax.get_title("left") for ax in figure.axes[:-1])
    names = "sound, T = 1; sound, T = 4 and faulty, T = 1"
    assert (equal_title, faulty_title) == (
        f"{names}: equal bit for bit",
        "faulty, T = 4",
    )
    assert figure.get_figheight() < 3.3  # a third panel needs 0.6 inches more


def test_values_that_are_drawn_as_another_are_named():
    rows = fidelity(names=["sound"])
    assert "below 1e-08" not in texts(plots.heatmap(rows))
    assert "1 − cosine below 1e-08" in texts(plots.heatmap(rows.assign(cosine=1.0)))


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


def first_of_each_plot() -> list:
    """The shipped figures; all but the first of each plot are left to `make test-all`."""
    drawn_plots, cases = set(), []
    for name, path in SHIPPED.items():
        plot = json.loads(path.read_text())["plot"]
        cases.append(wide(name) if plot in drawn_plots else name)
        drawn_plots.add(plot)
    return cases


@pytest.mark.parametrize("width", [plots.COLUMN, wide(plots.PAGE)])
@pytest.mark.parametrize("name", first_of_each_plot())
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
        paths = plots.save(draw(name), stem, subtitle="tiny-llama · fp16")
        written.append([path.read_bytes() for path in paths])
        assert [path.suffix for path in paths] == [".svg", ".pdf", ".png"]
    assert written[0] == written[1]
    assert b"tiny-llama \xc2\xb7 fp16" in written[0][0]


def test_the_front_of_a_tradeoff_passes_and_is_numbered_by_its_cost():
    rows = [
        ("cheap", "GREEN", "WITHIN", 0.001, 10.0),
        ("slower", "GREEN", "WITHIN", 0.002, 5.0),
        ("faster", "GREEN", "WITHIN", 0.01, 20.0),
        ("red", "RED", "not_run", 0.02, 80.0),
        ("over", "GREEN", "OVER", 0.06, 90.0),
    ]
    names = ["name", "verdict", "quality", "kl_mean", "tokens_per_s"]
    words = texts(plots.tradeoff(pd.DataFrame(rows, columns=names)))
    assert "1: cheap" in words and "2: faster" in words
    assert not any(name in words for name in ("slower", ": red", ": over"))
    assert "GREEN, WITHIN" in words and "GREEN, OVER" in words


def test_a_panel_of_the_worst_names_the_largest_difference():
    rows = pd.DataFrame(list(product([1, 4], [0, 1], [0, 1])))
    rows = rows.set_axis(["T", "layer", "position"], axis=1)
    rows = rows.assign(tensor="update", mode="isolated", finite=True, cosine=0.999)
    rows = rows.assign(error=0.0, budget=0.0, max_abs=1.0, digest="a")
    same = plots.heatmap(rows, worst_of="T")
    assert "T = 1 and T = 4: equal bit for bit" in texts(same)
    rows.loc[7, "cosine"] = 0.969  # at T = 4, layer 1, position 1
    figure = plots.heatmap(rows, worst_of="T")
    (mesh,) = drawn(figure, QuadMesh)[:1]
    np.testing.assert_allclose(
        mesh.get_array().ravel(), [1e-3] * 3 + [0.031], rtol=1e-6
    )
    words = " ".join(texts(figure).split())
    assert (
        "the worst of T = 1 and T = 4, which differ by at most 0.03 in a cell" in words
    )
    rows.loc[7, "finite"] = False
    assert "differ by at most inf in a cell" in texts(plots.heatmap(rows, worst_of="T"))
    rows.loc[3, "finite"] = False  # the same cell at T = 1
    assert "inf" not in texts(plots.heatmap(rows, worst_of="T"))


def test_a_numbered_configuration_has_no_part_of_its_name_that_all_have():
    names = ["compress a, kv_write m, T 1", "compress b, kv_write s, T 1"]
    rows = pd.DataFrame({"name": names, "kl_mean": [0.1, 0.2], "verdict": "GREEN"})
    rows = rows.assign(quality="WITHIN", tokens_per_s=[9.0, 18.0])
    words = texts(plots.tradeoff(rows))
    assert "1: compress a, kv_write m; 2: compress b, kv_write s\n" in words
    assert f"1: {names[0]}\n" in texts(plots.tradeoff(rows[:1]))


def test_a_tradeoff_says_once_the_verdicts_that_all_configurations_share():
    options = ["mask", "slice"]
    rows = pd.DataFrame({"option": options, "name": options, "kl_mean": [0.1, 0.2]})
    rows = rows.assign(tokens_per_s=[9.0, 9.1], verdict="GREEN", quality="WITHIN")

    def legend(rows: pd.DataFrame) -> list[str]:
        (drawn_legend,) = plots.tradeoff(rows, hue="option").legends
        return [text.get_text() for text in drawn_legend.get_texts()]

    shared = legend(rows)
    assert {"mask", "slice"} <= {*shared}
    assert texts(plots.tradeoff(rows, hue="option")).count("GREEN, WITHIN") == 1
    rows["quality"] = ["WITHIN", "OVER"]
    assert {"mask, GREEN, WITHIN", "slice, GREEN, OVER"} <= {*legend(rows)}


def test_each_of_twenty_names_is_drawn_and_lines_have_looks_of_their_own():
    data = pd.DataFrame({"name": map(str, range(20)), "kl_mean": 0.1, "verdict": "RED"})
    data["tokens_per_s"] = 1.0
    (legend,) = plots.lines(data, x="kl_mean", y="tokens_per_s", hue="name").legends
    styles = {(key.get_color(), key.get_marker()) for key in legend.legend_handles}
    (legend,) = plots.tradeoff(data, hue="name").legends
    assert len(styles) == len(legend.get_texts()) == 20


FORMATS = ["fp16", "lut6-g16", "lut4-g8"]


@pytest.mark.parametrize("plot", ["lines", "tradeoff", "frontier"])
def test_a_name_has_one_look_whichever_names_a_figure_shows(plot):
    """In any order of the rows, and where the first names have no row."""
    every = formats_and_choices()
    every = every[every["kind"] == "one format"]
    options = {"x": "mib", "xlabel": "MiB", "vocabulary": FORMATS}
    if plot != "frontier":
        every = every.assign(kl_mean=0.1, tokens_per_s=every["mib"], verdict="RED")
        options = {"hue": "name", "vocabulary": FORMATS}
    if plot == "lines":
        options |= {"x": "mib", "y": "kl", "ylog": True}
    styles = {}
    for rows in (every, every[::-1], every[1:], every[2:]):
        (legend,) = getattr(plots, plot)(rows, **options).legends
        for key, text in zip(legend.legend_handles, legend.get_texts()):
            if name := next((n for n in FORMATS if n in text.get_text()), None):
                styles.setdefault(name, set()).add(look_of(key))
    assert {"lut6-g16", "lut4-g8"} <= styles.keys()
    assert all(len(looks) == 1 for looks in styles.values())
    assert len(set.union(*styles.values())) == len(styles)


def test_every_preset_has_a_colour_and_a_mark_of_its_own():
    assert {*PRESETS, MIXED.name} == PRESET_LOOKS.keys()
    colours, marks = zip(*PRESET_LOOKS.values())
    # marks alone tell them apart in grey; no preset has the mark of a RED export
    assert len({*colours}) == len({*marks}) == len(PRESET_LOOKS)
    assert RED_MARK not in marks


def test_a_further_preset_has_a_look_that_is_taken_by_nothing_else():
    looks = [*PRESET_LOOKS.values(), *SPARE_LOOKS, CHOSEN_LOOK]
    colours, marks = zip(*looks)
    assert len({*colours}) == len({*marks}) == len(looks)
    assert {CHOSEN_LOOK[1], RED_MARK}.isdisjoint(marks[:-1])
    names = looks_by_name(range(63)).values()
    assert {colour for colour, _ in SPARE_LOOKS}.isdisjoint(
        colour for colour, _ in names
    )
    # in grey
    lightness = {colour: np.dot(to_rgb(colour), LUMINANCE) for colour in colours}
    for colour, _ in SPARE_LOOKS:
        others = [value for name, value in lightness.items() if name != colour]
        assert min(abs(lightness[colour] - value) for value in others) > 0.03


def test_the_chosen_star_has_a_colour_of_its_own_and_is_the_largest_mark():
    figure = plots.frontier(formats_and_choices(), x="mib", xlabel="MiB")
    for ax in figure.axes:
        (star,) = [line for line in ax.lines if line.get_marker() == CHOSEN_LOOK[1]]
        others = [line for line in ax.lines if line is not star]
        assert star.get_color() not in {line.get_color() for line in others}
        assert star.get_color() not in PALETTE
        assert star.get_markersize() > 2 * max(
            line.get_markersize() for line in others if len(line.get_xdata())
        )
        assert star.get_zorder() > max(line.get_zorder() for line in others)


@pytest.mark.parametrize("vocabulary", [(), FORMATS, [*PRESETS]])
def test_a_preset_has_one_look_in_figures_of_every_kind(vocabulary):
    choices = formats_and_choices()
    choices = choices.assign(kl_mean=0.1, tokens_per_s=choices["mib"], verdict="RED")
    single_formats = choices[choices["kind"] == "one format"]
    options = {"hue": "name", "vocabulary": vocabulary}
    figures = [
        plots.lines(single_formats, x="mib", y="kl", ylog=True, **options),
        plots.frontier(choices, x="mib", xlabel="MiB", vocabulary=vocabulary),
    ]
    names = {*FORMATS} - {"fp16"}  # its KL of 0 has no place on these axes
    for figure in figures:
        (legend,) = figure.legends
        texts = [text.get_text() for text in legend.get_texts()]
        looks = dict(zip(texts, map(look_of, legend.legend_handles)))
        assert {name: looks[name] for name in names} == {
            name: PRESET_LOOKS[name] for name in names
        }
    colours = {
        colour
        for points in drawn(plots.tradeoff(single_formats, **options), PathCollection)
        for colour in map(to_hex, points.get_facecolor())
    }
    assert colours <= {colour.lower() for colour, _ in PRESET_LOOKS.values()}


def test_another_name_never_has_the_look_of_a_preset():
    names = ["lut4-g16", *PRESET_LOOKS, *map(str, range(20))]
    looks = looks_by_name(names)
    assert {name: looks[name] for name in PRESET_LOOKS} == PRESET_LOOKS
    assert len({*looks.values()}) == len(names)


def look_of(key) -> tuple:
    """Colour and mark of a key of a legend."""
    if hasattr(key, "get_marker"):
        return key.get_color(), key.get_marker()
    return tuple(key.get_edgecolor()[0]), key.get_paths()[0].vertices.tobytes()


def test_a_grid_of_names_has_a_colour_for_each_and_those_that_occur_in_its_legend():
    columns = ["0", "1", "head"]
    cells = [["lut4-g8", "lut6-g16", None], [None, None, "lut4-g8"]]
    table = pd.DataFrame(cells, index=["q_proj", "head"], columns=columns)
    order = ["lut4-g8", "lut6-g16", "fp16"]
    figure = plots.grid(table, categories=order, label="format", blank=True)
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == order[:2]
    (mesh,) = drawn(figure, QuadMesh)
    colours = mesh.to_rgba([0, 1])
    assert [k.get_facecolor() for k in legend.legend_handles] == [
        tuple(colour) for colour in colours
    ]
    assert len(figure.axes) == 1  # no bar of colours
    assert (
        "not measured" not in texts(figure) and figure.axes[0].patch.get_hatch() is None
    )
    other = plots.grid(table[["1"]], categories=order)
    assert "not measured" in texts(other)
    assert other.legends[0].legend_handles[0].get_facecolor() == tuple(colours[1])


def test_the_last_of_many_columns_of_a_grid_has_its_label():
    columns = [*map(str, range(48)), "", "head"]
    table = pd.DataFrame("fp16", index=["q_proj"], columns=columns)
    (ax,) = plots.grid(table, categories=["fp16"]).axes
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels[-1] == "head" and len(labels) < len(columns)


def marks_of(axes) -> dict[str, list[int]]:
    """Cache rows by the label of their mark, of a figure with one call."""
    return {line.get_label(): line.get_xdata().tolist() for line in axes.lines}


def test_cache_rows_show_wrong_rows_of_any_layer():
    call = {"T": 2, "pos": 5, "expected": [5, 6]}
    rows = [call | {"changed": [5, 6]}, call | {"changed": [5, 7]}]
    (axes,) = plots.cache_rows(pd.DataFrame(rows)).axes
    assert marks_of(axes) == {
        "changed as addressed": [5],
        "addressed and unchanged": [6],
        "changed and not addressed": [7],
    }


def test_a_changed_cache_row_is_not_said_to_hold_its_own_tokens_values():
    """One row late, the call of three tokens changes row 7 with the values of row 6."""
    late = {"T": 3, "pos": 5, "expected": [5, 6, 7], "changed": [5, 7, 8]}
    figure = plots.cache_rows(pd.DataFrame([late]))
    assert marks_of(figure.axes[0])["changed as addressed"] == [5, 7]
    written = " ".join(texts(figure).split())
    assert "may hold the values of another token" in written
    assert "written" not in written
    shapes = {(key.get_marker(), key.get_fillstyle()) for key in keys_of(figure)}
    assert len(shapes) == 3  # without colours too


def keys_of(figure) -> list:
    """The marks of a figure's legend."""
    return figure.legends[0].legend_handles


def test_the_legend_of_cache_rows_names_what_is_drawn_and_what_lies_outside():
    right = pd.DataFrame([{"T": 1, "pos": 5, "expected": [5], "changed": [5]}])
    assert "not addressed" not in texts(plots.cache_rows(right))
    late = right.assign(changed=[[5, plots.MAX_CACHE_ROWS]])
    assert "not addressed" not in texts(plots.cache_rows(late))
    assert "1 mark from cache row 24 on" in texts(plots.cache_rows(late))


UNITS = [None, "CPU_AND_NE", "CPU_ONLY", None, "CPU_AND_NE", "CPU_ONLY"]


def markers(figure) -> int:
    """Points of a figure's lines and clouds."""
    lines = [line for ax in figure.axes for line in ax.lines if line.get_marker()]
    marked = (line for line in lines if line.get_marker() in plots.MARKERS)
    clouds = (c for ax in figure.axes for c in ax.collections)
    offsets = [len(c.get_offsets()) for c in clouds if hasattr(c, "get_sizes")]
    return sum(len(line.get_xdata()) for line in marked) + sum(offsets)


@pytest.mark.parametrize("null", [None, wide(np.nan), pd.NA, wide(pd.NaT)])
def test_null_is_a_group_of_every_figure(null):
    units = [null if unit is None else unit for unit in UNITS]
    data = pd.DataFrame({"x": range(6), "y": 1.0, "hue": units})
    named = "compute_units not set"
    data = data.rename(columns={"hue": "compute_units"})
    lines = plots.lines(data, x="x", y="y", hue="compute_units")
    panels = plots.lines(data.assign(h=1), x="x", y="y", hue="h", col="compute_units")
    rows = data.assign(kl_mean=0.1, tokens_per_s=data["x"], name="n", verdict="GREEN")
    traded = plots.tradeoff(rows, hue="compute_units")
    for figure in (lines, panels, traded):
        assert named in texts(figure) and markers(figure) == len(data)
    cells = fidelity(names=["sound"]).assign(compute_units="CPU_ONLY")
    cells.loc[cells["T"] == 4, ["compute_units", "cosine"]] = [null, 0.5]
    assert named in texts(plots.heatmap(cells, by="compute_units"))
    call = {"T": 2, "pos": 5, "expected": [5, 6], "changed": [5, 6]}
    calls = pd.DataFrame([call | {"compute_units": unit} for unit in units[:3]])
    drawn_calls = plots.cache_rows(calls, by="compute_units")
    assert named in texts(drawn_calls) and len(drawn_calls.axes) == 3
    table = pd.DataFrame({"a": [1.0, 2.0]}, index=["b", null])
    for figure in (
        plots.bars(table),
        plots.bars(table.T),
        plots.grid(table),
        plots.grid(table.T),
    ):
        assert "not set" in texts(figure)


def test_null_beside_numbers_leaves_them_whole():
    data = pd.DataFrame({"x": [1, 1], "y": [1.0, 2.0], "T": [4, None]})
    words = texts(plots.lines(data, x="x", y="y", hue="T"))
    assert "T = 4\n" in words and "T not set" in words


def test_a_verdict_that_is_null_is_drawn():
    rows = {"name": ["a", "b"], "verdict": ["GREEN", None], "kl_mean": 0.1}
    figure = plots.tradeoff(pd.DataFrame(rows | {"tokens_per_s": [1.0, 2.0]}))
    assert markers(figure) == 2 and "verdict not set" in texts(figure)


def test_a_legend_has_no_entry_without_a_point_and_says_what_is_not_drawn():
    data = pd.DataFrame({"x": [1, 1, 0, None], "y": [1.0, 0.0, 2.0, 3.0]})
    data["hue"] = ["drawn", "zero", "early", "nowhere"]
    figure = plots.lines(data, x="x", y="y", hue="hue", xlog=2, ylog=True)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["drawn"]
    words = texts(figure)
    assert "y ≤ 0 is not on the logarithmic axis: 1 point of zero" in words
    assert "x ≤ 0 is not on the logarithmic axis: 1 point" in words
    assert "not drawn: 1 of 4 rows, without x or y" in words
    rows = {"name": list("ab"), "verdict": "GREEN", "tokens_per_s": 1.0}
    lacking = pd.DataFrame(rows | {"kl_mean": [0.1, None]})
    note = "not drawn: 1 of 2 rows, without kl_mean or tokens_per_s"
    assert note in texts(plots.tradeoff(lacking))
    exact = plots.tradeoff(pd.DataFrame(rows | {"kl_mean": [0.1, 0.0]}))
    assert "1 with a KL below 1e-08" in texts(exact)


def test_points_lie_at_their_own_x_and_are_named_with_their_bars():
    data = pd.DataFrame(product([64, 128], [1, 2, 3], [1.0, 2.0, 6.0]))
    data.columns = ["x", "T", "y"]
    figure = plots.lines(data, x="x", y="y", hue="T", xlog=2)
    lines = [line for line in figure.axes[0].lines if line.get_marker() in "os^"]
    assert {tuple(line.get_xdata()) for line in lines} == {(64, 128)}
    assert "points: medians; bars: the least to the most" in texts(figure)
    spread = plots.lines(data, x="x", y="y", hue="T", spread=(0.1, 0.9))
    assert "points: medians; bars: 10% to 90% of the values" in texts(spread)
    single = data.groupby(["x", "T"], as_index=False).first()
    assert "medians" not in texts(plots.lines(single, x="x", y="y", hue="T"))


def test_points_at_a_single_x_are_seen_on_a_logarithmic_axis():
    data = pd.DataFrame({"x": 64, "y": [1.0, 2.0], "T": [1, 2]})
    figure = plots.lines(data, x="x", y="y", hue="T", xlog=2)
    left, right = figure.axes[0].get_xlim()
    assert left <= 64 / 1.5 and right >= 64 * 1.5


def test_a_linear_axis_that_starts_above_0_says_so():
    data = pd.DataFrame({"x": [1, 2], "y": [100.0, 101.0], "T": 1})
    axis_note = "(axis starts above 0)"
    for ylabel in (None, "", "ms"):
        figure = plots.lines(data, x="x", y="y", hue="T", ylabel=ylabel)
        assert axis_note in figure.axes[0].get_ylabel()
    low = data.assign(y=[0.0, 101.0])
    assert axis_note not in texts(plots.lines(low, x="x", y="y", hue="T"))


def test_the_front_of_a_tradeoff_says_by_how_much_it_is_faster():
    rows = {"name": list("ab"), "verdict": "GREEN", "kl_mean": [0.1, 0.2]}
    figure = plots.tradeoff(pd.DataFrame(rows | {"tokens_per_s": [1.0, 2.0]}))
    words = texts(figure)
    assert "with a median more than 2% above all of a lower KL (no test of the" in words
    assert "bars" not in words


def test_a_tradeoff_draws_the_range_of_the_processes_of_each_configuration():
    """Four configurations of one KL; one of them has a single process."""
    rows = pd.DataFrame({"name": list("abcd"), "verdict": "GREEN", "kl_mean": 0.1})
    rows = rows.assign(quality="WITHIN", tokens_per_s=[28.2, 26.6, 25.7, 24.6])
    rows = rows.assign(slowest=[28.1, 25.5, 21.8, 24.6], fastest=[29.2, 26.7, 60, 24.6])
    figure = plots.tradeoff(rows, hue="name")
    figure.draw_without_rendering()
    (ax,) = figure.axes
    bars = [part for part in ax.collections if isinstance(part, LineCollection)]
    spans = [bar.get_segments()[0][:, 1].tolist() for bar in bars]
    assert spans == [[28.1, 29.2], [25.5, 26.7], [21.8, 60]]
    ends = (bar.get_transform().transform(bar.get_segments()[0]) for bar in bars)
    bar_places = [points[0, 0] for points in ends]
    dots = [part for part in ax.collections if isinstance(part, PathCollection)]
    dot_places = [
        dot.get_offset_transform().transform(dot.get_offsets())[0, 0] for dot in dots
    ]
    np.testing.assert_allclose(bar_places, dot_places[:3])  # through its mark
    assert np.diff(dot_places).min() > 5  # none lies upon another
    ((place, _),) = ax.transData.transform([(0.1, 28.2)])
    assert np.mean(dot_places) == pytest.approx(place)
    assert ax.get_ylim()[1] > 60
    words = texts(figure)
    assert "bars: the slowest to the fastest process; marks of one KL stand" in words
    (line,) = ax.get_lines()  # marks the KL
    assert line.get_xdata()[0] == 0.1


def test_bars_of_two_lines_do_not_cover_each_other_and_lie_within_the_axes():
    rows = [
        {"S": S, "T": T, "ms": ms}
        for S in (128, 512)
        for T, times in ((1, (50, 79)), (4, (71, 117)))
        for ms in times
    ]
    figure = plots.lines(pd.DataFrame(rows), x="S", y="ms", hue="T", xlog=2)
    figure.draw_without_rendering()
    (ax,) = figure.axes
    bars = [part for part in ax.collections if isinstance(part, LineCollection)]
    first, second = (
        bar.get_transform().transform(bar.get_segments()[0])[:, 0] for bar in bars
    )
    assert abs(first[0] - second[0]) > 3  # pixels
    low, high = ax.get_ylim()
    assert low < 50 and 117 < high
    assert ax.get_xlim()[0] < 128 and 512 < ax.get_xlim()[1]


def test_marks_of_different_kl_with_bars_stand_at_their_own_kl():
    rows = pd.DataFrame({"name": list("ab"), "verdict": "GREEN", "kl_mean": [0.1, 0.2]})
    rows = rows.assign(quality="WITHIN", tokens_per_s=2.0, slowest=1.0, fastest=3.0)
    figure = plots.tradeoff(rows.set_index(pd.Index([7, 7])), hue="name")
    (ax,) = figure.axes
    for part, kl in zip(drawn(figure, PathCollection), [0.1, 0.2]):
        ((place, _),) = part.get_offset_transform().transform(part.get_offsets())
        ((expected, _),) = ax.transData.transform([(kl, 2.0)])
        assert place == pytest.approx(expected)
    assert "side by side" not in texts(figure)


@pytest.mark.parametrize(
    ("largest", "label"), [(86.25, "86.2"), (12.0, "12"), (2500.0, "2500")]
)
def test_the_bar_of_a_heatmap_names_its_largest_value(largest, label):
    rows = long_text(30, 48).assign(budget=0.0, error=plots.HALF_ULP)
    rows.loc[rows.index[0], "error"] = largest * plots.HALF_ULP
    figure = plots.heatmap(rows, metric="error", by=None)
    figure.draw_without_rendering()
    bar = figure.axes[-1]
    assert label in [text.get_text() for text in bar.get_yticklabels()]
    assert not labels_overlap(bar.yaxis)


def test_a_largest_value_beside_a_mark_of_the_bar_has_no_label():
    rows = long_text(30, 48).assign(budget=0.0, error=6.1 * plots.HALF_ULP)
    bar = plots.heatmap(rows, metric="error", by=None).axes[-1]
    labels = [text.get_text() for text in bar.get_yticklabels()]
    assert labels == ["1 rounding", f"{plots.TOLERANCE_FACTOR:g} tolerance"]


@pytest.mark.parametrize("width", [plots.COLUMN, plots.PAGE])
@pytest.mark.parametrize("count", [12, 30, 60])
def test_labels_of_layers_and_head_do_not_run_together(width, count):
    layers = [str(layer) for layer in range(count)]
    gap = [" " * place for place in range(1 + count // 32)]
    table = pd.DataFrame(
        "a", index=["down_proj", "head"], columns=[*layers, *gap, "head"]
    )
    figure = plots.grid(table, categories=["a"], width=width)
    figure.draw_without_rendering()
    (ax,) = figure.axes
    shown = [text for text in ax.get_xticklabels() if text.get_text().strip()]
    assert shown[-1].get_text() == "head" and len(shown) >= 4
    boxes = [text.get_window_extent() for text in shown]
    space = 0.04 * figure.dpi  # inches: less looks like one label
    assert all(b.x0 - a.x1 >= space for a, b in zip(boxes, boxes[1:]))


def formats_and_choices() -> pd.DataFrame:
    """Three formats alone, one of them without any KL, and a frontier with two measured
    choices."""
    rows = [
        ("one format", "fp16", 256.0, 0.0, 0.0, 0.0),
        ("one format", "lut6-g16", 98.0, 0.012, 0.06, 0.012),
        ("one format", "lut4-g8", 65.0, 0.23, 1.5, 0.23),
        # predicted before the losses of lut4-g8 were scaled to what was measured
        ("mixed", "lut4-g8", 65.0, 0.23, 1.5, 0.2),
        ("mixed", "mixed", 75.0, None, None, 0.1),
        ("mixed", "mixed", 84.0, 0.049, 0.37, 0.045),
        ("chosen", "mixed", 84.0, 0.048, 0.36, 0.045),
    ]
    columns = ["kind", "name", "mib", "kl", "kl_p99", "predicted_kl"]
    return pd.DataFrame(rows, columns=columns)


def test_a_frontier_draws_predicted_means_and_measured_tails():
    figure = plots.frontier(formats_and_choices(), x="mib", xlabel="MiB", max_kl=0.05)
    mean, tail = ([line.get_xydata() for line in ax.lines] for ax in figure.axes)
    # the mean as predicted throughout, from the measured single format on
    assert [point.tolist() for point in mean[0]] == [[65, 0.23], [75, 0.1], [84, 0.045]]
    assert [point.tolist() for point in tail[0]] == [[65, 1.5], [84, 0.37]]
    assert [point.tolist() for point in mean[1]] == [[65, 0.23], [84, 0.049]]  # dots
    assert len(tail[1]) == 2
    words = texts(figure)
    assert "fp16 has a KL of 0, of storage alone" in words
    assert "which a logarithmic axis cannot show" in " ".join(words.split())
    assert "your limit, 0.05 nats" in words
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert {"lut6-g16", "lut4-g8", "chosen"} <= set(labels)
    assert "fp16" not in labels
    for ax in figure.axes:
        (least, most), (left, right) = ax.get_ylim(), ax.get_xlim()
        assert least < 0.012 and most > 1.5 and left < 65 and right > 98


def test_a_frontier_draws_the_intervals_of_its_marks_inside_the_axes():
    choices = formats_and_choices().rename(columns={"mib": "ms"})
    choices = choices.assign(low=choices["ms"] / 3, high=choices["ms"] * 3)
    options = {"x": "ms", "xlabel": "ms", "bars": "bars: 90% intervals"}
    figure = plots.frontier(choices, ends=["low", "high"], **options)
    for ax in figure.axes:
        spans = [bar.lines[2][0].get_segments()[0][:, 0] for bar in ax.containers]
        # both formats with a KL, and the chosen one
        np.testing.assert_allclose(spans, [[98 / 3, 294], [65 / 3, 195], [28, 252]])
        left, right = ax.get_xlim()
        assert left < 65 / 3 and right > 294 and ax.get_xscale() == "log"
    assert "bars: 90% intervals" in texts(figure)
    without = plots.frontier(choices, **options)
    assert not any(ax.containers for ax in without.axes)
    assert "bars" not in texts(without)


SETTINGS = {
    "text.usetex": True,
    "font.family": "serif",
    "axes.grid": True,
    "axes.facecolor": "black",
    "figure.facecolor": "black",
    "text.color": "white",
    "savefig.bbox": "tight",
    "savefig.transparent": True,
    "savefig.facecolor": "red",
    "lines.linewidth": 7,
    "image.cmap": "jet",
    "path.sketch": (1, 100, 2),
    "axes.formatter.use_locale": True,
    "svg.fonttype": "path",
    "xtick.labelsize": 20,
    "figure.max_open_warning": 1,
}


@pytest.mark.slow("draws two figures and saves them as six files under two settings")
def test_settings_of_the_user_change_no_byte_and_stay_as_they_are(tmp_path):
    data = pd.DataFrame({"x": [1, 2, 3], "y": [1.0, 5.0, 2.0], "T": [1, 1, 4]})
    rows = fidelity(fault=[3], names=["faulty"])
    written = []
    for name, settings in (("default", {}), ("theirs", SETTINGS)):
        with matplotlib.rc_context(settings):
            before = dict(matplotlib.rcParams)
            figures = [
                plots.lines(data, x="x", y="y", hue="T", ylog=True),
                plots.heatmap(rows, tokens=TOKENS),
            ]
            for number, figure in enumerate(figures):
                stem = tmp_path / name / str(number)
                saved = plots.save(figure, stem, subtitle="tiny-llama")
                saved.append(stem.with_suffix(".user.png"))
                figure.savefig(saved[-1])  # as the README does
                written.append([path.read_bytes() for path in saved])
                assert figure._repr_png_().startswith(b"\x89PNG")
            assert before == dict(matplotlib.rcParams)
        assert not matplotlib.pyplot.get_fignums()
    assert written[:2] == written[2:]


FOREIGN = ["你好", "안녕", "नमस्ते", "😀", "👨‍👩‍👧", "abc", "Ωmega", "日本語の長い言葉"]


def test_characters_that_the_font_lacks_are_code_points_with_one_warning(tmp_path):
    rows = fidelity(names=["sound"])
    rows = rows[rows["position"] < len(FOREIGN)]
    with pytest.warns(UserWarning, match=r"U\+4F60.*U\+1F469") as warned:
        figure = plots.heatmap(rows, tokens=FOREIGN, title="の: 1 − cosine")
    assert len(warned) == 1
    with warnings.catch_warnings():  # of a glyph that is missing
        warnings.simplefilter("error")
        svg, pdf, png = plots.save(figure, tmp_path / "foreign", subtitle="fp16")
        labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels[0] == "U+4F60 U+597D" and labels[3] == "😀"  # the font has this one
    assert labels[5:7] == ["abc", "Ωmega"] and labels[7].endswith("…")
    assert "你" not in svg.read_text() and "U+306E: 1 − cosine" in svg.read_text()
    data = pd.DataFrame({"x": [1], "y": [1.0], "T": ["你"]})
    with pytest.warns(UserWarning) as warned:
        assert "U+4F60" in texts(plots.lines(data, x="x", y="y", hue="T"))
    assert len(warned) == 1


def long_text(layers: int, positions: int) -> pd.DataFrame:
    """Rows of a long text at T = 1 and T = 4, with one bad cell at T = 4."""
    index = pd.MultiIndex.from_product([(1, 4), range(layers), range(positions)])
    table = index.to_frame(index=False, name=["T", "layer", "position"])
    errors = np.random.default_rng(0).normal(size=len(table))
    bad = table.eq({"T": 4, "layer": layers // 3, "position": positions // 2}).all(
        axis=1
    )
    table["error"] = np.where(bad, 0.5, 0.003 * np.exp(errors / 4))
    table = table.assign(tensor="update", mode="isolated", budget=0.003, finite=True)
    return table.assign(cosine=1 - table["error"] ** 2 / 2)


@pytest.mark.parametrize("layers, positions", [(12, 1024), wide(48, 4096)])
@pytest.mark.parametrize("width", [plots.COLUMN, wide(plots.PAGE)])
def test_a_heatmap_of_a_long_text_is_small_and_shows_its_worst_cell(
    layers, positions, width, tmp_path
):
    start = time.process_time()
    rows = long_text(layers, positions)
    tokens = [f"t{i}" for i in range(positions)]
    figure = plots.heatmap(rows, tokens=tokens, width=width)
    paths = plots.save(figure, tmp_path / "long")
    assert time.process_time() - start < 20
    assert max(path.stat().st_size for path in paths) < 5e6
    assert "<text" in paths[0].read_text() and "<image" in paths[0].read_text()
    top, bottom = figure.axes[:2]
    meshes = drawn(figure, QuadMesh)
    worst = [ax.collections[0].get_array().max() for ax in (top, bottom)]
    assert worst[1] == 1 - rows["cosine"].min() and worst[0] < 1e-3
    # a cell of its own pixel, in the colour of its kind
    columns = meshes[0].get_array().shape[1]
    pixels = np.asarray(matplotlib.image.imread(paths[2]))[..., :3]
    assert columns < 0.8 * width * 200
    vermilion = np.abs(pixels - matplotlib.colors.to_rgb(plots.BEYOND_COLOUR))
    y, x = np.nonzero((vermilion < 0.01).all(axis=-1))
    cells = figure.axes[1].get_window_extent()
    scale = 200 / figure.dpi
    inside = (x > cells.x0 * scale) & (x < cells.x1 * scale)
    inside &= pixels.shape[0] - y > cells.y0 * scale
    shares = (x[inside].mean() - cells.x0 * scale) / (cells.width * scale)
    assert inside.any() and abs(shares - 0.5) < 0.02
    assert "is the worst of" in texts(figure)


def test_small_heatmaps_have_vector_cells(tmp_path):
    figure = plots.heatmap(fidelity(fault=range(1, 10)), by="panel", tokens=TOKENS)
    svg, *_ = plots.save(figure, tmp_path / "small")
    collections = [c for ax in figure.axes for c in ax.collections]
    assert not any(c.get_rasterized() for c in collections[:-1])
    assert "is the worst of" not in texts(figure)


def test_an_svg_has_a_pixel_in_the_exact_colour_of_each_cell_and_no_edges(tmp_path):
    """Browsers smooth the edges of shapes, and leave light lines between them."""
    figure = plots.heatmap(fidelity(fault=range(1, 10)), by="panel", tokens=TOKENS)
    svg, *_ = plots.save(figure, tmp_path / "small")
    words = svg.read_text()
    assert "QuadMesh" not in words
    images = re.findall(r"<image [^>]*base64,([^\"]*)\"[^>]*>", words)
    meshes = [mesh for mesh in drawn(figure, QuadMesh) if not mesh.get_rasterized()]
    assert len(meshes) == 2 and words.count("image-rendering:pixelated") == 2
    pixels = [np.asarray(Image.open(BytesIO(b64decode(image)))) for image in images]
    for mesh in meshes:
        colours = mesh.to_rgba(mesh.get_array(), bytes=True)
        assert any(np.array_equal(colours, image) for image in pixels)


def test_a_grid_has_lines_between_its_cells_in_an_svg(tmp_path):
    table = pd.DataFrame([[1.0, 2.0]])
    svg, *_ = plots.save(plots.grid(table), tmp_path / "grid")
    assert svg.read_text().count("stroke: #ffffff") >= table.size


def test_lines_of_a_long_text_are_small(tmp_path):
    data = pd.DataFrame(
        product(range(2048), "abc", [1.0, 2.0]), columns=["x", "h", "y"]
    )
    paths = plots.save(plots.lines(data, x="x", y="y", hue="h"), tmp_path / "lines")
    assert max(path.stat().st_size for path in paths) < 1e6


def test_panels_and_one_panel_of_the_worst_exclude_each_other():
    rows = fidelity([3])
    with pytest.raises(ValueError, match="'T' and one panel of the worst of 'panel'"):
        plots.heatmap(rows, by="T", worst_of="panel")
    assert len(drawn(plots.heatmap(rows, by=None, worst_of="panel"), QuadMesh)) == 2


def test_the_titles_of_three_panels_end_within_the_figure():
    names = ["largest |value|", "attention", "change of the update by rounding"]
    rows = pd.DataFrame({"x": [1, 2] * 3, "y": 1e4, "h": "a", "q": np.repeat(names, 2)})
    for width in (plots.COLUMN, plots.PAGE):
        labels = dict.fromkeys(names, "relative RMS")
        options = {"x": "x", "y": "y", "hue": "h", "col": "q", "ylabel": labels}
        figure = plots.lines(rows, **options, width=width)
        figure.draw_without_rendering()
        titles = [ax._left_title for ax in figure.axes]
        assert [" ".join(title.get_text().split()) for title in titles] == names
        boxes = [title.get_window_extent() for title in titles]
        assert max(box.x1 for box in boxes) <= figure.bbox.width
        assert not any(a.overlaps(b) for a, b in zip(boxes, boxes[1:]))


def test_a_quantity_without_a_label_of_its_own_is_refused():
    rows = pd.DataFrame({"x": [1, 2], "y": [1.0, 2.0], "h": "a", "q": ["ms", "tok/s"]})
    with pytest.raises(ValueError, match="no label for the panel 'tok/s'"):
        plots.lines(rows, x="x", y="y", hue="h", col="q", ylabel={"ms": "ms"})


@pytest.mark.parametrize("panels", [1, 2])
def test_the_colour_bar_of_one_row_has_room_for_its_numbers(panels):
    rows = fidelity([3], names=["sound"]).query("layer == 0")
    rows = rows[rows["T"].isin([1, 4][:panels])].assign(tensor="logits", mode="chained")
    rows.loc[rows["T"].eq(4), "cosine"] = 0.9
    figure = plots.heatmap(rows, tensor="logits", mode="chained", tokens=TOKENS)
    figure.draw_without_rendering()
    *drawn_panels, bar = figure.axes
    assert len(drawn_panels) == panels
    assert bar.get_window_extent().height / figure.dpi > 0.8
    numbers = [text for text in bar.get_yticklabels() if text.get_text()]
    boxes = [text.get_window_extent() for text in numbers]
    assert not any(a.overlaps(b) for a, b in zip(boxes, boxes[1:]))


def test_an_unknown_metric_of_a_heatmap_is_refused_by_its_name():
    with pytest.raises(ValueError, match="'ratio'; needs one of cosine, error"):
        plots.heatmap(fidelity([3]), metric="ratio")


def labels_overlap(axis) -> bool:
    boxes = [text.get_window_extent() for text in axis.get_ticklabels()]
    return any(a.overlaps(b) for a, b in zip(boxes, boxes[1:]))


@pytest.mark.parametrize("width", [plots.COLUMN, plots.PAGE])
def test_positions_do_not_overlap_and_the_last_layer_is_named(width):
    rows = long_text(30, 48)
    for metric in ("cosine", "error"):
        figure = plots.heatmap(rows, metric=metric, by=None, width=width)
        figure.draw_without_rendering()
        ax = figure.axes[0]
        assert not labels_overlap(ax.xaxis) and not labels_overlap(ax.yaxis)
        assert [text.get_text() for text in ax.get_yticklabels()][-2:] == ["25", "29"]
        assert len(ax.get_xticklabels()) >= 4


def test_several_metrics_share_layers_and_tokens_and_the_bar_names_its_marks():
    rows = fidelity(names=["sound"])
    figure = plots.heatmap(rows, metric=["error", "cosine"], by=None, tokens=TOKENS)
    upper, lower, *bars = figure.axes
    assert upper.get_shared_x_axes().joined(upper, lower)
    assert upper.get_shared_y_axes().joined(upper, lower)
    labels = [text.get_text() for text in bars[0].get_yticklabels()]
    assert labels == ["1 rounding", f"{plots.TOLERANCE_FACTOR:g} tolerance"]
    # in lines beside panels that are as low as these
    words = [" ".join(bar.get_ylabel().split()) for bar in bars]
    assert words == ["error ÷ rounding", "1 − cosine"]
    assert "lighter is worse" in texts(figure).splitlines()  # the bars are too short
    figure.draw_without_rendering()
    edges = [bar.yaxis.label.get_window_extent().x0 for bar in bars]
    assert edges[0] == pytest.approx(edges[1], abs=1)
    ratios = rows["error"] / np.hypot(rows["budget"], plots.HALF_ULP)
    drawn_errors, distances = (mesh.get_array() for mesh in drawn(figure, QuadMesh)[:2])
    assert drawn_errors.max() == ratios.max()
    assert distances.max() == 1 - rows["cosine"].min()


def test_figures_with_common_limits_have_one_colour_scale():
    """Values beyond the limits extend it."""
    sound, faulty = (
        fidelity([3], names=[name]).query("T == 4") for name in ("sound", "faulty")
    )
    together = pd.concat([sound, faulty])
    for metric in plots.METRICS:
        limits = plots.find_limits(together, metric)
        figures = [
            plots.heatmap(rows, metric=metric, limits=limits)
            for rows in (sound, faulty, together)
        ]
        norms = [drawn(figure, QuadMesh)[0].norm for figure in figures]
        assert len({(norm.vmin, norm.vmax) for norm in norms}) == 1
        alone = drawn(plots.heatmap(faulty, metric=metric), QuadMesh)[0].norm
        wider = plots.heatmap(faulty, metric=metric, limits=[alone.vmin, alone.vmin])
        assert drawn(wider, QuadMesh)[0].norm.vmax == alone.vmax
    broken = sound.assign(finite=False)
    assert plots.find_limits(broken, "cosine") == ()
    with pytest.raises(ValueError, match="limits of 2 metrics"):
        plots.heatmap(sound, metric=["error", "cosine"], limits=[0.1, 1.0])


@pytest.mark.parametrize("plot", ["heatmap", "lines", "bars"])
def test_a_plot_is_drawn_into_a_subfigure_whose_size_it_keeps(plot):
    data, options = fidelity(names=["sound"]), {}
    if plot == "lines":
        options = {"x": "position", "y": "error", "hue": "T"}
    if plot == "bars":
        data = pd.DataFrame({"ms": [2.0, 1.0]}, index=["a", "b"])
    whole = plots.StyledFigure(figsize=(7, 4), layout="constrained")
    left, right = whole.subfigures(1, 2)
    assert getattr(plots, plot)(data, figure=left, title="left", **options) is left
    assert left.axes and not right.axes
    assert tuple(whole.get_size_inches()) == (7, 4)
    whole.draw_without_rendering()


def test_layers_have_ticks_at_layers_that_exist():
    data = pd.DataFrame({"layer": range(30), "error": 0.1, "T": 1})
    ax = plots.lines(data, x="layer", y="error", hue="T").axes[0]
    ticks = ax.get_xticks()
    assert len(ticks) >= 4 and set(ticks) <= set(range(30))
    few = data[data["layer"].isin([3, 17])]
    assert set(
        plots.lines(few, x="layer", y="error", hue="T").axes[0].get_xticks()
    ) <= {*range(3, 18)}


@pytest.mark.parametrize("width", [plots.COLUMN, plots.PAGE])
def test_a_title_is_wrapped_at_the_width_of_its_figure(width):
    title = f"{'will it fit, ' * 12}and the last one"
    figure = plots.bars(pd.DataFrame({"a": [1.0]}), title=title, width=width)
    lines = figure.get_suptitle().splitlines()
    assert " ".join(lines) == title
    widths = [measure_line(line, **TITLE_FONT) for line in lines]
    assert len(lines) > 1 and max(widths) <= width
    assert all(line_width > 0.8 * width for line_width in widths[:-1])


def test_narrow_characters_fill_a_line_as_wide_ones_do():
    narrow, wide_ones = (wrap_at(f"{word} " * 40, 3.0) for word in ("ill", "WWW"))
    first_lines = [text.splitlines()[0] for text in (narrow, wide_ones)]
    assert len(first_lines[0]) > 2 * len(first_lines[1])
    assert all(2.5 < measure_line(line) <= 3.0 for line in first_lines)


def test_a_figure_that_is_saved_twice_has_one_subtitle(tmp_path):
    data = pd.DataFrame({"x": [1, 2], "y": [1.0, 2.0], "panel": "a"})
    figure = plots.lines(data, x="x", y="y", hue="panel")
    first, *_ = plots.save(figure, tmp_path / "a", subtitle="tiny-llama · fp16")
    second, *_ = plots.save(figure, tmp_path / "b", subtitle="tiny-llama · fp16")
    assert first.read_bytes() == second.read_bytes()
    assert first.read_text().count("tiny-llama · fp16") == 1


@pytest.mark.parametrize("width", [plots.COLUMN, plots.PAGE])
def test_a_subtitle_is_smaller_and_lighter_than_the_title_and_below_it(width, tmp_path):
    data = pd.DataFrame({"x": [1, 2], "y": [1.0, 2.0], "panel": "a"})
    options = {"x": "x", "y": "y", "hue": "panel", "col": "panel", "title": "a title"}
    figure = plots.lines(data, **options, width=width)
    height, facts = figure.get_figheight(), "model · int8-channel · max_seq_len 256"
    plots.save(figure, tmp_path / "a", subtitle=f"{facts} · {facts}")
    assert figure.get_suptitle() == "a title"
    assert figure.get_figheight() > height
    (title,) = (words for words in figure.texts if words.get_text() == "a title")
    (subtitle,) = (words for words in figure.findobj(Annotation))
    assert title.get_fontweight() == "bold" != subtitle.get_fontweight()
    assert 6 <= subtitle.get_fontsize() < title.get_fontsize()
    assert to_rgb(title.get_color()) < to_rgb(subtitle.get_color())
    assert not any(line.startswith("·") for line in subtitle.get_text().splitlines())
    figure.draw_without_rendering()
    upper, lower = (words.get_window_extent() for words in (title, subtitle))
    top_of_axes = figure.axes[0].get_tightbbox().y1
    assert upper.y0 >= lower.y1 and lower.y0 >= top_of_axes
    assert upper.x0 == pytest.approx(lower.x0, abs=1) and lower.x1 <= figure.bbox.x1


@pytest.mark.parametrize("plot", ["bars", "lines"])
def test_a_note_is_in_the_legend_below_the_notes_of_the_plot(plot):
    data = pd.DataFrame({"x": [1, 1, 2], "y": [1.0, 2.0, 3.0], "name": "a"})
    options = {"x": "x", "y": "y", "hue": "name"}
    if plot == "bars":  # a single column has no legend
        data, options = data[["y"]], {}
    figure = getattr(plots, plot)(data, note="see table orders", **options)
    (legend,) = figure.legends
    lines = legend.get_title().get_text().splitlines()
    plot_notes = (
        ["points: medians; bars: the least to the most"] if plot == "lines" else []
    )
    assert lines == [*plot_notes, "see table orders"]
    assert legend.get_title().get_visible() and legend.get_title().get_fontsize() >= 6
    figure.draw_without_rendering()
    assert legend.get_window_extent().y1 <= figure.axes[0].get_tightbbox().y0


def test_a_legend_has_as_few_rows_as_its_width_allows():
    data = pd.DataFrame(
        {"x": [1, 2] * 6, "y": range(12), "name": [*"aabbccddee", "", ""]}
    )
    data["name"] = data["name"].replace("", "a name that is far longer than the others")
    rows = {}
    for width in (plots.COLUMN, plots.PAGE):
        figure = plots.lines(data, x="x", y="y", hue="name", width=width)
        figure.draw_without_rendering()
        (legend,) = figure.legends
        assert legend.get_window_extent().x1 <= figure.bbox.x1
        rows[width] = len({round(t.get_window_extent().y0) for t in legend.get_texts()})
    assert rows[plots.PAGE] == 1 < rows[plots.COLUMN] < 4


def test_a_mark_hides_none_of_an_earlier_group():
    rows = {"name": ["a", "b"], "kl_mean": 0.1, "tokens_per_s": 2.0, "verdict": "GREEN"}
    ax = plots.tradeoff(pd.DataFrame(rows), hue="name").axes[0]
    below, above = (marks.get_sizes()[0] for marks in ax.collections)
    assert below > 2 * above


def test_a_mark_of_one_panel_is_drawn_there_and_in_the_legend():
    """A limit of the stream's values says nothing of the attention beside them."""
    rows = pd.DataFrame({"layer": [0, 1] * 2, "shown": [2.0, 9.0, 0.1, 0.2]})
    rows["quantity"] = ["value"] * 2 + ["attention"] * 2
    figure = plots.lines(
        rows.assign(token="a"),
        x="layer",
        y="shown",
        hue="token",
        col="quantity",
        ylog=True,
        ylabel={"value": "value of a channel", "attention": "weight"},
        marks={"largest": 65504.0},
        marked="value",
    )
    marked = [
        ax.get_title(loc="left")
        for ax in figure.axes
        if any(list(line.get_ydata()) == [65504.0] * 2 for line in ax.lines)
    ]
    assert marked == ["value"]
    assert [ax.get_ylabel() for ax in figure.axes] == ["value of a channel", "weight"]
    (legend,) = figure.legends
    assert "largest" in {text.get_text() for text in legend.get_texts()}
