"""The command line `workbench`, one command per question.

Every command takes `--json`. The exit codes are those of `ending`."""

import os
import sys
import warnings
from contextlib import nullcontext

from cyclopts import App, Group, Parameter

from workbench import plugins
from workbench.cli import bundles, checks, experiments, planning
from workbench.cli.common import libraries_on_stderr
from workbench.errors import InputError, visible

COMMANDS = {
    "Make": [bundles.export, bundles.golden, bundles.adopt],
    "Check": [checks.validate, checks.explain],
    "Run": [checks.generate, checks.evaluate],
    "Experiments and their log": [
        *(experiments.run, experiments.report, experiments.sweep, experiments.log)
    ],
    "Machine": [planning.plan, bundles.doctor],
    "Plug-ins": [entry.load() for entry in plugins.find_plugins("commands").values()],
}
# a switch has no `--no` form, and a list is given by naming its option again
app = App(
    "workbench",
    help="Export transformer layers as stateful Core ML shards, compare them with "
    "Hugging Face's model, measure how fast they decode.",
    default_parameter=Parameter(negative=()),
    group_commands="Options",
    result_action="return_value",
    exit_on_error=False,
    suppress_keyboard_interrupt=False,
    print_error=False,
)
for name, functions in COMMANDS.items():
    panel = Group.create_ordered(name)
    for function in functions:
        app.command(function, group=panel)


def run() -> None:
    """Runs the command that `sys.argv` names; a warning is one line."""
    warnings.formatwarning = lambda message, *rest: f"workbench: {visible(message)}\n"
    _check_settings()
    arguments = sys.argv[1:]
    if sys.flags.optimize == 2 and (not arguments or {"-h", "--help"} & {*arguments}):
        # Python has removed the texts, which are docstrings
        os.environ.pop("PYTHONOPTIMIZE", None)
        command = [sys.executable, "-m", "workbench.cli", *arguments]
        os.execv(sys.executable, command)
    with libraries_on_stderr() if "--json" in arguments else nullcontext():
        app(arguments)


def _check_settings() -> None:
    """Refuses settings of libraries that they themselves cannot read."""
    names = ", ".join(name for name in os.environ if name.startswith("TQDM_"))
    if not names:
        return
    try:
        import tqdm.auto  # noqa: F401
    except ValueError as problem:
        needed, step = "values that tqdm can read", "correct or unset it"
        raise InputError(names, str(problem), needed, step) from None
