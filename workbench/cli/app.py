"""The command line `workbench`, one command per question.

Every command takes `--json`. The exit codes are those of `ending`."""

import os
import sys
import warnings
from contextlib import nullcontext

from cyclopts import App, CycloptsError, Group, Parameter, UnusedCliTokensError

from workbench import plugins
from workbench.cli import (
    bundles,
    checks,
    experiments,
    explaining,
    inference,
    logs,
    planning,
)
from workbench.cli.arguments import as_input_error
from workbench.cli.fields import in_own_words
from workbench.cli.output import libraries_on_stderr
from workbench.cli.spellings import check_spelling, unknown_words_error
from workbench.errors import InputError, visible
from workbench.progress import end_stage, plain_stage_lines

COMMANDS = {
    "Make": [bundles.export, bundles.golden, bundles.adopt],
    "Check": [checks.validate, explaining.explain],
    "Run": [inference.generate, inference.evaluate],
    "Experiments and their log": [
        experiments.run,
        experiments.report,
        experiments.sweep,
        logs.log,
    ],
    "Machine": [planning.plan, bundles.doctor],
    "Plug-ins": [entry.load() for entry in plugins.find_plugins("commands").values()],
}
"""Heading of the help page → functions, each a command of its name."""

SUBCOMMANDS = {
    "validate": {"units": checks.validate_units},
    "explain": {
        "parts": explaining.explain_parts,
        "variant": explaining.explain_variant,
        "ranges": explaining.explain_ranges,
        "op": explaining.explain_op,
    },
    "log": {
        "compare": logs.log_compare,
        "pack": logs.log_pack,
        "unpack": logs.log_unpack,
    },
}
"""Command → function of each subcommand. A word behind the command that names a
subcommand always is one; a folder of that name is reached as ./NAME."""

# a switch has no `--no` form, and a list is given by naming its option again
app = App(
    "workbench",
    help="Export transformer layers as stateful Core ML shards, compare them with "
    "Hugging Face's model, measure how fast they decode. Begin with `workbench export` "
    "and `workbench validate`. Exit codes: 0 not RED, 1 RED, 2 bad input, 3 crashed or "
    "cut short, 4 OVER.",
    default_parameter=Parameter(negative=()),
    group_commands="Options",
    result_action="return_value",
    exit_on_error=False,
    suppress_keyboard_interrupt=False,
    print_error=False,
)
for heading, functions in COMMANDS.items():
    panel = Group.create_ordered(heading)
    for function in functions:
        app.command(function, group=panel)
for command, functions in SUBCOMMANDS.items():
    for word, function in functions.items():
        app[command].command(function, name=word, group="Subcommands")


def run_command(arguments: list[str]) -> None:
    """Runs the command that `arguments` name.

    Raises:
        InputError: bad input, such as a spelling of an earlier version, or arguments
            that no command takes.
    """
    check_spelling(arguments)
    try:
        app(arguments)
    except InputError as problem:
        worded = in_own_words(problem)
        if worded is problem:
            raise
        raise worded from None
    except UnusedCliTokensError as problem:
        command, *subcommand = problem.command_chain or [""]
        if subcommand or command not in SUBCOMMANDS:
            raise as_input_error(problem, _names()) from None
        words = problem.unused_tokens or []
        # the command takes a misspelled subcommand for its own argument
        first = arguments[1] if len(arguments) > 1 else ""
        subcommands = SUBCOMMANDS[command]
        raise unknown_words_error(command, words, subcommands, first) from None
    except CycloptsError as problem:
        raise in_own_words(as_input_error(problem, _names())) from None


def _names() -> list[str]:
    """The names of all commands."""
    return [name for name in app if not name.startswith("-")]


def run() -> None:
    """Runs the command that `sys.argv` names; a warning is one line."""
    warnings.formatwarning = _format_warning
    _check_settings()
    arguments = sys.argv[1:]
    if sys.flags.optimize == 2 and (not arguments or {"-h", "--help"} & {*arguments}):
        # the texts are docstrings, which Python has removed: once more, with them
        os.environ.pop("PYTHONOPTIMIZE", None)
        command = [sys.executable, "-m", "workbench.cli", *arguments]
        os.execv(sys.executable, command)
    is_json = "--json" in arguments
    with plain_stage_lines(), libraries_on_stderr() if is_json else nullcontext():
        run_command(arguments)


def _format_warning(message: Warning | str, *rest) -> str:
    """A warning as one line. It takes the place of the stage that a terminal shows, which
    would stay in front of it."""
    end_stage()
    return f"workbench: {visible(message)}\n"


def _check_settings() -> None:
    """Refuses environment variables that tqdm cannot read, before it is imported in the
    middle of a command."""
    names = ", ".join(name for name in os.environ if name.startswith("TQDM_"))
    if not names:
        return
    try:
        import tqdm.auto  # noqa: F401
    except ValueError as problem:
        needed, step = "values that tqdm can read", "correct or unset it"
        raise InputError(names, str(problem), needed, step) from None
