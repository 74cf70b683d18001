"""`export --compress mixed` from texts to a bundle, and the commands that read it."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from in_process import cli, invoke
from refusal import refused
from tiny import DATA

from workbench import Bundle, Checkpoint, Golden
from workbench.bundle.presets import find_preset
from workbench.check.text import default_ids, task_text
from workbench.decode.tokenizer import encode_text
from workbench.explain.weights import measure_costs
from workbench.sweep.grid import Grid, cells
from workbench.widgets import Explorer

pytestmark = pytest.mark.usefixtures("shared_conversions")

TINY = DATA / "tiny-llama"
LIMIT = 0.001


@dataclass(frozen=True)
class Texts:
    """The files of two texts that a mixed export needs."""

    calibrate: Path
    select: Path

    @property
    def options(self) -> tuple:
        return "--calibrate", self.calibrate, "--select", self.select


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Texts:
    """Two disjoint parts of the held-out tasks."""
    folder = tmp_path_factory.mktemp("texts")
    words = task_text().split()
    texts = Texts(folder / "calibrate.txt", folder / "select.txt")
    texts.calibrate.write_text(" ".join(words[:1500]))
    texts.select.write_text(" ".join(words[1600:2900]))
    return texts


def export_mixed(out, *options):
    command = "export", TINY, out, "--compress", "mixed", "--max-seq-len", 64
    return invoke(*command, *options)


@pytest.fixture(scope="module")
def exported(texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("mixed") / "b"
    return export_mixed(out, *texts.options, "--max-kl", LIMIT), out


def test_it_says_what_was_chosen(exported):
    output, out = exported
    mixed, manifest = output["mixed"], Bundle.open(out).manifest
    assert 0 < mixed["kl"] <= LIMIT < mixed["kl_p99"]
    assert 4 < mixed["bits"] < 16
    assert sum(mixed["formats"].values()) == len(manifest.formats) == 29
    assert len(mixed["formats"]) > 1
    assert mixed["selection_tokens"] == manifest.selection.tokens
    assert mixed["predicted_chip"] == "M4" and mixed["predicted_ms"] > 0
    low, high = mixed["predicted_low_ms"], mixed["predicted_high_ms"]
    assert low < mixed["predicted_ms"] < high


def test_fewer_bytes_have_their_limit_too(exported, texts, tmp_path):
    size = exported[0]["mixed"]["matrix_bytes"] - 10_000
    output = export_mixed(tmp_path / "b", *texts.options, "--bytes", size)["mixed"]
    assert size - 60_000 < output["matrix_bytes"] <= size


def test_milliseconds_have_the_limit_of_validate_by_default(texts, tmp_path):
    output = export_mixed(tmp_path / "b", *texts.options, "--ms-on", "M1")["mixed"]
    assert output["predicted_chip"] == "M1" and output["kl"] <= 0.05
    record = json.loads((tmp_path / "b" / "allocation.json").read_text())
    assert (record["minimizes"], record["limit"]["kl"]) == ("ms", 0.05)


def test_ids_select_as_their_text_does(exported, texts, tmp_path):
    ids = encode_text(TINY, texts.select.read_text())
    np.save(tmp_path / "ids.npy", np.int32(ids))
    options = "--calibrate", texts.calibrate, "--select-ids", tmp_path / "ids.npy"
    output = export_mixed(tmp_path / "b", *options, "--max-kl", LIMIT)
    assert output["mixed"] == exported[0]["mixed"]


def test_a_text_for_selection_that_calibrates_too_is_refused(texts, tmp_path):
    command = "export", TINY, tmp_path / "b", "--compress", "mixed", "--max-kl", 0.05
    result = cli(*command, *Texts(texts.calibrate, select=texts.calibrate).options)
    assert result.exit_code == 2 and "a part of calibrate.txt" in result.stderr
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("command", ["evaluate", "validate"])
def test_no_text_that_chose_the_formats_judges_the_bundle(command, exported, texts):
    result = cli(command, exported[1], "--checkpoint", TINY, "--text", texts.select)
    assert result.exit_code == 2
    assert "formats were chosen" in result.stderr


def test_plan_names_the_formats_and_that_no_row_has_several(exported):
    output = invoke("plan", exported[1], "--chip", "M4")
    (row,) = output["chips"]
    assert " streamed as " in row["weights"].partition(", ")[2]
    assert " and " in row["extrapolates"]["format"]
    assert all(advice["option"] != "compress" for advice in output["advice"])


def test_compressed_weights_alone_are_said_to_cost(exported):
    bundle, source = Bundle.open(exported[1]), Checkpoint(TINY)
    golden = Golden.of(source, default_ids(source, 9))
    costs, _ = measure_costs(bundle, source, golden)
    formats = bundle.manifest.formats
    compressed = {
        (int(name.split(".")[2]), ".".join(name.split(".")[3:]))
        for name, preset in formats.items()
        if "layers." in name and find_preset(preset).bits < 16
    }
    assert set(zip(costs["layer"], costs["tensor"])) == compressed


def test_the_explorer_calls_it_mixed(exported, tmp_path):
    golden = tmp_path / "g"
    invoke("golden", TINY, "--out", golden, "--tokens", 5)
    grid = {"bundle": [str(exported[1])], "golden": str(golden), "run": {"n_gen": 2}}
    explorer = Explorer(grid, None, root=tmp_path)
    assert explorer.results.cells["cell"].iloc[0].options.compress == "mixed"
    assert explorer.missing()[0].label.startswith("mixed, max_seq_len 64")


def test_a_grid_cannot_choose_formats():
    grid = {"checkpoint": str(TINY), "export": {"compress": ["int8-channel", "mixed"]}}
    with refused("compress = mixed.*no text.*under bundle"):
        list(cells(Grid(**grid)))
