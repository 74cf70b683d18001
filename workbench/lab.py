"""The way in which JupyterLab saves notebooks: `make lab` installs `without_outputs` as its hook.

A filter of git would not do: git calls a file modified when its size has changed, before
it runs the filter."""

from pathlib import Path

import nbformat
from nbconvert.preprocessors import ClearMetadataPreprocessor, ClearOutputPreprocessor

from workbench.files import project_root

# the fields of a notebook's metadata that are saved; the others say which Python ran it
SAVED_METADATA = {"kernelspec", ("language_info", "name")}


def without_outputs(model: dict, path: str, contents_manager) -> None:
    """Saves a notebook without its outputs, so that running it changes no file that git
    tracks, and writes a copy with the outputs to `build/notebooks`. The signature is that
    of Jupyter's `pre_save_hook`; the notebook in `model` is replaced."""
    if model["type"] != "notebook":
        return
    notebook = nbformat.from_dict(model["content"])
    saved = Path(contents_manager.root_dir, path).absolute()
    project = project_root(saved.parent) or saved.parent
    copy = project / "build" / "notebooks" / saved.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, copy)
    metadata = {
        "preserve_nb_metadata_mask": SAVED_METADATA,
        "clear_cell_metadata": False,
    }
    steps = ClearOutputPreprocessor(), ClearMetadataPreprocessor(**metadata)
    for step in steps:
        notebook, _ = step.preprocess(notebook, {})
    model["content"] = notebook
