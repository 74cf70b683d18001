"""`workbench run` and `report`: an experiment's notebook, headless, and its write-up from the
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
    numbers: Annotated[list[str], Argument(help="Numbers of experiments, such as 05 34.")],
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
    """Runs experiment notebooks headless: verdict, figures, log rows, report. A cell that crashes
    exits 3.

    The write-up goes to experiments/NN_slug/CHECKPOINT, which git ignores.

    Example: workbench run 05 --set CHECKPOINT=/models/Llama-3.2-1B --set MAX_SEQ_LEN=512
    """
    from workbench.report.notebook import CellError, parameter_names, run_notebook

    parameters = dict(map(_parameter, set_))
    names = {number: parameter_names(number) for number in numbers}
    unknown = parameters.keys() - set().union(*names.values())
    extracts = [n for n in numbers if "EXTRACT" in names[n] and parameters.get("EXTRACT")]
    try:
        results = [
            run_notebook(
                number,
                {n: v for n, v in parameters.items() if n in names[number] | unknown},
                progress=not json,
                publish=publish,
            )
            for number in numbers
        ]
    except CellError as problem:
        echo(f"workbench: {problem}", err=True)
        raise Exit(3) from None
    verdict, lines = "RED" if any(r["verdict"] == "RED" for r in results) else "GREEN", []
    for r in results:
        lines += [
            f"{r['verdict']}  experiment {r['experiment']}",
            f"  report    {r['report']}",
            f"  notebook  {r['executed']}",
            f"  {len(r['figures'])} figures and {len(r['runs'])} log rows, which the report names",
        ]
    command = sys.argv[0] if sys.argv[0].endswith("workbench") else "workbench"
    step = f"{command} run {' '.join(extracts)}" if extracts else "make lab"
    lines += [
        "",
        f"verdict  {verdict}",
        *(f"open     {_headline(r['figures'])}" for r in results if r["figures"]),
        f"go on    {step}" + "  (all cells, three rounds)" * bool(extracts),
    ]
    show({"verdict": verdict, "experiments": results}, json, lines)


def _headline(figures: list[str]) -> str:
    """The figure that says most."""
    return next((p for p in figures if Path(p).stem in ("planted", "speed")), figures[0])


def _parameter(text: str) -> tuple[str, object]:
    """`NAME=VALUE`, the value as YAML reads it: 64, int8-tensor, [1, 2]; a text with a colon in it
    stays a text."""
    import yaml

    name, _, value = text.partition("=")
    with contextlib.suppress(yaml.YAMLError, ValueError):
        if name and value:
            parsed = yaml.safe_load(value)
            return name, value if isinstance(parsed, dict) and value[0] != "{" else parsed
    raise InputError("--set", repr(text), "NAME=VALUE", "write for example --set MAX_SEQ_LEN=128")


def report_command(
    experiment: Annotated[
        str | None, Argument(help="Number of the experiment, such as 05.")
    ] = None,
    run: str | None = None,
    publish: Publish = False,
    html: bool = False,
    all_: Annotated[
        bool,
        Option("--all", help="HTML of all experiments and all machines of the log: build/report."),
    ] = False,
    log_dir: LogFolder = None,
    json: Json = False,
) -> None:
    """What a write-up starts from, out of the log: Markdown, LaTeX tables, figures as SVG, PDF and
    PNG.

    It goes to experiments/NN_slug/CHECKPOINT, which git ignores.

    Example: workbench report 05

    Args:
        run: The notebook's run; default: the newest.
        html: Also one HTML page that needs no other file.
    """
    if (experiment is None) != all_ or (all_ and (run or publish)):
        actual = "the number of an experiment and --all" if experiment else "no experiment"
        actual = "--run or --publish, which are of one experiment" if run or publish else actual
        needed, step = "either an experiment or --all", "give one of them"
        raise InputError("workbench report", actual, needed, step)
    from workbench import log
    from workbench.report import page, writeup

    if all_:
        path = str(page.write_site(log.project(log_dir) / "build" / "report", log_dir))
        return show({"html": path}, json, [path])
    report = (writeup.publish if publish else writeup.write_report)(experiment, log_dir, run)
    result = {"report": str(report)}
    if html:
        result["html"] = str(page.write_page(report, experiment, log_dir, run))
    show(result, json, list(result.values()))
