"""`workbench clean`: lists caches with their sizes and removes them."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from workbench.cli.common import Json, show
from workbench.sweep.caches import KINDS, cache_entries, remove

PANEL = "Housekeeping"

Kind = StrEnum("Kind", {kind: kind for kind in KINDS})


def clean_command(
    kinds: Annotated[
        list[Kind] | None, Argument(help="What to list: all kinds by default.")
    ] = None,
    folder: Annotated[
        list[Path] | None, Option(help="A further folder of bundles, such as build.")
    ] = None,
    yes: Annotated[bool, Option("--yes", help="Remove what is listed.")] = False,
    json: Json = False,
) -> None:
    """Lists the caches that the workbench can rebuild, with their sizes; --yes removes
    them.

    Example: workbench clean compiled goldens --folder build --yes
    """
    from workbench.log import project

    every = cache_entries(project(), tuple(folder or ()))
    entries = [entry for entry in every if entry.kind in (kinds or KINDS)]
    if yes:
        for entry in entries:
            remove(entry)
    total, lines, rows = 0, [], []
    for entry in entries:
        total += entry.bytes
        lines.append(f"{entry.bytes / 2**20:10.1f} MiB  {entry.kind:11} {entry.path}")
        rows.append(vars(entry) | {"path": str(entry.path)})
    end = "in all; workbench clean --yes removes them"
    if yes:
        end = "removed"
    lines.append(f"{total / 2**20:10.1f} MiB  {end}")
    if not entries:
        lines = ["nothing to remove"]
    show({"bytes": total, "removed": yes, "entries": rows}, json, lines)
