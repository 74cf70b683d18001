"""Perplexity and KL over a text: transformers' own figures, each token once, resumed where it
stopped."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from in_process import cli

from workbench import Decoder, InputError
from workbench.check import evaluate
from workbench.check.golden import stored_weights
from workbench.check.hf import Reference
from workbench.decode.transcript import encode_text
from workbench.models.checkpoint import Checkpoint

DATA = Path(__file__).parents[2] / "data"
TINY = DATA / "tiny-llama"
WINDOW, STRIDE = 24, 10


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Several held-out prompts, one a line: 97 words."""
    lines = (DATA / "tasks" / "heldout.jsonl").read_text().splitlines()
    words = " ".join(json.loads(line)["prompt"] for line in lines).split()[:97]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(words))
    return path


@pytest.fixture(scope="module")
def bundle(exports):
    return exports.bundle(TINY, max_seq_len=32, compress="int8-tensor")


def hugging_face(path: Path = TINY):
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


def strided(
    model, ids: list[int], window: int, stride: int
) -> tuple[float, list[np.ndarray]]:
    """transformers' documented loop: perplexity, and log probabilities [V] of each scored token."""
    rows, losses, before = [], [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        with torch.inference_mode():
            logits = model(torch.tensor([ids[begin:end]])).logits[0].double()
        for position in range(max(before, begin + 1), end):
            row = logits[position - 1 - begin].log_softmax(-1)
            rows.append(row.numpy())
            losses.append(-row[ids[position]].item())
        before = end
        if end == len(ids):
            break
    return float(np.exp(np.mean(losses))), rows


def stored_model(checkpoint: Checkpoint, bundle):
    """transformers' model with the weights that the bundle stores."""
    reference = Reference(checkpoint, stored_weights(checkpoint, bundle))

    def logits(ids: torch.Tensor):
        hidden = reference.last_hidden(ids.numpy(), use_cache=False)
        return SimpleNamespace(logits=reference.logits(hidden))

    return logits


def command(*arguments, code: int = 0) -> dict:
    result = cli("evaluate", *arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Finished windows are stored below the working directory."""
    monkeypatch.chdir(tmp_path)


def test_both_perplexities_and_kl_are_transformers(bundle, text):
    how = ("--window", WINDOW, "--stride", STRIDE, "--precision", "exact")
    result = command(bundle.root, "--text", text, "--checkpoint", TINY, *how)
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    ids = tokenizer(text.read_text())["input_ids"]
    golden_perplexity, p = strided(hugging_face(), ids, WINDOW, STRIDE)
    perplexity, q = strided(stored_model(Checkpoint(TINY), bundle), ids, WINDOW, STRIDE)
    assert result["golden_perplexity"] == pytest.approx(golden_perplexity, rel=1e-6)
    assert result["perplexity"] == pytest.approx(perplexity, rel=1e-6)
    assert perplexity != pytest.approx(golden_perplexity, rel=1e-5)
    kl = [float((np.exp(a) * (a - b)).sum()) for a, b in zip(p, q)]
    figures = {
        "mean": np.mean(kl),
        "median": np.median(kl),
        "p99": np.percentile(kl, 99),
    }
    assert result["kl"] == pytest.approx(figures | {"max": max(kl)}, rel=1e-2, abs=1e-7)
    assert result["same_top"] == np.mean(
        [a.argmax() == b.argmax() for a, b in zip(p, q)]
    )
    assert (result["tokens"], result["windows"]) == (len(ids) - 1, 9) == (97, 9)


@pytest.mark.parametrize(
    "n, window, stride",
    [(2, 8, 4), (8, 8, 4), (9, 8, 4), (12, 8, 7), (100, 9, 4), (7, 3, 1)],
)
def test_each_token_but_the_first_is_scored_once(n, window, stride):
    spans = evaluate.windows(n, window, stride)
    scored = [position for _, first, end in spans for position in range(first, end)]
    assert scored == list(range(1, n))
    assert all(end - begin <= window and begin < first for begin, first, end in spans)


def test_bos_is_prepended_where_the_checkpoint_has_one(tmp_path):
    words = "set river amber"
    assert encode_text(TINY, words)[0] == 1 and len(encode_text(TINY, words)) == 4
    without = shutil.copytree(TINY, tmp_path / "without")
    settings = json.loads((without / "tokenizer_config.json").read_text()) | {
        "bos_token": None
    }
    (without / "tokenizer_config.json").write_text(json.dumps(settings))
    assert encode_text(without, words) == encode_text(TINY, words)[1:]


def test_an_interrupted_evaluation_goes_on(bundle, text, monkeypatch):
    sizes = "--window", WINDOW, "--stride", STRIDE
    arguments = bundle.root, "--text", text, "--checkpoint", TINY, *sizes
    whole = command(*arguments)
    (path,) = Path("data/evaluations").glob("*.npy")
    rows = np.load(path)
    np.save(path, rows[: WINDOW - 1 + 3 * STRIDE])  # of four windows
    calls = []
    advance = Decoder.advance
    monkeypatch.setattr(
        Decoder, "advance", lambda *a, **k: calls.append(1) or advance(*a, **k)
    )
    resumed = command(*arguments)
    assert 0 < resumed.pop("resumed") < resumed["windows"] and calls
    np.testing.assert_allclose(np.load(path), rows, rtol=1e-4, atol=1e-7)
    assert resumed["perplexity"] == whole["perplexity"] and whole["resumed"] == 0
    calls.clear()
    assert command(*arguments)["resumed"] == 9 and not calls
    assert command(*arguments, "--precision", "exact")["resumed"] == 0


def test_windows_of_a_batch_and_of_one_sequence_give_the_same(exports, text):
    how = ("--text", text, "--window", 20, "--precision", "exact")
    one, three = (
        command(exports.bundle(TINY, max_seq_len=32, batch=B, **options).root, *how)
        for B, options in [(1, {}), (3, {"kv_write": "slice"})]
    )
    assert one["perplexity"] == pytest.approx(three["perplexity"], rel=1e-6)
    assert one["golden_perplexity"] is one["kl"] is one["same_top"] is None


def test_intervals_hold_the_figure_and_are_null_for_few_windows(bundle, text):
    many = command(bundle.root, "--text", text, "--checkpoint", TINY, "--window", 9)
    for name, (low, high) in many["intervals"].items():
        figure = many["kl"]["mean"] if name == "kl_mean" else many[name]
        assert low <= figure <= high and (low < high or name == "same_top"), name
    ratio = many["perplexity"] / many["golden_perplexity"]
    assert many["perplexity_ratio"] == pytest.approx(ratio, rel=1e-12)
    few = command(bundle.root, "--text", text, "--checkpoint", TINY, "--window", 32)
    assert few["windows"] < evaluate.MIN_WINDOWS and few["intervals"] is None


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--window", 33), "at most max_seq_len = 32"),
        (("--window", 8, "--stride", 8), "1 … 7"),
        (("--window", 1), "2"),
        (("--checkpoint", DATA / "tiny-qwen2"), "was exported from"),
        (("--text", "none"), "no such file"),
        (("--text", "empty"), "at least two"),
        (("--text", "latin"), "UTF-8"),
        (("--prompt-ids", "1,2,3"), "needs one of --prompt"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(bundle, text, arguments, words):
    Path("empty").touch()
    Path("latin").write_bytes("ä".encode("latin-1"))
    named = [] if "--text" in arguments else ["--text", str(text)]
    result = cli("evaluate", bundle.root, *named, *arguments)
    assert isinstance(result.exception, InputError) and words in str(
        result.exception
    ), result
    assert not Path("data").exists()


def test_a_bundle_without_a_tokenizer_takes_token_ids(exports, text):
    plain = exports.bundle(exports.checkpoint("llama"), max_seq_len=16)
    ids = np.random.default_rng(0).integers(0, 97, 40)
    given = ",".join(map(str, ids))
    assert command(plain.root, "--prompt-ids", given)["tokens"] == 39
    refused = cli("evaluate", plain.root, "--text", text)
    assert "no tokenizer.json" in str(refused.exception) and "--prompt-ids" in str(
        refused.exception
    )
