"""Where a log lies, and the names of its runs."""

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
        after: the newest id of a log. Where its time lies ahead, since the clock was
            set back, the new id has the next microsecond.
    """
    time = datetime.now(UTC)
    with suppress(ValueError, OverflowError):  # an id of another form
        newest = datetime.strptime(after.partition("-")[0], TIME_FORMAT)
        time = max(time, newest.replace(tzinfo=UTC) + timedelta(microseconds=1))
    return f"{time:{TIME_FORMAT}}-{secrets.token_hex(4)}"


def default_root() -> Path:
    """``experiments/log`` of the checkout around the working directory, else of the
    directory, or of the folder that takes its place (see `files.output_root`)."""
    return output_root() / "experiments" / "log"


def shipped_root(root: Path) -> Path:
    """The log of the runs that came with the project of the log at `root`; for a log
    outside the checkout that takes the place of the checkout's, the checkout's."""
    if root == default_root() and not (root / SHIPPED).exists():
        return checkout() / "experiments" / "log" / SHIPPED
    return root / SHIPPED


def project(root: Root = None) -> Path:
    """The project whose ``experiments/log`` a log is, else the folder that contains the
    log."""
    root = Path(root or default_root()).absolute()
    is_projects = root.parts[-2:] == ("experiments", "log")
    return root.parent.parent if is_projects else root.parent
