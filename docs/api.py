"""Writes the pages of the API out of the docstrings: `python docs/api.py` → build/docs."""

import warnings
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pdoc

import miltorch
import workbench

PAGES = """workbench workbench.bundle workbench.decode workbench.check.validate
workbench.check.fidelity workbench.ane.roofline workbench.experiment miltorch""".split()


def write_pages(folder: Path) -> None:
    """Writes a page for `workbench`, each module of it that its `__all__` names, and each of
    `PAGES`.

    A name of `__all__` that cannot be imported is an error.
    """
    # pdoc sees attributes only, and packages with a `__getattr__` import theirs late
    rooms = [m.name for m in iter_modules(workbench.__path__, "workbench.") if m.ispkg]
    for package in (miltorch, workbench, *map(import_module, rooms)):
        if "__getattr__" in vars(package):
            for name in package.__all__:
                setattr(package, name, getattr(package, name))
    warnings.simplefilter("error")
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*PAGES, output_directory=folder)


if __name__ == "__main__":
    write_pages(Path(__file__).parents[1] / "build" / "docs")
