"""The folders of a log, and the ids of its runs."""

import secrets
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from workbench.files import checkout, output_root

SHIPPED = "shipped"
TIME_FORMAT = "%Y%m%dT%H%M%S%fZ"
Root = Path | str | None
"""A log's folder; None is `default_root()`."""


def new_run_id(after: str = "") -> str:
    """UTC time and random hex, such as ``20260131T094512123456Z-5f3a9c01``; sorts by
    time.

    Args:
        after: the newest id of a log. If the clock was set back since, the new id has
            the next microsecond after this one's.
    """
    time = datetime.now(UTC)
    with suppress(ValueError, OverflowError):  # an id of another form
        newest = datetime.strptime(after.partition("-")[0], TIME_FORMAT)
        time = max(time, newest.replace(tzinfo=UTC) + timedelta(microseconds=1))
    return f"{time:{TIME_FORMAT}}-{secrets.token_hex(4)}"


def default_root() -> Path:
    """``experiments/log`` in the folder for outputs (see `files.output_root`), which is
    usually the checkout around the working directory."""
    return output_root() / "experiments" / "log"


def shipped_root(root: Path) -> Path:
    """The log of the runs that came with the project of the log at `root`. A default
    log outside of the checkout has the checkout's."""
    if root == default_root() and not (root / SHIPPED).exists():
        return checkout() / "experiments" / "log" / SHIPPED
    return root / SHIPPED


def shipped_runs(root: Root = None) -> set[str]:
    """The ids of the runs that came with the project."""
    folder = shipped_root(Path(root or default_root())) / "runs"
    return {file.stem for file in folder.glob("*.parquet")}


def project(root: Root = None) -> Path:
    """The project whose ``experiments/log`` is the log at `root`, or else the folder
    that contains the log."""
    root = Path(root or default_root()).absolute()
    is_projects = root.parts[-2:] == ("experiments", "log")
    return root.parent.parent if is_projects else root.parent
