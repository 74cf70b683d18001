"""What a command prints: whole help texts, figures in plain numbers, each figure once."""

import inspect
import re
import shlex
from dataclasses import fields

import numpy as np
import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from workbench import plugins
from workbench.cli import generate, notebooks, plan, validate
from workbench.cli.app import app
from workbench.cli.common import Prompt, Where
from workbench.cli.generate import unknown_words
from workbench.decode import Decoder, transcript
from workbench.errors import InputError
from workbench.log import project

TINY = project() / "data" / "tiny-llama"


def every_command():
    """Names of each command → click's command."""
    groups = [((), typer.main.get_command(app))]
    for names, command in groups:
        yield names, command
        below = getattr(command, "commands", {})
        groups += [((*names, name), one) for name, one in below.items()]


def page_of(names, columns: int) -> str:
    sizes = {"COLUMNS": str(columns), "TERMINAL_WIDTH": str(columns)}
    return CliRunner().invoke(app, [*names, "--help"], env=sizes).stdout


def words(text: str) -> str:
    """The letters and digits of a text without what a table draws around them."""
    return re.sub(r"[\W_]+", "", text)


def test_no_help_text_is_cut_at_80_columns():
    for names, command in every_command():
        page = words(page_of(names, 80))
        callback = getattr(command.callback, "__doc__", None) or ""
        _, _, section = inspect.cleandoc(callback).partition("\n\nArgs:\n")
        told = r"^    \w+: ((?:.+\n?(?:        .+\n?)*))"
        for text in re.findall(told, section, re.MULTILINE):
            assert words(text) in page, (names, text)
        for parameter in command.params:
            text = getattr(parameter, "help", None) or ""
            # a sentence in a narrow column is broken by the names beside it: its words stay
            assert all(words(word) in page for word in text.split()), (names, text)


def test_option_names_have_dashes():
    names = [o for _, c in every_command() for p in c.params for o in p.opts]
    assert "--max-seq-len" in names
    assert not [name for name in names if name.startswith("--") and "_" in name]


@pytest.mark.parametrize("given", ["5", "05"])
def test_a_number_of_one_digit_names_its_experiment(given, monkeypatch):
    ran = []
    result = {"experiment": "05", "verdict": "GREEN", "conclusion": "", "figures": []}
    result |= {"report": "", "executed": "", "runs": []}
    monkeypatch.setattr(
        "workbench.experiment.run_notebook",
        lambda number, *_, **__: ran.append(number) or result,
    )
    assert CliRunner().invoke(app, ["run", given]).exit_code == 0
    assert ran == ["05"]


def test_each_notebook_says_what_it_found_before_the_next_one_starts(monkeypatch):
    seen = []

    def run_notebook(number, parameters, **_):
        seen.append(number)
        return {
            "experiment": number,
            "verdict": "GREEN",
            "conclusion": f"{number} holds.\nIt is small.",
            "figures": [{"path": f"{number}/a.png", "alt": f"picture of {number}"}],
            "report": f"{number}/report.md",
            "executed": "",
            "runs": [],
        }

    monkeypatch.setattr("workbench.experiment.run_notebook", run_notebook)
    monkeypatch.setattr(notebooks, "echo", lambda text: seen.extend(text.split("\n")))
    result = CliRunner().invoke(app, ["run", "05", "34"])
    assert result.output.endswith("verdict  GREEN\ngo on    make lab\n")
    second = seen.index("34")
    for line in ("05 holds.", "It is small.", "05/a.png: picture of 05"):
        assert f"  {line}" in seen[:second]
    assert "  34/a.png: picture of 34" in seen[second:]


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("MAX_SEQ_LEN=abc", "a whole number"),
        ("MAX_SEQ_LEN=1.5", "a whole number"),
        ("MAX_SEQ_LEN=true", "a whole number"),
    ],
)
def test_a_parameter_of_another_type_is_refused_before_anything_runs(
    text, needed, monkeypatch
):
    monkeypatch.setattr(
        "workbench.experiment.run_notebook", lambda *_, **__: pytest.fail("ran")
    )
    result = CliRunner().invoke(app, ["run", "5", "--set", text])
    assert isinstance(result.exception, InputError)
    assert "MAX_SEQ_LEN" in str(result.exception) and needed in str(result.exception)


def test_a_text_parameter_takes_digits():
    assert notebooks.typed("PROMPT", "12", "one two") == "12"
    assert notebooks.typed("RATE", "1", 0.5) == 1
    assert notebooks.typed("FREE", "[1, 2]", None) == [1, 2]


@pytest.mark.parametrize("new", [1, 2, 3, 9])
def test_the_first_step_is_no_part_of_the_speed(new, llama_bundle):
    found = transcript.transcript(Decoder(llama_bundle), [1, 2], new)["decode"]
    samples = found["samples_ms"]
    assert len(samples) == found["tokens"] - 1
    if new < 3:
        assert found["tokens_per_s"] is None and found["layer_ms"] is None
    else:
        assert found["tokens_per_s"] == 1e3 / np.median(samples[1:])


def test_the_mean_kl_is_printed_once():
    kl = {"mean": 0.001234567, "median": 0.001, "p99": 0.01, "max": 0.1}
    result = {
        "tokens": 9,
        "windows": 9,
        "perplexity": 2.0,
        "golden_perplexity": 2.0,
        "perplexity_ratio": 1.0,
        "kl": kl,
        "same_top": 1.0,
        "intervals": {"kl_mean": (0.0011, 0.0013)},
    }
    text = "\n".join(generate.evaluation_lines(result))
    (line,) = [line for line in text.splitlines() if line.startswith("KL")]
    assert line.count("mean") == 1 and text.count("0.00123") == 1
    assert "(95%: 0.0011 – 0.0013)" in line and "max 0.1" in line


def test_predicted_speeds_are_plain_numbers():
    speeds = pd.DataFrame({"chip": ["M1"], "tokens_per_s": [1343.2], "ms": [0.7445]})
    text = plan.plain(speeds)
    assert "1,343" in text and "0.745" in text and "e+" not in text


def test_a_unit_without_fault_has_nothing_to_blame():
    units = pd.DataFrame(
        {"unit": ["a", "b"], "blame": [None, None], "kl_portable": [0.0, float("nan")]}
    )
    text = validate.unit_table(units)
    assert "None" not in text and "nan" not in text.lower() and "blame" not in text
    text = validate.unit_table(units.assign(blame=[None, "precision"]))
    assert "precision" in text and "None" not in text


def test_words_that_the_tokenizer_does_not_know_are_named(llama_bundle):
    assert unknown_words(TINY, "set river amber") == []
    assert unknown_words(TINY, "hello river World") == ["hello", "World"]
    arguments = ["generate", str(llama_bundle.root), "--max-new", "1", "--prompt"]
    with pytest.warns(UserWarning, match="unknown to the tokenizer: hello, World"):
        result = CliRunner().invoke(app, [*arguments, "hello river World"])
    assert result.exit_code == 0


def test_loading_weights_draws_no_bar_of_its_own(capfd):
    from workbench.check import golden

    golden.whole_prompt(golden.Checkpoint(TINY))
    assert "Loading" not in capfd.readouterr().err


def test_the_grid_of_the_readme_is_shipped():
    from workbench import sweep

    text = (project() / "README.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert shown in (project() / "data" / "grid.yaml").read_text()
    assert sweep.load_grid(project() / "data" / "grid.yaml")
    lines = [line for line in text.splitlines() if "workbench sweep" in line]
    paths = [shlex.split(line.replace("`", " "))[2] for line in lines]
    assert paths and set(paths) == {"data/grid.yaml"}


COMMANDS = "export golden validate explain evaluate generate plan sweep log run report"


def test_there_are_thirteen_commands_with_at_most_92_parameters():
    offered = {*plugins.offered("commands")}
    found = dict(list(every_command())[1:])
    found = {n: c for (n,), c in found.items() if n not in offered}
    assert found.keys() == {*COMMANDS.split(), "doctor", "adopt"}
    shared = [field.name for group in (Prompt, Where) for field in fields(group)]
    own = [p.name for c in found.values() for p in c.params if p.name not in shared]
    assert len(own) + len(shared) <= 92


def test_an_unknown_command_names_the_nearest_one():
    result = CliRunner().invoke(app, ["valdate"])
    assert result.exit_code == 2 and "validate" in result.output
