"""What a row says of its machine: what the system tells, and nothing else."""

import json
import os
import platform
import subprocess

import psutil
import pytest

from workbench import log
from workbench.log import machine

PMSET = """System-wide power settings:
 sleep                1 (sleep prevented by coreaudiod, caffeinate)
 {mode}
 womp                 0"""
BATTERY = """Now drawing from 'Battery Power'
 -InternalBattery-0 (id=23199843)	81%; discharging; 6:17 remaining present: true"""
MAC = {
    "sysctl": """case "$2" in
        machdep.cpu.brand_string) echo "Apple M4 Max";;
        hw.model) echo Mac16,5;; *) exit 1;; esac""",
    "sw_vers": "echo 25B78",
    "notifyutil": 'echo "$2 1"',
    "pmset": f"""case "$2" in
        batt) cat <<'END'\n{BATTERY}\nEND\n;;
        *) cat <<'END'\n{PMSET.format(mode="lowpowermode         1")}\nEND\n;; esac""",
}


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Puts shell scripts in place of all commands of the system but `cat`."""

    def install(bodies: dict[str, str]) -> None:
        for name, body in (bodies | {"cat": 'exec /bin/cat "$@"'}).items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return install


def test_every_fact_is_a_column_of_runs_and_logs(tmp_path):
    here = log.environment()
    assert set(here) <= set(log.SCHEMAS["runs"].names)
    log.append("runs", here | {"status": "ok"}, tmp_path)
    (row,) = log.load("runs", tmp_path).to_dict("records")
    assert json.loads(row["versions"])["python"] == platform.python_version()
    assert f"{psutil.cpu_count()} cores" in row["machine"]


def test_a_mac_says_all_of_it(commands):
    commands(MAC)
    here = log.environment()
    memory = f"{round(psutil.virtual_memory().total / 2**30)} GiB"
    assert here["machine"] == (
        f"Apple M4 Max, Mac16,5, {memory}, {psutil.cpu_count()} cores"
    )
    assert here["software"].startswith("25B78, coremltools 9.")
    assert {name: here[name] for name in log.state()} == {
        "power_source": "Battery Power",
        "low_power": True,
        "thermal_pressure": "moderate",
        "swap_bytes": psutil.swap_memory().used,
    }


@pytest.mark.parametrize(
    ("command", "text", "fact"),
    [
        ("notifyutil", "com.apple.system.thermalpressurelevel 0", "nominal"),
        ("notifyutil", "com.apple.system.thermalpressurelevel 4", "sleeping"),
        ("notifyutil", "com.apple.system.thermalpressurelevel 30", "30"),
        ("notifyutil", "com.apple.system.thermalpressurelevel: Failed", None),
        ("pmset", PMSET.format(mode="lowpowermode         0"), False),
        ("pmset", PMSET.format(mode="powermode            1"), True),
        ("pmset", PMSET.format(mode="powermode            2"), False),
    ],
)
def test_a_command_s_words_are_understood(commands, command, text, fact):
    commands({command: f"cat <<'END'\n{text}\nEND"})
    column = {"notifyutil": "thermal_pressure", "pmset": "low_power"}[command]
    assert log.state()[column] == fact


@pytest.mark.parametrize("body", [None, "exit 1", "printf '\\377\\376'"])
def test_what_the_system_does_not_tell_is_none(commands, monkeypatch, body):
    commands(dict.fromkeys(MAC, body) if body else {})
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None)
    monkeypatch.setattr(machine, "_text", lambda path: None)
    here = log.environment()
    names = ("power_source", "low_power", "thermal_pressure", "commit")
    assert [here[name] for name in names] == [None] * 4
    assert here["swap_bytes"] is not None and "cores" in here["machine"]


@pytest.mark.parametrize(
    ("plugged", "source"), [(True, "AC Power"), (False, "Battery Power"), (None, None)]
)
def test_a_laptop_without_pmset_tells_its_power_source(
    commands, monkeypatch, plugged, source
):
    commands({})
    battery = psutil._ntuples.sbattery(80, 3600, plugged)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery)
    assert log.state()["power_source"] == source


def test_the_commit_is_this_checkouts_and_says_when_it_has_changes(
    tmp_path, monkeypatch
):
    package = tmp_path / "workbench" / "log"
    package.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('name = "workbench"\n')
    monkeypatch.setattr(machine, "__file__", str(package / "machine.py"))
    git = f"git -C {tmp_path} -c user.name=x -c user.email=x@x"
    made = (
        f"git init -q {tmp_path} && {git} add pyproject.toml && {git} commit -qm first"
    )
    assert os.system(made) == 0
    clean = log.environment()["commit"]
    assert len(clean) == 40
    (tmp_path / "pyproject.toml").write_text('name = "workbench"\nversion = 2\n')
    assert log.environment()["commit"] == f"{clean}-dirty"
    (tmp_path / "pyproject.toml").write_text('name = "other"\n')
    assert log.environment()["commit"] is None


def test_a_command_that_hangs_is_not_measured(monkeypatch):
    def hangs(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", hangs)
    assert machine.environment()["commit"] is None
