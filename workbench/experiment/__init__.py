"""A numbered experiment: its notebook shows figures and tables, which are files at
once, and its last cell logs one row and writes the report.

A finished run is a folder, `build/experiments/NN_slug/NAME-HASH`, of one checkpoint by
the hash of its content: ``figures/NAME.json`` and ``.parquet`` are a figure's options
and data, from which ``.svg``, ``.pdf`` and ``.png`` are drawn; ``tables/NAME.parquet``
and ``.tex``; ``run.json`` has verdict, gates, parameters and the ids of all runs behind
the figures; ``report.md`` and ``report.html`` are written from these files alone. All
of them have one run id, and readers refuse a mixture. A run that has not finished lies
in a folder of its own and replaces the finished one as a whole.

The modules, in the order in which a run passes them: `notebooks` and `parameters` find
a notebook and its parameters, `running` executes it without a browser, `recording` has
`Experiment`, the run while its notebook goes on, with its `entries`; `sources`
has the checkpoint of a run, `folders` its folder and `parts` the files of its figures
and tables, and `tables` writes tables in all formats. `report` writes a
finished run's report, `publishing` ships it, and `overview` lists the shipped ones.
`page` has the blocks that reports consist of, and writes them as Markdown or HTML;
`validation` makes the page of a bundle of them."""

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
from workbench.experiment.report import redraw, write_again, write_html, write_report
from workbench.experiment.running import run_notebook
from workbench.experiment.tables import gate_table, show

__all__ = [
    "CellError",
    "Experiment",
    "check_writable",
    "find_notebook",
    "gate_table",
    "last_run",
    "notebook_parameters",
    "parse_value",
    "publish_run",
    "read_run",
    "redraw",
    "run_folder",
    "run_notebook",
    "show",
    "writable_run",
    "write_again",
    "write_html",
    "write_report",
]
