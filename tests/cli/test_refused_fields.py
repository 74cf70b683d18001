"""A field of a grid, of bundle.json or of an export's options that pydantic refuses is refused in
the words of the workbench, with the nearest name."""

import re
import shlex
import shutil

import pytest
from in_process import cli
from tiny import DATA

# words of pydantic that name its own classes, or the check in place of the value
PYDANTIC = re.compile(
    "Extra inputs|valid list|valid dict|should|equal to|unable to|EOF"
)


@pytest.mark.parametrize(
    ("text", "found", "needs", "step"),
    [
        (
            "{chekpoint: x}",
            "chekpoint: 'x'",
            "one of the keys checkpoint,",
            "checkpoint",
        ),
        ("{run: {dept: [0]}}", "run.dept: [0]", "one of the keys T, depth", "depth"),
        (
            "{run: {hints: [{reshapeFreq: Frequent}]}}",
            "run.hints.0.reshapeFreq: 'Frequent'",
            "one of the keys reshapeFrequency,",
            "reshapeFrequency",
        ),
        (
            "{run: {precision: [declard]}}",
            "run.precision.0: 'declard'",
            "one of declared, exact, narrow",
            "declared",
        ),
        (
            "{run: {runtime: [portabel]}}",
            "run.runtime.0: 'portabel'",
            "one of auto, portable, coreml, stand-in",
            "portable",
        ),
        (
            "{export: {kv_write: [maks]}}",
            "export.kv_write.0: 'maks'",
            "one of mask, slice",
            "mask",
        ),
        ("{run: {T: [0]}}", "run.T.0: 0", "a number from 1", None),
        ("{run: {T: 1}}", "run.T: 1", "a list, such as [1]", None),
        ("{run: {T: []}}", "run.T: []", "at least 1 in the list", None),
        ("{run: {timeout_s: 0}}", "run.timeout_s: 0", "a number above 0", None),
        ("{run: {rounds: 1.5}}", "run.rounds: 1.5", "a whole number", None),
        ("{run: {cool_down_s: 2s}}", "run.cool_down_s: '2s'", "a number", None),
        ("{run: {fast: [maybe]}}", "run.fast.0: 'maybe'", "true or false", None),
        ("{run: 3}", "run: 3", "keys with values", None),
        (
            "{export: {max_seq_len: [12x]}}",
            "export.max_seq_len.0: '12x'",
            "a whole number",
            None,
        ),
        ("{export: {batch: [0]}}", "export.batch.0: 0", "a number from 1", None),
        ("[1, 2]", "[1, 2]", "keys with values, such as checkpoint: ", None),
        ("", "no keys", "keys with values, such as checkpoint: ", None),
    ],
)
def test_a_wrong_field_of_a_grid_is_named_with_what_it_needs(
    text, found, needs, step, tmp_path
):
    grid = tmp_path / "grid.yaml"
    if text.startswith("{") and "chekpoint" not in text:
        text = f"{{checkpoint: {DATA / 'tiny-llama'}, {text[1:]}"
    grid.write_text(text)
    result = cli("sweep", grid, "--log", tmp_path / "log")
    assert (result.exit_code, result.stdout) == (2, "")
    message = result.stderr.splitlines()[-1]
    assert f"grid {grid}: found {found}; needs {needs}" in message
    proposal = f"Next: did you mean {step}? If not, see docs/guide.md: Sweeps."
    assert message.endswith(proposal if step else "Next: see docs/guide.md: Sweeps.")
    assert not PYDANTIC.search(message) and message.count("Next:") == 1


@pytest.mark.parametrize(
    ("before", "after", "found", "needs", "step"),
    [
        (
            '"max_seq_len"',
            '"max_seqlen"',
            "options.max_seqlen: 32",
            "one of the keys max_seq_len, tokens",
            "did you mean max_seq_len? If not, restore the file",
        ),
        (
            '"kv_write": "mask"',
            '"kv_write": "maks"',
            "options.kv_write: 'maks'",
            "one of mask, slice",
            "did you mean mask? If not, restore the file",
        ),
        (
            '"batch": 1',
            '"batch": 0',
            "options.batch: 0",
            "a number from 1",
            "restore the file",
        ),
        (
            '"version": 2,',
            '"version": 2',
            "no JSON in line 4, column 2: expected",
            "JSON, as workbench export writes it",
            "restore the file",
        ),
        (
            '"version": 2',
            '"version": 1',
            "version 1",
            "version 2",
            "export again with this workbench",
        ),
    ],
    ids=["key", "value", "number", "JSON", "version"],
)
def test_a_fault_of_a_manifest_is_named_with_its_place(
    before, after, found, needs, step, llama_bundle, tmp_path
):
    bundle = shutil.copytree(llama_bundle.root, tmp_path / "edited")
    manifest = bundle / "bundle.json"
    text = manifest.read_text()
    assert before in text
    manifest.write_text(text.replace(before, after))
    result = cli("plan", bundle)
    assert (result.exit_code, result.stdout) == (2, "")
    message = result.stderr.splitlines()[-1]
    assert f"{manifest}: found {found}" in message
    assert f"; needs {needs}" in message and f"Next: {step}" in message
    assert not PYDANTIC.search(message)


@pytest.mark.parametrize("text", ["", '{"format": "workbench-'])
def test_a_manifest_that_is_cut_off_ends_too_early(text, llama_bundle, tmp_path):
    bundle = shutil.copytree(llama_bundle.root, tmp_path / "cut")
    (bundle / "bundle.json").write_text(text)
    message = cli("plan", bundle).stderr
    assert "found no JSON in line 1, column " in message
    assert ": the file ends too early; needs JSON" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--max-seq-len 0", "max_seq_len: found 0; needs a number from 1. Next: see"),
        (
            "--kv-write maks",
            "kv_write: found 'maks'; needs one of mask, slice. Next: did you mean mask?",
        ),
        ("--tokens 1,64 --max-seq-len 32", "tokens = 1,64; needs max_seq_len = 64"),
    ],
)
def test_a_wrong_option_of_an_export_has_no_words_of_pydantic(options, words, tmp_path):
    out = tmp_path / "out"
    result = cli("export", DATA / "tiny-llama", out, *shlex.split(options))
    assert result.exit_code == 2 and words in result.stderr
    assert not PYDANTIC.search(result.stderr) and not out.exists()
