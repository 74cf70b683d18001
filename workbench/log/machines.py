"""Which machine a timing belongs to: timings of two machines are never mixed.

Rows of the log's `runs` in, names out. A leaf: knows neither the log nor what was measured.
"""

import json
from collections.abc import Mapping

import pandas as pd

from workbench.errors import InputError

COLUMNS = ("chip", "model", "memory_bytes", "cores")
SOFTWARE = ("os_build", "versions")


def name(run: Mapping) -> str:
    """A machine in words, such as ``Apple M4 Max, Mac16,5, 64 GiB, 16 cores``.

    Two rows of `runs` are of one machine when their names are equal. What a row does not say is
    left out; memory is
    rounded to GiB, since systems report a few pages more or less.
    """
    chip, model, memory, cores = (run.get(column) for column in COLUMNS)
    words = [chip if _is_known(chip) else "unknown chip"]
    words += [str(model)] if _is_known(model) else []
    words += [f"{round(int(memory) / 2**30)} GiB"] if _is_known(memory) else []
    words += [f"{int(cores)} cores"] if _is_known(cores) else []
    return ", ".join(words)


def software(run: Mapping) -> str:
    """What else decides a timing: the system's build, and the versions of coremltools and torch."""
    build, versions = (run.get(column) for column in SOFTWARE)
    versions = (
        json.loads(versions)
        if isinstance(versions, str)
        else versions
        if isinstance(versions, Mapping)
        else {}
    )
    words = [
        f"{package} {versions[package]}"
        for package in ("coremltools", "torch")
        if versions.get(package)
    ]
    return ", ".join([str(build) if _is_known(build) else "unknown build", *words])


def _is_known(value) -> bool:
    return value is not None and not pd.isna(value)


def with_names(runs: pd.DataFrame) -> pd.DataFrame:
    """Rows of `runs` with the columns `machine` and `software`."""
    columns = [*COLUMNS, *SOFTWARE]
    rows = list(runs[columns].itertuples(index=False, name=None))
    different = {row: dict(zip(columns, row)) for row in rows}
    machine, system = (
        {row: word(run) for row, run in different.items()} for word in (name, software)
    )
    return runs.assign(
        machine=[machine[row] for row in rows], software=[system[row] for row in rows]
    )


def names(runs: pd.DataFrame) -> list[str]:
    """The machines of some rows (see `with_names`), the one of the newest run first."""
    return runs.sort_values("run_id", ascending=False)["machine"].drop_duplicates().tolist()


def choose(runs: pd.DataFrame, machine: str | None, here: str) -> pd.DataFrame:
    """The rows of one machine (see `with_names`): the one named, else `here` if there are rows
    of it, else the newest run's.

    Raises:
        InputError: no row is of the machine named.
    """
    offered = names(runs)
    if machine is not None and machine not in offered:
        raise InputError(
            "machine",
            repr(machine),
            f"one of {'; '.join(offered) or 'none, no run fits'}",
            "name one of these, or none for the default",
        )
    if not offered:
        return runs
    return runs[runs["machine"] == (machine or (here if here in offered else offered[0]))]


def only(frame: pd.DataFrame) -> str:
    """The one machine that a frame's column `machine` names; without such a column, "".

    Raises:
        ValueError: rows of several machines.
    """
    found = list(frame["machine"].dropna().unique()) if "machine" in frame else []
    if len(found) > 1:
        raise ValueError(
            f"rows of the machines {'; '.join(found)}; times are shown of one machine at a time"
        )
    return found[0] if found else ""
