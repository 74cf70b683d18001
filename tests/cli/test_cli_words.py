"""What a command prints: whole help pages, figures in plain numbers, each figure once."""

import dataclasses
import inspect
import re
import shlex

import pandas as pd
import pytest
from in_process import cli, invoke
from tiny import DATA

from workbench import plugins
from workbench.cli import experiments
from workbench.cli.app import SUBCOMMANDS, app
from workbench.cli.mixed import FormatTarget
from workbench.cli.output import format_result
from workbench.experiment import parse_value
from workbench.log import project
from workbench.recommend import describe_verdict
from workbench.recommend.scores import KEPT

COMMANDS = "export golden validate explain evaluate generate plan sweep log run report doctor adopt"
NAMES = [name for name in app if not name.startswith("-")]
FUNCTIONS = {name: app[name].default_command for name in NAMES}
PAGES = FUNCTIONS | {
    f"{name} {word}": function
    for name, functions in SUBCOMMANDS.items()
    for word, function in functions.items()
}
# of the section `Args` of a docstring: a parameter and its description, which may go on in lines
# that are indented further
PARAMETER = re.compile(r"^ +(\w+): (.+(?:\n {8,}.+)*)$", re.MULTILINE)
# of a page 200 columns wide: an option, its type and its description, as in
# `│ *  --max-seq-len  INT  The longest context. [default: 256] │`
OPTION = re.compile(r"^│ [* ]*--\S+ *[A-Z. ]* +(?=\S)(.*) │$", re.MULTILINE)


def read_page(name: str, columns: int) -> str:
    return cli(*name.split(), "--help", columns=columns).stdout


def letters(text: str) -> str:
    """The letters and digits of a text: a table breaks lines and draws between them."""
    return re.sub(r"[\W_]+", "", text)


@pytest.mark.parametrize("name", PAGES)
def test_help_has_the_whole_docstring_at_80_columns(name):
    page = letters(read_page(name, 80))
    summary, _, section = inspect.getdoc(PAGES[name]).partition("\n\nArgs:\n")
    for paragraph in summary.split("\n\n"):
        assert letters(paragraph) in page
    for parameter, description in PARAMETER.findall(section):
        # a narrow column breaks a sentence into lines, with names of options between them, but
        # breaks no word
        missing = [word for word in description.split() if letters(word) not in page]
        assert not missing, parameter


@pytest.mark.parametrize("name", PAGES)
def test_the_example_of_a_help_page_is_a_command(name):
    names, document = name.split(), inspect.getdoc(PAGES[name])
    _, *arguments = shlex.split(re.search(r"Example: (.+)", document)[1])
    assert arguments[: len(names)] == names
    app.parse_args(arguments)  # raises for what it does not know


@pytest.mark.parametrize("name", PAGES)
def test_brackets_of_a_docstring_are_printed_and_not_read_as_markup(name):
    page = read_page(name, 200)
    brackets = re.findall(r"\[[^\]]*\]", inspect.getdoc(PAGES[name]))
    assert all(bracket in page for bracket in brackets)


@pytest.mark.parametrize("name", PAGES)
def test_help_describes_every_option_in_more_than_a_word(name):
    page = read_page(name, 200)
    assert not re.search(r"--\w+_|--no-", page)
    descriptions = OPTION.findall(page)
    assert descriptions
    for description in descriptions:
        text = re.sub(r"\[(default|required).*", "", description)
        assert len(text.split()) > 1


def test_help_of_export_describes_both_of_its_arguments():
    page = read_page("export", 200)
    assert re.search(r"CHECKPOINT +The folder of a model", page)
    assert re.search(r"BUNDLE +Folder of the new bundle", page)


def test_help_of_export_says_which_options_are_for_mixed_alone():
    descriptions = OPTION.findall(read_page("export", 200))
    marked = [text for text in descriptions if text.startswith("For mixed only: ")]
    assert len(marked) == len(dataclasses.fields(FormatTarget))


def test_help_says_of_exit_code_3_what_the_guide_says():
    page = " ".join(cli("--help", columns=200).stdout.split())
    assert "3 crashed or cut short" in page
    guide = (DATA.parent / "docs" / "guide.md").read_text()
    assert "| 3 | something crashed or was cut short" in guide


def test_help_is_in_groups():
    lines = cli("--help", columns=120).stdout.splitlines()
    headings = [line.split("─ ")[1].split(" ─")[0] for line in lines if "╭─ " in line]
    assert len(headings) == len(set(headings)) > 4 and "Commands" not in headings


def test_help_names_every_subcommand():
    for name, functions in SUBCOMMANDS.items():
        page = cli(name, "--help", columns=120).stdout.partition("Subcommands")[2]
        assert all(re.search(rf"│ {word} +\w", page) for word in functions)


def test_there_are_thirteen_commands():
    names = FUNCTIONS.keys() - plugins.find_plugins("commands").keys()
    assert names == {*COMMANDS.split()}


def test_each_notebook_says_what_it_found_before_the_next_one_starts(monkeypatch):
    def run_notebook(number, parameters, **_):
        print(number, "starts")
        document = {"experiment": number, "report": "", "executed": ""}
        document["verdict"] = "GREEN" if number == "05" else "not_run"
        document["quality"] = "WITHIN" if number == "05" else "not_run"
        document["judges_export"] = number == "05"
        document["conclusion"] = f"{number} holds.\nIt is small."
        figures = [{"path": f"{number}/a.png", "alt": f"picture of {number}"}]
        return document | {"figures": figures}

    monkeypatch.setattr("workbench.experiment.run_notebook", run_notebook)
    result = cli("run", "5", "34")
    assert [line.split() for line in result.output.splitlines()[-3:]] == [
        ["export", "GREEN"],
        ["quality", "WITHIN"],
        ["next", "workbench", "report", "05", "--html"],
    ]
    first, _, second = result.output.partition("34 starts")
    assert first.startswith("05 starts\nexperiment 05\n  export")
    for line in ("05 holds.", "It is small.", "  a.png: picture of 05"):
        assert f"  {line}" in first
    assert "figures   34\n    a.png: picture of 34" in second
    lines = [line.split() for line in cli("run", "34").output.splitlines()]
    assert ["export", "not", "run"] in lines


@pytest.mark.parametrize(
    ("number", "verdict", "code"),
    [
        ("05", "GREEN", 4),
        ("05", "RED", 1),
        ("31", "GREEN", 0),
        ("31", "RED", 1),
        ("35", "GREEN", 0),
    ],
)
def test_a_notebook_that_asks_for_the_cost_ends_well_when_it_is_over(
    monkeypatch, number, verdict, code
):
    def run_notebook(number, parameters, **_):
        judged = {"verdict": verdict, "quality": "OVER", "conclusion": ""}
        judged["judges_export"] = True
        files = {"experiment": f"{number}_name", "report": "", "executed": ""}
        return judged | files | {"figures": []}

    monkeypatch.setattr("workbench.experiment.run_notebook", run_notebook)
    assert cli("run", number).exit_code == code


def own_gates(number, parameters, **_) -> dict:
    """A run whose gates judge no export, in place of `run_notebook`."""
    words = {"verdict": "GREEN", "quality": "not_run", "judges_export": False}
    files = {"experiment": number, "report": "", "executed": "", "figures": []}
    return words | files | {"conclusion": ""}


def test_gates_that_judge_no_export_are_named_as_in_the_report(monkeypatch):
    monkeypatch.setattr("workbench.experiment.run_notebook", own_gates)
    output = cli("run", "34").output
    sentence = (
        "Gates of this experiment: GREEN. They are no verdict on a single export."
    )
    assert output.count(sentence) == 2  # of the notebook, and of all notebooks
    assert not re.search("export +GREEN|quality", output)


def test_the_next_run_after_an_extract_is_of_the_same_model(monkeypatch):
    monkeypatch.setattr("workbench.experiment.run_notebook", own_gates)
    settings = ["--set", f"CHECKPOINT={DATA / 'tiny-llama'}", "--set", "ROUNDS=2"]
    output = cli("run", "34", "31", *settings, "--set", "EXTRACT=true").output
    last = output.splitlines()[-1]
    command, _, rest = last.removeprefix("next").strip().partition("  (")
    assert rest == "all cells and rounds)"
    assert shlex.split(command) == ["workbench", "run", "34", *settings]


EXPORT = "workbench export data/tiny-llama build/tiny-llama-fp16 --compress fp16"
PAGE = "workbench report 31 --html"
RECOMMENDED = {
    "compress": "fp16",
    "outcome": KEPT,
    "kl": 0.001,
    "kl_low": 0.0008,
    "kl_high": 0.0012,
    "MiB": 2.0,
    "bundle_MiB": 1.0,
    "command": EXPORT,
}


@pytest.mark.parametrize(("quality", "step"), [("OVER", EXPORT), ("WITHIN", PAGE)])
def test_the_next_command_after_over_is_the_recommended_export(
    quality, step, monkeypatch
):
    def run_notebook(number, parameters, **_):
        words = [*describe_verdict([], pd.DataFrame([RECOMMENDED])), "The end."]
        return {
            "experiment": number,
            "verdict": "GREEN",
            "quality": quality,
            "judges_export": True,
            "conclusion": "\n".join(words),
            "figures": [],
            "report": "",
            "executed": "",
        }

    monkeypatch.setattr("workbench.experiment.run_notebook", run_notebook)
    last = cli("run", "31").output.splitlines()[-1]
    assert last == f"{'next':20}{step}"


def test_the_list_of_notebooks_has_questions_and_parameters_and_runs_none():
    output = cli("run", "--list").output
    assert "05_stateful_kv_cache: Does an exported model keep its KV cache?" in output
    assert "CHECKPOINT=" in output and output.count("\n\n") >= 6
    listed = invoke("run", "05", "--list")["notebooks"]
    assert [entry["experiment"] for entry in listed] == ["05_stateful_kv_cache"]
    assert listed[0]["parameters"]["MAX_SEQ_LEN"] > 0


def test_a_run_names_the_folder_of_its_figures_once(monkeypatch):
    figures = [{"path": f"build/figures/{name}.png", "alt": name} for name in "ab"]
    result = {"experiment": "31", "verdict": "GREEN", "quality": "WITHIN"}
    result |= {"judges_export": True, "conclusion": "Yes.", "figures": figures}
    result |= {"report": "build/report.md", "executed": "build/notebook.ipynb"}
    monkeypatch.setattr("workbench.experiment.run_notebook", lambda *_, **__: result)
    output = cli("run", "31").output
    assert output.count("build/figures") == 1
    assert "a.png: a" in output and "b.png: b" in output


def test_the_terminal_has_the_first_sentences_of_an_answer_and_no_markdown():
    long = "This paragraph's first sentence is one that a terminal shows whole. More follows."
    answer = f"Yes.\n## The bundle\n{long}\n1.5 is a number. It stays."
    assert experiments._answer_lines(answer) == [
        "Yes.",
        "",
        "The bundle:",
        "This paragraph's first sentence is one that a terminal shows whole. …",
        "1.5 is a number. It stays.",
        "",
        "…: the report has the rest",
    ]


def test_a_parameter_has_the_type_of_its_default():
    assert parse_value("PROMPT", "12", "one two") == "12"
    assert parse_value("PROMPT", "note: this", "") == "note: this"
    assert parse_value("RATE", "1", 0.5) == 1
    assert parse_value("FREE", "[1, 2]", None) == [1, 2]
    assert parse_value("TOKENS", '{"tokens": "1-16"}', {}) == {"tokens": "1-16"}


def test_a_result_is_its_names_and_values_and_its_rows_a_table():
    kl = {"mean": 0.001234567, "p99": None}
    units = [{"unit": "a", "rate": 1343.25, "blame": None}, {"unit": "b", "rate": None}]
    columns = ("name", "verdict", "value", "threshold", "reason")
    rows = [
        ("host", "GREEN", 1.0, 2.0, "it agrees"),
        ("weights", "RED", "nan", None, "one is lost"),
    ]
    gates = [dict(zip(columns, row, strict=True)) for row in rows]
    result = {"verdict": "RED", "tokens": 9, "bytes": 3 << 20, "kl": kl, "gates": gates}
    result |= {"windows": None, "notes": ["It holds."], "units": units}
    lines = [" ".join(line.split()) for line in format_result(result)]
    assert lines == [
        "export RED",
        "tokens 9",
        "size 3.0 MiB",
        "KL (nats) mean 0.001234567, p99 -",
        "RED weights nan one is lost",
        "GREEN host 1 (limit 2) it agrees",
        "- It holds.",
        "",
        "units",
        "unit rate",
        "a 1343",
        "b -",
    ]


def test_a_name_in_text_says_what_its_value_is():
    result = {"memory_bytes": 3 << 20, "peak_rss_bytes": 1 << 20}
    lines = [" ".join(line.split()) for line in format_result(result | {"stamped": 31})]
    assert lines == ["memory 3.0 MiB", "peak memory 1.0 MiB", "programs reused 31"]


def test_words_that_the_tokenizer_does_not_know_are_named(llama_bundle):
    command = "generate", llama_bundle.root, "--max-new", "1", "--prompt"
    with pytest.warns(UserWarning, match="unknown to the tokenizer: hello, World$"):
        result = cli(*command, "hello river World")
    assert result.exit_code == 0
    assert cli(*command, "set river amber").exit_code == 0  # warnings are errors


def test_loading_weights_draws_no_bar_of_its_own(capfd):
    from workbench.check import hf

    hf.whole_model(hf.Checkpoint(project() / "data" / "tiny-llama"))
    assert "Loading" not in capfd.readouterr().err


def test_the_grid_of_the_guide_is_shipped():
    from workbench import sweep

    text = (project() / "docs" / "guide.md").read_text()
    example, *_ = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert example == (project() / "data" / "grid.yaml").read_text()
    assert sweep.load_grid(project() / "data" / "grid.yaml")
