"""The state of this machine that affects timings: heat, power, memory, virtualization,
Rosetta.

All values come from the operating system. A value is None if its command is missing,
fails, or prints nothing usable. One function parses the text of each command."""

import ctypes
import os
import platform
import re
import struct
import subprocess
import sys
from pathlib import Path

import psutil

# macOS' OSThermalNotification.h
THERMAL_PRESSURES = ("nominal", "moderate", "heavy", "trapping", "sleeping")
_RUSAGE_BYTES = 96  # struct rusage_info_v0: 16 bytes of a UUID, ten numbers of 64 bits
_FOOTPRINT = 16 + 7 * 8


def host_state() -> dict:
    """The state of this machine now, as columns of ``runs``; None if the system has no
    answer.

    Returns:
        model: the maker's name of the machine (``Mac16,5``).
        os_build: the build of the system (``24F74``).
        power_source: ``AC Power`` or ``Battery Power``.
        low_power: whether the system saves power.
        thermal: the output of ``pmset -g therm``.
        thermal_pressure: a word of `THERMAL_PRESSURES`, or the number of a level beyond
            them.
        performance_cores, efficiency_cores: physical cores of a Mac by kind.
        virtual_machine: whether a hypervisor runs this system.
        rosetta: whether this process is translated from x86-64.
        swap_bytes: bytes of all processes that are swapped out.
        footprint_bytes: memory of this process that cannot be dropped, swapped parts
            included.
    """
    kernel = f"{platform.release()} {platform.version()}".strip()
    profile = file_text("/sys/firmware/acpi/platform_profile")
    if sys.platform == "darwin":
        footprint = mac_footprint(_rusage())
    else:
        footprint = linux_footprint(file_text("/proc/self/status"))
    return {
        "model": sysctl("hw.model") or file_text("/sys/class/dmi/id/product_name"),
        "os_build": command_output("sw_vers", "-buildVersion") or kernel or None,
        "power_source": power_source(command_output("pmset", "-g", "batt"))
        or _battery(),
        "low_power": low_power(command_output("pmset", "-g"), profile),
        "thermal": command_output("pmset", "-g", "therm"),
        "thermal_pressure": pressure_name(thermal_level()),
        "performance_cores": number(sysctl("hw.perflevel0.physicalcpu")),
        "efficiency_cores": number(sysctl("hw.perflevel1.physicalcpu")),
        "virtual_machine": virtual_machine(
            sysctl("kern.hv_vmm_present"), file_text("/proc/cpuinfo")
        ),
        "rosetta": flag(sysctl("sysctl.proc_translated")),
        "swap_bytes": psutil.swap_memory().used,
        "footprint_bytes": footprint,
    }


def sysctl(name: str) -> str | None:
    """A value of macOS' sysctl, as `command_output` returns it."""
    return command_output("sysctl", "-n", name)


def command_output(*command: str) -> str | None:
    """A command's output on one line; None if it cannot be run, fails, takes over 10 s
    or prints nothing."""
    try:
        output = subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return " ".join(output.decode(errors="replace").split()) or None


def thermal_level() -> int | None:
    """The thermal pressure now, an index of `THERMAL_PRESSURES`."""
    return pressure_level(
        command_output("notifyutil", "-g", "com.apple.system.thermalpressurelevel")
    )


def pressure_level(text: str | None) -> int | None:
    """The level in ``com.apple.system.thermalpressurelevel 1``, the output of
    notifyutil."""
    return number(first_group(r"thermalpressurelevel (\d+)$", text))


def pressure_name(level: int | None) -> str | None:
    """A thermal pressure as a word of `THERMAL_PRESSURES`; a level beyond them as its
    number."""
    if level is None:
        return None
    if level < len(THERMAL_PRESSURES):
        return THERMAL_PRESSURES[level]
    return str(level)


def power_source(text: str | None) -> str | None:
    """``AC Power`` of ``Now drawing from 'AC Power'``, the output of ``pmset -g
    batt``."""
    return first_group(r"drawing from '(.+?)'", text)


def low_power(pmset: str | None, profile: str | None = None) -> bool | None:
    """Whether power is saved, from the output of ``pmset -g`` (``lowpowermode 1``;
    ``powermode 1`` on machines with three modes) or from Linux' platform profile."""
    if mode := first_group(r"\b(?:low)?powermode (\d)", pmset):
        return mode == "1"
    return profile and profile == "low-power"


def virtual_machine(hypervisor: str | None, cpuinfo: str | None = None) -> bool | None:
    """Whether a hypervisor is present: ``1`` of a Mac's ``kern.hv_vmm_present``, or the
    flag of Linux' /proc/cpuinfo, which exists on x86-64 alone."""
    flags = first_group(r"^flags\s*:(.*)$", cpuinfo)
    if hypervisor:
        return flag(hypervisor)
    return flags and "hypervisor" in flags.split()


def flag(text: str | None) -> bool | None:
    """``0`` or ``1`` as a bool."""
    return {"0": False, "1": True}.get(text)


def number(text: str | None) -> int | None:
    """A whole number of digits alone."""
    if text and re.fullmatch(r"\d+", text, re.ASCII):
        return int(text)
    return None


def mac_footprint(rusage: bytes | None) -> int | None:
    """`ri_phys_footprint` of a ``struct rusage_info_v0``."""
    if rusage:
        return struct.unpack_from("=Q", rusage, _FOOTPRINT)[0]
    return None


def linux_footprint(status: str | None) -> int | None:
    """Resident anonymous memory and swap of a /proc/PID/status, in bytes."""
    sizes = re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB$", status or "", re.MULTILINE)
    return sum(map(int, sizes)) * 1024 if sizes else None


def _rusage() -> bytes | None:
    """`rusage_info_v0` of this process, of macOS alone."""
    buffer = ctypes.create_string_buffer(_RUSAGE_BYTES)
    try:
        refused = ctypes.CDLL(None).proc_pid_rusage(os.getpid(), 0, buffer)
    except (OSError, AttributeError):
        return None
    return None if refused else buffer.raw


def _battery() -> str | None:
    """The power source of a laptop without pmset, in its words."""
    battery = psutil.sensors_battery()
    return battery and {True: "AC Power", False: "Battery Power"}.get(
        battery.power_plugged
    )


def first_group(pattern: str, text: str | None) -> str | None:
    """The first group of the pattern's first match in any line of a text."""
    match = re.search(pattern, text or "", re.MULTILINE)
    return match and match[1]


def file_text(path: str) -> str | None:
    """A file's text without the white space around it; None where it cannot be read or
    is empty."""
    try:
        return Path(path).read_text(errors="replace").strip() or None
    except OSError:
        return None
