"""The hook that `make lab` installs for JupyterLab's saving of notebooks."""

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
    """Jupyter's `pre_save_hook`: saves the notebook without outputs, so that `git
    status` stays empty after Run All, and writes a copy with outputs to
    `build/notebooks`."""
    if model["type"] != "notebook":
        return
    import nbformat
    from nbstripout import strip_output

    notebook = nbformat.from_dict(model["content"])
    saved = Path(contents_manager.root_dir, path).absolute()
    copy = (
        (project_root(saved.parent) or saved.parent)
        / "build"
        / "notebooks"
        / saved.name
    )
    copy.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, copy)
    model["content"] = strip_output(
        notebook,
        keep_output=False,
        keep_count=False,
        keep_id=True,
        extra_keys=EDITOR_KEYS,
    )
