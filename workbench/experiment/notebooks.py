"""The numbered notebooks of a checkout."""

import re
from pathlib import Path

from workbench.errors import InputError
from workbench.files import checkout
from workbench.nbformat_import import import_nbformat

# copies beside a notebook have other names: `05_slug-Copy1`, `05_slug.nbconvert`
STEM = re.compile(r"(\d\d)_\w+")


def notebooks_folder() -> Path:
    """The folder of the checkout's notebooks."""
    return checkout() / "notebooks"


def notebooks_by_number() -> dict[str, list[Path]]:
    """Number of an experiment → its notebook, or several where a number was given twice."""
    by_number = {}
    for path in sorted(notebooks_folder().glob("*.ipynb")):
        if stem := STEM.fullmatch(path.stem):
            by_number.setdefault(stem[1], []).append(path)
    return by_number


def find_notebook(number: str) -> Path:
    """The notebook of an experiment. Copies that JupyterLab or nbconvert put beside it
    are not read.

    Raises:
        InputError: there is none, or several have the number.
    """
    number = number.zfill(2)
    by_number = notebooks_by_number()
    if number not in by_number:
        needed = f"one of {', '.join(by_number)}"
        if not by_number:
            needed = (
                f"a checkout of this project, with notebooks in {notebooks_folder()}"
            )
        step = "name one of these, inside a checkout of this project"
        if (stem := STEM.fullmatch(Path(number).stem)) and stem[1] in by_number:
            step = f"name it by its number, {stem[1]}"
        raise InputError(f"experiment {number}", "no such notebook", needed, step)
    if len(by_number[number]) > 1:
        names = ", ".join(path.name for path in by_number[number])
        step = "give the others another number, or move them to another folder"
        raise InputError(f"experiment {number}", names, "one notebook", step)
    return by_number[number][0]


def named_notebook(name: str) -> Path | None:
    """The notebook with this stem, such as ``05_stateful_kv_cache``, if there is one."""
    path = notebooks_folder() / f"{name}.ipynb"
    return path if path.is_file() else None


def cells_of(path: Path) -> list:
    """The cells of a notebook."""
    # takes a moment, which no page of a bundle needs
    return import_nbformat().read(path, as_version=4).cells


def title_of(name: str) -> str:
    """The first heading of an experiment's notebook, else the experiment's name."""
    path = named_notebook(name)
    if path is None:
        return name
    return cells_of(path)[0].source.partition("\n")[0].lstrip("# ")
