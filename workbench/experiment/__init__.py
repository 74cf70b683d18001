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
    validation   the page of a bundle's validation"""

from workbench.errors import CellError
from workbench.experiment.folders import (
    check_writable,
    last_run,
    read_run,
    run_folder,
    writable_run,
)
from workbench.experiment.notebooks import find_notebook
from workbench.experiment.parameters import notebook_parameters, parse_value
from workbench.experiment.publishing import publish_run
from workbench.experiment.recording import Experiment
from workbench.experiment.report import (
    draw_figure,
    redraw_run,
    write_html,
    write_report,
)
from workbench.experiment.running import run_notebook
from workbench.experiment.tables import gate_table, show

__all__ = [
    "CellError",
    "Experiment",
    "check_writable",
    "draw_figure",
    "find_notebook",
    "gate_table",
    "last_run",
    "notebook_parameters",
    "parse_value",
    "publish_run",
    "read_run",
    "redraw_run",
    "run_folder",
    "run_notebook",
    "show",
    "writable_run",
    "write_html",
    "write_report",
]
