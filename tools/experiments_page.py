"""Writes experiments/README.md from the shipped runs, as publishing a run does.

python tools/experiments_page.py"""

from pathlib import Path

from workbench.experiment.overview import write_overview

if __name__ == "__main__":
    print(write_overview(Path(__file__).resolve().parents[1] / "experiments"))
