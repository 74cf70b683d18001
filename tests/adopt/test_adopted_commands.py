"""Commands that take bundles take adopted folders: the same keys, figures that agree with Hugging
Face, and a reason where something cannot be asked."""

import json
from pathlib import Path

import in_process
import numpy as np
import pytest
from test_adopt import command

from workbench import log, sweep
from workbench.check import metrics
from workbench.errors import InputError
from workbench.sweep import process

IDS = [(7 * i + 5) % 97 for i in range(60)]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "ids.txt"
    path.write_text(",".join(map(str, IDS)))
    return path


def negative_log_likelihoods(adoptions, style, ids) -> np.ndarray:
    """Of ids[1:], by Hugging Face's model on the weights that the packages hold."""
    from workbench.adopt import passes
    from workbench.adopt.weights import stored_weights

    adapter = adoptions.adapter(style)
    reader, _ = stored_weights(adapter, adapter.checkpoint)
    logits = passes.reference(adapter.checkpoint, ids, reader).logits
    return np.array([-metrics.log_softmax(row)[i] for row, i in zip(logits, ids[1:])])


@pytest.mark.parametrize("style", ["recipe", "chunks", "shards"])
def test_evaluate_gives_the_perplexity_of_the_weights_that_are_stored(
    adoptions, text, style, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    options = "--window", 30, "--stride", 29, "--precision", "exact", "--json"
    source = adoptions.checkpoint(style)
    result = command(
        "evaluate",
        adoptions.folder(style),
        "--ids",
        text,
        "--checkpoint",
        source,
        *options,
    )
    losses = [
        negative_log_likelihoods(adoptions, style, IDS[i : i + 30]) for i in (0, 29)
    ]
    losses.append(negative_log_likelihoods(adoptions, style, IDS[58:]))
    expected = np.exp(np.concatenate(losses).mean())
    assert (result["tokens"], result["windows"]) == (59, 3)
    assert result["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert result["kl"]["mean"] < 0.5 and result["same_top"] > 0.5


def test_evaluate_says_what_an_argmax_inside_keeps(
    adoptions, text, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    arguments = (
        "--ids",
        text,
        "--checkpoint",
        adoptions.checkpoint("monolith"),
        "--json",
    )
    result = command("evaluate", adoptions.folder("monolith"), *arguments)
    assert result["perplexity"] is None and result["kl"] is None
    assert "argmax is inside" in result["not_run"]
    assert result["golden_perplexity"] > 1 and result["same_top"] > 0.5


@pytest.mark.parametrize("style", ["chunks", "host", "recipe"])
def test_memory_counts_packages_states_and_the_table(adoptions, style):
    result = command("memory", adoptions.folder(style), "--memory", "16G", "--json")
    adapter = adoptions.adapter(style)
    caches = sum(2 * value.size for value in adapter.read(adapter.begin()).values())
    files = [
        f for f in adoptions.packages(style).glob("[!.]*.mlpackage/**/*") if f.is_file()
    ]
    assert result["kv"] == caches
    assert result["weights"] == sum(f.stat().st_size for f in files)
    assert result["fits"] and len(result["predicted"]) > 3


def test_reuse_decodes_as_many_tokens_as_are_asked_for(adoptions):
    result = command("reuse", adoptions.folder("chunks"), "--max-new", 3, "--json")
    assert {tuple(cell["tokens"]) for cell in result["cells"]} == {(3,)}
    refusal = command("reuse", adoptions.folder("chunks"), "--max-new", 500, code=2)
    assert "--max-new" in refusal


@pytest.fixture(scope="module")
def swept(adoptions, tmp_path_factory):
    """(the grid of two adopted folders, the log that its sweep wrote)."""
    from workbench.check import golden
    from workbench.models.checkpoint import Checkpoint

    folder = tmp_path_factory.mktemp("sweep")
    stored = golden.make_golden(Checkpoint(adoptions.checkpoint("chunks")), IDS[:24])
    styles = [str(adoptions.folder(name)) for name in ("chunks", "theta")]
    grid = {
        "bundle": styles,
        "golden": str(stored.save(folder / "g.safetensors")),
        "run": {"T": [1, 8], "depth": [8], "n_gen": 4, "repetitions": 1},
    }
    root = folder / "experiments" / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "call", in_process.call)
        counts = sweep.sweep(sweep.make_grid(grid), root=root, progress=False)
    assert counts["failed"] == 0, counts["reasons"]
    return grid, root, counts


def test_sweep_measures_and_validates_adopted_folders(swept):
    grid, root, counts = swept
    assert (counts["cells"], counts["done"]) == (4, 4)
    rows = log.load("runs", root=root)
    verdicts = rows[rows["verdict"].notna()].set_index("bundle")["verdict"].to_dict()
    assert verdicts == {"chunks": "GREEN", "theta": "RED"}
    assert set(rows["max_seq_len"]) == {32, 64} and rows["compress"].isna().all()
    table = sweep.configurations(sweep.make_grid(grid), root=root)
    assert len(table) == 4 and (table["tokens_per_s"] > 0).all()
    assert sweep.sweep(sweep.make_grid(grid), root=root, progress=False)["resumed"] == 4


def test_the_explorer_shows_what_a_sweep_of_adopted_folders_logged(swept):
    from workbench.widgets import Explorer

    grid, root, _ = swept
    explorer = Explorer(grid, root=root)
    explorer.check()
    explorer.controls["tensor"].value = "k"
    for bundle, T in (("chunks", 8), ("theta", 1), ("chunks", 1)):
        explorer.controls["bundle"].value, explorer.controls["T"].value = bundle, T
        explorer.check()
        assert set(explorer.rows["T"]) == {T} and len(explorer.rows) == 2 * 24
        assert (explorer.rows["cosine"].min() > 0.999) == (bundle == "chunks")
    assert explorer.job.run.description == "Nothing is missing"


def test_a_number_of_tokens_that_no_function_takes_is_a_failed_cell(
    swept, tmp_path, monkeypatch
):
    grid, _, _ = swept
    monkeypatch.setattr(process, "call", in_process.call)
    one = grid | {"bundle": grid["bundle"][:1], "run": grid["run"] | {"T": [3]}}
    counts = sweep.sweep(sweep.make_grid(one), root=tmp_path / "log", progress=False)
    assert counts["failed"] == 1 and "3 tokens at position" in json.dumps(
        counts["reasons"]
    )


def test_a_cluster_is_refused_packages_that_lie_beside_the_folder(adoptions):
    from workbench.sweep import execute

    with pytest.raises(InputError, match="whole folders"):
        execute._sent(
            {"identity": "x", "bundle": str(adoptions.folder("chunks"))}, None, ""
        )


def test_two_recorded_validations_make_a_heatmap_of_their_difference(
    adoptions, tmp_path, monkeypatch
):
    from workbench.report.difference import run_difference

    monkeypatch.chdir(tmp_path)
    ids, runs = ",".join(map(str, IDS[:12])), []
    for style, code in (("recipe", 0), ("theta", 1)):
        arguments = "--prompt-ids", ids, "--record", "--json"
        runs.append(
            command("validate", adoptions.folder(style), *arguments, code=code)[
                "run_id"
            ]
        )
    found = run_difference(*runs, tensor="k")
    assert len(found.cells) == 2 * 12
    assert (found.cells["difference"][found.cells["position"] > 4] < 0).any()
