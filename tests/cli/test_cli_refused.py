"""Bad input: one message that names it and the next step, exit code 2, and nothing left behind.
Paths that lead elsewhere are in test_cli_paths.py."""

import shlex
from pathlib import Path

import pytest
from in_process import cli, invoke
from tiny import DATA

from workbench.cli import main
from workbench.cli.spellings import OLD_OPTIONS

MIXED = "export TINY out --compress mixed --calibrate TINY/../tasks/heldout.txt"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("export TINY out --max-seq-len 0", "max_seq_len"),
        ("export TINY out --compress int8", "lut6-g16, lut4-g8"),
        ("export TINY out --tokens '1;2'", "1-4, 4 or 1,64"),
        ("export TINY out --compress mixed --max-kl 0.05", "data/calibration.txt"),
        (f"{MIXED}", "found no target"),
        (f"{MIXED} --max-kl 0.05 --bytes 1M", "--max-kl and --bytes"),
        (f"{MIXED} --ms-on M4 --bytes 1M", "--bytes and --ms-on"),
        (f"{MIXED} --max-kl -1", "--max-kl"),
        (f"{MIXED} --max-kl 0.05 --select nowhere", "nowhere"),
        (f"{MIXED} --max-kl 0.05 --select README --select-ids README", "two texts"),
        (f"{MIXED} --max-kl 0.05 --select README", "unknown to the tokenizer"),
        ("export TINY out --max-kl 0.05", "leave --max-kl out"),
        ("export TINY out --bytes 1M", "leave --bytes out"),
        ("export TINY out --compress fp16 --ms-on M4", "leave --ms-on out"),
        ("export TINY out --select README", "leave --select out"),
        ("export TINY out --select-ids README", "leave --select-ids out"),
        ("plan TINY --compress mixed", "not chosen yet"),
        ("sweep nowhere.yaml", "grid"),
        ("sweep BUNDLE --T '1;2'", "run.T.0: '1;2'"),
        ("report 99", "99"),
        ("plan TINY --memory lots", "lots"),
        ("plan TINY --memory 0", "above zero"),
        ("plan TINY --tokens 4-1", "tokens"),
        ("plan TINY --chip M9", "M9"),
        ("plan TINY --moe routed", "moe = routed"),
        ("generate BUNDLE --prompt-ids 1 --top-k 4", "--temperature above 0"),
        pytest.param(
            "generate BUNDLE --prompt-ids 1 --runtime stand-in --precision exact",
            "the portable runtime",
            marks=pytest.mark.shim,
        ),
        ("golden TINY --out .", "--out"),
        ("golden TINY --out /proc/x/g", "--out"),
        ("golden TINY --out new/g --prompt-ids ''", "prompt ids"),
        ("golden TINY --out new/g --prompt-ids 1,256", "from 0 to 255"),
        ("golden TINY --out g --prompt get --prompt-ids 1", "one of --prompt"),
        ("run 34 --set T=1", "inside a checkout"),
        ("run 34 --publish --beside", "--publish, --beside: found both"),
        (
            "validate BUNDLE --golden README --tasks TINY/../tasks/heldout.jsonl",
            "--checkpoint",
        ),
        ("validate BUNDLE --checkpoint TINY --max-kl -1", "--max-kl"),
        (
            "validate units BUNDLE --checkpoint TINY --tasks TINY/../tasks/heldout.jsonl",
            "--tasks",
        ),
        ("validate BUNDLE --single-copy", "leave --single-copy out"),
        ("validate units BUNDLE", "--golden"),
        ("validate units BUNDLE --golden README --single-copy", "--single-copy"),
        ("validate units BUNDLE --golden README --prompt-ids 1", "--prompt-ids"),
        ("validate BUNDLE --prompt-ids 1", "--golden"),
        ("validate BUNDLE --tokens 4", "--golden"),
        ("validate BUNDLE --golden README --prompt-ids 1", "--prompt-ids"),
        ("validate units BUNDLE --precision exact", "--precision"),
        ("validate units BUNDLE --compute-units CPU_ONLY", "--compute-units"),
        ("validate BUNDLE --compute-units NE", "--compute-units"),
        ("explain BUNDLE", "explain ranges BUNDLE"),
        ("explain parts BUNDLE", "--checkpoint"),
        ("explain variant BUNDLE", "--checkpoint"),
        ("explain part BUNDLE --checkpoint TINY", "parts, variant, ranges, op"),
        ("explain BUNDLE --layer 0", "--layer"),
        ("explain BUNDLE --position 0", "--position"),
        ("explain BUNDLE --reduce out", "--reduce"),
        ("explain ranges BUNDLE --layer 0", "--layer"),
        ("explain ranges BUNDLE --checkpoint TINY", "--checkpoint"),
        ("explain variant BUNDLE --checkpoint TINY --runtime coreml", "--runtime"),
        ("explain op BUNDLE --checkpoint TINY", "--checkpoint"),
        ("explain op parts BUNDLE", "Unused Tokens"),
        ("explain BUNDLE/head_00.mlpackage --checkpoint TINY", "--checkpoint"),
        ("explain BUNDLE/head_00.mlpackage --prompt-ids 1", "--prompt-ids"),
        ("explain ranges BUNDLE/head_00.mlpackage --prompt-ids 1", "--prompt-ids"),
        ("log compare a b out.zip", "Unused Tokens"),
        ("log compare a b --rows", "--rows"),
        ("log compare a", "RUN_B"),
        ("log a", "compare, pack, unpack"),
        ("log unpack README --where 'T == 1'", "--where"),
        ("log pack out.zip --rows", "--rows"),
        ("log pack /proc/x/y.zip", "log pack"),
        ("log pack TINY", "a folder"),
        ("log --sort speed", "--sort"),
        ("log compare a b", "run a: found"),
        ("sweep first-light --T 4", "--T"),
        ("sweep TINY/../grid.yaml --runtime portable", "--runtime"),
        ("plan BUNDLE --max-seq-len 64", "--max-seq-len"),
        ("plan TINY --runtime coreml", "--runtime"),
        ("generate BUNDLE", "one of them"),
        ("generate BUNDLE --prompt-ids 1" + 32 * ",1", "max_seq_len"),
        ("generate BUNDLE --prompt-ids 1 --logits /proc/l.npy", "--logits"),
        ("generate BUNDLE --prompt-ids ²", "a whole number"),
        ("generate BUNDLE --prompt-ids 1 --tokens -1", "--tokens"),
        ("generate BUNDLE --prompt-ids 1 --max-new -3", "new tokens"),
        ("generate BUNDLE --chat --prompt-ids 1,2", "--prompt"),
    ],
)
def test_bad_input_is_refused_by_name(
    command, words, llama_bundle, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    command = command.replace("TINY", str(DATA / "tiny-llama"))
    command = command.replace("README", str(DATA / "README.md"))
    result = cli(*shlex.split(command.replace("BUNDLE", str(llama_bundle.root))))
    assert result.exit_code == 2 and result.stdout == ""
    assert words in result.stderr
    assert not list(tmp_path.iterdir())


OLD_SPELLINGS = {
    "validate BUNDLE --checkpoint TINY --each-unit": "validate units BUNDLE",
    "validate --each-unit BUNDLE": "validate units BUNDLE",
    "validate BUNDLE --golden g --alone": "--single-copy",
    "validate units BUNDLE --golden g --alone": "--single-copy",
    "explain BUNDLE --only parts": "explain parts|variant|ranges BUNDLE",
    "explain BUNDLE --only=ranges": "explain parts|variant|ranges BUNDLE",
    "explain BUNDLE --op --layer 0": "explain op BUNDLE",
    "log --pack out.zip": "log pack ZIP",
    "log --unpack out.zip --log folder": "log unpack ZIP",
    "log a b": "log compare RUN_A RUN_B",
    "log --log folder a b --json": "log compare RUN_A RUN_B",
}


@pytest.mark.parametrize("command", OLD_SPELLINGS)
def test_a_spelling_of_an_earlier_version_is_refused_with_the_present_one(
    command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = cli(*shlex.split(command))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f" {OLD_SPELLINGS[command]}." in result.stderr
    assert not list(tmp_path.iterdir())


def test_every_old_option_has_a_case():
    cases = {tuple(case.replace("=", " ").split()) for case in OLD_SPELLINGS}
    for command, options in OLD_OPTIONS.items():
        for option in options:
            assert any(case[0] == command and option in case for case in cases), option


def test_a_word_is_the_subcommand_and_a_folder_of_its_name_has_its_path(
    llama_bundle, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for word in ("parts", "units"):
        Path(word).symlink_to(llama_bundle.root)
    missing = cli("explain", "parts")
    assert missing.exit_code == 2 and "BUNDLE" in missing.stderr
    document = invoke("explain", "./parts", "--checkpoint", DATA / "tiny-llama")
    assert document["parts"] and document["ranges"]
    assert invoke("validate", "./units")["gates"]


@pytest.mark.parametrize("value", ["abc", "1.5", "true"])
def test_a_parameter_of_another_type_is_refused_before_anything_runs(
    value, monkeypatch
):
    monkeypatch.setattr("workbench.experiment.run_notebook", pytest.fail)
    result = cli("run", "5", "--set", f"MAX_SEQ_LEN={value}")
    assert result.exit_code == 2 and result.stdout == ""
    said = f"MAX_SEQ_LEN: found {value}; needs a value like 256"
    assert said in result.stderr


def test_ctrl_c_ends_a_command_with_130_and_without_a_traceback(monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("workbench.doctor.examine", stop)
    monkeypatch.setattr("sys.argv", ["workbench", "doctor"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert capsys.readouterr() == ("", "workbench: interrupted\n")
