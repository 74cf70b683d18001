"""Widgets in Python: a moved control changes the picture's data, a click chooses a cell, missing
results are made beside the notebook, and what a callback raises is kept, shown and raised by
check()."""

import base64
import re
import signal
import time
from pathlib import Path

import in_process
import nbformat
import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbconvert import HTMLExporter

from workbench import log, sweep
from workbench.errors import InputError
from workbench.sweep import process
from workbench.widgets import Compare, Explorer, Planner

DATA = Path(__file__).parents[2] / "data"
GRID = {
    "checkpoint": str(DATA / "tiny-llama"),
    "validate_ids": [1, 4, 69, 173],
    "export": {"max_seq_len": [16, 32], "t_max": [2], "compress": ["int8-tensor"]},
    "run": {"T": [1, 2], "n_gen": 2, "repetitions": 3},
}
PART = GRID | {
    "export": GRID["export"] | {"max_seq_len": [16]},
    "run": GRID["run"] | {"precision": ["declared", "exact"]},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explorer") / "experiments" / "log"
    made = Explorer(PART, root=folder)
    assert "no times yet" in made.message.value
    assert made.job.run.description == "Run what is missing (5)"
    labels = []
    made.job.label.observe(lambda change: labels.append(change["new"]), names="value")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "call", in_process.call)
        made.job.run.click()
        made.job.thread.join()
    made.check()
    counts = list(dict.fromkeys(label[:6] for label in labels if label))
    assert counts == [f"{done} of 5" for done in range(6)]
    assert (
        "ms per layer" in made.message.value
        and made.job.run.description == "Nothing is missing"
    )
    return folder


@pytest.fixture
def explorer(root, monkeypatch):
    with monkeypatch.context() as patch:  # draws the second setting alone
        patch.setattr(Explorer, "draw", lambda explorer: None)
        made = Explorer(GRID, root=root)
    made.controls["max_seq_len"].value = 16
    made.check()
    return made


def mesh(explorer):
    return explorer.figure.axes[0].collections[0].get_array()


def test_a_moved_slider_changes_the_plot_s_data(explorer):
    picture = explorer.picture.png
    explorer.controls["T"].value = 2
    explorer.check()
    assert set(explorer.rows["T"]) == {2} and explorer.figure.axes[0].get_title(
        "left"
    ).endswith("T = 2")
    np.testing.assert_allclose(
        mesh(explorer).ravel(), (1 - explorer.rows["cosine"]).clip(1e-6)
    )
    assert explorer.picture.png != picture and explorer.picture.png[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("control", "value"),
    [
        ("tensor", "k"),
        ("tensor", "logits"),
        ("metric", "psnr_db"),
        ("metric", "max_abs"),
    ],
)
def test_every_tensor_and_metric_is_drawn(explorer, control, value):
    before = explorer.picture.png
    explorer.controls[control].value = value
    explorer.check()
    assert explorer.picture.png != before and len(explorer.worst.options) > 1


def test_a_setting_that_is_not_measured_shows_the_nearest_one_and_says_so(explorer):
    before = explorer.rows
    explorer.controls["max_seq_len"].value = 32
    explorer.check()
    assert (
        "heatmap is of max_seq_len 16; press Run to measure 32"
        in explorer.message.value
    )
    assert len(explorer.rows) == len(before) and set(explorer.rows["max_seq_len"]) == {
        16
    }
    assert all(ax.axison for ax in explorer.figure.axes)  # no blank panel


def test_an_empty_log_shows_one_line_and_no_blank_panel(tmp_path):
    explorer = Explorer(GRID, root=tmp_path / "experiments" / "log")
    explorer.check()
    assert texts(explorer) == "nothing measured at this setting: press Run"
    assert len(explorer.figure.axes) == 1
    explorer.guarded(explorer.save)
    with pytest.raises(InputError, match="press Run first"):
        explorer.check()


def texts(explorer) -> str:
    """All that is written on the axes."""
    return " ".join(text.get_text() for ax in explorer.figure.axes for text in ax.texts)


def test_every_cell_has_its_figures_for_the_pointer(explorer):
    cells = explorer.picture.cells
    assert [len(row) for row in cells["texts"]] == [4] * len(explorer.layers)
    rows = explorer.rows.set_index(["layer", "position"])
    for layer, position in rows.index:
        row, text = rows.loc[(layer, position)], cells["texts"][layer][position]
        assert text.startswith(
            f"layer {layer}, position {position} “{explorer.tokens[position]}”"
        )
        assert (
            f"T = 1: relative error {row['error']:.4g}, 1 − cosine {1 - row['cosine']:.4g}"
            in text
        )
        assert f"{row['error'] / row['budget']:.3g} × budget" in text
    left, top, right, bottom = cells["box"]
    for layer, position in ((0, 0), (3, 2)):  # a click lands where the pointer reads
        x = left + (position + 0.5) / 4 * (right - left)
        y = top + (layer + 0.5) / len(explorer.layers) * (bottom - top)
        explorer.picture.clicked = [x, y]
        explorer.check()
        assert explorer.cell == (layer, position)
        assert explorer.picture.chosen == cells["texts"][layer][position]


def test_the_scale_spans_the_data_or_stays(explorer):
    fixed = explorer.figure.axes[0].collections[0].norm
    explorer.controls["scale"].value = "data"
    explorer.check()
    data, values = (
        explorer.figure.axes[0].collections[0].norm,
        1 - explorer.rows["cosine"],
    )
    assert (fixed.vmin, fixed.vmax) == (1e-6, 1e-1)
    assert (
        fixed.vmin < data.vmin <= values.min()
        and values.max() <= data.vmax < fixed.vmax
    )
    explorer.controls["metric"].value = "psnr_db"
    explorer.check()
    data = explorer.figure.axes[0].collections[0].norm
    assert (
        data.vmin
        < explorer.rows["psnr_db"].min()
        < explorer.rows["psnr_db"].max()
        < data.vmax
    )


def test_the_difference_to_one_token_a_call_is_that_of_the_log(explorer):
    assert explorer.controls["show"].disabled  # T = 1 differs from itself by nothing
    first = explorer.rows.set_index(["layer", "position"])["cosine"]
    explorer.controls["T"].value = 2
    explorer.controls["show"].value = "difference to T = 1"
    explorer.check()
    second = explorer.rows.set_index(["layer", "position"])["cosine"]
    np.testing.assert_allclose(mesh(explorer).ravel(), first - second, atol=1e-12)
    assert "T = 2 minus T = 1" in explorer.figure.axes[0].get_title("left")
    assert f"; at T = 1: {1 - first[0, 1]:.4g}" in explorer.picture.cells["texts"][0][1]
    explorer.controls["tensor"].value = "logits"
    explorer.check()
    assert explorer.controls["show"].disabled and set(explorer.rows["mode"]) == {
        "chained"
    }


def test_a_control_with_one_stop_is_a_text(explorer):
    shown = {n for n, c in explorer.controls.items() if c.layout.display != "none"}
    assert shown == {"max_seq_len", "T", "tensor", "metric", "show", "scale"}
    assert (
        "precision: declared" in explorer.settled.value
        and "T:" not in explorer.settled.value
    )


def test_a_picture_has_two_dots_for_each_pixel_it_is_shown_at(explorer):
    wide = int.from_bytes(explorer.picture.png[16:20], "big")
    assert wide == 2 * explorer.picture.width == 2 * 960


def test_a_click_on_a_cell_shows_the_split_of_its_layer(explorer):
    ax, (wide, high) = (
        explorer.figure.axes[0],
        explorer.figure.get_size_inches() * explorer.figure.dpi,
    )
    x, y = ax.transData.transform((2.5, 3.5))  # position 2, layer 3
    explorer.picture.clicked = [x / wide, 1 - y / high]
    explorer.check()
    assert explorer.cell == (3, 2)
    assert "error of layer 3, split" in [
        ax.get_title("left") for ax in explorer.figure.axes
    ]
    assert "quantization" in explorer.split.value


def test_a_click_beside_the_cells_chooses_nothing(explorer):
    explorer.picture.clicked = [0.01, 0.01]
    explorer.check()
    assert explorer.cell is None


def test_the_list_of_worst_cells_starts_with_the_worst_and_chooses(explorer):
    rows = explorer.rows
    worst = rows.loc[rows["cosine"].idxmin()]
    explorer.worst.value = explorer.worst.options[1][1]
    explorer.check()
    assert explorer.cell == (worst["layer"], worst["position"])


def test_cancel_keeps_what_was_finished(root, tmp_path):
    made = Explorer(PART, root=tmp_path / "experiments" / "log")
    made.job.finish = lambda: None
    steps = [
        ("one", 1, lambda: done.append(1) or made.job.cancel.click()),
        ("two", 1, lambda: done.append(2)),
    ]
    done, made.job.steps = [], lambda: steps
    made.job.start()
    made.job.thread.join()
    assert (
        done == [1] and "cancelled" in made.job.label.value and made.job.cancel.disabled
    )


def test_nothing_is_drawn_after_a_job_says_that_it_is_cancelled(root, tmp_path):
    """A message written after "cancelled", such as that of Save, would be overwritten."""
    made = Explorer(PART, root=tmp_path / "experiments" / "log")
    labels, steps = [], [("one", 1, made.job.cancel.click), ("two", 1, lambda: None)]
    made.job.steps, made.job.finish = (
        lambda: steps,
        lambda: labels.append(made.job.label.value),
    )
    made.job.start()
    made.job.thread.join()
    assert labels == ["1 of 2: one"] and "cancelled" in made.job.label.value


def test_cancel_kills_the_process_that_a_step_waits_for(root, tmp_path, monkeypatch):
    made, ask, children = (
        Explorer(PART, root=tmp_path / "experiments" / "log"),
        process._ask,
        [],
    )
    monkeypatch.setattr(
        process, "_ask", lambda child, job: children.append(child) or ask(child, job)
    )
    made.job.run.click()
    while not children:
        time.sleep(0.02)
    made.job.cancel.click()
    made.job.thread.join()
    assert [child.returncode for child in children] == [-signal.SIGKILL]
    made.check()
    assert "cancelled" in made.job.label.value and not len(
        log.load("runs", root=made.root)
    )


def test_all_that_is_shown_is_saved_as_a_log_row_and_files(explorer):
    paths = explorer.save()
    assert [p.suffix for p in paths] == [".svg", ".pdf", ".png", ".json"] * 3
    name = "explorer-update-S16-T1-int8-tensor-declared"
    exhibits = log.load("exhibits", root=explorer.root)
    assert list(exhibits["name"]) == [name, f"{name}-split", f"{name}-speed"]
    assert list(exhibits["plot"]) == ["fidelity_heatmap", "layer_parts", "speed"]
    assert exhibits["run_id"].nunique() == 1 and all(
        p.stat().st_size > 100 for p in paths
    )


def test_an_error_in_a_callback_is_kept_shown_and_raised(explorer):
    explorer.tables["fidelity"] = None
    explorer.controls["T"].value = 2
    assert (
        "TypeError" in explorer.message.value
        and "workbench-error" in explorer.message.value
    )
    with pytest.raises(TypeError):
        explorer.check()


def test_an_error_in_a_job_ends_it_and_shows(explorer):
    explorer.job.steps = lambda: [
        ("bad", 1, lambda: [][1]),
        ("never", 1, lambda: pytest.fail("went on")),
    ]
    explorer.job.start()
    explorer.job.thread.join()
    with pytest.raises(IndexError):
        explorer.check()


def test_compare_shows_what_differs_between_two_runs(root):
    compare = Compare(root=root)
    compare.check()
    assert "<td>precision</td>" in compare.settings.value and compare.figure.axes[
        0
    ].get_title("left").startswith("B against A")
    compare.controls["A"].value = compare.controls["B"].value
    compare.check()
    assert {text.get_text() for text in compare.figure.axes[0].texts} == {"1×"}


def test_compare_names_better_and_worse_and_no_identities(root):
    compare = Compare(root=root)
    assert {label.split(",")[0] for label, _ in compare.controls["A"].options} != {""}
    assert all("2026" not in label for label, _ in compare.controls["A"].options)
    assert "bundle_hash" not in compare.settings.value
    words = {
        text.get_text().rpartition(" ")[2] for text in compare.figure.axes[0].texts
    }
    assert (
        words
        and words <= {"better", "worse"}
        and compare.figure.axes[0].get_xscale() == "log"
    )


def test_html_of_nbconvert_keeps_a_picture_of_a_widget(explorer, capture_display):
    still, box = capture_display(explorer)
    assert box["application/vnd.jupyter.widget-view+json"]
    cell = nbformat.v4.new_code_cell("explorer")
    cell.outputs = [
        nbformat.v4.new_output("display_data", data=d) for d in (still, box)
    ]
    body, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    (image,) = re.findall(
        r'<img [^>]*class="workbench-still"[^>]*base64,([^"]*)"', body
    )
    assert base64.b64decode(image) == explorer.picture.png


@pytest.fixture
def capture_display(monkeypatch):
    """Displays a widget; gives the data of its outputs."""
    outputs = []
    formatter = InteractiveShell.instance().display_formatter

    def show(widget):
        display = lambda *things: outputs.extend(formatter.format(t)[0] for t in things)  # noqa: E731
        monkeypatch.setattr("IPython.display.display", display)
        widget._ipython_display_()
        return outputs

    return show


def test_compare_needs_two_timed_runs(tmp_path):
    with pytest.raises(InputError, match="two"):
        Compare(root=tmp_path)


def test_planner_says_memory_speed_and_which_rules_the_exported_graph_breaks(tmp_path):
    planner = Planner(DATA / "tiny-llama", bundles=tmp_path)
    planner.check()
    before, said = planner.picture.png, planner.message.value
    assert (
        "fits in 16 GiB" in said
        and "tok/s at T = 1, " in said
        and "Not measured" in said
    )
    planner.controls["chip"].value = "M1"
    assert planner.message.value != said
    planner.controls["max_seq_len"].value = 64
    assert planner.picture.png != before and "not checked" in planner.rules.value
    planner.job.run.click()
    planner.job.thread.join()
    planner.check()
    # RangeDim: the sources disagree
    assert "<td" in planner.rules.value and "D3" in planner.rules.value
    planner.controls["T"].value = 1
    assert "not checked" in planner.rules.value


def test_a_grid_of_a_checkpoint_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError):
        Explorer(GRID | {"checkpoint": "nowhere"}, root=tmp_path)
    assert sweep.make_grid(GRID).checkpoint


@pytest.mark.shim
def test_rows_of_another_runtime_are_shown_and_measured_once(tmp_path, monkeypatch):
    """Core ML has no precision and no fast path: rows of it are the same whichever is chosen."""
    monkeypatch.setattr(process, "call", in_process.call)
    run = {"T": [1], "n_gen": 2, "repetitions": 1, "precision": ["declared", "exact"]}
    run |= {"runtime": ["portable", "stand-in"]}
    grid = GRID | {"run": run, "export": GRID["export"] | {"max_seq_len": [16]}}
    explorer = Explorer(grid, root=tmp_path / "experiments" / "log")
    explorer.job.run.click()
    explorer.job.thread.join()
    explorer.check()
    rows = log.load("runs", root=tmp_path / "experiments" / "log").query(
        "command == 'sweep'"
    )
    assert sorted(rows["runtime"]) == ["portable", "portable", "stand-in"]
    for runtime, precision in (
        ("stand-in", "exact"),
        ("stand-in", "declared"),
        ("portable", "exact"),
    ):
        explorer.controls["runtime"].value = runtime
        explorer.controls["precision"].value = precision
        explorer.check()
        assert "ms per layer" in explorer.message.value
        assert set(explorer.rows["runtime"]) == {runtime}
