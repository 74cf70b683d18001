"""The command line `workbench`, one command per question.

Every command takes `--json`. The exit code is 1 for a RED verdict, 2 for bad input,
which prints one message, and 3 for a notebook's cell that raises."""

import sys
import warnings
from typing import Annotated

from typer import Exit, Option, Typer, echo

from workbench import plugins
from workbench.cli import explain, export, generate, notebooks, plan, sweeps, validate
from workbench.cli.common import register
from workbench.errors import InputError

# Markdown, because Rich's own markup takes "[max_new + 1, V]" in a help text for a tag
# and drops it
app = Typer(
    rich_markup_mode="markdown",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Export transformer layers as stateful Core ML shards, compare them with "
    "Hugging Face's model, measure how fast they decode.",
)
ours = (export, validate, explain, generate, plan, sweeps, notebooks)
for module in (*ours, *(e.load() for e in plugins.offered("commands").values())):
    register(app, vars(module))


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        echo(f"workbench {installed('workbench')}")
        raise Exit()


def main() -> None:
    """Entry point: prints an InputError as one message with exit code 2, a warning as
    one line."""
    warnings.formatwarning = lambda message, *rest: f"workbench: {message}\n"
    try:
        app()
    except InputError as problem:
        echo(f"workbench: {problem}", err=True)
        sys.exit(2)
    except SystemExit as end:
        if end.code == 130:  # what typer makes of Ctrl-C
            echo("workbench: interrupted", err=True)
        raise
