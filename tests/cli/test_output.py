"""The next step that `validate` prints after a RED result."""

import io
from pathlib import Path

import pytest

from workbench.cli.output import (
    READ_AND_EXPORT,
    fit_terminal,
    format_result,
    print_and_exit,
    step_after_red,
)

EXPLAIN = "workbench explain b --checkpoint m"
NAMES = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"


def clause(layer: int, name: str) -> str:
    """What gate `weights` says of a tensor."""
    tensor = f"model.layers.{layer}.{name}.weight"
    return (
        f"layers_{layer:02}_{layer:02}: {tensor}: 20 times half a step of int8-channel"
    )


@pytest.mark.parametrize(
    "clauses, others, step",
    [
        (
            [clause(1, name) for name in NAMES],
            [],
            "workbench explain variant b --checkpoint m",
        ),
        ([clause(i, name) for i, name in enumerate(NAMES)], [], EXPLAIN),
        ([clause(1, "q_proj")] * 5, [], EXPLAIN),
        ([clause(1, name) for name in NAMES], ["program"], EXPLAIN),
    ],
    ids=["a layer", "five layers", "one tensor", "the program too"],
)
def test_a_layer_of_wrong_weights_leads_to_explain_variant(clauses, others, step):
    """It says whether they are another layer's."""
    gates = [{"name": "weights", "verdict": "RED", "reason": "; ".join(clauses)}]
    gates += [{"name": name, "verdict": "RED", "reason": ""} for name in others]
    result = {"verdict": "RED", "gates": gates}
    assert step_after_red(result, Path("b"), Path("m")) == step


def test_a_reason_of_interface_names_what_an_export_mends():
    gates = [{"name": "interface", "verdict": "RED", "reason": "x: dtype"}]
    step = step_after_red({"verdict": "RED", "gates": gates}, Path("b"), Path("m"))
    assert step == READ_AND_EXPORT


REASON = "the reason of a gate goes on for several words " * 6
GATE = f"{'RED':12}{'weights':20}{'9 (limit 1)':28}{REASON}".rstrip()
COMMAND = (
    "workbench validate '/a folder/of a bundle' --checkpoint /models/of/someone/else"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "line, indent",
    [(GATE, 12), (f"- {REASON}", 2), (f"{'conclusion':20}{REASON}", 20), (REASON, 2)],
    ids=["gate", "sentence", "labelled", "text"],
)
def test_a_line_is_wrapped_to_the_terminal_with_a_hanging_indent(
    monkeypatch, line, indent, columns
):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout", Terminal())
    first, *others = rows = fit_terminal([line])
    assert others and max(map(len, rows)) <= columns
    assert all(row[:indent].isspace() and row[indent] != " " for row in others)
    assert " ".join(rows).split() == line.split() and line.startswith(first)


def test_a_pipe_has_one_line_for_each_gate(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert fit_terminal([GATE]) == [GATE]


def test_a_command_and_a_page_are_not_broken(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout", Terminal())
    step, page = f"{'next':20}{COMMAND}", f"| {REASON} |\n| - |"
    assert fit_terminal([step, page, "", "a"]) == [step, page, "", "a"]
    step = step.replace("workbench", ".venv/bin/workbench", 1)
    assert fit_terminal([step]) == [step]
    rows = fit_terminal([f"- {REASON}To export it: {COMMAND}"])
    assert rows[-1] == f"  {COMMAND}" and max(map(len, rows[:-1])) <= 60


def test_the_next_command_works_where_the_shell_does_not_find_workbench(
    tmp_path, monkeypatch, capsys
):
    program = tmp_path / ".venv" / "bin" / "workbench"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    monkeypatch.setattr("sys.executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", str(tmp_path))
    other = tmp_path / "other"
    other.mkdir()

    def last_line(step: str) -> str:
        print_and_exit({"a": 1}, False, next_command=step)
        return capsys.readouterr().out.splitlines()[-1].removeprefix("next").strip()

    monkeypatch.chdir(tmp_path)
    assert last_line("workbench report 05") == ".venv/bin/workbench report 05"
    assert last_line(READ_AND_EXPORT) == READ_AND_EXPORT
    monkeypatch.chdir(other)
    assert last_line("workbench report 05") == f"{program} report 05"
    monkeypatch.setenv("PATH", str(program.parent))
    assert last_line("workbench report 05") == "workbench report 05"


def test_the_figures_of_an_evaluation_have_units_and_whole_words():
    lines = format_result({"kl": {"mean": 0.5}, "same_top": 0.9, "resumed": 0})
    assert lines[0].split("mean")[0].strip() == "KL (nats)"
    assert lines[1].startswith("same top token ")
    assert lines[2].startswith("windows resumed ")


def test_a_boolean_is_yes_or_no_and_an_empty_object_has_no_line():
    lines = format_result({"coreml_available": False, "plugins": {}, "fits": True})
    assert [line.split() for line in lines] == [
        ["coreml", "available", "no"],
        ["fits", "yes"],
    ]


def test_a_verdict_with_gates_is_that_of_the_export():
    gate = {"name": "host", "verdict": "GREEN", "value": 0, "threshold": 1}
    lines = format_result({"verdict": "GREEN", "gates": [gate | {"reason": ""}]})
    assert lines[0].split() == ["export", "GREEN"]
    assert format_result({"verdict": "GREEN"}) == ["GREEN"]
