"""Commands take bundles of other exporters' packages: figures that agree with Hugging Face, and a
reason where something cannot be asked."""

import numpy as np
import pytest
from test_adopt import command, validate

from workbench import Bundle, log, sweep
from workbench.check import compare, golden
from workbench.models.checkpoint import Checkpoint
from workbench.widgets import Explorer

IDS = [(7 * i + 5) % 97 for i in range(60)]


def about(adoptions, style) -> tuple:
    text = ",".join(map(str, IDS))
    source = "--checkpoint", adoptions.checkpoint(style)
    return adoptions.folder(style), "--prompt-ids", text, *source


def losses(adoptions, ids) -> np.ndarray:
    """Negative log-likelihoods of ids[1:], by Hugging Face's model on the weights that
    the packages hold."""
    source = Checkpoint(adoptions.checkpoint("chunks"))
    weights = golden.stored_weights(source, Bundle.open(adoptions.folder("chunks")))
    logits = golden.make_golden(source, ids, weights, "stored")["logits"]
    return np.array([-compare.log_softmax(row)[i] for row, i in zip(logits, ids[1:])])


def test_evaluate_gives_the_perplexity_of_the_weights_that_are_stored(
    adoptions, checkout
):
    how = "--window", 30, "--stride", 29, "--precision", "exact", "--json"
    result = command("evaluate", *about(adoptions, "chunks"), *how)
    windows = [losses(adoptions, IDS[i : i + 30]) for i in (0, 29)]
    windows.append(losses(adoptions, IDS[58:]))
    expected = np.exp(np.concatenate(windows).mean())
    assert (result["tokens"], result["windows"]) == (59, 3)
    assert result["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert result["kl"]["mean"] < 0.5 and result["same_top"] > 0.5


def test_evaluate_says_what_an_argmax_inside_keeps(adoptions, checkout):
    result = command("evaluate", *about(adoptions, "host"), "--json")
    assert result["perplexity"] is None and result["kl"] is None
    assert "argmax is inside" in result["not_run"]
    assert result["golden_perplexity"] > 1 and result["same_top"] > 0.5


def test_logits_of_an_argmax_inside_are_refused(adoptions, tmp_path):
    how = "--prompt-ids", "1,2,3", "--max-new", 4, "--logits", tmp_path / "logits.npy"
    problem = command("generate", adoptions.folder("host"), *how, code=2)
    assert "argmax inside" in problem


def test_plan_counts_packages_and_states_and_places_every_function(adoptions):
    result = command("plan", adoptions.folder("chunks"), "--memory", "16G", "--json")
    states = adoptions.decoder("chunks").seqs.named_states
    files = adoptions.packages("chunks").glob("[!.]*.mlpackage/**/*")
    sizes = [file.stat().st_size for file in files if file.is_file()]
    assert result["bytes"]["kv"] == sum(2 * s.read(name).size for s, name in states)
    assert result["bytes"]["weights"] == sum(sizes)
    assert result["fits"] and len(result["chips"]) > 3
    placed = [shard["shard"] for shard in result["shards"]]
    assert len(placed) == 6 and "tiny_FFN_PF_chunk_02of02 prefill" in placed


@pytest.mark.slow("validates two bundles and times four cells")
@pytest.mark.wide
def test_a_sweep_measures_foreign_bundles_and_the_explorer_shows_them(
    adoptions, tmp_path, calls_here
):
    validate(adoptions, "chunks")  # their verdicts are stored
    validate(adoptions, "theta", code=1)
    stored = golden.make_golden(Checkpoint(adoptions.checkpoint("chunks")), IDS[:24])
    grid = {
        "bundle": [str(adoptions.folder(name)) for name in ("chunks", "theta")],
        "golden": str(stored.save(tmp_path / "g.safetensors")),
        "run": {"T": [1, 9], "depth": [4], "n_gen": 4, "repetitions": 1},
    }
    root = tmp_path / "experiments" / "log"
    counts = sweep.sweep(sweep.make_grid(grid), root=root, progress=False)
    assert (counts["done"], counts["failed"]) == (4, 0), counts["reasons"]
    rows = log.load("runs", root=root)
    verdicts = rows.dropna(subset="verdict").set_index("bundle")["verdict"]
    assert verdicts.to_dict() == {"chunks": "GREEN", "theta": "RED"}
    table = sweep.configurations(sweep.make_grid(grid), root=root)
    assert len(table) == 4 and (table["tokens_per_s"] > 0).all()
    explorer = Explorer(grid, None, root=root)
    explorer.tensor.value = "k"
    for bundle, T in (("chunks", 9), ("theta", 1), ("chunks", 1)):
        explorer.axes["bundle"].value, explorer.axes["T"].value = bundle, T
        assert "workbench-error" not in explorer.message.value, explorer.message.value
        rows = explorer.shown[explorer.shown["T"] == T]
        assert len(rows) == 2 * 24
        assert (rows["cosine"].min() > 0.9) == (bundle == "chunks")
    assert explorer.run.description == "Nothing is missing"
