"""`workbench run` executes experiments' notebooks, `report` writes them up again."""

from typing import Annotated

from typer import Argument, Exit, Option, echo

from workbench.cli.common import Json, show
from workbench.errors import InputError

PANEL = "Experiments and their log"
Publish = Annotated[bool, Option("--publish", help="Make this the shipped write-up.")]
# the type of a parameter's default → what its value must be
TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list, such as [1, 2]",
    dict: "names with values, such as {tokens: 1-16}",
}


def run_command(
    numbers: Annotated[list[str], Argument(help="Experiments, such as 05 34.")],
    set_: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="NAME=VALUE",
            help="Sets a notebook's parameter; notebooks without it ignore it.",
        ),
    ] = None,
    publish: Publish = False,
    json: Json = False,
) -> None:
    """Runs experiment notebooks headless: verdict, figures, log rows, report.

    The exit code is 3 if a cell raises. What is written is ignored by git.

    Example: workbench run 05 --set CHECKPOINT=/models/Llama-3.2-1B --set MAX_SEQ_LEN=512
    """
    from workbench.experiment import CellError, parameter_defaults, run_notebook

    numbers = [number.zfill(2) for number in numbers]
    defaults = {number: parameter_defaults(number) for number in numbers}
    values = _values(set_ or [], defaults)
    results = []
    try:
        for number in numbers:
            how = {"progress": not json, "publish": publish}
            results.append(run_notebook(number, values[number], **how))
            if not json:
                echo("\n".join(run_lines(results[-1])))
    except CellError as problem:
        echo(f"workbench: {problem}", err=True)
        raise Exit(3) from None
    red = any(result["verdict"] == "RED" for result in results)
    verdict = "RED" if red else "GREEN"
    step = "make lab"
    if parts := [n for n in numbers if values[n].get("EXTRACT")]:
        step = f"workbench run {' '.join(parts)}  (all cells and rounds)"
    lines = [f"verdict  {verdict}", f"go on    {step}"]
    show({"verdict": verdict, "experiments": results}, json, lines)


def run_lines(result: dict) -> list[str]:
    """What a notebook's run found: its verdict and conclusion, each figure with its
    description, the paths of report and notebook."""
    lines = [f"{result['verdict']}  experiment {result['experiment']}"]
    lines += [f"  {line}" for line in result["conclusion"].splitlines()]
    lines += [f"  {figure['path']}: {figure['alt']}" for figure in result["figures"]]
    paths = f"  report    {result['report']}", f"  notebook  {result['executed']}"
    return [*lines, *paths, ""]


def _values(given: list[str], defaults: dict[str, dict]) -> dict[str, dict]:
    """The parameters of each notebook from `NAME=VALUE`; a name that none of them has
    is left to the first one to refuse."""
    values = {number: {} for number in defaults}
    for text in given:
        name, _, value = text.partition("=")
        if not (name and value):
            step = "write for example --set MAX_SEQ_LEN=128"
            raise InputError("--set", repr(text), "NAME=VALUE", step)
        owners = [number for number, own in defaults.items() if name in own]
        for number in owners or defaults:
            values[number][name] = typed(name, value, defaults[number].get(name))
    return values


def typed(name: str, text: str, default: object) -> object:
    """The value that YAML reads in `text`, of the type of the parameter's default; a
    text stays as it is."""
    import yaml

    if isinstance(default, str):
        return text.strip("\"'")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        raise InputError(f"--set {name}", text, "a value", "quote it") from None
    if isinstance(value, dict) and text[0] != "{":
        value = text
    expected = type(default)
    if expected not in TYPES or type(value) is expected:
        return value
    if expected is float and type(value) is int:
        return float(value)
    step = f"write for example --set '{name}={default}'"
    raise InputError(f"--set {name}", text, TYPES[expected], step)


def report_command(
    experiment: Annotated[str, Argument(help="Its number, such as 05.")],
    publish: Publish = False,
    html: bool = False,
    json: Json = False,
) -> None:
    """Draws the figures of an experiment's newest run again from their data, and writes
    its report; without a run of your own, of the shipped one.

    Example: workbench report 05

    Args:
        html: Also the executed notebook as one HTML page without code.
    """
    from workbench import experiment as experiments

    folder = experiments.last_run(experiment)
    if publish:
        folder = experiments.publish_run(folder)
    result = {"report": str(experiments.write_again(folder))}
    if html:
        result["html"] = str(experiments.write_html(experiment))
    show(result, json, list(result.values()))
