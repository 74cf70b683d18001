"""The command line `workbench`, one command per question.

Every command takes `--json`. The exit code is 1 for a RED verdict, 2 for bad input,
which prints one message, and 3 for a notebook's cell that raises."""

import sys
import warnings
from typing import Annotated

from typer import Exit, Option, Typer, echo
from typer.core import TyperGroup

from workbench.cli import (
    adopt,
    bench,
    check,
    clean,
    crosscheck,
    decode,
    evaluate,
    explain,
    export,
    first_light,
    measure,
    notebooks,
    sweeps,
)
from workbench.cli.common import register
from workbench.errors import InputError

# command and old spelling of an option → its spelling now
RENAMED = {
    **{
        (command, "--log-dir"): "--log"
        for command in ("sweep", "log", "compare", "report")
    },
    **{
        (command, "--log"): "--record"
        for command in ("validate", "error", "explain", "trace", "matrix", "residency")
    },
}


class Commands(TyperGroup):
    """The commands; an option's old spelling is an error that names the new one."""

    def resolve_command(self, ctx, args):
        command, *arguments = args
        for old in (argument.partition("=")[0] for argument in arguments):
            if new := RENAMED.get((command, old)):
                raise InputError(
                    f"workbench {command}",
                    old,
                    f"{new}, the name of this option now",
                    f"write {new}",
                )
        return super().resolve_command(ctx, args)


# Markdown, because Rich's own markup takes "[max_new + 1, V]" in a help text for a tag
# and drops it
app = Typer(
    cls=Commands,
    rich_markup_mode="markdown",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Export transformer layers as stateful Core ML shards, prove them, decode "
    "them, measure them.",
)
app.add_typer(bench.bench, name="bench", rich_help_panel=measure.PANEL)
modules = (
    measure,
    export,
    adopt,
    check,
    crosscheck,
    evaluate,
    explain,
    decode,
    sweeps,
    notebooks,
    clean,
)
for module in (*modules, first_light):
    register(app, vars(module), "_command")


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
            echo("workbench: interrupted; what was finished is kept", err=True)
        raise
