"""Notebooks run in kernels: every run ends, whatever happens to the kernel, and no kernel outlives
the process that started it."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from refusal import refused

from workbench import kernel, progress
from workbench.errors import CellError


def notebook(folder: Path, *sources: str, kernel_name: str = "python3") -> Path:
    words = {"name": kernel_name, "display_name": "Python 3", "language": "python"}
    cells = [new_code_cell(source) for source in sources]
    path = folder / "07_toy.ipynb"
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": words}), path)
    return path


def execute(source: Path) -> list:
    """The cells of a notebook that was executed."""
    copy = source.with_name("copy.ipynb")
    kernel.execute(source, copy, {}, progress=False)
    return nbformat.read(copy, 4).cells


# The reply to the cell arrives while the Output widget's message is on its way: that is the order
# in which the reader's signal is lost.
DELAYED = """
import sys, time
from pathlib import Path
from nbclient.output_widget import OutputWidget
from workbench import kernel

send = OutputWidget.send
def send_late(self, *arguments, **options):
    time.sleep(1)
    send(self, *arguments, **options)
OutputWidget.send = send_late
kernel.execute(*map(Path, sys.argv[1:]), {}, progress=False)
"""
WIDGET = """
import ipywidgets
from IPython.display import HTML, display
ipywidgets.interactive(lambda x: display(HTML(str(x))), x=3)
"""


@pytest.mark.slow("two processes import Jupyter; the faulty order takes a second")
def test_a_reply_is_heard_that_arrives_while_a_widget_sends(tmp_path):
    source, copy = notebook(tmp_path, WIDGET), tmp_path / "copy.ipynb"
    command = [sys.executable, "-c", DELAYED, source, copy]
    subprocess.run(command, check=True, timeout=90)
    (cell,) = nbformat.read(copy, 4).cells
    assert cell.metadata.papermill.status == "completed"


def install_kernel(folder: Path, *words: str) -> None:
    path = folder / "kernels" / "broken" / "kernel.json"
    path.parent.mkdir(parents=True)
    spec = {"argv": words, "display_name": "broken", "language": "python"}
    path.write_text(json.dumps(spec))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "No such kernel named broken"),
        (["/nowhere/python"], "no process was started.*nowhere"),
        (["false"], "Kernel died before replying"),
        (["sleep", "60"], "respond in 1 seconds"),
    ],
    ids=["unknown", "no command", "ends at once", "no answer"],
)
def test_a_kernel_that_does_not_start_is_one_message(
    tmp_path, monkeypatch, caplog, words, reason
):
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setattr(kernel, "START_S", 1)
    if words:
        install_kernel(tmp_path, *words)
    source = notebook(tmp_path, "1", kernel_name="broken")
    before = psutil.Process().children()
    with pytest.raises(
        CellError, match=f"07_toy: the kernel failed: .*{reason}"
    ) as said:
        execute(source)
    assert "\n" not in str(said.value)
    assert not caplog.records
    assert psutil.Process().children() == before


def test_a_kernel_that_is_killed_is_one_message(tmp_path):
    source = notebook(tmp_path, "1", "import os\nos.kill(os.getpid(), 9)")
    with pytest.raises(CellError, match="07_toy: the kernel failed: Kernel died"):
        execute(source)


@pytest.mark.usefixtures("forked")
def test_a_cell_that_takes_too_long_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr("nbclient.NotebookClient._get_timeout", lambda *_: 1)
    source = notebook(tmp_path, "import time\ntime.sleep(60)")
    with pytest.raises(CellError, match="07_toy: the kernel failed: .*1 seconds"):
        execute(source)


@pytest.mark.usefixtures("forked")
def test_a_cell_s_refusal_is_a_refusal_and_any_other_error_the_cell_s(tmp_path):
    code = (
        "from workbench import InputError\nraise InputError('x', '1', '2', 'write 2')"
    )
    with refused("x: found 1; needs 2. Next: write 2"):
        execute(notebook(tmp_path, code))
    with pytest.raises(CellError, match=r"07_toy, cell \[1\]: ZeroDivisionError"):
        execute(notebook(tmp_path, "1 / 0"))


def test_sockets_have_short_paths_where_temporary_files_have_long_ones(
    tmp_path, monkeypatch
):
    folder = tmp_path / ("scratch" * 12)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    (cell,) = execute(notebook(tmp_path, "1 + 1"))
    assert cell.outputs[0].data["text/plain"] == "2"


# A process that adopts orphans, as systemd's user session does, kills a run in the middle of a cell,
# and waits for the kernel, which is its child then.
ADOPTING = """
import ctypes, os, subprocess, sys, time
from pathlib import Path

ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
source, pid = map(Path, sys.argv[1:])
code = "import sys, pathlib; from workbench import kernel\\n"
code += "source = pathlib.Path(sys.argv[1])\\n"
code += "kernel.execute(source, source.with_name('copy.ipynb'), {}, progress=False)"
runner = subprocess.Popen([sys.executable, "-c", code, source])
while not pid.exists():
    time.sleep(0.05)
runner.kill()
runner.wait()
orphan, deadline = int(pid.read_text()), time.monotonic() + 10
while not os.waitpid(orphan, os.WNOHANG)[0]:
    if time.monotonic() > deadline:
        os.kill(orphan, 9)
        sys.exit("the kernel lives")
    time.sleep(0.05)
"""
WAITING = """
import os, time
from pathlib import Path
Path("pid.new").write_text(str(os.getpid()))
Path("pid.new").rename("pid")
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.slow("three processes start, two of them with Jupyter")
def test_a_kernel_ends_with_a_run_that_is_killed(tmp_path):
    pid = tmp_path / "pid"
    command = [sys.executable, "-c", ADOPTING, notebook(tmp_path, WAITING), pid]
    subprocess.run(command, check=True, timeout=90)


@pytest.mark.usefixtures("forked")
def test_the_bar_names_the_stage_of_the_running_cell(tmp_path, capfd, monkeypatch):
    """The stage of a cell that has ended does not stay beside the next one."""
    monkeypatch.setattr(kernel, "STAGE_POLL_S", 0.05)
    monkeypatch.setattr(kernel, "shows_bars", lambda: True)
    begin = (
        "import time; from workbench.progress import stage; stage('export: weights')"
    )
    source = notebook(tmp_path, f"{begin}; time.sleep(1)", "time.sleep(1)")
    kernel.execute(source, tmp_path / "copy.ipynb", {})
    lines = capfd.readouterr().err.split("\r")
    counts = "0 of 2 cells", "1 of 2 cells"
    first, second = ([line for line in lines if n in line] for n in counts)
    assert any("export: weights" in line for line in first)
    assert second and "export: weights" not in second[-1]
    # an estimate of the remaining time stands behind <
    assert not any("<" in line for line in [*first, *second])


@pytest.mark.usefixtures("forked")
def test_a_run_whose_output_is_a_file_prints_plain_lines_of_cells_and_stages(
    tmp_path, capfd, monkeypatch
):
    """A redrawn bar would leave hundreds of fragments in a log of CI."""
    monkeypatch.setattr(kernel, "STAGE_POLL_S", 0.05)
    monkeypatch.setattr(progress, "TICK_S", 0.0)
    begin = (
        "import time; from workbench.progress import stage; stage('export: weights')"
    )
    source = notebook(tmp_path, f"{begin}; time.sleep(1)", "time.sleep(1)")
    kernel.execute(source, tmp_path / "silent.ipynb", {})
    assert not capfd.readouterr().err
    with progress.plain_stage_lines():
        kernel.execute(source, tmp_path / "copy.ipynb", {})
    text = capfd.readouterr().err
    assert "\r" not in text and "\x1b" not in text
    lines = text.splitlines()
    assert len(lines) == len(set(lines))
    assert "07_toy: 0 of 2 cells, export: weights" in lines
    assert any(line.startswith("07_toy: 1 of 2 cells") for line in lines)
