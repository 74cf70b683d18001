"""The machine and software that a run sees, as columns of the ``runs`` table.

Asks the operating system and never guesses: what it does not tell is None. Knows nothing of runtimes: a chip's name
does not say that a model ran on its Neural Engine.
"""

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from workbench.log.store import project_root

_PACKAGES = ("workbench", "coremltools", "torch", "transformers", "numpy", "pandas", "pyarrow", "scipy")


def environment() -> dict:
    """The columns of ``runs`` that describe this machine, now: `time` to `versions` below.

    ``thermal`` is what macOS reports of throttling, in its own words; ``commit`` ends in ``-dirty`` when the checkout
    has changes; ``versions`` maps ``python`` and the packages that decide a result to their versions.
    """
    return {
        "time": datetime.now(UTC), "platform": platform.platform(),
        "chip": _command_output("sysctl", "-n", "machdep.cpu.brand_string") or _proc_cpu(),
        "model": _command_output("sysctl", "-n", "hw.model") or _dmi_model(), "cores": psutil.cpu_count(),
        "os_build": _command_output("sw_vers", "-buildVersion") or f"{platform.release()} {platform.version()}".strip() or None,
        "memory_bytes": psutil.virtual_memory().total, "power_source": _power_source(),
        "thermal": _command_output("pmset", "-g", "therm"), "commit": _commit(),
        "versions": {"python": platform.python_version()} | {name: _package(name) for name in _PACKAGES},
    }  # fmt: skip


def _command_output(*command: str) -> str | None:
    """A command's output on one line; None where it does not exist, fails, takes over 10 s or says nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return " ".join(done.stdout.split()) or None


def _proc_cpu() -> str | None:
    info = Path("/proc/cpuinfo")
    found = info.is_file() and re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE)
    return found[1] if found else None


def _dmi_model() -> str | None:
    """What the firmware of a PC or a virtual machine calls it."""
    path = Path("/sys/class/dmi/id/product_name")
    return (path.read_text(errors="replace").strip() or None) if os.access(path, os.R_OK) else None


def _power_source() -> str | None:
    """``AC Power`` or ``Battery Power``, as macOS calls them."""
    if found := re.search(r"drawing from '(.+?)'", _command_output("pmset", "-g", "batt") or ""):
        return found[1]
    battery = psutil.sensors_battery()
    return battery and {True: "AC Power", False: "Battery Power"}.get(battery.power_plugged)


def _commit() -> str | None:
    """The checkout that this code runs from; None for an installed copy, whatever repository surrounds it."""
    source = Path(__file__).resolve().parents[2]
    if project_root(source) != source:
        return None
    return _command_output("git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
