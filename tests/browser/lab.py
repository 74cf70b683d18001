"""JupyterLab in headless Chromium, as a researcher uses it: a server on a copy of the project, and
an open notebook.

Everything JupyterLab would read from or write to the user's home goes to a folder of its own.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import nbformat
from forks import kernels

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
SETTINGS = {
    "notebook-extension/tracker": {
        "windowingMode": "none"
    },  # every cell is in the page
    "apputils-extension/notification": {"fetchNews": "false"},
}
LIMIT_S = 300
SIZE = {"width": 1400, "height": 1000}
ROOT = Path(__file__).parents[2]


def chromium() -> str | None:
    """The browser of this machine, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def commit(project: Path) -> None:
    """Makes a copy of the project a checkout of its own."""
    shutil.copy(ROOT / ".gitignore", project)
    for path in (ROOT / "experiments").glob("[0-9]*"):  # write-ups as they are shipped
        own = {p.name for p in path.iterdir()} - {"figures", "tables", "report.md"}
        ignore = shutil.ignore_patterns(*own)
        shutil.copytree(path, project / "experiments" / path.name, ignore=ignore)
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=x", "-c", "user.email=x", "commit", "-q", "-m", "x"],
    ):
        subprocess.run(["git", "-C", project, *command], check=True)


def changes(project: Path) -> list[str]:
    """What git says has changed, or is new, in that checkout."""
    command = ["git", "-C", project, "status", "--porcelain"]
    return subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.splitlines()


@contextmanager
def serve(project: Path, home: Path, python: str):
    """Runs JupyterLab on `project`, with kernels of `python`; gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in SETTINGS.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
    names = (
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_RUNTIME_DIR",
        "IPYTHONDIR",
        "JUPYTERLAB_WORKSPACES_DIR",
    )
    # short: sockets lie there, and a socket's path has 107 characters
    runtime = tempfile.mkdtemp()
    homes = {name: str(home / name.lower()) for name in names} | {
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTER_RUNTIME_DIR": runtime,
    }
    homes["JUPYTER_PATH"] = str(kernels(python))
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--expose-app-in-browser",
    ]
    command += [
        f"--port={port}",
        f"--ServerApp.root_dir={project}",
        "--IdentityProvider.token=",
    ]
    command += ["--KernelManager.transport=ipc"]
    makefile = (ROOT / "Makefile").read_text()
    command += re.findall(r"--FileContentsManager\S+", makefile)  # as `make lab`
    with (home / "server.log").open("w") as said:
        process = subprocess.Popen(
            command, env=os.environ | homes, stdout=said, stderr=subprocess.STDOUT
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(
            lambda: _answers(f"{address}/api"),
            LIMIT_S,
            f"JupyterLab did not start, see {home / 'server.log'}",
        )
        yield address
    finally:
        process.terminate()
        process.wait(LIMIT_S)
        shutil.rmtree(runtime, ignore_errors=True)


def _answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except OSError:
        return False


def _wait(ready, seconds: float, otherwise: str, every: float = 0.2):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := ready():
            return found
        time.sleep(every)
    raise AssertionError(otherwise)


OPEN = """async path => {
    const lab = window.jupyterapp;
    const others = Array.from(lab.shell.widgets("main"));
    await Promise.all(others.map(other => other.sessionContext?.shutdown()));
    const notebook = await lab.commands.execute("docmanager:open", {path});
    others.forEach(other => other.dispose());
    await notebook.context.ready;
    lab.shell.activateById(notebook.id);
}"""


def open_lab(page, address: str):
    """JupyterLab in a page, without a notebook."""
    page.set_default_timeout(1000 * LIMIT_S)
    page.goto(f"{address}/lab?reset", wait_until="load")
    page.wait_for_function("window.jupyterapp != null")
    page.evaluate("window.jupyterapp.restored.then(() => true)")
    return page


class Notebook:
    """One notebook in the browser: opened in JupyterLab, whose other notebooks and their kernels
    end.

    Args:
        page: a Playwright page in which JupyterLab is open.
        path: the notebook in the project.
        shots: folder for screenshots.
    """

    def __init__(self, page, path: Path, shots: Path):
        self.page, self.path, self.shots = page, path, shots
        shots.mkdir(parents=True, exist_ok=True)
        page.evaluate(OPEN, f"notebooks/{path.name}")
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        self._in_lab("sessionContext.ready.then(() => true)")

    def _in_lab(self, expression: str):
        return self.page.evaluate(f"window.jupyterapp.shell.currentWidget.{expression}")

    def rest(self) -> None:
        """Waits until the kernel has answered all that it was sent."""
        status = "sessionContext.session.kernel.status"
        _wait(
            lambda: self._in_lab(status) == "idle",
            LIMIT_S,
            "the kernel does not rest",
            every=0.05,
        )

    def run_all(self) -> None:
        """Run > Run All Cells, until the kernel rests and every code cell has run or one has
        failed."""
        self.page.click(".lm-MenuBar-itemLabel:text-is('Run')")
        self.page.click(".lm-Menu-itemLabel:text-is('Run All Cells')")
        cells = "content.model.sharedModel.cells.filter(c => c.cell_type === 'code')"
        failed = "some(c => c.outputs.some(o => o.output_type === 'error'))"
        _wait(
            lambda: (
                self._in_lab("sessionContext.session.kernel.status") == "idle"
                and (
                    self._in_lab(f"{cells}.every(c => c.execution_count)")
                    or self._in_lab(f"{cells}.{failed}")
                )
            ),
            LIMIT_S,
            f"{self.path.name} did not finish in {LIMIT_S} s",
        )

    def save(self) -> nbformat.NotebookNode:
        """Saves; gives the copy with outputs."""
        self._in_lab("context.save().then(() => true)")
        copy = self.path.parents[1] / "build" / "notebooks" / self.path.name
        return nbformat.read(copy, as_version=4)

    def errors(self) -> list[str]:
        """What went wrong: error outputs of cells, and callback errors that widgets show."""
        raised = [
            o["ename"] + ": " + o["evalue"]
            for c in self.save().cells
            for o in c.get("outputs", [])
            if o["output_type"] == "error"
        ]
        return raised + self.page.locator(".workbench-error").all_inner_texts()

    def widget(self, name: str) -> "Widget":
        """The first widget of a kind (`explorer`, `planner`)."""
        return Widget(self, self.page.locator(f".workbench-{name}").first)

    def shoot(self) -> None:
        """Keeps the whole notebook as one picture, taken in a window as high as it is."""
        scroller = "document.querySelector('.jp-WindowedPanel-outer')"
        height = self.page.evaluate(f"{scroller}.scrollHeight")
        self.page.set_viewport_size(SIZE | {"height": min(height + 200, 16_000)})
        self.page.evaluate(f"{scroller}.scrollTop = 0")  # below the last cell is room
        self.page.wait_for_timeout(300)
        self.page.screenshot(path=self.shots / f"{self.path.stem}.png")
        self.page.set_viewport_size(SIZE)


class Widget:
    """A widget of the workbench in an open notebook, moved as a person would."""

    def __init__(self, notebook: Notebook, box):
        self.notebook, self.box = notebook, box

    def shown(self) -> str:
        """The pixels of its canvases and its text."""
        canvases = "[...b.querySelectorAll('canvas')].map(c => c.toDataURL()).join()"
        return self.box.evaluate(f"b => {canvases} + b.innerText")

    def changes(self, action, name: str) -> None:
        """Does `action` and waits until something else is shown."""
        self.notebook.rest()
        before = self.shown()
        action()
        _wait(
            lambda: self.shown() != before,
            LIMIT_S,
            f"{name}: nothing changed",
            every=0.02,
        )
        self.notebook.rest()

    def move(self, name: str) -> None:
        """Moves a control to another stop: a slider one to the right, a list to its next entry."""
        select = self.box.locator(
            f".widget-dropdown:has(label:text-is('{name}')) select"
        )
        if select.count():
            chosen = select.first.evaluate("s => s.selectedIndex")
            self.changes(lambda: select.first.select_option(index=chosen + 1), name)
            return
        slider = self.box.locator(f".widget-hslider:has(label:text-is('{name}'))")
        handle = slider.locator(".noUi-handle").first
        handle.scroll_into_view_if_needed()
        handle.focus()
        press = self.notebook.page.keyboard.press
        self.changes(lambda: press("ArrowRight"), name)

    def click_picture(self, x: float, y: float) -> None:
        """Clicks at fractions of the size of the first picture, once it rests."""
        self.notebook.rest()
        canvas = self.box.locator("canvas").nth(1)  # the overlay of the first picture
        canvas.scroll_into_view_if_needed()
        size = canvas.bounding_box()
        at = size["x"] + size["width"] * x, size["y"] + size["height"] * y
        self.changes(lambda: self.notebook.page.mouse.click(*at), "click")

    def press(self, label: str) -> None:
        self.box.locator(f"button:has-text('{label}')").first.click()

    def says(self, text: str) -> None:
        """Waits until the widget shows a text."""
        self.box.get_by_text(text).first.wait_for()
