"""The command line `workbench`, one command per question.

Every command takes `--json`. The exit code is 1 for a RED verdict, 2 for bad input,
which prints one message, and 3 for a notebook's cell that raises."""

import sys
import warnings

from cyclopts import App, CycloptsError, Group, Parameter

from workbench import plugins
from workbench.cli import bundles, checks, experiments
from workbench.errors import InputError, visible

COMMANDS = {
    "Make": [bundles.export, bundles.golden, bundles.adopt],
    "Check": [checks.validate, checks.explain],
    "Run": [checks.generate, checks.evaluate],
    "Experiments and their log": [
        *(experiments.run, experiments.report, experiments.sweep, experiments.log)
    ],
    "Machine": [bundles.plan, bundles.doctor],
    "Plug-ins": [entry.load() for entry in plugins.offered("commands").values()],
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
    print_error=False,
)
for name, functions in COMMANDS.items():
    panel = Group.create_ordered(name)
    for function in functions:
        app.command(function, group=panel)


def main() -> None:
    """Entry point: prints bad input as one message with exit code 2, a warning as one
    line."""
    warnings.formatwarning = lambda message, *rest: f"workbench: {visible(message)}\n"
    try:
        app(sys.argv[1:])
    except (InputError, CycloptsError) as problem:
        print(f"workbench: {problem}", file=sys.stderr)
        sys.exit(2)
