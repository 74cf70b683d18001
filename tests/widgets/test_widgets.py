"""Widgets in Python: a moved control changes the picture's data, a click chooses a cell, missing results are made beside
the notebook, and what a callback raises is kept, shown and raised by check()."""

from pathlib import Path

import numpy as np
import pytest

from workbench import log, sweep
from workbench.errors import InputError
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
    assert (
        "not measured" in made.message.value
        and made.job.run.description == "Run what is missing (3)"
    )
    made.job.run.click()
    made.job.thread.join()
    made.check()
    assert "ms per layer" in made.message.value and made.job.run.description == "Nothing is missing"
    return folder


@pytest.fixture
def explorer(root):
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
    assert set(explorer.rows["T"]) == {2} and explorer.figure.axes[0].get_title("left").endswith(
        "T = 2"
    )
    np.testing.assert_allclose(mesh(explorer).ravel(), (1 - explorer.rows["cosine"]).clip(1e-6))
    assert explorer.picture.png != picture and explorer.picture.png[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("control", "value"),
    [("tensor", "k"), ("tensor", "logits"), ("metric", "psnr_db"), ("metric", "max_abs")],
)
def test_every_tensor_and_metric_is_drawn(explorer, control, value):
    before = explorer.picture.png
    explorer.controls[control].value = value
    explorer.check()
    assert explorer.picture.png != before and len(explorer.worst.options) > 1


def test_what_is_not_measured_says_so(explorer):
    explorer.controls["max_seq_len"].value = 32
    explorer.check()
    assert "not measured" in explorer.message.value
    said = [text.get_text() for ax in explorer.figure.axes for text in ax.texts]
    assert (
        "fidelity not measured at this setting" in said
        and "error split not measured at this setting" in said
    )


def test_a_click_on_a_cell_shows_the_split_of_its_layer(explorer):
    ax, (wide, high) = (
        explorer.figure.axes[0],
        explorer.figure.get_size_inches() * explorer.figure.dpi,
    )
    x, y = ax.transData.transform((2.5, 3.5))  # position 2, layer 3
    explorer.picture.clicked = [x / wide, 1 - y / high]
    explorer.check()
    assert explorer.cell == (3, 2)
    assert "error of layer 3, split" in [ax.get_title("left") for ax in explorer.figure.axes]
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
        ("one", lambda: done.append(1) or made.job.cancel.click()),
        ("two", lambda: done.append(2)),
    ]
    done, made.job.steps = [], lambda: steps
    made.job.start()
    made.job.thread.join()
    assert done == [1] and "cancelled" in made.job.label.value and made.job.cancel.disabled


def test_a_saved_figure_is_a_log_row_and_files(explorer):
    paths = explorer.save()
    assert [p.suffix for p in paths] == [".svg", ".pdf", ".png", ".json"]
    assert len(log.load("exhibits", root=explorer.root)) == 1


def test_an_error_in_a_callback_is_kept_shown_and_raised(explorer):
    explorer.tables["fidelity"] = None
    explorer.controls["T"].value = 2
    assert "TypeError" in explorer.message.value and "workbench-error" in explorer.message.value
    with pytest.raises(TypeError):
        explorer.check()


def test_an_error_in_a_job_ends_it_and_shows(explorer):
    explorer.job.steps = lambda: [("bad", lambda: [][1]), ("never", lambda: pytest.fail("went on"))]
    explorer.job.start()
    explorer.job.thread.join()
    with pytest.raises(IndexError):
        explorer.check()


def test_compare_shows_what_differs_between_two_runs(root):
    compare = Compare(root=root)
    compare.check()
    assert "<td>precision</td>" in compare.settings.value and compare.figure.axes[0].get_title(
        "left"
    ).startswith("B against A")
    compare.controls["A"].value = compare.controls["B"].value
    compare.check()
    assert {text.get_text() for text in compare.figure.axes[0].texts} == {"1×"}


def test_compare_needs_two_timed_runs(tmp_path):
    with pytest.raises(InputError, match="two"):
        Compare(root=tmp_path)


def test_planner_says_memory_speed_and_which_rules_the_exported_graph_breaks(tmp_path):
    planner = Planner(DATA / "tiny-llama", bundles=tmp_path)
    planner.check()
    before, said = planner.picture.png, planner.message.value
    assert "fits in 16 GiB" in said and "tok/s at T = 1, " in said and "Not measured" in said
    planner.controls["chip"].value = "M1"
    assert planner.message.value != said
    planner.controls["max_seq_len"].value = 64
    assert planner.picture.png != before and "not checked" in planner.rules.value
    planner.job.run.click()
    planner.job.thread.join()
    planner.check()
    assert (
        "<td" in planner.rules.value and "D3" in planner.rules.value
    )  # RangeDim: the sources disagree
    planner.controls["T"].value = 1
    assert "not checked" in planner.rules.value


def test_a_grid_of_a_checkpoint_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError):
        Explorer(GRID | {"checkpoint": "nowhere"}, root=tmp_path)
    assert sweep.make_grid(GRID).checkpoint


@pytest.mark.shim
def test_rows_of_another_runtime_are_shown_and_measured_once(tmp_path):
    """Core ML has no precision and no fast path: rows of it are the same whichever is chosen."""
    run = {"T": [1], "n_gen": 2, "repetitions": 1, "precision": ["declared", "exact"]}
    run |= {"runtime": ["portable", "stand-in"]}
    grid = GRID | {"run": run, "export": GRID["export"] | {"max_seq_len": [16]}}
    explorer = Explorer(grid, root=tmp_path / "experiments" / "log")
    explorer.job.run.click()
    explorer.job.thread.join()
    explorer.check()
    rows = log.load("runs", root=tmp_path / "experiments" / "log").query("command == 'sweep'")
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
