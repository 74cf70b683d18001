"""What comes from a file is printed and never obeyed by a terminal."""

import shutil

import pytest
from in_process import cli
from tiny import edit_json

from workbench import Bundle
from workbench.cli.output import print_and_exit
from workbench.errors import InputError, did_you_mean, nearest_names, propose, visible

NAME = "\x1b]0;owned\x07\x1b[2Jname\r\x9b31m\u202eeman\x7f"
SHOWN = r"\x1b]0;owned\x07\x1b[2Jname\r\x9b31m\u202eeman\x7f"


def test_control_characters_are_seen_and_others_stay():
    assert visible(NAME) == SHOWN and visible(SHOWN) == SHOWN
    plain = "tab\tline\n" + "\u00e4 \u6587 \U0001f600 \u2026 \u2192"
    assert visible(plain) == plain
    assert visible("name \udcff") == r"name \udcff"


@pytest.mark.parametrize("part", range(4))
def test_an_error_shows_them_wherever_they_come_from(part):
    parts = ["subject", "actual", "needed", "step"]
    parts[part] = NAME
    problem = InputError(*parts)
    assert SHOWN in str(problem) and NAME not in str(problem)
    assert "\x1b" not in "".join(problem._render_traceback_())
    assert str(InputError.from_message(str(problem))) == str(problem)


def test_a_result_is_printed_with_them_seen(capsys):
    gate = {"name": NAME, "verdict": "GREEN", "value": 1.0, "threshold": 1.0}
    gate["reason"] = NAME
    print_and_exit({"name": NAME, "gates": [gate], "rows": [{"a": NAME}]}, json=False)
    printed = capsys.readouterr().out
    assert printed.count(SHOWN) == 4 and "\x1b" not in printed


def test_names_in_a_bundle_are_printed_so(llama_bundle, tmp_path):
    copy = shutil.copytree(llama_bundle.root, tmp_path / "b")
    edit_json(copy / "bundle.json", ("checkpoint/name", NAME), ("family", NAME))
    assert Bundle.open(copy).manifest.checkpoint["name"] == NAME
    for command in ("plan", "validate"):
        result = cli(command, copy)
        assert result.exit_code == 0
        assert not {"\x1b", "\x9b"} & {*result.output}


def test_a_name_in_the_wrong_case_is_answered_with_the_right_one():
    step = did_you_mean("checkpoint", ["T_MAX", "CHECKPOINT"], "see --help")
    assert step == "did you mean CHECKPOINT? If not, see --help"


def test_names_that_begin_with_a_word_come_before_similar_ones():
    names = ["taken", "tokens_per_s", "tokens", "kl"]
    assert nearest_names("token", names) == ["tokens_per_s", "tokens", "taken"]
    assert nearest_names("token", names, count=1) == ["tokens_per_s"]
    assert nearest_names("", names) == nearest_names("zzz", names) == []


def test_a_step_proposes_all_names_before_the_usual_step():
    assert propose([], "look") == "look"
    assert propose(["a"], "look") == "did you mean a? If not, look"
    assert propose(["a", "b", "c"], "look") == "did you mean a, b or c? If not, look"
