"""Write-ups out of the log: `study` collects an experiment's exhibits, `writeup` draws
them, `notebook` runs it whole."""

from workbench.report.writeup import (
    EXPERIMENTS,
    behind,
    data_of,
    exhibit,
    experiment,
    folder,
    publish,
    write_exhibit,
    write_report,
)

__all__ = [
    "EXPERIMENTS",
    "behind",
    "data_of",
    "exhibit",
    "experiment",
    "folder",
    "publish",
    "write_exhibit",
    "write_report",
]
