"""Bad input: one message that names it and the next step, exit code 2, and nothing left behind.
Paths that lead elsewhere are in test_cli_paths.py."""

import shlex

import pytest
from in_process import cli
from tiny import DATA

TINY = DATA / "tiny-llama"


def refused(*arguments) -> str:
    """The message of a command that ends with 2 and prints nothing else."""
    result = cli(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    return str(result.exception)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("export TINY out --max-seq-len 0", "max_seq_len"),
        ("export TINY out --tokens '1;2'", "1-4, 4 or 1,64"),
        ("sweep nowhere.yaml", "grid"),
        ("report 99", "99"),
        ("plan TINY --memory lots", "lots"),
        ("plan TINY --memory 0", "above zero"),
        ("plan TINY --tokens 4-1", "tokens"),
        ("plan TINY --chip M9", "M9"),
        ("golden TINY --out .", "--out"),
        ("golden TINY --out /proc/x/g", "--out"),
        ("golden TINY --out new/g --prompt-ids ''", "prompt ids"),
        ("golden TINY --out new/g --prompt-ids 1,256", "from 0 to 255"),
        ("run 34 --set DAY=2026-13-45", "DAY"),
    ],
)
def test_bad_input_is_refused_by_name(command, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in refused(*shlex.split(command.replace("TINY", str(TINY))))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["abc", "1.5", "true"])
def test_a_parameter_of_another_type_is_refused_before_anything_runs(
    value, monkeypatch
):
    monkeypatch.setattr("workbench.experiment.run_notebook", pytest.fail)
    problem = refused("run", "5", "--set", f"MAX_SEQ_LEN={value}")
    assert "MAX_SEQ_LEN" in problem and "a value like 256" in problem


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "validate --golden TINY/../README.md --tasks TINY/../tasks/heldout.jsonl",
            "--checkpoint",
        ),
        ("validate --checkpoint TINY --prompt-ids ''", "prompt ids"),
        ("validate --checkpoint TINY --max-kl -1", "--max-kl"),
        ("validate --alone", "leave --alone out"),
        ("validate --each-unit", "--golden"),
        ("validate --prompt-ids 1", "--golden"),
        ("explain", "--checkpoint"),
        ("explain --only part", 'Choose from: "parts"'),
        ("explain --only ranges --prompt-ids 1,2,400", "from 0 to 255"),
        ("generate", "one of them"),
        ("generate --prompt-ids 1" + 32 * ",1", "max_seq_len"),
        ("generate --prompt-ids 256", "a whole number from 0 to 255"),
        ("generate --prompt-ids 1 --max-new -3", "new tokens"),
        ("generate --chat --prompt-ids 1,2", "--prompt"),
        ("sweep --T '1;2'", "run.T.0: '1;2'"),
    ],
)
def test_bad_input_about_a_bundle_is_refused(llama_bundle, command, words):
    name, *rest = shlex.split(command.replace("TINY", str(TINY)))
    assert words in refused(name, llama_bundle.root, *rest)


@pytest.mark.parametrize("command", ["golden", "validate", "explain"])
def test_several_prompts_and_a_missing_text_are_refused(
    command, llama_bundle, tmp_path
):
    first = [llama_bundle.root, "--checkpoint", TINY]
    if command == "golden":
        first = [TINY, "--out", tmp_path / "g"]
    prompts = "--prompt", "get", "--prompt-ids", "1"
    assert "one of --prompt" in refused(command, *first, *prompts)
    assert "no such file" in refused(command, *first, "--text", tmp_path / "none")


def test_ctrl_c_ends_a_command_with_130_and_without_a_traceback(monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("workbench.doctor.examine", stop)
    try:
        ended = cli("doctor")
    except KeyboardInterrupt:  # it would end pytest
        pytest.fail("the interrupt reaches Python, which prints a traceback")
    assert (ended.exit_code, ended.output) == (130, "")
