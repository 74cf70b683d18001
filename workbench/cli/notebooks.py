"""`workbench run` executes experiments' notebooks, `report` writes them up from the
log."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, echo

from workbench.cli.common import Json, LogFolder, Publish, show
from workbench.errors import InputError

PANEL = "Experiments and their log"


def run_command(
    numbers: Annotated[
        list[str], Argument(help="Numbers of experiments, such as 05 34.")
    ],
    set_: Annotated[
        list[str],
        Option(
            "--set",
            metavar="NAME=VALUE",
            help="A parameter of those of the notebooks that have it; repeat for several.",
        ),
    ] = [],  # noqa: B006
    publish: Publish = False,
    json: Json = False,
) -> None:
    """Runs experiment notebooks headless: verdict, figures, log rows, report.

    The exit code is 3 if a cell raises. The write-up goes to
    experiments/NN_slug/CHECKPOINT, which git ignores.

    Example: workbench run 05 --set CHECKPOINT=/models/Llama-3.2-1B --set MAX_SEQ_LEN=512
    """
    from workbench.report.notebook import CellError, parameter_names, run_notebook

    parameters = dict(map(_parameter, set_))
    names = {number: parameter_names(number) for number in numbers}
    unknown = parameters.keys() - set().union(*names.values())
    results, extracts, verdict = [], [], "GREEN"
    how = {"progress": not json, "publish": publish}
    try:
        for number in numbers:
            chosen = names[number] | unknown
            values = {
                name: value for name, value in parameters.items() if name in chosen
            }
            results.append(run_notebook(number, values, **how))
            if results[-1]["verdict"] == "RED":
                verdict = "RED"
            if values.get("EXTRACT"):
                extracts.append(number)
    except CellError as problem:
        echo(f"workbench: {problem}", err=True)
        raise Exit(3) from None
    lines = _run_lines(results, verdict, extracts)
    show({"verdict": verdict, "experiments": results}, json, lines)


def _run_lines(results: list[dict], verdict: str, extracts: list[str]) -> list[str]:
    """The results as text; `extracts` are the experiments of which a part of the cells
    ran."""
    lines, figures = [], []
    for r in results:
        lines += [
            f"{r['verdict']}  experiment {r['experiment']}",
            f"  report    {r['report']}",
            f"  notebook  {r['executed']}",
            f"  {len(r['figures'])} figures and {len(r['runs'])} log rows, which the report names",
        ]
        if r["figures"]:
            figures.append(f"open     {_headline(r['figures'])}")
    step = "make lab"
    if extracts:
        command = sys.argv[0] if sys.argv[0].endswith("workbench") else "workbench"
        step = f"{command} run {' '.join(extracts)}  (all cells, three rounds)"
    return [*lines, "", f"verdict  {verdict}", *figures, f"go on    {step}"]


def _headline(figures: list[str]) -> str:
    """The figure to open first: `planted` or `speed` where there is one, else the
    first."""
    for figure in figures:
        if Path(figure).stem in ("planted", "speed"):
            return figure
    return figures[0]


def _parameter(text: str) -> tuple[str, object]:
    """The name and the value of `NAME=VALUE`.

    YAML reads the value: 64, int8-tensor, [1, 2]. A text with a colon in it stays a
    text."""
    import yaml

    name, _, value = text.partition("=")
    with contextlib.suppress(yaml.YAMLError, ValueError):
        if name and value:
            parsed = yaml.safe_load(value)
            if isinstance(parsed, dict) and value[0] != "{":
                parsed = value
            return name, parsed
    step = "write for example --set MAX_SEQ_LEN=128"
    raise InputError("--set", repr(text), "NAME=VALUE", step)


def report_command(
    experiment: Annotated[
        str | None, Argument(help="Number of the experiment, such as 05.")
    ] = None,
    run: str | None = None,
    publish: Publish = False,
    html: bool = False,
    all_: Annotated[
        bool,
        Option(
            "--all",
            help="HTML of all experiments and all machines of the log: build/report.",
        ),
    ] = False,
    log_dir: LogFolder = None,
    json: Json = False,
) -> None:
    """Writes the report of a logged experiment: Markdown, LaTeX tables, figures (SVG,
    PDF, PNG).

    It goes to experiments/NN_slug/CHECKPOINT, which git ignores.

    Example: workbench report 05

    Args:
        run: The notebook's run; default: the newest.
        html: Also one HTML page that needs no other file.
    """
    if (experiment is None) != all_ or (all_ and (run or publish)):
        actual = "no experiment"
        if run or publish:
            actual = "--run or --publish, which are of one experiment"
        elif experiment:
            actual = "the number of an experiment and --all"
        needed, step = "either an experiment or --all", "give one of them"
        raise InputError("workbench report", actual, needed, step)
    from workbench import log
    from workbench.report import page, writeup

    if all_:
        path = str(page.write_site(log.project(log_dir) / "build" / "report", log_dir))
        return show({"html": path}, json, [path])
    write = writeup.publish if publish else writeup.write_report
    report = write(experiment, log_dir, run)
    result = {"report": str(report)}
    if html:
        result["html"] = str(page.write_page(report, experiment, log_dir, run))
    show(result, json, list(result.values()))
