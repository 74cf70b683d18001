"""`make` believes .venv where it records this place, this Python and equal files, and only a whole
.venv is recorded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ready
from tiny import ROOT

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


READY = "ready: make run, or .venv/bin/workbench --help"


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A checkout whose packages are installed by a stub, which counts."""
    (tmp_path / "pyproject.toml").write_text("dependencies")
    (tmp_path / "requirements.lock").write_text("a==1")
    monkeypatch.setattr(ready, "ROOT", tmp_path)

    def install(venv):
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        for name in ("python", "workbench"):
            (venv / "bin" / name).touch()
        with (venv / "installed").open("a") as file:
            file.write("x")

    monkeypatch.setattr(ready, "install", install)
    monkeypatch.setattr(
        ready, "ask", lambda venv, option, code: "" if code == ready.CHECK else PYTHON
    )
    return tmp_path


def make(*options: str) -> None:
    sys.argv[1:] = options
    ready.main()


@pytest.fixture(autouse=True)
def arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ready.py"])


def installed(checkout: Path) -> int:
    """How often .venv was installed since it was made anew."""
    return len((checkout / ".venv" / "installed").read_text())


def test_equal_contents_need_no_pip_whatever_their_times(checkout):
    make()
    for name in ready.FILES:
        os.utime(checkout / name, (2e9, 2e9))
    make()
    assert installed(checkout) == 1
    (checkout / "requirements.lock").write_text("a==2")
    make()
    assert installed(checkout) == 2
    (checkout / ".venv" / "bin" / "workbench").unlink()
    make()
    assert installed(checkout) == 3


def test_the_last_line_says_what_to_type_where_something_was_installed(
    checkout, capsys
):
    make()
    assert capsys.readouterr().out.splitlines()[-1] == READY
    make()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["python", "place"])
def test_another_python_or_place_makes_it_anew_and_says_so(checkout, capsys, name):
    make()
    file = checkout / ".venv" / "ready"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: "another"}))
    (checkout / ".venv" / "old").touch()
    make()
    assert not (checkout / ".venv" / "old").exists() and installed(checkout) == 1
    *_, said, last = capsys.readouterr().out.splitlines()
    assert said == f"Making .venv anew: its {name} was another"
    assert last == READY


def test_an_active_one_is_made_anew_by_the_python_that_made_it(tmp_path):
    venv = tmp_path / "venv"
    make_venv = [ready.base_python(), "-m", "venv", "--without-pip", str(venv)]
    subprocess.run(make_venv, check=True)
    code = (
        f"import shutil, subprocess, sys; sys.path.insert(0, {str(ROOT / 'tools')!r})\n"
        f"import ready; assert sys.prefix == {str(venv)!r}; shutil.rmtree({str(venv)!r})\n"
        f"subprocess.run([ready.base_python(), *{make_venv[1:]!r}], check=True)"
    )
    subprocess.run([venv / "bin" / "python", "-c", code], check=True)
    assert (venv / "bin" / "python").exists()


def test_a_python_that_is_not_named_may_be_any(checkout):
    make()
    file = checkout / ".venv" / "ready"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"python": "3.12"}))
    make("--any-python")
    assert installed(checkout) == 1


def test_an_incomplete_one_is_not_recorded(checkout, monkeypatch):
    monkeypatch.setattr(ready, "ask", lambda *_: "torch numpy")
    with pytest.raises(SystemExit, match="lacks torch numpy"):
        make()
    assert not (checkout / ".venv" / "ready").exists()
    monkeypatch.setattr(ready, "ask", lambda *_: "")
    make()
    assert installed(checkout) == 2


def test_an_interrupted_installation_is_not_believed(checkout, monkeypatch):
    make()
    (checkout / "requirements.lock").write_text("a==2")
    install = ready.install

    def interrupt(venv):
        raise KeyboardInterrupt

    monkeypatch.setattr(ready, "install", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make()
    (checkout / "requirements.lock").write_text("a==1")
    monkeypatch.setattr(ready, "install", install)
    make()
    assert installed(checkout) == 2


def test_packages_outside_are_missing(monkeypatch, tmp_path):
    prefix = Path(sys.prefix)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert ready.ask(prefix, "-c", ready.CHECK) == ""
    outside = f"import sys; sys.prefix = {str(tmp_path)!r}\n"
    assert ready.ask(prefix, "-c", outside + ready.CHECK) == "workbench"


def test_indexes_stay_the_user_s_and_places_do_not(monkeypatch, tmp_path):
    configuration = tmp_path / "pip.conf"
    configuration.write_text(
        "[global]\nindex-url = https://example.org/simple\ntarget = /elsewhere\n"
        "[install]\nprefix = /elsewhere\nuser = true\nno-binary = a\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    for name in ("PIP_PREFIX", "PIP_TARGET", "PIP_USER", "PYTHONPATH"):
        monkeypatch.setenv(name, "/elsewhere")
    monkeypatch.setenv("PIP_CERT", "/certificates")
    environment = ready.clean_environment()
    assert environment["PIP_CERT"] == "/certificates"
    assert not environment.keys() & {
        "PIP_PREFIX",
        "PIP_TARGET",
        "PIP_USER",
        "PYTHONPATH",
    }
    listed = ready.ask(Path(sys.prefix), "-m", "pip", "config", "list")
    settings = ready.pip_settings(listed)
    assert settings["PIP_INDEX_URL"] == "https://example.org/simple"
    assert settings["PIP_NO_BINARY"] == "a"
    assert not settings.keys() & {"PIP_PREFIX", "PIP_TARGET", "PIP_USER"}


def test_make_compares_at_every_call_and_takes_a_named_python():
    rule = (ROOT / "Makefile").read_text().partition(".venv/ready: always")[2]
    assert rule.startswith("\n\t@$(PYTHON) tools/ready.py ")
