"""Commands take bundles of other exporters' packages: figures that agree with Hugging Face, and a
reason where something cannot be asked."""

import numpy as np
import pytest
from circle import wide
from test_adopt import command, validate

from workbench import Bundle, log, sweep
from workbench.check import compare, golden
from workbench.models.checkpoint import Checkpoint

IDS = [(7 * i + 5) % 97 for i in range(60)]


def about(adoptions, style) -> tuple:
    text = ",".join(map(str, IDS))
    source = "--checkpoint", adoptions.checkpoint(style)
    return adoptions.folder(style), "--prompt-ids", text, *source


def losses(adoptions, style, ids) -> np.ndarray:
    """Negative log-likelihoods of ids[1:], by Hugging Face's model on the weights that
    the packages hold."""
    source = Checkpoint(adoptions.checkpoint(style))
    weights = golden.stored_weights(source, Bundle.open(adoptions.folder(style)))
    logits = golden.make_golden(source, ids, weights, "stored")["logits"]
    return np.array([-compare.log_softmax(row)[i] for row, i in zip(logits, ids[1:])])


@pytest.mark.parametrize("style", ["chunks", wide("recipe")])
def test_evaluate_gives_the_perplexity_of_the_weights_that_are_stored(
    adoptions, style, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    how = "--window", 30, "--stride", 29, "--precision", "exact", "--json"
    result = command("evaluate", *about(adoptions, style), *how)
    windows = [losses(adoptions, style, IDS[i : i + 30]) for i in (0, 29)]
    windows.append(losses(adoptions, style, IDS[58:]))
    expected = np.exp(np.concatenate(windows).mean())
    assert (result["tokens"], result["windows"]) == (59, 3)
    assert result["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert result["kl"]["mean"] < 0.5 and result["same_top"] > 0.5


def test_evaluate_says_what_an_argmax_inside_keeps(adoptions, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = command("evaluate", *about(adoptions, "host"), "--json")
    assert result["perplexity"] is None and result["kl"] is None
    assert "argmax is inside" in result["not_run"]
    assert result["golden_perplexity"] > 1 and result["same_top"] > 0.5


def test_logits_are_written_row_by_row(adoptions, tmp_path):
    file = tmp_path / "logits.npy"
    how = "--prompt-ids", "1,2,3", "--max-new", 4, "--logits", file, "--json"
    result = command("generate", adoptions.folder("chunks"), *how)
    logits = np.load(file)
    assert logits.shape == (5, 97) and logits.dtype == np.float32
    assert logits[:4].argmax(-1).tolist() == result["tokens"]
    problem = command("generate", adoptions.folder("host"), *how[:-1], code=2)
    assert "argmax inside" in problem


@pytest.mark.parametrize("style", ["chunks", wide("host")])
def test_plan_counts_packages_and_states_and_places_every_function(adoptions, style):
    result = command("plan", adoptions.folder(style), "--memory", "16G", "--json")
    states = adoptions.decoder(style).seqs.named_states
    files = adoptions.packages(style).glob("[!.]*.mlpackage/**/*")
    sizes = [file.stat().st_size for file in files if file.is_file()]
    assert result["bytes"]["kv"] == sum(2 * s.read(name).size for s, name in states)
    assert result["bytes"]["weights"] == sum(sizes)
    assert result["fits"] and len(result["chips"]) > 3
    if style == "chunks":
        placed = [shard["shard"] for shard in result["shards"]]
        assert len(placed) == 6 and "tiny_FFN_PF_chunk_02of02 prefill" in placed


@pytest.fixture(scope="module")
def swept(adoptions, tmp_path_factory):
    """(the grid of two bundles, the log that its sweep wrote)."""
    import in_process

    from workbench import process

    folder = tmp_path_factory.mktemp("sweep")
    validate(adoptions, "chunks")  # their verdicts are stored
    validate(adoptions, "theta", code=1)
    stored = golden.make_golden(Checkpoint(adoptions.checkpoint("chunks")), IDS[:24])
    grid = {
        "bundle": [str(adoptions.folder(name)) for name in ("chunks", "theta")],
        "golden": str(stored.save(folder / "g.safetensors")),
        "run": {"T": [1, 9], "depth": [4], "n_gen": 4, "repetitions": 1},
    }
    root = folder / "experiments" / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "call", in_process.call)
        counts = sweep.sweep(sweep.make_grid(grid), root=root, progress=False)
    assert counts["failed"] == 0, counts["reasons"]
    return grid, root, counts


@pytest.mark.wide
def test_sweep_measures_and_validates_foreign_bundles(swept):
    grid, root, counts = swept
    assert (counts["cells"], counts["done"]) == (4, 4)
    rows = log.load("runs", root=root)
    verdicts = rows[rows["verdict"].notna()].set_index("max_seq_len")["verdict"]
    assert verdicts.to_dict() == {32: "GREEN", 64: "RED"}
    table = sweep.configurations(sweep.make_grid(grid), root=root)
    assert len(table) == 4 and (table["tokens_per_s"] > 0).all()
    assert sweep.sweep(sweep.make_grid(grid), root=root, progress=False)["resumed"] == 4


@pytest.mark.wide
def test_the_explorer_shows_what_a_sweep_of_foreign_bundles_logged(swept):
    from workbench.widgets import Explorer

    grid, root, _ = swept
    explorer = Explorer(grid, root=root)
    explorer.check()
    explorer.tensor.value = "k"
    for bundle, T in (("chunks", 9), ("theta", 1), ("chunks", 1)):
        explorer.axes["bundle"].value, explorer.axes["T"].value = bundle, T
        explorer.check()
        rows = explorer.shown[explorer.shown["T"] == T]
        assert len(rows) == 2 * 24
        assert (rows["cosine"].min() > 0.9) == (bundle == "chunks")
    assert explorer.run.description == "Nothing is missing"
