"""The machine and software that a run sees, as columns of the table `runs`, and the names by which
rows are told apart: timings of two machines are never mixed.

The operating system is asked and nothing is guessed: what it does not say is None. A chip's name
does not say that a model ran on its Neural Engine.
"""

import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pandas as pd
import psutil

from workbench.errors import InputError
from workbench.log.host_state import command_output, file_text, first_group, host_state
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
    """The columns of ``runs`` that describe this machine, now: `time` to `versions` below, and
    those of `host_state`.

    ``commit`` ends in ``-dirty`` when the checkout has changes; ``versions`` maps ``python`` and
    the packages that decide a result to their versions.
    """
    return {
        "time": datetime.now(UTC),
        "platform": platform.platform(),
        "chip": command_output("sysctl", "-n", "machdep.cpu.brand_string")
        or first_group(r"^model name\s*: (.+)$", file_text("/proc/cpuinfo")),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "commit": _commit(),
        "versions": {"python": platform.python_version()}
        | {name: _package(name) for name in _PACKAGES},
    } | host_state()


def _commit() -> str | None:
    """The checkout that this code runs from; None for an installed copy, whatever repository
    surrounds it."""
    source = Path(__file__).resolve().parents[2]
    if project_root(source) != source:
        return None
    return command_output(
        "git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"
    )


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def machine_name(run: Mapping) -> str:
    """A machine in words, such as ``Apple M4 Max, Mac16,5, 64 GiB, 16 cores``.

    Two rows of `runs` are of one machine when their names are equal. What a row does not say is
    left out; memory is rounded to GiB, since systems report a few pages more or less.
    """
    chip, model, memory, cores = (_value(run, column) for column in MACHINE_COLUMNS)
    words = [
        chip or "unknown chip",
        model,
        memory and f"{round(memory / 2**30)} GiB",
        cores and f"{int(cores)} cores",
    ]
    return ", ".join(str(word) for word in words if word)


def software_name(run: Mapping) -> str:
    """What else decides a timing: the system's build, and the versions of coremltools and torch."""
    versions = _value(run, "versions") or {}
    versions = json.loads(versions) if isinstance(versions, str) else versions
    words = [f"{name} {versions[name]}" for name in ("coremltools", "torch") if versions.get(name)]
    return ", ".join([str(_value(run, "os_build") or "unknown build"), *words])


def _value(run: Mapping, column: str):
    """A value of a row of `runs`; None for every kind of null."""
    value = run.get(column)
    return None if pd.isna(value) else value


def with_machines(runs: pd.DataFrame) -> pd.DataFrame:
    """Rows of `runs` with the columns `machine` and `software`."""
    columns = [*MACHINE_COLUMNS, "os_build", "versions"]
    each = runs[columns].drop_duplicates()
    rows = each.to_dict("records")
    each["machine"] = [machine_name(row) for row in rows]
    each["software"] = [software_name(row) for row in rows]
    return runs.merge(each, "left", columns)


def machine_names(runs: pd.DataFrame) -> list[str]:
    """The machines of some rows (see `with_machines`), the one of the newest run first."""
    return runs.sort_values("run_id", ascending=False)["machine"].drop_duplicates().tolist()


def of_machine(runs: pd.DataFrame, machine: str | None, here: str) -> pd.DataFrame:
    """The rows of one machine (see `with_machines`): `machine`, else `here` if it has
    rows, else that of the newest run.

    Raises:
        InputError: no row is of the machine named.
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
    return runs[runs["machine"] == (machine or (here if here in names else names[0]))]


def only_machine(rows: pd.DataFrame) -> str:
    """The one machine that the column `machine` of `rows` names; without such a column, "".

    Raises:
        ValueError: rows of several machines.
    """
    names = list(rows["machine"].dropna().unique()) if "machine" in rows else []
    if len(names) > 1:
        raise ValueError(
            f"rows of the machines {'; '.join(names)}; times are shown of one machine at a time"
        )
    return names[0] if names else ""
