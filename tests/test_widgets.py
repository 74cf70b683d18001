"""Sliders in Python: moving one changes the picture's data; what a callback raises is kept and fails the notebook."""

from pathlib import Path

import pytest

from workbench import sweep
from workbench.widgets import Explorer

DATA = Path(__file__).parents[1] / "data"
GRID = {"checkpoint": str(DATA / "tiny-llama"), "validate_ids": [1, 4, 69, 173],
        "export": {"max_seq_len": [16, 32], "t_max": [2], "compress": ["int8-tensor"]}, "run": {"T": [1, 2], "n_gen": 2, "repetitions": 1}}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explorer") / "experiments" / "log"
    part = GRID | {"export": GRID["export"] | {"max_seq_len": [16]}}
    sweep.sweep(sweep.make_grid(part), root=folder, progress=False)
    return folder


@pytest.fixture
def explorer(root):
    made = Explorer(GRID, root=root)
    made.check()
    return made


def mesh(explorer):
    return explorer.figure.axes[0].collections[0].get_array()


def test_a_moved_slider_changes_the_plot_s_data(explorer):
    before, picture = mesh(explorer).copy(), explorer.picture.value
    explorer.controls["T"].value = 2
    explorer.check()
    assert (mesh(explorer) != before).any()
    assert explorer.picture.value != picture and bytes(explorer.picture.value[:4]) == b"\x89PNG"


def test_what_is_not_measured_says_so(explorer):
    explorer.controls["max_seq_len"].value = 32
    explorer.check()
    assert "not measured" in explorer.message.value
    assert "not measured" in explorer.figure.axes[0].get_title(loc="center") + explorer.figure.axes[0].get_title(loc="left")


def test_the_run_button_measures_what_is_missing(tmp_path):
    made = Explorer(GRID | {"export": GRID["export"] | {"max_seq_len": [16]}}, root=tmp_path / "experiments" / "log")
    assert "not measured" in made.message.value
    made.run_button.click()
    made.check()
    assert "ms per layer" in made.message.value and not made.run_button.disabled


def test_an_error_in_a_callback_is_kept_shown_and_raised(explorer):
    explorer.stored["fidelity"] = None
    explorer.controls["T"].value = 2
    assert "TypeError" in explorer.message.value
    with pytest.raises(TypeError):
        explorer.check()
