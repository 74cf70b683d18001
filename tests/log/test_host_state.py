"""The state of the machine in a run row: what macOS' own commands answer, and null for everything
else."""

import struct

import psutil
import pytest

from workbench import log
from workbench.log import host_state as states
from workbench.log.host_state import host_state

PMSET = """System-wide power settings:
Currently in use:
 standby              1
 Sleep On Power Button 1
 hibernatefile        /var/vm/sleepimage
 powernap             1
 sleep                1 (sleep prevented by coreaudiod, caffeinate)
 tcpkeepalive         1
 {mode}
 womp                 0"""
BATTERY = """Now drawing from 'Battery Power'
 -InternalBattery-0 (id=23199843)	81%; discharging; 6:17 remaining present: true"""
STATUS = "VmRSS:\t   91234 kB\nRssAnon:\t   40000 kB\nRssFile:\t   51234 kB\nVmSwap:\t    1000 kB\n"
MAC = {
    "sysctl": """case "$2" in
        hw.model) echo Mac16,5;;
        hw.perflevel0.physicalcpu) echo 12;; hw.perflevel1.physicalcpu) echo 4;;
        kern.hv_vmm_present) echo 0;; sysctl.proc_translated) echo 0;;
        *) exit 1;; esac""",
    "sw_vers": "echo 25B78",
    "notifyutil": 'echo "$2 1"',
    "pmset": f"""case "$2" in
        batt) cat <<'END'\n{BATTERY}\nEND\n;;
        therm) echo 'Note: No thermal warning level has been recorded';;
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


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("com.apple.system.thermalpressurelevel 0", "nominal"),
        ("com.apple.system.thermalpressurelevel 2", "heavy"),
        ("com.apple.system.thermalpressurelevel 4", "sleeping"),
        ("com.apple.system.thermalpressurelevel 30", "30"),
        ("com.apple.system.thermalpressurelevel: Failed", None),
        (None, None),
    ],
)
def test_thermal_pressure_is_a_word(text, word):
    assert states.pressure_name(states.pressure_level(text)) == word


@pytest.mark.parametrize(
    ("mode", "saving"),
    [
        ("lowpowermode         1", True),
        ("lowpowermode         0", False),
        ("powermode            1", True),
        ("powermode            2", False),
        ("", None),
    ],
)
def test_low_power_mode_is_one_line_of_pmset(mode, saving):
    assert states.low_power(" ".join(PMSET.format(mode=mode).split())) is saving


@pytest.mark.parametrize(
    ("profile", "saving"), [("low-power", True), ("balanced", False), (None, None)]
)
def test_linux_has_a_platform_profile(profile, saving):
    assert states.low_power(None, profile) is saving


def test_the_power_source_is_quoted():
    assert states.power_source(" ".join(BATTERY.split())) == "Battery Power"
    assert (
        states.power_source("No adapter attached.") is states.power_source(None) is None
    )


@pytest.mark.parametrize(
    ("hypervisor", "cpuinfo", "virtual"),
    [
        ("1", None, True),
        ("0", None, False),
        (None, "flags\t\t: fpu sse2 hypervisor lm\n", True),
        (None, "flags\t\t: fpu sse2 lm\n", False),
        (None, "Features\t: fp asimd\n", None),
        (None, None, None),
    ],
)
def test_a_virtual_machine_is_one_where_the_system_says_so(
    hypervisor, cpuinfo, virtual
):
    assert states.virtual_machine(hypervisor, cpuinfo) is virtual


def test_flags_and_numbers_are_nothing_else():
    assert [states.flag(text) for text in ("0", "1", "2", "", None)] == [
        False,
        True,
    ] + [None] * 3
    assert [states.number(text) for text in ("12", "-1", "12 cores", "", None)] == [
        12
    ] + [None] * 4


def test_the_footprint_is_what_cannot_be_dropped():
    rusage = bytes(16) + struct.pack("=10Q", *range(10))
    assert len(rusage) == states._RUSAGE_BYTES
    assert states.mac_footprint(rusage) == 7 and states.mac_footprint(None) is None
    assert states.linux_footprint(STATUS) == 41000 * 1024
    assert states.linux_footprint("") is states.linux_footprint(None) is None


def test_a_mac_says_all_of_it(commands, monkeypatch):
    commands(MAC)
    monkeypatch.setattr(states.sys, "platform", "darwin")
    monkeypatch.setattr(
        states, "_rusage", lambda: bytes(16) + struct.pack("=10Q", *range(10))
    )
    assert host_state() == {
        "model": "Mac16,5",
        "os_build": "25B78",
        "power_source": "Battery Power",
        "low_power": True,
        "thermal": "Note: No thermal warning level has been recorded",
        "thermal_pressure": "moderate",
        "performance_cores": 12,
        "efficiency_cores": 4,
        "virtual_machine": False,
        "rosetta": False,
        "swap_bytes": psutil.swap_memory().used,
        "footprint_bytes": 7,
    }


def refused(tmp_path) -> None:
    """Tools that are there and cannot be executed."""
    for name in MAC:
        (tmp_path / name).write_text("no program\n")


@pytest.mark.parametrize("tools", [lambda path: None, refused])
def test_a_tool_that_is_missing_or_not_executable_is_null(tools, tmp_path, monkeypatch):
    tools(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(states, "file_text", lambda path: None)
    monkeypatch.setattr(states.psutil, "sensors_battery", lambda: None)
    state = host_state()
    assert state.pop("os_build") and state.pop("swap_bytes") is not None
    assert set(state.values()) == {None}


def test_an_answer_that_is_no_text_is_no_exception(commands):
    commands(MAC | {"notifyutil": r"printf '\377\376'"})
    assert host_state()["thermal_pressure"] is None


def test_the_state_before_and_after_are_columns_of_a_run(tmp_path):
    from workbench.sweep import runs

    runs.record_run("x", runs.state_before(), root=tmp_path)
    (row,) = log.load("runs", tmp_path).to_dict("records")
    assert {*host_state(), *runs.state_before()} <= set(row)
    assert row["swap_bytes_before"] >= 0 and row["footprint_bytes"] > 1 << 20
