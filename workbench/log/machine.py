"""The machine, its software and its present state, as columns of the table `runs`.

All values come from the operating system. A value is None if its command is missing,
fails, or prints nothing usable. The name of a chip does not imply that a model ran on
its Neural Engine."""

import os
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import psutil

from workbench.files import project_root
from workbench.log.anonymous import anonymize

PACKAGES = "workbench coremltools torch transformers numpy pandas pyarrow scipy"
# macOS' OSThermalNotification.h
THERMAL_PRESSURES = ("nominal", "moderate", "heavy", "trapping", "sleeping")
THERMAL_KEY = "com.apple.system.thermalpressurelevel"


def environment() -> dict:
    """The columns of ``runs`` that describe this machine now, with those of
    `identify_machine` and `machine_state`.

    Returns:
        commit: of the checkout; it ends in ``-dirty`` when files were changed.
        versions: ``python`` and the packages that decide a result → their versions.
        time, platform.

        Names of this host are left out (see `anonymize`), as in a logged row.
    """
    versions = {"python": platform.python_version()}
    versions |= {name: _package_version(name) for name in PACKAGES.split()}
    columns = {
        "time": datetime.now(UTC),
        "platform": platform.platform(),
        "commit": _commit(),
        "versions": versions,
    }
    return anonymize(columns | machine_state()) | identify_machine()


def identify_machine() -> dict:
    """The columns of ``runs`` that decide which times can be compared. They take
    milliseconds, where the commit of `environment` starts git.

    Returns:
        machine: the `hardware` in words, such as ``Apple M4 Max, Mac16,5, 64 GiB, 16
            cores``. Times of two machines are never mixed.
        software: the system's build and the versions of coremltools and torch, which
            affect timings, too. Times of two versions are never mixed.

        Names of this host are left out (see `anonymize`), as in a logged row.
    """
    kernel = f"{platform.release()} {platform.version()}".strip()
    build = command_output("sw_vers", "-buildVersion") or kernel
    versions = {name: _package_version(name) for name in ("coremltools", "torch")}
    return anonymize(
        {
            "machine": machine_name(**hardware()),
            "software": software_name(build, versions),
        }
    )


def _package_version(name: str) -> str | None:
    """The version of an installed package; None for one that is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def hardware() -> dict:
    """chip, model (the maker's name for it, such as ``Mac16,5``), memory_bytes, cores."""
    cpu = _first_match(r"^model name\s*: (.+)$", _read_text("/proc/cpuinfo"))
    return {
        "chip": command_output("sysctl", "-n", "machdep.cpu.brand_string") or cpu,
        "model": command_output("sysctl", "-n", "hw.model")
        or _read_text("/sys/class/dmi/id/product_name"),
        "memory_bytes": psutil.virtual_memory().total,
        "cores": psutil.cpu_count(),
    }


def machine_name(chip, model, memory_bytes, cores) -> str:
    """The column `machine`. Nulls are left out; memory is rounded to GiB, since systems
    report a few pages more or less."""
    parts = [chip or "unknown chip"]
    if model:
        parts.append(model)
    if memory_bytes:
        parts.append(f"{round(memory_bytes / 2**30)} GiB")
    if cores:
        parts.append(f"{cores} cores")
    return ", ".join(parts)


def software_name(build: str | None, versions: dict) -> str:
    """The column `software`."""
    text = build or "unknown build"
    for name in ("coremltools", "torch"):
        if versions.get(name):
            text += f", {name} {versions[name]}"
    return text


def machine_state() -> dict:
    """What affects timings and changes while a machine runs, as columns of ``runs``.

    Returns:
        power_source: ``AC Power`` or ``Battery Power``, of a machine with a battery.
        low_power: whether macOS saves power.
        thermal_pressure: a word of `THERMAL_PRESSURES`, or the number of a level beyond
            them.
        swap_bytes: bytes of all processes that are swapped out.
    """
    battery = psutil.sensors_battery()
    sources = {True: "AC Power", False: "Battery Power"}
    mode = _first_match(r"\b(?:low)?powermode (\d)", command_output("pmset", "-g"))
    output = command_output("notifyutil", "-g", THERMAL_KEY)
    level = _first_match(r"thermalpressurelevel (\d+)$", output)
    pressures = dict(zip("01234", THERMAL_PRESSURES))
    return {
        "power_source": None if battery is None else sources.get(battery.power_plugged),
        "low_power": None if mode is None else mode == "1",
        "thermal_pressure": pressures.get(level, level),
        "swap_bytes": psutil.swap_memory().used,
    }


@contextmanager
def measure_disturbance() -> Iterator[dict[str, float | None]]:
    """Yields the columns of ``runs`` that show whether other work disturbed the block
    (see `times.disturbance_reasons`); they are filled in when it ends.

    ``load_start``, ``load_end``: processes that ran or waited to run, averaged over the
    minute before. ``steal``: the share of the processors' time within the block that a
    hypervisor gave to other machines; None off Linux."""
    columns = {"load_start": _load_average(), "load_end": None, "steal": None}
    before = _processor_ticks()
    yield columns
    columns["load_end"] = _load_average()
    after = _processor_ticks()
    if before and after and after.total > before.total:
        stolen = after.stolen - before.stolen
        columns["steal"] = stolen / (after.total - before.total)


def _load_average() -> float | None:
    """The load average of the last minute; None where the system has none."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


class _Ticks(NamedTuple):
    """Ticks of all processors since the start of the machine."""

    stolen: int
    """Given to other machines by a hypervisor."""
    total: int


def _processor_ticks() -> _Ticks | None:
    """The ticks in ``/proc/stat``; None where there is no such file.

    The line is ``cpu user nice system idle iowait irq softirq steal guest
    guest_nice``; the two for guests are parts of user and nice."""
    line = _first_match(r"^cpu +(\d+(?: \d+){7})", _read_text("/proc/stat"))
    if line is None:
        return None
    ticks = [int(count) for count in line.split()]
    *_, stolen = ticks
    return _Ticks(stolen, sum(ticks))


def command_output(*command: str) -> str | None:
    """A command's output on one line; None if it cannot be run, fails, takes over 10 s
    or prints nothing."""
    try:
        output = subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return " ".join(output.decode(errors="replace").split()) or None


def _commit() -> str | None:
    """The commit of the checkout that this code runs from; None for an installed
    copy."""
    source = Path(__file__).resolve().parents[2]
    if project_root(source) != source:
        return None
    options = "describe --always --dirty --abbrev=40 --exclude=*"
    return command_output("git", "-C", str(source), *options.split())


def _first_match(pattern: str, text: str | None) -> str | None:
    """The first group of the pattern's first match in a text; None without one. ``^``
    and ``$`` are the ends of any line."""
    match = re.search(pattern, text or "", re.MULTILINE)
    return None if match is None else match[1]


def _read_text(path: str) -> str | None:
    """A file's text; None where it cannot be read or is empty."""
    try:
        return Path(path).read_text(errors="replace").strip() or None
    except OSError:
        return None
