"""A numbered experiment: its notebook shows figures and tables, which are files at
once, and its last cell logs one row and writes the report.

A finished run is a folder, `build/experiments/NN_slug/NAME-HASH`, of one checkpoint by
the hash of its content: ``figures/NAME.json`` and ``.parquet`` are a figure's options
and data, from which ``.svg``, ``.pdf`` and ``.png`` are drawn; ``tables/NAME.parquet``
and ``.tex``; ``run.json`` has verdict, gates, parameters and the ids of all runs behind
the figures; ``report.md`` and ``report.html`` are written from these files alone. All
of them have one run id, and readers refuse a mixture. A run that has not finished lies
in a folder of its own and replaces the finished one as a whole.

The modules, in the order in which a run passes them:

    notebooks    finds the notebook of a number
    parameters   the values of the cell tagged `parameters`
    running      executes a notebook without a browser
    recording    `Experiment`, the run while its notebook goes on
    entries      gates, figures and tables in the order of the cells
    sources      the checkpoint of a run
    folders      the folders of runs, and `run.json`
    artifacts    the files of figures and tables
    tables       writes tables as HTML and Markdown
    headings     names the columns of a paper's tables
    latex        writes tables for a paper
    page         the blocks of a page, written as Markdown or HTML
    report       the page of a finished run
    publishing   ships a finished run
    overview     the page of all shipped runs
    validation   the page of a bundle's validation

The names below are imported when they are first used, so that a command refuses the number
of a notebook before torch is loaded."""

from importlib import import_module

_MODULES = {
    "errors": ("CellError",),
    "experiment.folders": (
        "check_writable",
        "is_shipped",
        "last_run",
        "read_run",
        "run_folder",
        "writable_run",
    ),
    "experiment.notebooks": ("find_notebook",),
    "experiment.parameters": ("notebook_parameters", "parse_value"),
    "experiment.publishing": ("publish_run",),
    "experiment.recording": ("Experiment",),
    "experiment.report": (
        "APPENDIX",
        "draw_figure",
        "find_report",
        "redraw_run",
        "write_html",
        "write_report",
    ),
    "experiment.running": ("run_notebook",),
    "experiment.tables": ("gate_table", "show"),
}
__all__ = sorted(name for names in _MODULES.values() for name in names)


def __getattr__(name: str):
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"workbench.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
