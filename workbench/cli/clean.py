"""`workbench clean`: caches with their sizes, and their removal."""

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
    """Caches that the workbench makes again by itself, with their sizes; removes them with `--yes`.

    Example: workbench clean compiled goldens --folder build --yes
    """
    from workbench.log import project

    entries = [
        e for e in cache_entries(project(), tuple(folder or ())) if e.kind in (kinds or KINDS)
    ]
    if yes:
        for entry in entries:
            remove(entry)
    total = sum(entry.bytes for entry in entries)
    lines = [f"{entry.bytes / 2**20:10.1f} MiB  {entry.kind:11} {entry.path}" for entry in entries]
    end = "removed" if yes else "in all; workbench clean --yes removes them"
    show(
        {
            "bytes": total,
            "removed": yes,
            "entries": [{**vars(entry), "path": str(entry.path)} for entry in entries],
        },
        json,
        [*lines, f"{total / 2**20:10.1f} MiB  {end}" if entries else "nothing to remove"],
    )
