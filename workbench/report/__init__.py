"""Write-ups out of the log: `study` collects an experiment's exhibits, `writeup` draws them, `notebook` runs it whole."""

from workbench.report.writeup import (
           EXPERIMENTS,
           Experiment,
           behind,
           data_of,
           draw,
           exhibit,
           experiment,
           folder,
           runs_of,
           write_exhibit,
           write_report,
)

__all__ = ["EXPERIMENTS", "Experiment", "behind", "data_of", "draw", "exhibit", "experiment", "write_exhibit", "folder",
           "runs_of", "write_report"]
