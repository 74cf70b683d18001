"""Widgets in Python: sliders change the heatmap's data, a click shows a cell and measures its
layer's split, missing results are measured beside the notebook, and no error is lost."""

import gc
import json
import re
import shutil
import threading
import time
import weakref
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import in_process
import numpy as np
import pandas as pd
import pytest
from ipywidgets.widgets.widget import _instances
from matplotlib.text import Annotation
from tiny import DATA, once

from workbench import Decoder, Golden, plots, process
from workbench.bundle import PRESETS
from workbench.check import fidelity, gates
from workbench.experiment import Experiment
from workbench.explain import operation
from workbench.sweep import identity
from workbench.sweep.error_split import signed_share
from workbench.widgets import Explorer, planner, planning, results, sentences
from workbench.widgets import explorer as explorers
from workbench.widgets.controls import OF_SETTING, STALE
from workbench.widgets.estimates import EXPORTING, MEASURING, Stage
from workbench.widgets.jobs import Job
from workbench.widgets.views import Place

GRID = {
    "checkpoint": str(DATA / "tiny-llama"),
    "validate_ids": [1, 4, 69, 173],
    "export": {"max_seq_len": [16, 32], "tokens": ["1-2"], "compress": ["int8-tensor"]},
    "run": {"T": [1, 2], "n_gen": 2, "repetitions": 3},
}
PART = GRID | {"export": GRID["export"] | {"max_seq_len": [16]}}


def check(view: Explorer) -> None:
    assert "workbench-error" not in view.message.value, view.message.value


@pytest.fixture(scope="module")
def root(shared_folder) -> Path:
    """The log of what the Explorer measured of a part of the grid, once for all workers."""
    return once(shared_folder / "explorer", measure_part) / "experiments" / "log"


def measure_part(folder: Path) -> None:
    """Has the Explorer measure a part of the grid in a new project."""
    log = folder / "experiments" / "log"
    view = Explorer(PART, Experiment("05_x", {}), root=log)
    assert "not measured at this setting" in view.message.value
    assert view.cancel_button.disabled
    # nothing was measured on which an estimate could rest
    assert view.run_button.description == (
        "Run what is missing (2 measurements, no estimate yet)"
    )
    said = []
    view.status.observe(lambda change: said.append(change["new"]), names="value")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "call", in_process.call)
        view.run_button.click()
        view.queue.thread.join()
    check(view)
    job = "measuring int8-tensor, max_seq_len 16"
    first = f"0 of 2 measured; {job}, no estimate yet, then 1 more measurement"
    assert said[0] == first and said[-2].startswith(f"1 of 2 measured; {job}")
    stages = [(stage.name, stage.validates) for stage, _ in view.cell_seconds._measured]
    measured = {(MEASURING, True), (MEASURING, False)}
    assert stages[0] == (EXPORTING, False) and {*stages[1:]} == measured
    assert (
        view.run_button.description == "Nothing is missing" and view.run_button.disabled
    )
    assert "tokens per second" in view.message.value


@pytest.fixture
def explorer(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = shutil.copytree(root, "log")  # what a test measures stays its own
    view = Explorer(GRID, Experiment("05_x", {}), root=log)
    check(view)
    return view


def mesh(explorer) -> np.ndarray:
    return explorer.heatmap.canvas.figure.axes[0].collections[0].get_array()


def click(explorer, layer: int, position: int) -> None:
    axes = explorer.heatmap.canvas.figure.axes[0]
    at = {"xdata": position + 0.5, "ydata": layer + 0.5}
    explorer.click(SimpleNamespace(inaxes=axes, **at))


def test_it_starts_with_the_cosine_of_the_updates_and_describes_what_is_pointed_at(
    explorer,
):
    rows = explorer.shown_rows[explorer.shown_rows["T"] == 1].sort_values(
        ["layer", "position"]
    )
    drawn = (1 - rows["cosine"]).clip(lower=1e-8)
    np.testing.assert_allclose(mesh(explorer).ravel(), drawn)
    (row,) = rows.query("layer == 1 and position == 2").to_dict("records")
    said = explorer.heatmap.canvas.figure.axes[0].format_coord(2.5, 1.5)
    assert f"1 − cosine {sentences._three_digits(1 - row['cosine'])}" in said
    assert explorer.tokens[2] in said and "× the rounding budget" in said


def test_both_sliders_move_tokens_per_second_and_ms_per_layer(explorer):
    said = [explorer.message.value]
    explorer.axes["T"].value = 2
    check(explorer)
    titles = [ax.get_title("left") for ax in explorer.speed.canvas.figure.axes]
    assert titles == [sentences.SPEED, sentences.LAYER]
    assert explorer.message.value not in said


def test_a_setting_that_is_not_measured_shows_the_nearest_one_and_says_so(explorer):
    before = explorer.shown_rows
    explorer.heatmap.canvas.send_json({"type": "message", "message": "of a cell"})
    explorer.axes["max_seq_len"].value = 32
    check(explorer)
    assert not explorer.heatmap.canvas._message
    measures = "<i>Run what is missing</i> measures them."
    said = f"Times: not measured at this setting. {measures}<br>Errors: "
    said += "not measured at max_seq_len = 32; the heatmap shows those at "
    said += f"max_seq_len = 16. {measures}"
    assert explorer.message.value == said
    pd.testing.assert_frame_equal(explorer.shown_rows, before)
    assert explorer.speed.canvas.layout.display == "none"


def rename_T(explorer, before: int, after: int) -> None:
    """Lets the errors that were measured at one T have been measured at another."""
    rows = explorer.results.tables["fidelity"]
    explorer.results.tables["fidelity"] = rows.replace({"T": {before: after}})


def test_a_T_whose_errors_were_not_measured_shows_the_next_larger_one_and_says_so(
    explorer,
):
    rename_T(explorer, 2, 4)
    explorer.axes["T"].value = 2
    check(explorer)
    # both panels, which the figure below has
    said = "<br>Errors: not measured at T = 2; the heatmap shows those at T = 1 and 4. "
    assert explorer.message.value.endswith(said + explorers.RUN_MEASURES_THEM)
    figure = explorer.heatmap.canvas.figure
    # the panels alone name their T
    assert (
        figure.get_suptitle() == "1 − cosine of each layer's update from Hugging Face's"
    )
    shown = " ".join(ax.get_title("left") for ax in explorer.heatmap.axes())
    assert "T = 1" in shown and "T = 4" in shown and "T = 2" not in shown
    assert set(explorer.shown_rows["T"]) == {1, 4}
    assert ", T = 4:" in explorer.heatmap.describe(Place(1, 2))
    explorer.save_button.click()
    check(explorer)
    assert "saved explorer-16-4-" in explorer.saved_text.value
    explorer.axes["max_seq_len"].value = 32
    said = (
        "at max_seq_len = 32 and T = 2; the heatmap shows those at max_seq_len = 16, "
    )
    assert f"{said}T = 1 and 4." in explorer.message.value


def test_a_T_that_no_validation_measures_is_marked_and_named(explorer, monkeypatch):
    """The button does not offer to measure it."""
    monkeypatch.setattr(results, "validated_ts", lambda _: [1, 4])
    rename_T(explorer, 2, 4)
    explorer.refresh = None  # would read the log again
    explorer._show_results()
    assert labels(explorer, "T") == ["1", "2 (times only)"]
    explorer.axes["T"].value = 2
    check(explorer)
    assert explorer.message.value.endswith(
        "<br>Errors: not measured at T = 2; the heatmap shows those at T = 1 and 4. "
        "A validation measures errors at T = 1, 4 alone."
    )


def labels(explorer, name: str) -> list[str]:
    """The labels of a control's values in the page."""
    return [*explorer.axes[name]._options_labels]


def test_values_that_the_log_lacks_are_marked_until_they_are_measured(explorer):
    drawn = []
    explorer.axes["max_seq_len"].observe(drawn.append, "value")
    assert labels(explorer, "max_seq_len") == ["16", "32 (not measured)"]
    assert labels(explorer, "T") == ["1", "2"]
    explorer.axes["max_seq_len"].value = 32
    for name, rows in explorer.results.tables.items():
        cells = explorer.results.cells
        column = results.HASHES[name]
        of_32 = [c.columns()[column] for c in cells[cells["max_seq_len"] == 32]["cell"]]
        others = rows.assign(**{column: of_32[0]})
        explorer.results.tables[name] = pd.concat([rows, others])
    explorer._mark_stops()
    assert labels(explorer, "max_seq_len") == ["16", "32"]
    assert explorer.axes["max_seq_len"].value == 32


def test_it_opens_at_the_setting_of_which_the_most_is_measured(root, tmp_path):
    """And not at the first one of the grid, of which the log has nothing."""
    grid = GRID | {"export": GRID["export"] | {"max_seq_len": [32, 16]}}
    view = Explorer(grid, Experiment("05_x", {}), root=root)
    check(view)
    assert view.setting()["max_seq_len"] == 16 and view.setting()["T"] == 1
    assert "tokens per second" in view.message.value
    # without results it opens at the first one
    view = Explorer(grid, Experiment("05_x", {}), root=tmp_path / "log")
    assert view.setting()["max_seq_len"] == 32
    assert labels(view, "max_seq_len") == ["16", "32"]


def test_a_picture_is_dimmed_from_the_change_until_the_next_one_is_sent(explorer):
    canvas, was_stale = explorer.heatmap.canvas, []
    canvas.syncing_data_url = False  # as once a page shows it
    assert STALE not in canvas._dom_classes
    draw = explorer.draw
    explorer.draw = lambda: (was_stale.append(STALE in canvas._dom_classes), draw())
    explorer.tensor.value = "k"
    check(explorer)
    # before anything is drawn, and until the page gets the picture
    assert was_stale == [True] and STALE in canvas._dom_classes
    canvas.send_binary(b"")
    assert STALE not in canvas._dom_classes
    assert f".{STALE} > *" in explorer.children[-1].value


def test_the_page_dims_what_belongs_to_another_value_without_the_kernel(explorer):
    """The page compares a hidden bar, which follows a control there, with this rule."""
    selections = explorer.selections
    for bar, link, control in zip(selections.bars, selections.links, explorer.controls):
        assert link.source == (control, "index") and link.target == (bar, "value")
        assert bar.value == control.index and bar in explorer.children

    def drawn() -> list[int]:
        return [int(place) for place in re.findall(r'" (\d+)%"', selections.rule.value)]

    assert drawn() == [control.index for control in explorer.controls]
    explorer.tensor.value = "k"
    check(explorer)
    assert drawn() == [control.index for control in explorer.controls]
    dimmed = [w for w in explorer.children if OF_SETTING in w._dom_classes]
    assert {explorer.heatmap.canvas, explorer.speed.canvas} <= {*dimmed}
    assert {explorer.message, explorer.ranks_text, explorer.place_text} <= {*dimmed}
    explorer.draw = lambda: 1 / 0
    before = drawn()
    explorer.tensor.value = "v"
    # the picture is still that of the last value; the error is not dimmed
    assert drawn() == before and ":not(:has(.workbench-error))" in selections.rule.value


def test_a_clicked_cell_is_described_once(explorer, calls_here):
    pointed_at = explorer.heatmap.canvas.figure.axes[0].format_coord
    assert "layer 1, position 2" in pointed_at(2.5, 1.5)
    click(explorer, 1, 2)
    explorer.queue.thread.join()
    assert "layer 1, position 2" in explorer.place_text.value
    pointed_at = explorer.heatmap.canvas.figure.axes[0].format_coord
    assert pointed_at(2.5, 1.5) == "" and "position 1" in pointed_at(1.5, 1.5)


def test_saving_says_so_before_it_begins_and_where_the_figure_is(explorer, monkeypatch):
    said = []
    explorer.saved_text.observe(lambda change: said.append(change["new"]), "value")
    save = explorer.save
    monkeypatch.setattr(
        explorer, "save", lambda: (said.append(explorer.save_button.disabled), save())
    )
    explorer.save_button.click()
    check(explorer)
    assert said[:2] == [explorers.SAVING, True] and said[2].startswith(
        "saved explorer-"
    )
    assert not explorer.save_button.disabled
    explorer.tensor.value = "k"  # another picture, which was not saved
    assert explorer.saved_text.value == ""
    explorer.save = lambda: [][1]
    explorer.save_button.click()
    assert explorer.saved_text.value == "" and "IndexError" in explorer.message.value


def test_the_split_s_parts_have_the_names_of_the_figures():
    names = [*sentences.PARTS]
    split = pd.DataFrame(
        [dict.fromkeys(names, 0.01234) | {"layer": 1, "runtime": None}]
    )
    said = sentences.split_table(split, 1)
    assert "re-authoring" in said and "reauthoring" not in said
    assert said.count('<td class="number">0.0123</td>') == len(names) - 1
    assert 'border="1"' not in said and "–" in said
    # an older log has no shares
    assert sentences.SHARE not in said
    shares = {
        signed_share("storage"): 0.0,
        signed_share("quantization"): 1.25,
        signed_share("precision"): -0.25,
    }
    said = sentences.split_table(split.assign(**shares), 1)
    row = said[said.index(sentences.SHARE) :]
    assert re.findall(r'"number">([^<]*)<', row) == [
        "0",
        "1.25",
        "–",
        "−0.25",
        "–",
        "1",
    ]
    assert "their shares add up to 1" in said
    assert sentences.split_table(split, None) == ""


def test_small_numbers_of_the_explorer_have_powers_of_ten():
    runs = pd.DataFrame(
        {"compress": ["fp16", "int8-channel"], "kl_mean": [7.951e-07, 2]}
    )
    said = sentences.costs_table(runs.assign(config=None), ["compress"])
    assert "7.95×10⁻⁷" in said and "e-07" not in said
    row = pd.Series({"T": 1, "cosine": 1 - 2**-20, "budget": 1e-3, "error": 2.5e-05})
    words = sentences.describe_cell(row, Place(0, 3), None)
    assert "1 − cosine 9.54×10⁻⁷, relative error 2.50×10⁻⁵" in words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1.00"),
        (0.9996, "1.00"),
        (1.0349, "1.03"),
        (0.0075, "0.00750"),
        (123.4, "123"),
        (4.56e-6, "4.56×10⁻⁶"),
        (0.0, "0"),
        (np.inf, "∞"),
        (np.nan, "–"),
    ],
)
def test_numbers_of_a_sentence_have_three_significant_digits(value, text):
    assert sentences._three_digits(value) == text


def test_the_ranks_tell_values_near_1_apart(explorer):
    rows = explorer.shown_rows.assign(error=0.1, budget=0.1, cosine=1.0)
    rows.loc[rows["layer"].eq(0), "error"] = 0.1042
    rows.loc[rows["layer"].eq(1), "error"] = 0.1012
    said = sentences.describe_ranks(rows)
    assert "RMS over positions: layer 0: 1.04; layer 1: 1.01;" in said


def test_logits_without_a_budget_are_drawn_as_cosine_and_the_page_says_why(explorer):
    explorer.metric.value = "error"
    assert explorer.metric_text.value == ""
    explorer.tensor.value = "logits"
    check(explorer)
    assert explorer.metric_text.value == (
        "No error ÷ rounding for logits: its rounding budget is not measured; "
        "1 − cosine is shown."
    )
    # beside the list
    assert any(
        {explorer.metric, explorer.metric_text} <= {*row.children}
        for row in explorer.children[:2]
    )
    rows = explorer.shown_rows[explorer.shown_rows["T"] == 1].sort_values("position")
    np.testing.assert_allclose(
        mesh(explorer).ravel(), (1 - rows["cosine"]).clip(lower=1e-8)
    )
    label = explorer.heatmap.canvas.figure.axes[-1].get_ylabel()
    assert " ".join(label.split()).removesuffix(" (lighter is worse)") == "1 − cosine"
    explorer.save_button.click()
    check(explorer)
    assert "-logits-cosine (svg" in explorer.saved_text.value
    # the choice of the user holds again where the metric exists
    explorer.tensor.value = "k"
    assert explorer.heatmap.options["metric"] == "error"
    assert explorer.metric_text.value == ""


def test_logits_say_why_a_panel_lacks_positions(explorer):
    def notes() -> str:
        (legend,) = explorer.heatmap.canvas.figure.legends
        return " ".join(legend.get_title().get_text().split())

    assert "take turns" not in notes()
    explorer.tensor.value = "logits"
    check(explorer)
    said = "in which calls of T = 1 and 2 take turns; a panel has the positions"
    assert said in notes()
    # what the note says is so
    rows = explorer.results.measured("logits")
    assert set(rows["T"]) == {1, 2} and rows["position"].is_unique


def test_all_measured_settings_have_one_colour_scale_in_the_page_and_in_a_file(
    explorer, monkeypatch
):
    export = PART["export"] | {"compress": ["int8-tensor", "fp16"]}
    view = Explorer(PART | {"export": export}, explorer.experiment, root=explorer.root)
    check(view)

    def scale() -> tuple[float, float]:
        norm = view.heatmap.axes()[0].collections[0].norm
        return norm.vmin, norm.vmax

    cells = view.results.cells
    (hash_,) = {
        cell.columns()["values"] for cell in cells[cells["compress"] == "fp16"]["cell"]
    }
    rows = view.results.tables["fidelity"]
    alone = scale()
    distance = (1 - rows["cosine"]) / 200
    of_fp16 = rows.assign(values=hash_, cosine=1 - distance, compress="fp16")
    # a measurement of another setting extends the scale of the shown one
    view.results.tables["fidelity"] = pd.concat([rows, of_fp16])
    view.draw()
    shared = scale()
    of_updates = rows["tensor"].eq("update") & rows["mode"].eq("isolated")
    least, largest = distance[of_updates].min(), 200 * distance[of_updates].max()
    np.testing.assert_allclose(shared, (least, largest))
    assert shared[0] < alone[0] / 50 and mesh(view).max() > shared[1] / 50
    view.axes["compress"].value = "fp16"
    check(view)
    assert scale() == shared and mesh(view).max() < shared[1] / 50
    view.save_button.click()
    check(view)
    (written,) = (view.experiment.folder / "figures").glob("explorer-*.json")
    saved = plots.heatmap(view.shown_rows, **json.loads(written.read_text())["options"])
    norm = saved.axes[0].collections[0].norm
    assert (norm.vmin, norm.vmax) == shared
    # the colours may also be those of one setting
    view.scale.value = False
    check(view)
    assert scale() != shared and mesh(view).min() == pytest.approx(scale()[0])

    def note() -> str:
        (legend,) = view.heatmap.canvas.figure.legends
        return " ".join(legend.get_title().get_text().split())

    assert "the colour scale of this setting alone" in note()
    view.save_button.click()
    check(view)
    assert "-update-cosine-own (svg" in view.saved_text.value
    view.scale.value = True
    assert scale() == shared and "one colour scale for all measured settings" in note()
    # each metric and tensor has a scale for itself
    view.metric.value = "error"
    assert scale() != shared


def test_a_control_of_one_value_is_text(explorer):
    precision = explorer.axes["precision"]
    assert len(precision.options) == 1 and precision.layout.display == "none"
    said = "tiny-llama · compress int8-tensor · precision declared"
    assert explorer.fixed_text.value == said
    for name in ("max_seq_len", "T"):
        assert explorer.axes[name].layout.display is None and name not in said


def test_a_ratio_that_half_a_unit_of_fp16_does_not_change_is_stated_once():
    row = pd.Series({"T": 1, "cosine": 0.99, "budget": 0.1, "error": 0.101})
    words = sentences.describe_cell(row, Place(0, 3), None)
    assert words.count("1.01") == 1 and words.endswith(
        "1.01 × the rounding budget, tolerance 6"
    )
    row["error"], row["budget"] = 0.0181, 0.0186  # 0.97312 and 0.97278
    words = sentences.describe_cell(row, Place(0, 3), None)
    assert words.endswith("0.973 × the rounding budget, tolerance 6")
    row["error"], row["budget"] = 0.101, 2**-11
    words = sentences.describe_cell(row, Place(0, 3), None)
    assert "207 × the rounding budget" in words
    assert f"{sentences.EXCESS_LABEL} 146, tolerance 6" in words


def test_a_measurement_that_changes_the_picture_clears_where_the_last_was_saved(
    explorer,
):
    measured = explorer.results.tables["fidelity"]
    rename_T(explorer, 2, 4)
    explorer.axes["T"].value = 2
    explorer.save_button.click()
    check(explorer)
    assert "saved explorer-16-4-" in explorer.saved_text.value
    explorer.draw()  # the same picture, as after a click
    assert "saved explorer-16-4-" in explorer.saved_text.value
    explorer.heatmap.canvas.send_json({"type": "message", "message": "T = 4"})
    explorer.results.tables["fidelity"] = measured  # as `refresh` reads it
    explorer._show_results()
    check(explorer)
    assert explorer.drawing.T == 2 and explorer.saved_text.value == ""
    assert not explorer.heatmap.canvas._message


def test_nothing_of_a_preset_stays_at_another_one(explorer, monkeypatch):
    monkeypatch.setattr(explorers, "find_operation", lambda *_: "found at int8")
    split = pd.DataFrame([dict.fromkeys(sentences.PARTS, 0.5) | {"layer": 1}])
    monkeypatch.setattr(
        explorers,
        "stored_split",
        lambda _, options, *__: split if options.compress == "int8-tensor" else None,
    )
    export = PART["export"] | {"compress": ["int8-tensor", "fp16"]}
    view = Explorer(PART | {"export": export}, explorer.experiment, root=explorer.root)
    cells = view.results.cells
    (hash_,) = {
        cell.columns()["values"] for cell in cells[cells["compress"] == "fp16"]["cell"]
    }
    rows = view.results.tables["fidelity"]
    of_fp16 = rows.assign(values=hash_, error=rows["error"] / 2)

    def show_int8() -> None:
        view.axes["compress"].value = "int8-tensor"
        click(view, 1, 2)
        view.search()
        view.queue.thread.join()
        check(view)
        assert "layer 1, position 2" in view.place_text.value
        assert "all positions together" in view.split_text.value
        assert view.search_text.value == "found at int8"
        view.heatmap.canvas.send_json({"type": "message", "message": "of int8"})

    monkeypatch.setattr(view.results, "refresh", lambda: None)  # keeps these rows
    show_int8()
    of_int8 = view.heatmap.describe(Place(1, 2))
    view.axes["compress"].value = "fp16"  # of which nothing was measured
    check(view)
    assert view.place_text.value == explorers.HINT
    assert view.split_text.value == view.search_text.value == ""
    assert not view.heatmap.canvas._message and view.ranks_text.value == ""
    view.results.tables["fidelity"] = pd.concat([rows, of_fp16])
    show_int8()
    view.axes["compress"].value = "fp16"
    check(view)
    assert "layer 1, position 2" in view.place_text.value
    assert of_int8 not in view.place_text.value
    assert "all positions together" not in view.split_text.value
    assert view.search_text.value == "" and not view.heatmap.canvas._message


def test_a_T_above_all_measured_ones_shows_the_largest(explorer):
    explorer.results.tables["fidelity"] = explorer.results.tables["fidelity"].query(
        "T == 1"
    )
    explorer.axes["T"].value = 2
    said = "not measured at T = 2; the heatmap shows those at T = 1."
    assert said in explorer.message.value
    (panel,) = explorer.heatmap.axes()
    assert panel.get_title("left") == "T = 1"
    assert "T =" not in explorer.heatmap.canvas.figure.get_suptitle()


def hollow_points(ax) -> list[float]:
    """The values of the markers that are drawn hollow."""
    lines = [line for line in ax.lines if line.get_markerfacecolor() == "white"]
    return [float(value) for line in lines for value in line.get_ydata()]


def test_disturbed_times_are_drawn_hollow(explorer):
    def entries() -> list[str]:
        (legend,) = explorer.speed.canvas.figure.legends
        return [text.get_text() for text in legend.get_texts()]

    for table in ("samples", "layers"):
        explorer.results.tables[table]["disturbed"] = None
    explorer.draw()
    assert not any(map(hollow_points, explorer.speed.canvas.figure.axes))
    assert "disturbed" not in entries()
    for table in ("samples", "layers"):
        rows = explorer.results.tables[table]
        rows["disturbed"] = rows["T"].map({2: "load of 9.0"})
    explorer.draw()
    check(explorer)
    assert "disturbed" in entries()
    times = explorer.results.tables["samples"]
    for ax in explorer.speed.canvas.figure.axes:
        assert len(hollow_points(ax)) == 1
    (rate,) = hollow_points(explorer.speed.canvas.figure.axes[0])
    rates = times[times["T"].eq(2) & times["phase"].eq("tokens_per_s")]["value"]
    assert rates.min() <= rate <= rates.max()


def test_every_tensor_and_metric_is_drawn_in_full(explorer):
    for tensor, metric in product(explorers.TENSORS, ("cosine", "error")):
        explorer.tensor.value, explorer.metric.value = tensor, metric
        explorer.heatmap.canvas.draw()
        check(explorer)
        assert set(explorer.shown_rows["tensor"]) == {tensor}
        # no cell is "not measured", whatever the pair
        assert not np.ma.is_masked(mesh(explorer)) and np.isfinite(mesh(explorer)).all()


def test_a_click_shows_the_cell_and_measures_its_layer_s_split_once(
    explorer, calls_here
):
    click(explorer, 1, 2)
    assert "layer 1, position 2" in explorer.place_text.value
    assert "error split" in explorer.status.value
    assert "no estimate yet" in explorer.status.value
    explorer.queue.thread.join()
    check(explorer)
    said = explorer.split_text.value
    assert "quantization" in said
    assert "Layer 1, its update at all positions together" in said
    row = re.findall(r'"number">([^<]*)<', said[said.index(sentences.SHARE) :])
    # the last is the total, which is 1; a part that was not measured, or that is tiny, is
    # no plain number
    words = [share.replace("−", "-") for share in row[:-1]]
    shares = [float(share) for share in words if re.fullmatch(r"-?[\d.]+", share)]
    assert row[-1] == "1" and sum(shares) == pytest.approx(1, abs=0.01)
    assert explorer.job_seconds["split"] > 0  # the estimate of the next one
    click(explorer, 0, 0)
    assert not explorer.queue.thread.is_alive()
    assert "layer 0" in explorer.place_text.value
    assert "Layer 0" in explorer.split_text.value
    assert "“" in explorer.place_text.value
    other = Explorer(GRID | {"validate_ids": [9, 8, 7, 6]}, None, root=explorer.root)
    other.chosen_place = Place(0, 0)
    other.describe()
    assert other._lacks_split() and "“" not in other.place_text.value
    explorer.tensor.value = "logits"  # of no layer
    click(explorer, 0, 1)
    check(explorer)
    assert "<b>logits, position " in explorer.place_text.value


@pytest.fixture
def running_split(explorer, monkeypatch):
    """Starts the split of the clicked cell, which ends only where it is cancelled; has
    its calls."""
    began, calls = threading.Event(), []

    def split(*arguments):
        calls.append(arguments[1])
        began.set()
        cancelled(arguments[-1])

    monkeypatch.setattr(explorers, "measure_split", split)
    click(explorer, 1, 2)
    assert began.wait(30)
    yield calls
    explorer.queue.cancel()
    explorer.queue.thread.join(30)


def test_run_stops_the_split_that_a_click_began_and_starts_it_again_afterwards(
    explorer, running_split, monkeypatch
):
    measured, go = [], threading.Event()
    monkeypatch.setattr(
        explorer, "_measure", lambda cell: (go.wait(30), measured.append(cell))
    )
    assert not explorer.run_button.disabled and not explorer.cancel_button.disabled
    assert explorer.split_text.value.endswith(explorers.RUN_TAKES_OVER)
    explorer.run_button.click()
    # the user reads what became of the split
    waits = "will be split after 2 measurements."
    wait_for(lambda: explorer.split_text.value.endswith(waits))
    assert len(running_split) == 1
    go.set()
    wait_for(lambda: len(running_split) == 2)
    assert len(measured) == explorer.missing_cells == 2
    wait_for(lambda: explorers.SPLITTING in explorer.split_text.value)
    explorer.cancel_button.click()
    wait_for(lambda: explorer.cancel_button.disabled)
    wait_for(lambda: explorer.split_text.value.endswith(explorers.NO_SPLIT))
    check(explorer)


def test_a_second_click_during_a_split_begins_no_second_one(explorer, running_split):
    click(explorer, 0, 1)
    assert "layer 0, position 1" in explorer.place_text.value
    assert explorers.SPLITTING in explorer.split_text.value
    assert not explorer.queue.jobs
    explorer.missing_cells = 0  # *Run* is disabled, and nothing names it
    explorer._follow_queue()
    assert explorer.split_text.value.endswith(explorers.SPLITTING)
    explorer.cancel_button.click()
    wait_for(lambda: explorer.split_text.value.endswith(explorers.NO_SPLIT))
    assert len(running_split) == 1


def test_a_split_that_waits_says_so(explorer, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(explorer, "_measure", lambda _: go.wait(30))
    monkeypatch.setattr(explorers, "measure_split", lambda *_: None)
    explorer.run_button.click()
    wait_for(lambda: explorer.queue.running)
    click(explorer, 1, 2)
    assert explorer.split_text.value.endswith(explorers.SPLIT_WAITS)
    assert explorer.run_button.disabled  # the cells still wait
    go.set()
    wait_for(lambda: not explorer.queue.is_busy)


def wait_for(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow("searches a program")
def test_the_operation_of_a_cell_is_searched_for_and_cancelled(
    explorer, calls_here, monkeypatch
):
    assert explorer.search_button.disabled
    click(explorer, 1, 2)
    if explorer.queue.thread:
        explorer.queue.thread.join()
    explorer.search_button.click()
    assert "layer 1, position 2, no estimate yet" in explorer.status.value
    explorer.queue.thread.join()
    check(explorer)
    assert explorer.search_text.value.startswith("No operation computes a wrong value")
    monkeypatch.setattr(operation, "find", lambda *_, stop, **__: cancelled(stop))
    explorer.search_button.click()
    explorer.cancel_button.click()
    explorer.queue.thread.join()
    assert explorer.status.value.startswith("cancelled")


def cancelled(stop):
    assert stop.wait(30)
    raise process.Cancelled


@pytest.mark.usefixtures("forked")
def test_cancel_kills_the_process_and_says_that_nothing_was_finished(
    explorer, monkeypatch
):
    waiting = threading.Event()

    def measure(cell):
        waiting.set()
        process.call(time.sleep, 60, stop=explorer.queue.cancelled)

    monkeypatch.setattr(explorer, "_measure", measure)
    explorer.run_button.click()
    assert waiting.wait(30)
    explorer.cancel_button.click()
    explorer.queue.thread.join(30)
    assert not explorer.queue.thread.is_alive()
    assert explorer.status.value == "cancelled; nothing was finished"


def test_two_metrics_are_saved_as_two_figures_with_their_data(explorer):
    for metric in ("cosine", "error"):
        explorer.metric.value = metric
        explorer.save_button.click()
        check(explorer)
        assert "saved explorer-16-" in explorer.saved_text.value
    folder = explorer.experiment.folder / "figures"
    names = sorted(path.stem for path in folder.glob("*.png"))
    written = json.loads((folder / f"{names[0]}.json").read_text())
    setting = "max_seq_len 16 · compress int8-tensor · precision declared"
    fed = "each layer fed Hugging Face's input"
    assert written["subtitle"] == f"tiny-llama · {setting} · portable runtime · {fed}"
    # the page has the same words
    shown = explorer.heatmap.canvas.figure.findobj(Annotation)[-1].get_text()
    assert " ".join(shown.split()) == written["subtitle"]
    title = "1 − cosine of each layer's update from Hugging Face's"
    assert written["options"]["title"] == title and title in written["alt"]
    assert "T = 1:" in written["alt"]
    drawing = (folder / f"{names[0]}.svg").read_text()
    assert "portable runtime" in drawing and title in drawing
    setting = "explorer-16-1-int8-tensor-declared-update"
    assert names == [f"{setting}-{metric}" for metric in ("cosine", "error")]
    saved = pd.read_parquet(folder / f"{names[0]}.parquet")
    assert len(saved) == len(explorer.shown_rows)


def test_a_failed_measurement_is_shown_and_ends_the_queue(explorer, monkeypatch):
    monkeypatch.setattr(explorer, "_measure", lambda *_: [][1])
    explorer.queue.add_first(*explorer.missing())
    explorer.queue.thread.join()
    assert not explorer.queue.jobs and "IndexError" in explorer.message.value


def test_the_planner_has_a_row_for_each_compression(monkeypatch):
    displayed = []
    monkeypatch.setattr(planning, "display", displayed.append)
    view = planner(DATA / "tiny-llama")
    view.update()
    table = displayed[-1].data
    assert set(table["compress"]) == {*PRESETS}
    assert (table["tok/s at least"] < table["tok/s"]).all()
    assert (table["tok/s"] < table["tok/s at most"]).all()
    caption = displayed[-1].caption
    assert "int4-block32: no decode row with int4-block32 weights" in caption
    view.children[0].value, view.children[1].value = 1 << 15, 1
    view.update()
    assert (displayed[-1].data["tok/s"] < table["tok/s"]).all()
    assert (displayed[-1].data["kv, MiB"] > table["kv, MiB"]).all()


def test_times_are_shown_where_errors_were_not_measured(explorer, monkeypatch):
    rows = explorer.results.tables["samples"]
    assert set(rows["max_seq_len"]) == {16}
    monkeypatch.setattr(explorer, "_draw_times", lambda *_: "<b>12 tok/s</b>")
    explorer.axes["max_seq_len"].value = 32
    assert "<b>12 tok/s</b><br>Errors: not measured" in explorer.message.value


def test_what_was_found_at_a_setting_is_shown_at_this_setting_alone(
    explorer, monkeypatch
):
    monkeypatch.setattr(explorers, "find_operation", lambda *_: "none <here>")
    explorer.chosen_place = Place(1, 2)
    explorer.draw()
    explorer.search()
    explorer.queue.thread.join()
    assert explorer.search_text.value == "none &lt;here&gt;"
    explorer.axes["T"].value = 2
    assert explorer.search_text.value == ""
    explorer.axes["T"].value = 1
    assert explorer.search_text.value == "none &lt;here&gt;"


def test_cells_and_layers_are_ranked_by_error_over_rounding_not_by_cosine(explorer):
    rows = explorer.shown_rows.assign(error=0.001, budget=0.001, cosine=1.0)
    first = rows["T"].eq(1) & rows["layer"].eq(0) & rows["position"].eq(0)
    second = rows["T"].eq(1) & rows["layer"].eq(2) & rows["position"].eq(3)
    rows.loc[first, ["cosine", "error", "budget"]] = [0.5, 1.0, 1.0]
    rows.loc[second, ["cosine", "error", "budget"]] = [0.99, 0.1, 0.001]
    said = sentences.describe_ranks(rows)
    assert said.index("layer 2, position 3") < said.index("layer 0, position 0")
    assert "RMS over positions: layer 2" in said and plots.BUDGET_FORMULA in said


def test_settings_are_compared_by_mean_and_99_percent_kl(explorer):
    """And what comes from the log is text."""
    runs = pd.DataFrame({"kl_mean": [0.2, 0.1], "compress": ["<b>", "fp16"]})
    runs["config"] = ['{"price": {"kl": {"mean": 0.2, "p99": 0.9}}}', None]
    explorer.runs = runs
    said = explorer._costs()
    assert said.index("fp16") < said.index("&lt;b&gt;") and "0.9" in said
    assert "99% KL" in said and "cosine" not in said


def test_the_machine_of_the_times_is_text(explorer):
    for table in ("samples", "layers"):
        explorer.results.tables[table]["machine"] = "<img onerror=x>"
    explorer.draw()
    assert "&lt;img" in explorer.message.value and "<img" not in explorer.message.value


def test_buttons_follow_what_is_measured_and_the_countdown_moves(explorer, monkeypatch):
    go, said = threading.Event(), []
    monkeypatch.setattr(explorer, "_measure", lambda _: go.wait(30))
    explorer.status.observe(lambda change: said.append(change["new"]), names="value")
    assert explorer.cancel_button.disabled and not explorer.run_button.disabled
    explorer.queue.add_first(Job("a <b>", 5.0, lambda: go.wait(30)))
    # *Run* is for the cells of the grid, which wait for this job
    assert not explorer.run_button.disabled and not explorer.cancel_button.disabled
    explorer.run_button.click()
    assert explorer.run_button.disabled and not explorer.cancel_button.disabled
    assert explorer.run_button.tooltip == explorers.RUN_IS_BUSY
    end = time.monotonic() + 20
    while len(said) < 3 and time.monotonic() < end:
        time.sleep(0.1)
    go.set()
    explorer.queue.thread.join()
    assert said[0] == "measuring a &lt;b&gt;, about 5 s to go"
    assert explorer.run_button.tooltip.startswith(explorers.RUN_TOOLTIP)
    assert len({*said[:3]}) == 3
    assert explorer.cancel_button.disabled and not explorer.run_button.disabled


def test_the_button_and_the_countdown_have_one_estimate(explorer, monkeypatch):
    """It rests on the seconds of stages, of other options until this bundle's are
    known: the recorded ones are those of a larger model."""
    recorded = {EXPORTING: 9.0, MEASURING: 3.0}
    options = explorer.results.options(explorer.setting())
    said, buttons = [], []

    def record(name: str, seconds: float) -> None:
        for validates in {False, name == MEASURING}:
            explorer.cell_seconds.add(Stage(name, validates, options), seconds)

    def measure(cell):
        buttons.append(explorer.run_button.description)
        record(MEASURING, 2.0)

    monkeypatch.setattr(explorer, "_measure", measure)
    assert explorer.missing_cells == 2
    assert explorer.run_button.description == (
        "Run what is missing (2 measurements, no estimate yet)"
    )
    for name, seconds in recorded.items():
        record(name, seconds)
    explorer.refresh()
    # one export and two measurements
    assert explorer.run_button.description == (
        "Run what is missing (2 measurements, about 15 s)"
    )
    explorer.status.observe(lambda change: said.append(change["new"]), names="value")
    explorer.run_button.click()
    explorer.queue.thread.join()
    check(explorer)
    texts = [text for text in said if text]
    assert texts[0].endswith(", about 15 s to go")
    assert any(text.endswith(", about 2 s to go") for text in texts)
    assert buttons == ["Run what is missing"] * 2
    # nothing reached the log
    assert explorer.run_button.description == (
        "Run what is missing (2 measurements, about 13 s)"
    )


@pytest.mark.parametrize(("pixels", "inches"), [(300, 4.0), (658, 6.5), (2000, 9.5)])
def test_the_pictures_have_the_width_of_the_page(explorer, pixels, inches, monkeypatch):
    """And a point of the page is the cell that is drawn there."""
    monkeypatch.setattr(explorers, "measure_split", lambda *_: None)
    explorer.page_width.field.value = pixels
    check(explorer)
    for picture in (explorer.heatmap, explorer.speed):
        assert picture.canvas.figure.get_figwidth() == pytest.approx(inches)
    canvas = explorer.heatmap.canvas
    canvas.draw()
    ax = explorer.heatmap.axes()[0]
    x, y = ax.transData.transform((2.5, 1.5))
    height = canvas.figure.bbox.height
    event = {"type": "button_press", "x": x, "y": height - y, "button": 0}
    canvas.handle_event(event | {"modifiers": [], "guiEvent": None, "buttons": 1})
    assert explorer.chosen_place == Place(1, 2)
    wait_for(lambda: not explorer.queue.is_busy)


def test_the_page_writes_its_width_into_a_hidden_field(explorer):
    field, starter = explorer.page_width.children
    assert explorer.page_width.layout.display == "none"
    assert f".{explorers.EXPLORER}" in starter.value and "onerror=" in starter.value
    assert starter.value.count('"') == 6  # no quote of the script ends it
    assert all(name in starter.value for name in field._dom_classes)


def test_the_values_of_a_cell_stand_above_the_picture_which_stays_in_its_place(
    explorer, running_split
):
    order = [*explorer.children]
    places = [order.index(text) for text in (explorer.place_text, explorer.split_text)]
    assert places[0] < order.index(explorer.heatmap.canvas) < places[1]
    assert explorer.place_text.layout.min_height
    assert "layer 1, position 2" in explorer.place_text.value


def test_the_metric_of_errors_has_the_name_that_the_colour_bar_has(explorer):
    for name, metric in explorer.metric.options:
        explorer.metric.value = metric
        label = explorer.heatmap.canvas.figure.axes[-1].get_ylabel()
        assert " ".join(label.split()).removesuffix(" (lighter is worse)") == name


def axis_label(view: Explorer) -> str:
    return view.heatmap.axes()[-1].get_xlabel()


def test_a_run_is_drawn_with_the_tokens_that_it_logged(explorer):
    """Whatever the prompt of the grid, which has as many tokens."""
    rows = explorer.results.tables["fidelity"]
    rows["prompt"] = "another"
    explorer.draw()
    check(explorer)
    assert axis_label(explorer) == "token position"
    logged = ["·A", "ferry", "is", "late"]
    explorer.runs["config"] = json.dumps({identity.TOKENS_KEY: logged})
    explorer.draw()
    check(explorer)
    assert axis_label(explorer) == "token"
    assert "“is”" in explorer.heatmap.describe(Place(1, 2))


def test_a_run_without_a_prompt_is_drawn_with_positions(explorer):
    """As the runs of notebooks before the prompt was logged, also that of this kernel's
    notebook."""
    rows = explorer.results.tables["fidelity"]
    rows["prompt"] = None
    (run_id,) = rows["run_id"].unique()
    explorer.experiment = SimpleNamespace(run_id=run_id)
    explorer.draw()
    check(explorer)
    assert axis_label(explorer) == "token position"


def test_the_tokens_of_a_notebook_s_run_are_there_after_a_restart(
    tmp_path, monkeypatch, exports
):
    """The Explorer of a new kernel labels the run with the notebook's prompt, although its
    grid has another one of as many tokens."""
    monkeypatch.chdir(tmp_path)
    bundle = exports.bundle(
        DATA / "tiny-llama", max_seq_len=16, tokens="1-2", compress="int8-tensor"
    )
    golden = Golden.of(DATA / "tiny-llama", [1, 173, 69, 4])
    decoder = Decoder(bundle)
    rows = fidelity.measure(decoder, golden, [1, 2]).rows
    concluded = Experiment("05_x", {})
    monkeypatch.setattr(concluded, "_write_finished", lambda *arguments: None)
    concluded.add_gates([gates.holds("host", True, "")])
    concluded.conclude("Yes.", decoder, golden=golden, fidelity=rows)
    view = Explorer(PART, Experiment("05_x", {}))
    check(view)
    assert view.tokens != golden.tokens
    assert axis_label(view) == "token"
    assert f"“{golden.tokens[1]}”" in view.heatmap.describe(Place(1, 1))


def test_making_it_again_frees_the_picture_of_the_one_before(explorer):
    pictures = [
        weakref.ref(c.figure) for c in (explorer.heatmap.canvas, explorer.speed.canvas)
    ]
    before = len(_instances)
    again = Explorer(GRID, explorer.experiment, root=explorer.root)
    check(again)
    gc.collect()
    assert not explorer.is_open and not any(picture() for picture in pictures)
    assert len(_instances) <= before
    other = Explorer(PART, None, root=explorer.root)
    assert again.is_open and other.is_open


def test_no_box_has_a_scroll_bar(explorer):
    boxes = [explorer, *explorer.children[:3]]
    assert {box.layout.overflow for box in boxes} == {"visible"}


def test_nothing_moves_when_a_measurement_begins(explorer, monkeypatch):
    """Neither the buttons beside *Run* nor what is below them."""
    go = threading.Event()
    monkeypatch.setattr(explorer, "_measure", lambda _: go.wait(30))
    width = explorer.run_button.layout.min_width
    assert int(width.removesuffix("ch")) > len(explorers.RUN)
    explorer.run_button.click()
    assert explorer.run_button.layout.min_width == width
    go.set()
    wait_for(lambda: not explorer.queue.is_busy)
    (line,) = [box for box in explorer.children[:3] if explorer.status in box.children]
    assert line.layout.min_height and explorer.saved_text in line.children


def test_sliders_and_buttons_have_tooltips_and_tensors_are_explained(explorer):
    sliders = [explorer.axes["max_seq_len"], explorer.axes["T"]]
    for control in [*sliders, *explorer.buttons]:
        assert control.tooltip, control.description
    explained = dict(explorer.tensor.options)
    assert [*explained.values()] == [*explorers.TENSORS]
    assert all(len(label) > len(name) for label, name in explained.items())
