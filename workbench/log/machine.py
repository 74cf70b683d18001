"""The machine and software of a run as columns of the table `runs`, and names made of
them, which keep timings of two machines apart.

All values come from the operating system and are None if it has no answer. The name of
a chip does not imply that a model ran on its Neural Engine."""

import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pandas as pd
import psutil

from workbench.errors import InputError
from workbench.log.host_state import (
    command_output,
    file_text,
    first_group,
    host_state,
    sysctl,
)
from workbench.log.store import project_root

MACHINE_COLUMNS = ("chip", "model", "memory_bytes", "cores")
_PACKAGES = (
    "workbench",
    "coremltools",
    "torch",
    "transformers",
    "numpy",
    "pandas",
    "pyarrow",
    "scipy",
)


def environment() -> dict:
    """The columns of ``runs`` that describe this machine now, those of `host_state`
    included.

    ``commit`` ends in ``-dirty`` when the checkout has changes; ``versions`` maps
    ``python`` and the packages that decide a result to their versions."""
    cpu = first_group(r"^model name\s*: (.+)$", file_text("/proc/cpuinfo"))
    packages = {name: _package(name) for name in _PACKAGES}
    versions = {"python": platform.python_version()} | packages
    return {
        "time": datetime.now(UTC),
        "platform": platform.platform(),
        "chip": sysctl("machdep.cpu.brand_string") or cpu,
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "commit": _commit(),
        "versions": versions,
    } | host_state()


def _commit() -> str | None:
    """The commit of the checkout that this code runs from; None for an installed
    copy."""
    source = Path(__file__).resolve().parents[2]
    if project_root(source) != source:
        return None
    options = ("--always", "--dirty", "--abbrev=40", "--exclude=*")
    return command_output("git", "-C", str(source), "describe", *options)


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def machine_name(run: Mapping) -> str:
    """The machine of a row of `runs` in words: ``Apple M4 Max, Mac16,5, 64 GiB, 16
    cores``.

    Two rows are of one machine when their names are equal. Nulls are left out; memory
    is rounded to GiB, since systems report a few pages more or less."""
    chip, model, memory, cores = (_value(run, column) for column in MACHINE_COLUMNS)
    words = [
        chip or "unknown chip",
        model,
        memory and f"{round(memory / 2**30)} GiB",
        cores and f"{int(cores)} cores",
    ]
    return ", ".join(str(word) for word in words if word)


def software_name(run: Mapping) -> str:
    """The software that affects a timing: the system's build, coremltools' and torch's
    versions."""
    versions = _value(run, "versions") or {}
    if isinstance(versions, str):
        versions = json.loads(versions)
    text = str(_value(run, "os_build") or "unknown build")
    for name in ("coremltools", "torch"):
        if versions.get(name):
            text += f", {name} {versions[name]}"
    return text


def _value(run: Mapping, column: str):
    """A value of a row of `runs`; None for every kind of null."""
    value = run.get(column)
    if pd.isna(value):
        return None
    return value


def with_machines(runs: pd.DataFrame) -> pd.DataFrame:
    """Rows of `runs` with the columns `machine` and `software`."""
    columns = [*MACHINE_COLUMNS, "os_build", "versions"]
    each = runs[columns].drop_duplicates()
    rows = each.to_dict("records")
    each["machine"] = [machine_name(row) for row in rows]
    each["software"] = [software_name(row) for row in rows]
    return runs.merge(each, "left", columns)


def machine_names(runs: pd.DataFrame) -> list[str]:
    """The machines of some rows (see `with_machines`), the one of the newest run
    first."""
    newest_first = runs.sort_values("run_id", ascending=False)
    return newest_first["machine"].unique().tolist()


def of_machine(runs: pd.DataFrame, machine: str | None, here: str) -> pd.DataFrame:
    """The rows of one machine (see `with_machines`): of `machine`, else of `here` if it
    has rows, else of the newest run's machine.

    Raises:
        InputError: no row is of `machine`.
    """
    names = machine_names(runs)
    if machine is not None and machine not in names:
        raise InputError(
            "machine",
            repr(machine),
            f"one of {'; '.join(names) or 'none, no run fits'}",
            "name one of these, or none for the default",
        )
    if not names:
        return runs
    default = here if here in names else names[0]
    return runs[runs["machine"] == (machine or default)]


def only_machine(rows: pd.DataFrame) -> str:
    """The single value of the column `machine` of `rows`; "" without such a column.

    Raises:
        ValueError: rows of several machines.
    """
    if "machine" not in rows:
        return ""
    names = list(rows["machine"].dropna().unique())
    if len(names) > 1:
        text = "times are shown of one machine at a time"
        raise ValueError(f"rows of the machines {'; '.join(names)}; {text}")
    return next(iter(names), "")
