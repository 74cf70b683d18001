"""What JupyterLab does when it saves a notebook; `make lab` asks for it."""

from pathlib import Path

from workbench.log.store import project_root

EDITOR_KEYS = [
    f"metadata.language_info.{key}"
    for key in (
        "codemirror_mode",
        "file_extension",
        "mimetype",
        "nbconvert_exporter",
        "pygments_lexer",
        "version",
    )
]


def without_outputs(model: dict, path: str, contents_manager) -> None:
    """Jupyter's `pre_save_hook`: the notebook is saved without its outputs, so `git status` stays
    empty after Run All.

    The notebook as it is shown, outputs included, is written to `build/notebooks`, as `workbench
    run` does.
    """
    if model["type"] != "notebook":
        return
    import nbformat
    from nbstripout import strip_output

    notebook = nbformat.from_dict(model["content"])
    saved = Path(contents_manager.root_dir, path).absolute()
    copy = (project_root(saved.parent) or saved.parent) / "build" / "notebooks" / saved.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, copy)
    model["content"] = strip_output(
        notebook, keep_output=False, keep_count=False, keep_id=True, extra_keys=EDITOR_KEYS
    )
