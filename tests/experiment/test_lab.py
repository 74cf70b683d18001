"""What JupyterLab saves (`workbench.lab`)."""

from types import SimpleNamespace

import nbformat
from test_notebooks import each_notebook

from workbench.lab import without_outputs

OF_A_KERNEL = {"version": "3.12.1", "mimetype": "text/x-python", "name": "python"}


@each_notebook
def test_a_notebook_that_ran_is_saved_as_git_has_it(path, checkout):
    (checkout / "notebooks").mkdir()
    ran = nbformat.read(path, as_version=4)
    ran.metadata.language_info = nbformat.from_dict(OF_A_KERNEL)
    for count, cell in enumerate(c for c in ran.cells if c.cell_type == "code"):
        cell.execution_count = count
        cell.outputs = [nbformat.v4.new_output("stream", text="words")]
    model = {"type": "notebook", "content": ran}
    manager = SimpleNamespace(root_dir=str(checkout))
    without_outputs(model, f"notebooks/{path.name}", manager)
    assert nbformat.writes(model["content"]) + "\n" == path.read_text()
    copy = checkout / "build" / "notebooks" / path.name
    assert "words" in copy.read_text()
