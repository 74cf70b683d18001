"""Perplexity and KL over a text are transformers' own figures; each token is scored once,
and an evaluation that was stopped or killed resumes to the same figures."""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from in_process import invoke
from refusal import refused
from tiny import prompt

from workbench.check import evaluate
from workbench.check.compare import relative_rms
from workbench.check.golden import stored_weights
from workbench.check.hf import Reference
from workbench.decode import Decoder
from workbench.models.checkpoint import Checkpoint

DATA = Path(__file__).parents[2] / "data"
TINY = DATA / "tiny-llama"
WINDOW, STRIDE = 24, 10
EXACT = "--precision", "exact"
SIZES = "--window", WINDOW, "--stride", STRIDE


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


def evaluate_in_windows(logits_of, ids: list[int], window: int, stride: int):
    """transformers' documented loop. Returns the perplexity and, for each scored token, its row of
    log probabilities [V]. `logits_of` gives the logits [n, V] of ids [1, n]."""
    rows, losses, before = [], [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        with torch.inference_mode():
            logits = logits_of(torch.tensor([ids[begin:end]])).double()
        for position in range(max(before, begin + 1), end):
            row = logits[position - 1 - begin].log_softmax(-1)
            rows.append(row.numpy())
            losses.append(-row[ids[position]].item())
        before = end
        if end == len(ids):
            break
    return float(np.exp(np.mean(losses))), rows


run_evaluate = partial(invoke, "evaluate")


@pytest.fixture(autouse=True)
def empty_working_folder(tmp_path, monkeypatch):
    """Finished windows are stored below the working directory."""
    monkeypatch.chdir(tmp_path)


def test_both_perplexities_and_kl_are_transformers(exports, bundle, text):
    result = run_evaluate(
        bundle.root, "--text", text, "--checkpoint", TINY, *SIZES, *EXACT
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    ids = tokenizer(text.read_text())["input_ids"]
    source, model = Checkpoint(TINY), exports.hf(TINY)
    stored = Reference(source, stored_weights(source, bundle))

    def logits_of_stored(ids):
        return stored.logits(stored.last_hidden(ids.numpy(), use_cache=False))[0]

    (golden_perplexity, p), (perplexity, q) = (
        evaluate_in_windows(logits_of, ids, WINDOW, STRIDE)
        for logits_of in (lambda ids: model(ids).logits[0], logits_of_stored)
    )
    assert result["golden_perplexity"] == pytest.approx(golden_perplexity, rel=1e-6)
    assert result["perplexity"] == pytest.approx(perplexity, rel=1e-6)
    assert perplexity != pytest.approx(golden_perplexity, rel=1e-5)
    kl = [float((np.exp(a) * (a - b)).sum()) for a, b in zip(p, q)]
    figures = dict(zip(("median", "p99", "max"), np.percentile(kl, [50, 99, 100])))
    figures |= {"mean": np.mean(kl)}
    assert result["kl"] == pytest.approx(figures, rel=1e-2, abs=1e-7)
    assert result["same_top"] == np.mean(np.argmax(p, -1) == np.argmax(q, -1))
    assert (result["tokens"], result["windows"]) == (len(ids) - 1, 9) == (97, 9)


def test_an_interrupted_evaluation_goes_on(bundle, text, monkeypatch):
    arguments = bundle.root, "--text", text, "--checkpoint", TINY, *SIZES
    whole = run_evaluate(*arguments)
    (path,) = Path("data/evaluations").glob("*.npy")
    rows = np.load(path)
    np.save(path, rows[: WINDOW - 1 + 3 * STRIDE])  # of four windows
    resumed = run_evaluate(*arguments)
    assert 0 < resumed["resumed"] < resumed["windows"] and whole["resumed"] == 0
    np.testing.assert_allclose(np.load(path), rows, rtol=1e-4, atol=1e-7)
    assert resumed["perplexity"] == whole["perplexity"]
    assert run_evaluate(*arguments, *EXACT)["resumed"] == 0
    monkeypatch.setattr(Decoder, "run_calls", None)  # nothing is left to run
    assert run_evaluate(*arguments)["resumed"] == 9


class CountedBar:
    """A bar whose ticks and line of text are noted in one list."""

    def __init__(self, noted: list, **options):
        self.noted = noted

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def update(self, count: int = 1) -> None:
        self.noted.append(count)

    def set_postfix_str(self, text: str) -> None:
        self.noted.append(text)


def test_each_window_is_stored_and_counted_before_the_next_one_runs(
    bundle, text, monkeypatch
):
    """Hugging Face's model runs over all windows of one shape at once, and names its layers
    meanwhile."""
    noted, sizes = [], []
    write_whole = evaluate.write_whole

    def counted_write(path, write):
        write_whole(path, write)
        sizes.append(len(np.load(path)))
        noted.append("stored")

    monkeypatch.setattr(evaluate, "bar", partial(CountedBar, noted))
    monkeypatch.setattr(evaluate, "write_whole", counted_write)
    run_evaluate(bundle.root, "--text", text, "--checkpoint", TINY, *SIZES)
    ticks = [index for index, entry in enumerate(noted) if entry == 1]
    assert len(ticks) == len(sizes) == 9
    assert all(noted[index - 1] == "stored" for index in ticks)
    assert sizes == sorted(set(sizes)) and sizes[0] == WINDOW - 1
    L = bundle.manifest.dims.L
    layers = [
        f"Hugging Face's model, 7 windows: layer {i + 1} of {L}" for i in range(L)
    ]
    first = noted.index(layers[0])
    assert noted[first : first + L] == layers
    shards = [f"bundle: shard {i + 1} of {L}" for i in range(L)]
    for index in ticks:
        assert noted[index - 1 - L : index - 1] == shards


# Runs the command in its own process, whose file of rows is written often, and ends the
# process with SIGKILL: behind the third writing, or in the middle of it.
KILLED = """
import os, signal, sys
import numpy as np
from workbench.check import evaluate
from workbench.cli import main

moment, tokens = sys.argv[1:3]
del sys.argv[1:3]
count, save, write_whole = 0, np.save, evaluate.write_whole

def counted_save(file, arr):
    global count
    count += 1
    if count == 3 and moment == "while rows are written":
        file.write(b"half of the rows")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    save(file, arr)

def counted_write(*arguments):
    write_whole(*arguments)
    if count == 3:
        os.kill(os.getpid(), signal.SIGKILL)

np.save, evaluate.write_whole = counted_save, counted_write
evaluate.REFERENCE_TOKENS = int(tokens)
main()
"""


@pytest.mark.slow("runs the command in a process that is killed")
@pytest.mark.parametrize(
    "moment, stored", [("behind a window", 3), ("while rows are written", 2)]
)
def test_a_killed_evaluation_resumes_to_the_same_figures(
    bundle, text, forked, moment, stored
):
    arguments = bundle.root, "--text", text, "--checkpoint", TINY, *SIZES
    whole = run_evaluate(*arguments)
    shutil.rmtree("data/evaluations")
    # The third window is the second of a group of two in Hugging Face's model. Each window
    # is written as soon as it is scored.
    program = [sys.executable, "-c", KILLED, moment, str(2 * WINDOW), "evaluate"]
    process = subprocess.run([*program, *map(str, arguments)], capture_output=True)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    resumed = run_evaluate(*arguments)
    assert resumed["resumed"] == stored
    # the reference's windows run in groups, which differ in the order of sums alone
    for name in ("perplexity", "golden_perplexity", "same_top"):
        assert resumed[name] == pytest.approx(whole[name], rel=1e-6)
    assert resumed["kl"] == pytest.approx(whole["kl"], rel=1e-4, abs=1e-9)


def tear(path, rows):
    path.write_bytes(path.read_bytes()[:-7])


# what a file of rows has become → a function of its path and its rows that makes it so
DAMAGES = {
    "torn": tear,
    "another number of rows": lambda path, rows: np.save(path, rows[:5]),
    "more rows": lambda path, rows: np.save(path, np.concatenate([rows, rows])),
    "other columns": lambda path, rows: np.save(path, rows[:, :2]),
    "other numbers": lambda path, rows: np.save(path, rows.astype(np.int32)),
    "no reference": lambda path, rows: np.save(path, rows * [1, np.nan, 1, 1]),
    "infinite": lambda path, rows: np.save(path, rows + [np.inf, 0, 0, 0]),
    "objects": lambda path, rows: np.save(path, rows.astype(object)),
}


@pytest.fixture(scope="module")
def evaluated(bundle, text, tmp_path_factory):
    """A finished evaluation: the arguments, the figures, and the working folder with its rows."""
    sizes = "--window", 24, "--stride", 23
    arguments = bundle.root, "--text", text, "--checkpoint", TINY, *sizes
    folder = tmp_path_factory.mktemp("evaluated")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return arguments, run_evaluate(*arguments), folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_stored_rows_of_another_form_are_computed_again(evaluated, tmp_path, damage):
    arguments, whole, folder = evaluated
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (path,) = Path("data/evaluations").glob("*.npy")
    DAMAGES[damage](path, np.load(path))
    again = run_evaluate(*arguments)
    assert again["resumed"] == 0 and again["perplexity"] == whole["perplexity"]


def test_an_evaluation_does_not_go_on_over_changed_weights(bundle, text, tmp_path):
    copy = shutil.copytree(bundle.root, tmp_path / "copy")
    run_evaluate(copy, "--text", text)
    path = max(copy.rglob("weight.bin"), key=lambda file: file.stat().st_size)
    status, weights = path.stat(), np.memmap(path, np.uint8, mode="r+")
    weights[-64:] ^= 1
    weights.flush()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with refused("weight.bin: found bytes that differ"):
        run_evaluate(copy, "--text", text)


def test_windows_of_a_batch_and_of_one_sequence_give_the_same(exports, text):
    arguments = ("--text", text, "--window", 20, *EXACT)
    one, three = (
        run_evaluate(exports.bundle(TINY, max_seq_len=32, **options).root, *arguments)
        for options in ({}, {"batch": 3, "kv_write": "slice"})
    )
    assert one["perplexity"] == pytest.approx(three["perplexity"], rel=1e-6)
    assert one["golden_perplexity"] is one["kl"] is one["same_top"] is None


def test_intervals_hold_the_figure_and_are_null_for_few_windows(bundle, text):
    many = run_evaluate(
        bundle.root, "--text", text, "--checkpoint", TINY, "--window", 9
    )
    for name, (low, high) in many["intervals"].items():
        figure = many["kl"]["mean"] if name == "kl_mean" else many[name]
        assert low <= figure <= high and (low < high or name == "same_top"), name
    ratio = many["perplexity"] / many["golden_perplexity"]
    assert many["perplexity_ratio"] == pytest.approx(ratio, rel=1e-12)
    few = run_evaluate(
        bundle.root, "--text", text, "--checkpoint", TINY, "--window", 32
    )
    assert few["windows"] < evaluate.MIN_WINDOWS and few["intervals"] is None


@pytest.mark.parametrize(
    ("family", "options", "columns"),
    [
        ("llama", {}, 256),
        ("gemma3_text", {}, 256),
        ("gemma3_text", {"sliding": "ring"}, 4),
        ("llama", {"kv_write": "slice"}, 4),
        ("llama", {"tokens": "1,4"}, 4),
        ("lfm2", {}, 256),
        ("qwen3_5_text", {}, 4),  # a matrix state is rounded once per call
    ],
)
def test_wide_calls_give_the_logits_of_calls_of_t_max(
    exports, family, options, columns
):
    """Only programs that take any number of columns have wide calls."""
    bundle = exports.bundle(family, max_seq_len=32, **options)
    decoder = Decoder(bundle, "portable", "exact")
    assert evaluate.call_columns(decoder) == columns
    ids = [prompt(bundle.manifest.dims.V, 28)]
    expected = decoder.sequence_logits(ids, 12)
    outputs = evaluate.last_outputs(decoder, ids, 12)
    assert relative_rms(expected, decoder.logits(outputs)) < 1e-5


@pytest.mark.parametrize("family", sorted(evaluate.SDPA_FAMILIES))
def test_fused_attention_gives_the_logits_of_eager_attention(exports, family):
    source = Checkpoint(exports.checkpoint(family))
    ids = np.array([prompt(source.config.vocab_size, 40)] * 2)
    logits = []
    for model in (Reference(source), evaluate.open_reference(source)):
        logits.append(model.logits(model.last_hidden(ids, use_cache=False)).numpy())
    assert relative_rms(*logits) < 1e-6


def test_segments_and_slices_do_not_change_the_figures(bundle, text, monkeypatch):
    """They bound the memory of calls and of logits."""
    arguments = bundle.root, "--text", text, "--checkpoint", TINY, *SIZES
    monkeypatch.setattr(evaluate, "COLUMNS", 5)
    whole = run_evaluate(*arguments)
    shutil.rmtree("data/evaluations")
    monkeypatch.setattr(evaluate, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(evaluate, "SCORED_NUMBERS", 3 * bundle.manifest.dims.V)
    parts = run_evaluate(*arguments)
    for name in ("perplexity", "golden_perplexity", "same_top"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-6)


def test_rows_of_calls_of_another_width_are_computed_again(bundle, text, monkeypatch):
    arguments = bundle.root, "--text", text, *SIZES
    run_evaluate(*arguments)
    monkeypatch.setattr(evaluate, "COLUMNS", 8)
    assert run_evaluate(*arguments)["resumed"] == 0


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--window", 33), "at most max_seq_len = 32"),
        (("--window", 8, "--stride", 8), "1 … 7"),
        (("--window", 1), "at least 2"),
        (("--checkpoint", DATA / "tiny-qwen2"), "was exported from"),
        (("--text", "none"), "no such file"),
        (("--text", "/dev/null"), "found no regular file"),
        (("--text", "empty"), "no text"),
        (("--text", "latin"), "UTF-8"),
        (("--prompt-ids", "1,2,3"), "needs one of --prompt"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(bundle, text, arguments, words):
    Path("empty").touch()
    Path("latin").write_bytes("ä".encode("latin-1"))
    named = [] if "--text" in arguments else ["--text", str(text)]
    with refused(words):
        run_evaluate(bundle.root, *named, *arguments)
    assert not Path("data").exists()


def test_a_bundle_without_a_tokenizer_takes_token_ids(exports, text):
    plain = exports.bundle("llama", max_seq_len=16)
    ids = prompt(97, 40)
    given = ",".join(map(str, ids))
    assert run_evaluate(plain.root, "--prompt-ids", given)["tokens"] == 39
    assert run_evaluate(plain.root, "--prompt-ids", "1,2")["windows"] == 1
    with refused("no tokenizer.json.*--prompt-ids"):
        run_evaluate(plain.root, "--text", text)
