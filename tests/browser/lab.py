"""JupyterLab in headless Chromium, as a researcher uses it: a server on a copy of the
project, and an open notebook.

Everything JupyterLab would read from or write to the user's home goes to a folder of its
own."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import nbformat
from forks import kernels

from workbench.widgets.controls import LARGEST_WIDTH

FLAGS = ["--no-sandbox", "--disable-gpu"]
NAMES = ("chromium", "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
SETTINGS = {
    # every cell is in the page
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false"},
}
LIMIT_S = 300
SIZE = {"width": 1400, "height": 1000}
ROOT = Path(__file__).parents[2]


def chromium() -> str | None:
    """The browser of this machine, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def serve(project: Path, home: Path, python: str):
    """Runs JupyterLab on `project`, with kernels of `python`; gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in SETTINGS.items():
        path = home / "lab/user-settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
    # short: sockets lie there, and a socket's path has 107 characters
    runtime = tempfile.mkdtemp()
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")
    homes = dict.fromkeys(names, str(home)) | {
        "JUPYTER_RUNTIME_DIR": runtime,
        "JUPYTER_PATH": str(kernels(python)),
    }
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *("--expose-app-in-browser", "--IdentityProvider.token="),
        *(f"--port={port}", f"--ServerApp.root_dir={project}"),
        "--KernelManager.transport=ipc",
        # as `make lab`
        *re.findall(r"--FileContentsManager\S+", (ROOT / "Makefile").read_text()),
    ]
    with (home / "server.log").open("w") as said:
        process = subprocess.Popen(
            command, env=os.environ | homes, stdout=said, stderr=said
        )
    try:
        _wait(lambda: _answers(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(LIMIT_S)
        shutil.rmtree(runtime, ignore_errors=True)


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _wait(ready) -> None:
    end = time.monotonic() + LIMIT_S
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.05)


OPEN = """async path => {
    const lab = window.jupyterapp;
    const others = Array.from(lab.shell.widgets("main"));
    await Promise.all(others.map(other => other.sessionContext?.shutdown()));
    // before the next one opens: JupyterLab answers an open path with the widget that is there
    others.forEach(other => other.dispose());
    const notebook = await lab.commands.execute("docmanager:open", {path});
    await notebook.context.ready;
    lab.shell.activateById(notebook.id);
    await notebook.sessionContext.ready;
}"""
SHOWN = "window.jupyterapp.shell.currentWidget"
RESTS = f"{SHOWN}.sessionContext.session.kernel.status === 'idle'"
DONE = f"""{RESTS} && (cells => cells.every(c => c.execution_count) ||
    cells.some(c => c.outputs.some(o => o.output_type === 'error'))
)({SHOWN}.content.model.sharedModel.cells.filter(c => c.cell_type === 'code'))"""

CELLS = f"{SHOWN}.content.widgets"
EDIT = f"""([id, source]) => {CELLS}.find(c => c.model.id === id)
    .model.sharedModel.setSource(source)"""
RUN_CELL = f"""async id => {{
    const notebook = {SHOWN}.content;
    notebook.activeCellIndex = notebook.widgets.findIndex(c => c.model.id === id);
    await window.jupyterapp.commands.execute("notebook:run-cell");
}}"""


def open_lab(page, address: str):
    """JupyterLab in a page, without a notebook."""
    page.set_default_timeout(1000 * LIMIT_S)
    page.goto(f"{address}/lab?reset", wait_until="load")
    page.wait_for_function("window.jupyterapp != null")
    page.evaluate("window.jupyterapp.restored.then(() => true)")
    return page


DIM = """explorer => {
    const bar = explorer.querySelector(".workbench-selection-0 .progress-bar")
    const picture = explorer.querySelector("canvas").closest(".workbench-of-setting > *")
    const opacity = () => Number(getComputedStyle(picture).opacity)
    const drawn = bar.getAttribute("style"), opacities = [opacity()]
    bar.style.width = "99%"
    opacities.push(opacity())
    bar.setAttribute("style", drawn)
    return [...opacities, opacity()]
}"""
"""Moves the hidden bar of the first control, as `Selections` does when its value changes."""


class Notebook:
    """One notebook in the browser: opened in JupyterLab, whose other notebooks and their
    kernels end.

    Args:
        page: a Playwright page in which JupyterLab is open.
        path: the notebook in the project.
    """

    def __init__(self, page, path: Path):
        self.page, self.path = page, path
        page.evaluate(OPEN, f"notebooks/{path.name}")
        page.wait_for_selector(".jp-Notebook .jp-Cell")

    def rest(self) -> None:
        """Waits until the kernel has answered all that it was sent."""
        self.page.wait_for_function(RESTS)

    def run_all(self) -> None:
        """Run > Run All Cells, until the kernel rests and every code cell has run or one
        has failed."""
        self.page.click(".lm-MenuBar-itemLabel:text-is('Run')")
        self.page.click(".lm-Menu-itemLabel:text-is('Run All Cells')")
        self.page.wait_for_function(DONE)

    def edit_cell(self, identifier: str, source: str) -> None:
        """Replaces the text of the code cell with this id."""
        self.page.evaluate(EDIT, [identifier, source])

    def run_cell(self, identifier: str) -> None:
        """Runs the code cell with this id, until the kernel rests."""
        self.page.evaluate(RUN_CELL, identifier)
        self.rest()

    def errors(self) -> list[str]:
        """What went wrong, in the copy with outputs that saving writes: error outputs of
        cells; and callback errors that widgets show."""
        self.page.evaluate(f"{SHOWN}.context.save().then(() => true)")
        copy = self.path.parents[1] / "build" / "notebooks" / self.path.name
        raised = [
            f"{o['ename']}: {o['evalue']}"
            for cell in nbformat.read(copy, as_version=4).cells
            for o in cell.get("outputs", [])
            if o["output_type"] == "error"
        ]
        return raised + self.page.locator(".workbench-error").all_inner_texts()


class Widget:
    """The Explorer of an open notebook, moved as a person would."""

    def __init__(self, notebook: Notebook):
        self.notebook, self.page = notebook, notebook.page
        self.box = self.page.locator(".workbench-explorer").first

    def shown(self) -> str:
        """The pixels of its canvases and its text."""
        canvases = "[...b.querySelectorAll('canvas')].map(c => c.toDataURL()).join()"
        return self.box.evaluate(f"b => {canvases} + b.innerText")

    def changes(self, action) -> None:
        """Does `action` and waits until something else is shown."""
        self.notebook.rest()
        before = self.shown()
        action()
        _wait(lambda: self.shown() != before)
        self.notebook.rest()

    def move(self, name: str, key: str = "ArrowRight") -> None:
        """Moves a control to another stop: a slider by a key, a list to its next
        entry."""
        control = self.box.locator(f".widget-inline-hbox:has(label:text-is('{name}'))")
        lists = control.locator("select")
        if lists.count():
            chosen = lists.evaluate("s => s.selectedIndex")
            self.changes(lambda: lists.select_option(index=chosen + 1))
        else:
            control.locator(".noUi-handle").focus()
            self.changes(lambda: self.page.keyboard.press(key))

    def opacities_at_another_value(self) -> list[float]:
        """The opacity of the first picture, once the drawn one has arrived, while the
        page has another value of the first control, and with the drawn one again."""
        _wait(lambda: self.box.evaluate(DIM)[0] == 1)
        return self.box.evaluate(DIM)

    def fits(self) -> None:
        """Waits until the first picture is as wide as the widget, but for a tenth, or has
        the largest width of a picture."""
        canvas = self.box.locator("canvas").nth(1)
        largest = 100 * LARGEST_WIDTH  # pixels

        def is_fitted() -> bool:
            width, page = (box.bounding_box()["width"] for box in (canvas, self.box))
            return 0.9 * min(page, largest) <= width <= page

        _wait(is_fitted)

    def click_picture(self, x: float, y: float) -> None:
        """Clicks at fractions of the size of the first picture, once it rests."""
        canvas = self.box.locator("canvas").nth(1)  # the overlay of the first picture
        canvas.scroll_into_view_if_needed()
        size = canvas.bounding_box()
        at = size["x"] + size["width"] * x, size["y"] + size["height"] * y
        self.changes(lambda: self.page.mouse.click(*at))

    def press(self, label: str) -> None:
        self.box.locator(f"button:has-text('{label}')").first.click()

    def says(self, text: str) -> None:
        """Waits until the widget shows a text."""
        self.box.get_by_text(text).first.wait_for()
