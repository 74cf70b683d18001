"""Figures show what the data say: values in cells, marks on failures, text on axes, the same bytes
every time."""

import json
import os
import subprocess
import sys

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection, QuadMesh
from matplotlib.figure import Figure
from PIL import Image

from workbench import plots

LAYERS, POSITIONS = (0, 2, 4), range(6)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def fidelity(T=1, **cells) -> pd.DataFrame:
    """1 − cosine of 1e-4 everywhere but in `cells`, e.g. L2_P5=0.5."""
    rows = [
        {
            "T": T,
            "layer": layer,
            "position": p,
            "tensor": "update",
            "mode": "isolated",
            "finite": True,
        }
        | {
            "cosine": 1 - cells.get(f"L{layer}_P{p}", 1e-4),
            "psnr_db": 60.0 + layer,
            "max_abs": 0.1,
        }
        for layer in LAYERS
        for p in POSITIONS
    ]
    # as the log loads them
    types = {"T": "Int64", "layer": "Int64", "position": "Int64", "finite": "boolean"}
    return pd.DataFrame(rows).astype(types)


def mesh(ax) -> np.ma.MaskedArray:
    (found,) = (artist for artist in ax.collections if isinstance(artist, QuadMesh))
    return found.get_array().reshape(found.get_coordinates().shape[0] - 1, -1)


def crossed(ax) -> set[tuple[int, int]]:
    """(row, column) of every crossed cell."""
    (marks,) = (
        artist for artist in ax.collections if isinstance(artist, PathCollection)
    )
    return {(int(y), int(x)) for x, y in marks.get_offsets()}


def legend(ax) -> list[str]:
    return (
        [text.get_text() for text in ax.get_legend().get_texts()]
        if ax.get_legend()
        else []
    )


def ticks(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


# --- fidelity heatmap
# ------------------------------------------------------------------------------------------------


def test_cells_hold_one_minus_cosine_by_layer_and_position():
    ax = plots.fidelity_heatmap(fidelity(L2_P5=0.05), T=1)
    expected = np.full((3, 6), 1e-4)
    expected[1, 5] = 0.05
    np.testing.assert_allclose(mesh(ax), expected, rtol=1e-9)
    assert (ticks(ax.yaxis), ticks(ax.xaxis)) == (["0", "2", "4"], list("012345"))
    assert ax.get_title("left") == "update, isolated, T = 1"
    assert not crossed(ax) and not legend(ax)


def test_cells_beyond_the_threshold_are_crossed_and_the_threshold_is_stated():
    ax = plots.fidelity_heatmap(
        fidelity(L2_P5=0.5, L0_P0=0.031, L0_P1=0.029), T=1, threshold=0.03
    )
    assert crossed(ax) == {(1, 5), (0, 0)}
    assert legend(ax) == ["1 − cosine > 0.03"]


def test_errors_beyond_their_own_budget_are_crossed_and_its_range_is_on_the_scale():
    data = fidelity()
    data = data.assign(error=0.01, budget=np.linspace(0.001, 0.004, len(data)))
    data.loc[4, "error"], data.loc[9, "error"] = 0.02, 0.5
    ax = plots.fidelity_heatmap(data, T=1, metric="error", budget=10)
    beyond = data["error"] > 10 * data["budget"]
    assert 0 < len(crossed(ax)) == beyond[data["T"] == 1].sum()
    assert legend(ax) == ["relative RMS error > 10 × budget"]
    (bar,) = (axis for axis in ax.figure.axes if axis is not ax)
    assert {float(line.get_ydata()[0]) for line in bar.lines} == {
        10 * data["budget"].min()
    }
    assert ax.get_title("right") == "limit: 10 × budget, 0.01 or more"
    low, high = bar.get_ylim()
    assert low < 0.01 and 0.5 < high < 2, "the scale spans the values"


@pytest.mark.parametrize(
    ("metric", "threshold", "rows"),
    [("psnr_db", 63.0, {0, 1}), ("max_abs", 0.05, {0, 1, 2}), ("max_abs", 0.2, set())],
)
def test_every_metric_fails_on_its_own_side(metric, threshold, rows):
    ax = plots.fidelity_heatmap(fidelity(), T=1, metric=metric, threshold=threshold)
    assert {row for row, _ in crossed(ax)} == rows


def test_a_missing_cell_is_hatched_and_not_crossed():
    data = fidelity().drop(index=7)
    data.loc[3, ["cosine", "finite"]] = [np.nan, pd.NA]
    ax = plots.fidelity_heatmap(data, T=1, threshold=0.03)
    assert np.argwhere(np.ma.getmaskarray(mesh(ax))).tolist() == [[0, 3], [1, 1]]
    assert ax.patch.get_hatch() and legend(ax) == ["not measured"] and not crossed(ax)


@pytest.mark.parametrize(("boundary", "lines"), [(4, [[4, 4]]), (99, []), (None, [])])
def test_a_boundary_is_a_line_before_its_position(boundary, lines):
    ax = plots.fidelity_heatmap(fidelity(), T=1, boundary=boundary)
    assert [list(line.get_xdata()) for line in ax.lines] == lines


@pytest.mark.parametrize("metric", ["1-cosine", "max_abs", "psnr_db"])
def test_a_result_that_is_not_finite_is_black_and_crossed_without_any_threshold(metric):
    data = fidelity()
    data.loc[8, ["cosine", "psnr_db", "max_abs"]] = [np.nan, np.nan, np.inf]
    data.loc[8, "finite"] = False
    ax = plots.fidelity_heatmap(data, T=1, metric=metric)
    (image,) = (artist for artist in ax.collections if isinstance(artist, QuadMesh))
    black = (image.to_rgba(mesh(ax))[..., :3] == 0).all(axis=-1)
    assert np.argwhere(black).tolist() == [[1, 2]]
    assert crossed(ax) == {(1, 2)} and legend(ax) == ["not finite"]


def test_an_exact_match_and_rounding_below_zero_are_the_best_colour_not_missing():
    ax = plots.fidelity_heatmap(fidelity(L0_P0=0.0, L0_P1=-1e-12), T=1)
    assert mesh(ax)[0, :2].tolist() == [1e-6, 1e-6]


def test_logits_belong_to_no_layer():
    rows = fidelity().query("layer == 0").assign(layer=-1, tensor="logits")
    ax = plots.fidelity_heatmap(rows, T=1, tensor="logits")
    assert (ticks(ax.yaxis), ax.get_ylabel()) == ([], "") and mesh(ax).shape == (1, 6)


def test_limits_are_fixed_so_that_figures_compare():
    scales = [
        plots.fidelity_heatmap(data, T=1).collections[0].get_clim()
        for data in (fidelity(), fidelity(L0_P0=0.9))
    ]
    assert scales[0] == scales[1] == (1e-6, 1e-1)
    assert plots.fidelity_heatmap(fidelity(), T=1, limits=(1e-8, 1.0)).collections[
        0
    ].get_clim() == (1e-8, 1.0)


def test_tokens_name_the_positions_with_white_space_shown_and_mathematics_untouched():
    ax = plots.fidelity_heatmap(
        fidelity(), T=1, tokens=["<s>", " a", "\n", r"$\x$", "日", "incomprehensible"]
    )
    assert ticks(ax.xaxis) == ["<s>", "␣a", "↵", r"$\x$", "□", "incomprehen…"]
    ax.figure.canvas.draw()


def test_many_positions_are_numbered_not_named():
    row = fidelity().iloc[[0] * 65].assign(position=range(65))
    ax = plots.fidelity_heatmap(row, T=1, tokens=["x"] * 65)
    assert ticks(ax.xaxis) == [str(position) for position in range(0, 65, 5)]


@pytest.mark.parametrize(
    "data",
    [fidelity(T=4), pd.concat([fidelity(), fidelity()])],
    ids=["no rows", "several rows"],
)
def test_data_that_do_not_say_one_thing_are_refused(data, request):
    with pytest.raises(ValueError, match=request.node.callspec.id):
        plots.fidelity_heatmap(data, T=1)


def test_a_figure_goes_into_the_axes_it_is_given():
    _, (left, right) = plt.subplots(1, 2)
    assert plots.fidelity_heatmap(fidelity(), T=1, ax=right) is right
    assert not left.collections


# --- small multiples
# ------------------------------------------------------------------------------------------------


def test_the_grid_sets_the_least_T_beside_the_worst_of_the_others_on_one_scale():
    data = pd.concat(
        [fidelity(T=1), fidelity(T=2, L4_P1=0.5), fidelity(T=4, L0_P3=0.2)]
    )
    figure = plots.fidelity_grid(data, [1, 2, 4], threshold=0.03)
    panels = [ax for ax in figure.axes if ax.get_title("left")]
    assert [ax.get_title("left") for ax in panels] == ["T = 1", "T = 2, 4: the worst"]
    assert [crossed(ax) for ax in panels] == [set(), {(2, 1), (0, 3)}]
    assert len(figure.axes) == 3, "two panels and one colour bar"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "1 − cosine > 0.03"
    ]


def test_panels_line_up_where_one_T_has_fewer_positions():
    figure = plots.fidelity_grid(
        pd.concat([fidelity(T=1), fidelity(T=4, L0_P0=0.2).query("position < 4")]),
        [1, 4],
    )
    panels = [ax for ax in figure.axes if ax.get_title("left")]
    assert [mesh(ax).shape for ax in panels] == [(3, 6)] * 2
    assert np.ma.getmaskarray(mesh(panels[1]))[:, 4:].all()


def test_values_that_are_not_finite_are_the_worst_of_several_T():
    bad = fidelity(T=2)
    bad.loc[8, ["cosine", "finite"]] = [np.nan, False]
    figure = plots.fidelity_grid(
        pd.concat([fidelity(T=1), bad, fidelity(T=3, L2_P2=0.9)]), [1, 2, 3]
    )
    _, worst = (ax for ax in figure.axes if ax.get_title("left"))
    assert (1, 2) in crossed(worst)


def test_equal_values_at_all_T_are_drawn_once_and_the_title_says_so():
    data = pd.concat([fidelity(T=T) for T in (1, 2, 3, 4)])
    figure = plots.fidelity_grid(data, [1, 2, 3, 4])
    titles = [ax.get_title("left") for ax in figure.axes if ax.get_title("left")]
    assert titles == ["T = 1 to 4, the same within 1%"]


# --- ablations and parts of the error
# --------------------------------------------------------------------------------


def test_update_bars_mark_what_fails_and_show_the_blind_hidden_state_beside():
    data = pd.DataFrame(
        [
            ("rope", "update", 0.49),
            ("rope", "hidden", 0.958),
            ("all", "update", 0.999),
            ("all", "hidden", 1.0),
        ],
        columns=["ingredient", "tensor", "cosine"],
    )
    ax = plots.update_cosine_bars(data, threshold=0.97)
    assert [bar.get_width() for bar in ax.patches] == [0.49, 0.999]
    assert [text.get_text() for text in ax.texts] == ["0.4900 ×", "0.9990"]
    assert ax.get_xlim()[1] < 1.1  # a cosine ends at 1
    assert ticks(ax.yaxis) == ["rope", "all"]
    rings = next(line for line in ax.lines if line.get_marker() == "o")
    assert rings.get_xdata().tolist() == [0.958, 1.0]


def test_a_part_without_error_says_so_where_a_log_scale_has_no_place_for_it():
    parts = pd.DataFrame(
        {
            "layer": [0, 1],
            "storage": [0.0, 0.0],
            "quantization": [0.0, 1e-3],
            "total": [1e-3, 1e-3],
        }
    )
    legend = plots.error_parts(parts).get_legend()
    assert [t.get_text() for t in legend.get_texts()] == [
        "total",
        "storage (0)",
        "quantization",
    ]


def test_a_part_has_one_colour_in_every_figure():
    parts = {"layer": [0, 1], "precision": [1e-3, 2e-3], "total": [1e-3, 2e-3]}
    alone = plots.error_parts(pd.DataFrame(parts))
    others = {"storage": [1e-4, 1e-4], "quantization": [1e-2, 1e-2]}
    along = plots.error_by_position(pd.DataFrame(parts | others | {"position": [0, 1]}))
    colours = [
        {line.get_label(): line.get_color() for line in ax.lines}["precision"]
        for ax in (alone, along)
    ]
    assert colours[0] == colours[1]


def test_error_parts_leave_out_what_was_not_measured():
    parts = {
        "layer": [1, 0],
        "storage": [2e-4, 1e-4],
        "precision": [2e-3, 1e-3],
        "runtime": [None, None],
    }
    ax = plots.error_parts(pd.DataFrame(parts | {"total": [4e-3, 3e-3]}))
    drawn = {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
    assert drawn == {
        "storage": [1e-4, 2e-4],
        "precision": [1e-3, 2e-3],
        "total": [3e-3, 4e-3],
    }


# --- speed, time, memory
# ---------------------------------------------------------------------------------------------


def samples(**columns) -> pd.DataFrame:
    rows = [
        {
            "max_seq_len": s,
            "T": T,
            "value": 1000 / s * T + r,
            "unit": "tok/s",
            "warmup": r == 9,
        }
        for s in (512, 128)
        for T in (1, 4)
        for r in (0, 1, 5, 9)
    ]
    return (
        pd.DataFrame(rows)
        .assign(**columns)
        .astype({"max_seq_len": "Int64", "T": "Int64", "warmup": "boolean"})
    )


def test_speed_draws_medians_with_their_range_and_no_warm_ups():
    ax = plots.speed(samples())
    bars = ax.containers
    assert [bar.get_label() for bar in bars] == ["T = 1", "T = 4"]
    for T, bar in zip((1, 4), bars):
        median, _, (spread,) = bar.lines
        np.testing.assert_allclose(
            median.get_xdata().astype(float), [128, 512], rtol=0.03
        )
        medians = median.get_ydata().astype(float)
        np.testing.assert_allclose(medians, [1000 / 128 * T + 1, 1000 / 512 * T + 1])
        reach = [
            segment[:, 1] - middle
            for segment, middle in zip(spread.get_segments(), medians)
        ]
        np.testing.assert_allclose(reach, [[-1, 4], [-1, 4]])
    assert len({bar.lines[0].get_marker() for bar in bars}) == 2, (
        "told apart without colour"
    )
    assert ax.get_title("left") == "decode speed, median and range, n = 3"
    assert (ticks(ax.xaxis), ax.get_ylabel(), ax.get_ylim()[0]) == (
        ["128", "512"],
        "tok/s",
        0,
    )


def test_speed_compares_any_setting():
    ax = plots.speed(
        pd.concat([samples(compress="fp16"), samples(compress="lut4")]),
        lines="compress",
    )
    assert legend(ax) == ["compress = fp16", "compress = lut4"]


def test_two_paths_stand_side_by_side_on_one_scale():
    rows = pd.DataFrame(
        {"max_seq_len": [16, 32] * 2, "value": [1.0, 1.1, 5.0, 9.0], "T": 1}
    )
    rows = rows.assign(unit="ms", path=["decode path"] * 2 + ["every operation"] * 2)
    figure = plots.speed_beside(rows, by="path")
    left, right = figure.axes
    names = [ax.get_xlabel().splitlines()[-1] for ax in figure.axes]
    assert names == ["decode path", "every operation"]
    assert left.get_ylim() == right.get_ylim() and right.get_ylim()[1] > 9
    assert left.containers[0].lines[0].get_ydata().tolist() == [1.0, 1.1]
    assert "time of a call, median and range, n = 1" in figure.get_suptitle()


def test_speed_refuses_to_mix_units():
    with pytest.raises(ValueError, match="ms.*tok/s"):
        plots.speed(pd.concat([samples(), samples(unit="ms")]))


def test_a_sustained_run_is_a_line_over_time_with_its_band_and_the_heat():
    at = np.arange(1200) / 2
    rows = pd.DataFrame(
        {"phase": "call", "elapsed_s": at, "value": 10 + at / 60, "T": 1}
    )
    hot = pd.DataFrame(
        {
            "phase": "thermal_pressure",
            "elapsed_s": [5.0, 300.0, 500.0],
            "value": [0, 1, 1],
            "T": 1,
        }
    )
    ax = plots.over_time(
        pd.concat([rows, hot, rows.assign(elapsed_s=np.nan, value=1e6)])
    )
    line, heat = ax.lines
    assert len(line.get_xdata()) == 60 and line.get_label() == "T = 1"
    assert np.allclose(line.get_ydata(), 10 + line.get_xdata() / 60)
    assert heat.get_xdata().tolist() == [300, 500] and "pressure 1" in heat.get_label()
    (band,) = ax.collections
    edges = band.get_paths()[0].vertices[:, 1]
    assert edges.min() < line.get_ydata()[0] and edges.max() > line.get_ydata()[-1]
    assert plots.over_time(rows.assign(elapsed_s=np.nan)).lines[:] == []


def test_layer_ms_writes_the_median_over_layers_into_each_cell():
    rows = [
        (1, 128, 0.1),
        (1, 128, 0.2),
        (1, 128, 0.9),
        (4, 128, 12.34),
        (4, 256, 1234.0),
    ]
    ax = plots.layer_ms(pd.DataFrame(rows, columns=["T", "max_seq_len", "layer_ms"]))
    assert mesh(ax).filled(-1).tolist() == [[0.2, -1], [12.34, 1234.0]]
    assert [text.get_text() for text in ax.texts] == ["0.200", "12.3", "1.23e+03"]
    assert (ticks(ax.yaxis), ticks(ax.xaxis), legend(ax)) == (
        ["1", "4"],
        ["128", "256"],
        ["not measured"],
    )


def test_memory_stacks_the_parts_against_the_machines():
    gib = 2**30
    parts = pd.DataFrame(
        [
            ("S 512", "weights", 4 * gib),
            ("S 512", "KV cache", gib // 2),
            ("S 4096", "weights", 4 * gib),
        ]
        + [("S 4096", "KV cache", 4 * gib)],
        columns=["setting", "part", "bytes"],
    )
    ax = plots.memory_bar(parts, {"6 GB": 6 * gib})
    spans = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in ax.patches]
    assert spans == [(0, 4), (0, 4), (4, 4.5), (4, 8)]
    assert ticks(ax.yaxis) == ["S 512", "S 4096"]
    assert [text.get_text() for text in ax.texts] == [
        "4.50 GiB",
        "8.00 GiB",
        "6 GB: 6.00 GiB",
    ]
    assert [line.get_xdata()[0] for line in ax.lines] == [6]
    assert legend(ax) == ["weights", "KV cache"]
    assert len({bar.get_hatch() for bar in ax.patches[:4]}) == 2, (
        "told apart without colour"
    )


# --- cache rows
# ------------------------------------------------------------------------------------------------


def test_cache_rows_tell_right_missed_and_stray_writes_apart_without_colour():
    rows = [
        {
            "call": call,
            "T": T,
            "slot": slot,
            "layer": layer,
            "expected": first <= slot < first + T,
        }
        for call, T, first in ((0, 2, 0), (1, 1, 2))
        for slot in range(4)
        for layer in (0, 1)
    ]
    data = pd.DataFrame(rows)
    data["changed"] = data["expected"]
    data.loc[data.eval("call == 0 and slot == 1 and layer == 1"), "changed"] = False
    data.loc[data.eval("call == 1 and slot == 0 and layer == 0"), "changed"] = True
    ax = plots.cache_rows(data)
    drawn = {
        line.get_label(): list(zip(line.get_ydata(), line.get_xdata()))
        for line in ax.lines
    }
    assert drawn == {
        "as expected (2)": [(0.5, 0.5), (1.5, 2.5)],
        "missed (1)": [(0.5, 1.5)],
        "stray (1)": [(1.5, 0.5)],
    }
    assert (
        len(
            {
                (line.get_marker(), line.get_markerfacecolor() == "none")
                for line in ax.lines
            }
        )
        == 3
    )
    assert (ticks(ax.yaxis), ticks(ax.xaxis)) == (
        ["T = 2, pos 0", "T = 1, pos 2"],
        list("0123"),
    )


# --- files
# ------------------------------------------------------------------------------------------------

SAVE = """
import sys
import pandas as pd
from workbench import plots
data = pd.read_json(sys.argv[1])
plots.save(lambda: plots.fidelity_heatmap(data, T=1, threshold=0.03), sys.argv[2], run_ids=["r1"], alt="One layer fails.")
"""


def test_a_figure_saved_in_another_process_has_the_same_bytes(tmp_path):
    data = fidelity(L2_P5=0.05).drop(index=3)
    data.to_json(tmp_path / "data.json")
    for name, seed in (("a", "1"), ("b", "2")):
        (tmp_path / name).mkdir()
        command = [
            sys.executable,
            "-c",
            SAVE,
            tmp_path / "data.json",
            tmp_path / name / "figure",
        ]
        subprocess.run(
            command,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed, "MPLBACKEND": "agg"},
        )
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert set(files) == {"figure.svg", "figure.pdf", "figure.png", "figure.json"}
    assert files == {
        path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()
    }
    assert b"update, isolated" in files["figure.svg"], "text stays text"


def test_the_sidecar_says_what_the_figure_shows(tmp_path):
    stem = tmp_path / "f.1" / "grid.v2"
    paths = plots.save(
        lambda: plots.fidelity_grid(fidelity(), [1]),
        stem,
        run_ids=["a", "b"],
        alt="x",
        about="tiny-llama · max_seq_len 64",
        formats=["png"],
    )
    assert paths == [
        tmp_path / "f.1" / "grid.v2.png",
        tmp_path / "f.1" / "grid.v2.json",
    ]
    sidecar = json.loads(paths[1].read_text())
    assert (sidecar["run_ids"], sidecar["alt"], sidecar["title"]) == (
        ["a", "b"],
        "x",
        "error of each layer's update, each layer fed Hugging Face's input",
    )
    assert sidecar["about"] == "tiny-llama · max_seq_len 64"
    assert sidecar["written_by"].startswith("matplotlib ")


@pytest.mark.parametrize(
    "draw",
    [lambda: plots.speed(samples()), lambda: plots.fidelity_grid(fidelity(), [1])],
)
def test_what_a_figure_is_about_is_its_subtitle_and_in_the_metadata(tmp_path, draw):
    about = "tiny-llama · int8-tensor · max_seq_len 64 · Apple M4 Max"
    paths = plots.save(draw, tmp_path / "f", run_ids=[], alt="x", about=about)
    svg, _, png, _ = paths
    text = svg.read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert f"<dc:description>{about}</dc:description>" in " ".join(
        text.split()
    ).replace("<dc:description> ", "<dc:description>")
    assert text.count("Apple M4 Max") >= 2, "in the metadata and in the picture"
    assert Image.open(png).text["Description"] == about
    assert "sans-serif" in text


def test_saving_closes_its_figures_and_leaves_the_style_of_others_alone(tmp_path):
    before = dict(plt.rcParams)
    plots.save(lambda: plots.speed(samples()), tmp_path / "speed", run_ids=[], alt="x")
    assert not plt.get_fignums() and dict(plt.rcParams) == before


def test_a_figure_without_a_text_alternative_is_refused(tmp_path):
    with pytest.raises(ValueError, match="text alternative"):
        plots.save(lambda: Figure(), tmp_path / "f", run_ids=[], alt=" ")
    assert not list(tmp_path.iterdir())


def test_a_backend_that_loads_with_the_first_figure_stays_interactive():
    before = matplotlib.is_interactive()
    try:
        matplotlib.interactive(False)
        with plots.style():
            matplotlib.interactive(True)  # as inline backends do
        assert matplotlib.is_interactive()
    finally:
        matplotlib.interactive(before)


# --- widgets' figures
# ------------------------------------------------------------------------------------------------


def test_the_split_of_a_layer_has_a_bar_and_a_figure_for_every_part():
    parts = pd.DataFrame(
        {
            "layer": [0, 1],
            "storage": [1e-4, 0],
            "quantization": [1e-2, 2e-2],
            "runtime": [None, None],
            "total": [1e-2, 2e-2],
        }
    )
    ax = plots.layer_parts(parts, layer=1)
    said = {label: text.get_text() for label, text in zip(ticks(ax.yaxis), ax.texts)}
    assert said == {
        "storage": "0",
        "quantization": "0.02",
        "runtime": "not measured",
        "total": "0.02",
    }
    assert ax.get_title("left") == "error of layer 1, split"


def test_a_part_of_a_split_has_the_colour_of_its_line():
    parts = pd.DataFrame({"layer": [0], "precision": [1e-3], "total": [1e-2]})
    (line,) = (
        ln for ln in plots.error_parts(parts).lines if ln.get_label() == "precision"
    )
    first, _ = plots.layer_parts(parts, layer=0).patches
    assert first.get_facecolor() == matplotlib.colors.to_rgba(line.get_color())


def test_the_parts_of_a_token_are_named_beside_the_bar():
    parts = pd.DataFrame({"part": ["probe", "rest", "moe"], "ms": [0.3, 4.2, 1.6]})
    ax = plots.parts_bar(parts)
    assert [t.get_text() for t in ax.texts] == [
        "probe, 0.3 ms",
        "rest, 4.2 ms",
        "moe, 1.6 ms",
    ]
    assert not ax.get_legend() and not any(bar.get_hatch() for bar in ax.patches)


def test_a_ratio_without_an_interval_is_hollow():
    rows = pd.DataFrame(
        {
            "phase": ["call", "head"],
            "shard": [None, "head_00"],
            "T": [1, 1],
            "depth": [0, 0],
            "ratio": [2.0, 0.5],
            "low": [1.5, np.nan],
            "high": [2.5, np.nan],
        }
    )
    words = [text.get_text() for text in plots.ratios(rows.assign(unit="ms")).texts]
    assert words == ["2×, B worse", "0.5×, B better"]
    words = [text.get_text() for text in plots.ratios(rows.assign(unit="tok/s")).texts]
    assert words == ["2×, B better", "0.5×, B worse"]
    ax = plots.ratios(rows)
    left, right = ax.get_xlim()
    assert "hollow: too few rounds" in ax.get_xlabel() and ax.get_xscale() == "log"
    assert left * right == pytest.approx(1)
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert [dot.get_markerfacecolor() for dot in dots] == ["#0072B2", "white"]
    assert [text.get_text() for text in ax.texts] == ["2×", "0.5×"] and ticks(ax.yaxis)[
        1
    ] == "head head_00 T 1 depth 0"


def test_a_peer_stands_beside_with_the_ratio_in_words():
    rows = pd.DataFrame(
        {
            "name": ["ms_per_token", "bytes_per_token"],
            "value": [5.0, 4e5],
            "unit": ["ms", "bytes"],
            "peer": "dense",
            "peer_value": [2.0, 1.6e6],
            "ratio": [0.4, 4.0],
        }
    )
    ms, size = plots.against_peer(rows, this="routed").axes
    assert [bar.get_height() for bar in size.patches] == [4e5, 1.6e6] and ticks(
        ms.xaxis
    ) == ["routed", "dense"]
    assert [ax.get_title("left") for ax in (ms, size)] == [
        "ms per token: 2.5× worse",
        "bytes per token: 4.0× better",
    ]
    assert size.yaxis.get_major_formatter()(1.5e6) == "1.5 MB"
