"""Commands take bundles of other exporters' packages: figures that agree with Hugging Face, and a
reason where something cannot be asked."""

import shutil
from unittest import mock

import numpy as np
import pytest
from in_process import invoke
from refusal import refused
from test_adopt import validate
from tiny import as_device

from miltorch.shim import Proxy
from workbench import Bundle, Decoder, log, sweep
from workbench.bundle.names import X
from workbench.check import compare, gates, golden, transcript, units
from workbench.check.device import device_gate, device_reference
from workbench.models.checkpoint import Checkpoint
from workbench.widgets import Explorer

IDS = [(7 * i + 5) % 97 for i in range(30)]


def about(adoptions, style) -> tuple:
    text = ",".join(map(str, IDS))
    source = "--checkpoint", adoptions.checkpoint(style)
    return adoptions.folder(style), "--prompt-ids", text, *source


def test_evaluate_gives_the_perplexity_of_the_weights_that_are_stored(
    adoptions, checkout
):
    result = invoke("evaluate", *about(adoptions, "chunks"), "--precision", "exact")
    logits = adoptions.stored_logits("chunks", IDS)
    nats = [-compare.log_softmax(row)[i] for row, i in zip(logits, IDS[1:])]
    assert result["perplexity"] == pytest.approx(np.exp(np.mean(nats)), rel=1e-4)
    assert result["kl"]["mean"] < 0.5 and result["same_top"] > 0.5


def test_evaluate_says_what_an_argmax_inside_keeps(adoptions, checkout):
    result = invoke("evaluate", *about(adoptions, "host"))
    assert result["perplexity"] is None and result["kl"] is None
    assert "argmax is inside" in result["not_run"]
    assert result["golden_perplexity"] > 1 and result["same_top"] > 0.5


@pytest.mark.parametrize(("style", "verdict"), [("recipe", "GREEN"), ("theta", "RED")])
def test_the_error_along_a_text_allows_for_constants_in_fp16(
    adoptions, monkeypatch, style, verdict
):
    checkpoint = Checkpoint(adoptions.checkpoint(style))
    prompts = {str(n): [1, *IDS[n : n + 8]] for n in range(3)}
    monkeypatch.setattr(transcript, "encode_prompts", lambda *_: prompts)
    decoder = Decoder(adoptions.folder(style), "portable")
    gate, *_ = transcript.transcribe(decoder, checkpoint, [*prompts], 16).judge()
    assert gate.verdict == verdict
    assert gate.threshold == transcript.FOREIGN_ERROR_LIMIT


def test_a_unit_is_validated_without_logits(adoptions, tmp_path):
    reference = golden.make_golden(Checkpoint(adoptions.checkpoint("host")), IDS[:4])
    file = reference.save(tmp_path / "g.safetensors")
    options = {"single_copy": False}
    bundle = shutil.copytree(adoptions.folder("host"), tmp_path / "bundle")
    (bundle / gates.VERDICT).unlink(missing_ok=True)
    result = units.validate_unit(bundle, file, None, "portable", "declared", options)
    # without a checkpoint host and program are not compared
    assert result["verdict"] == "not_run" and np.isnan(result["kl_max"])


def test_logits_of_an_argmax_inside_are_refused(adoptions, tmp_path):
    arguments = (
        "--prompt-ids",
        "1,2,3",
        "--max-new",
        4,
        "--logits",
        tmp_path / "logits.npy",
    )
    with refused("argmax inside"):
        invoke("generate", adoptions.folder("host"), *arguments)


def test_plan_counts_packages_and_states_and_places_every_function(adoptions):
    result = invoke("plan", adoptions.folder("chunks"), "--memory", "16G")
    states = adoptions.decoder("chunks").seqs.named_states
    files = adoptions.packages("chunks").glob("[!.]*.mlpackage/**/*")
    sizes = [file.stat().st_size for file in files if file.is_file()]
    assert result["bytes"]["kv"] == sum(2 * s.read(name).size for s, name in states)
    assert result["bytes"]["weights"] == sum(sizes)
    assert result["fits"] and len(result["chips"]) > 3
    placed = [shard["shard"] for shard in result["shards"]]
    assert len(placed) == 6 and "tiny_FFN_PF_chunk_02of02 prefill" in placed


@pytest.mark.shim
def test_a_device_compiles_each_package_once_and_has_a_plan_of_it(
    adoptions, tmp_path, calls_here
):
    folder = shutil.copytree(adoptions.folder("chunks"), tmp_path / "b")
    runtime = "--runtime", "stand-in-plan-ane"
    plan = invoke("plan", folder, *runtime)
    assert (plan["source"], len(plan["shards"])) == ("simulated", 6)
    with mock.patch.object(Proxy, "compileModel") as compiled:
        invoke("generate", folder, "--prompt-ids", "1,2", "--max-new", 1, *runtime)
    compiled.assert_not_called()


@pytest.mark.slow("validates two bundles and times four cells")
@pytest.mark.wide
def test_a_sweep_measures_foreign_bundles_and_the_explorer_shows_them(
    adoptions, tmp_path, calls_here
):
    validate(adoptions, "chunks")  # their verdicts are stored
    validate(adoptions, "theta")
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
    explorer = Explorer(grid, None, root=root)
    explorer.tensor.value = "k"
    for bundle, T in (("chunks", 9), ("theta", 1), ("chunks", 1)):
        explorer.axes["bundle"].value, explorer.axes["T"].value = bundle, T
        rows = explorer.shown_rows[explorer.shown_rows["T"] == T]
        assert len(rows) == 2 * 24
        assert (rows["cosine"].min() > 0.9) == (bundle == "chunks")
    assert explorer.run_button.description == "Nothing is missing"


def test_a_device_that_ends_in_other_logits_is_red(adoptions):
    prompt_golden = golden.make_golden(
        Checkpoint(adoptions.checkpoint("chunks")), IDS[:8]
    )
    bundle = Bundle.open(adoptions.folder("chunks"))
    reference = device_reference(bundle, prompt_golden)
    decoder = as_device(Decoder(bundle, "portable"))
    assert device_gate(decoder, prompt_golden, reference).verdict == "GREEN"
    run = decoder.run_calls

    def run_calls(*arguments):
        return [io | {X: 1.05 * io[X]} for io in run(*arguments)]

    decoder.run_calls = run_calls
    gate = device_gate(decoder, prompt_golden, reference)
    assert gate.verdict == "RED" and gate.reason.endswith("worst: logits")


def test_packages_are_adopted_into_a_relative_folder(adoptions, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    packages = sorted(adoptions.packages("recipe").glob("*.mlpackage"))
    source = "--checkpoint", adoptions.checkpoint("recipe")
    invoke("adopt", *packages, *source, "--out", "build/adopted")
    assert Bundle.open(tmp_path / "build" / "adopted").root.is_dir()
