"""What a run row says of its machine: what the system tells, and nothing else."""

import json
import os
import platform
import subprocess

import psutil
import pytest

from workbench import log
from workbench.log import machine

MAC = {
    "sysctl": 'case "$2" in machdep.cpu.brand_string) echo "Apple M4 Max";; hw.model) echo Mac16,5;; *) exit 1;; esac',
    "sw_vers": "echo 24F74",
    "pmset": """[ "$2" = batt ] && echo "Now drawing from 'Battery Power'" || printf 'CPU_Speed_Limit \\t= 100\\n'""",
}


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Replace every command of the system by the given shell bodies."""

    def install(bodies: dict[str, str]) -> None:
        for name, body in bodies.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return install


def test_every_column_belongs_to_the_runs_table_and_logs(tmp_path):
    here = log.environment()
    assert set(here) <= set(log.SCHEMAS["runs"].names)
    row = log.load(
        "runs", log.append("runs", here | {"status": "ok"}, tmp_path).parents[1]
    ).iloc[0]
    assert row["memory_bytes"] == psutil.virtual_memory().total
    assert json.loads(row["versions"])["python"] == platform.python_version()


def test_a_mac_is_read_through_its_own_commands(commands):
    commands(MAC)
    here = log.environment()
    assert (here["chip"], here["model"], here["os_build"]) == (
        "Apple M4 Max",
        "Mac16,5",
        "24F74",
    )
    assert (
        machine.machine_name(here | {"memory_bytes": (64 << 30) - 4096, "cores": 16})
        == "Apple M4 Max, Mac16,5, 64 GiB, 16 cores"
    )
    assert (here["power_source"], here["thermal"]) == (
        "Battery Power",
        "CPU_Speed_Limit = 100",
    )


def test_what_the_system_does_not_tell_is_none(commands, monkeypatch):
    commands(dict.fromkeys(MAC, "exit 1"))
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None)
    monkeypatch.setattr(machine, "file_text", lambda path: None)
    here = log.environment()
    assert [here[name] for name in ("chip", "power_source", "thermal", "commit")] == [
        None
    ] * 4


@pytest.mark.parametrize(
    ("plugged", "source"), [(True, "AC Power"), (False, "Battery Power"), (None, None)]
)
def test_a_laptop_without_pmset_tells_its_power_source(
    commands, monkeypatch, plugged, source
):
    commands({})
    battery = psutil._ntuples.sbattery(80, 3600, plugged)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery)
    assert log.environment()["power_source"] == source


def test_the_commit_is_this_checkouts_and_says_when_it_has_changes(
    tmp_path, monkeypatch, commands
):
    package = tmp_path / "workbench" / "log"
    package.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('name = "workbench"\n')
    monkeypatch.setattr(machine, "__file__", str(package / "machine.py"))
    git = f"git -C {tmp_path} -c user.name=x -c user.email=x@x"
    assert (
        os.system(
            f"git init -q {tmp_path} && {git} add pyproject.toml && {git} commit -qm first"
        )
        == 0
    )
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
