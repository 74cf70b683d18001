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


def default_root() -> Path:
    """``experiments/log`` of the checkout around the working directory, else of the
    directory."""
    return (project_root(Path.cwd()) or Path.cwd()) / "experiments" / "log"


def project(root: Root = None) -> Path:
    """The project whose ``experiments/log`` a log is, else the folder that contains the
    log."""
    root = Path(root or default_root()).absolute()
    is_projects = root.parts[-2:] == ("experiments", "log")
    return root.parent.parent if is_projects else root.parent
