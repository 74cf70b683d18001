"""JupyterLab's saving of notebooks: `make lab` installs `without_outputs` as its hook.

A filter of git would not do: git calls a file modified whose size has changed, before
it asks the filter."""

from pathlib import Path

import nbformat
from nbconvert.preprocessors import ClearMetadataPreprocessor, ClearOutputPreprocessor

from workbench.files import project_root

KEPT = {"kernelspec", ("language_info", "name")}
"""Of a notebook's metadata; the rest says which Python the kernel ran."""


def without_outputs(model: dict, path: str, contents_manager) -> None:
    """Jupyter's `pre_save_hook`: saves a notebook without its outputs, so that running
    it changes no file that git tracks, and writes a copy with them to
    `build/notebooks`."""
    if model["type"] != "notebook":
        return
    notebook = nbformat.from_dict(model["content"])
    saved = Path(contents_manager.root_dir, path).absolute()
    project = project_root(saved.parent) or saved.parent
    copy = project / "build" / "notebooks" / saved.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, copy)
    metadata = {"preserve_nb_metadata_mask": KEPT, "clear_cell_metadata": False}
    steps = ClearOutputPreprocessor(), ClearMetadataPreprocessor(**metadata)
    for step in steps:
        notebook, _ = step.preprocess(notebook, {})
    model["content"] = notebook
