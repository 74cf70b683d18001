"""Where a log lies, and the names of its runs."""

import secrets
from datetime import UTC, datetime
from pathlib import Path

from workbench.files import project_root

SHIPPED = "shipped"
Root = Path | str | None
"""A log's folder; None is `default_root()`."""


def new_run_id() -> str:
    """UTC time and random hex, such as ``20260131T094512123456Z-5f3a9c01``; sorts by
    time."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}-{secrets.token_hex(4)}"


def short(run_id: str) -> str:
    """The end of a run's id, by which commands and `log.find` name it."""
    return run_id.rpartition("-")[2]


def default_root() -> Path:
    """``experiments/log`` of the checkout around the working directory, else of the
    directory."""
    return (project_root(Path.cwd()) or Path.cwd()) / "experiments" / "log"


def whole(root: Root = None) -> Path:
    """The log at `root`; of the shipped part of a log, the whole log."""
    root = default_root() if root is None else Path(root).absolute()
    return root.parent if root.name == SHIPPED else root


def project(root: Root = None) -> Path:
    """The project whose ``experiments/log`` a log is, else the folder that contains the
    log."""
    root = whole(root)
    folder = root.parent
    if (folder.name, root.name) == ("experiments", "log"):
        return folder.parent
    return folder
