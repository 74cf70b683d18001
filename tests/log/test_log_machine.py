"""What a row says of its machine: what the system tells, and nothing else."""

import os

import psutil
import pytest

from workbench import log
from workbench.log import machine

PMSET = """System-wide power settings:
 sleep                1 (sleep prevented by coreaudiod, caffeinate)
 {mode}
 womp                 0"""
MAC = {
    "sysctl": """case "$2" in
        machdep.cpu.brand_string) echo "Apple M4 Max";;
        hw.model) echo Mac16,5;; *) exit 1;; esac""",
    "sw_vers": "echo 25B78",
    "notifyutil": 'echo "$2 1"',
    "pmset": f"cat <<'END'\n{PMSET.format(mode='lowpowermode         1')}\nEND",
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


@pytest.mark.parametrize(
    ("plugged", "source"), [(True, "AC Power"), (False, "Battery Power"), (None, None)]
)
def test_a_mac_says_all_of_it(commands, monkeypatch, plugged, source):
    commands(MAC)
    battery = psutil._ntuples.sbattery(80, 3600, plugged)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery)
    here = log.environment()
    memory = f"{round(psutil.virtual_memory().total / 2**30)} GiB"
    cores = psutil.cpu_count()
    assert here["machine"] == f"Apple M4 Max, Mac16,5, {memory}, {cores} cores"
    assert here["software"].startswith("25B78, coremltools 9.")
    assert {name: here[name] for name in log.machine_state()} == {
        "power_source": source,
        "low_power": True,
        "thermal_pressure": "moderate",
        "swap_bytes": psutil.swap_memory().used,
    }


@pytest.mark.parametrize(
    ("command", "text", "fact"),
    [
        ("notifyutil", "com.apple.system.thermalpressurelevel 0", "nominal"),
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
    assert log.machine_state()[column] == fact


@pytest.mark.parametrize("body", [None, "exit 1", "printf '\\377\\376'"])
def test_what_the_system_does_not_tell_is_none(commands, monkeypatch, body):
    commands(dict.fromkeys(MAC, body) if body else {})
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None)
    here = log.environment()
    names = ("power_source", "low_power", "thermal_pressure", "commit")
    assert [here[name] for name in names] == [None] * 4
    assert here["swap_bytes"] is not None and "cores" in here["machine"]


def test_the_commit_is_this_checkouts_and_says_when_it_has_changes(
    tmp_path, monkeypatch
):
    package = tmp_path / "workbench" / "log"
    package.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('name = "workbench"\n')
    monkeypatch.setattr(machine, "__file__", str(package / "machine.py"))
    git = f"git -C {tmp_path} -c user.name=x -c user.email=x@x"
    setup = f"git init -q {tmp_path} && {git} add . && {git} commit -qm first"
    assert os.system(setup) == 0
    clean = log.environment()["commit"]
    assert len(clean) == 40
    (tmp_path / "pyproject.toml").write_text('name = "workbench"\nversion = 2\n')
    assert log.environment()["commit"] == f"{clean}-dirty"
    (tmp_path / "pyproject.toml").write_text('name = "other"\n')
    assert log.environment()["commit"] is None


def test_load_and_stolen_time_around_a_measurement_are_recorded(monkeypatch):
    """Of 100 ticks within the block, other machines had 25; guests' are not counted
    twice."""
    loads = iter([(0.5, 9.0, 9.0), (2.5, 9.0, 9.0)])
    monkeypatch.setattr(os, "getloadavg", lambda: next(loads))
    texts = iter(
        [
            "cpu  100 0 50 800 10 0 0 40 7 0\ncpu0 1 1 1 1 1 1 1 1 1 1",
            "cpu  150 0 60 815 10 0 0 65 9 0\ncpu0 2 2 2 2 2 2 2 2 2 2",
        ]
    )
    monkeypatch.setattr(machine, "_read_text", lambda path: next(texts))
    with log.measure_disturbance() as columns:
        pass
    assert columns == {"load_start": 0.5, "load_end": 2.5, "steal": 0.25}


def test_a_system_without_load_or_stolen_time_records_null(monkeypatch):
    def no_load_average():
        raise OSError

    monkeypatch.setattr(os, "getloadavg", no_load_average)
    monkeypatch.setattr(machine, "_read_text", lambda path: None)
    with log.measure_disturbance() as columns:
        pass
    assert columns == {"load_start": None, "load_end": None, "steal": None}
