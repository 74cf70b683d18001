"""Writes the pages of the API out of the docstrings: `python docs/api.py` → build/docs."""

import warnings
from pathlib import Path

import pdoc

import miltorch
import workbench
from workbench import log, sweep

PAGES = """workbench workbench.bundle workbench.decode workbench.check.validate
workbench.check.fidelity workbench.ane.roofline workbench.experiment miltorch""".split()


def write_pages(folder: Path) -> None:
    """Writes a page for `workbench`, each module of it that its `__all__` names, and each of
    `PAGES`.

    A name of `__all__` that cannot be imported is an error.
    """
    # pdoc sees attributes, which these import late
    for package in (workbench, log, sweep, miltorch):
        for name in package.__all__:
            setattr(package, name, getattr(package, name))
    warnings.simplefilter("error")
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*PAGES, output_directory=folder)


if __name__ == "__main__":
    write_pages(Path(__file__).parents[1] / "build" / "docs")
