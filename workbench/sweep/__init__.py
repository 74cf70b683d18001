"""Cross products of options, measured cell by cell in fresh processes and logged.

`grid` describes the cells, `execute` measures those that the log lacks, `results` reads
the log's tables of a grid. `cell` and `timing` are one measurement, `process` and
`cluster` run it, `runs` describes and records rows of the log. The names below are
imported when they are first used, so that a child process starts without torch."""

from importlib import import_module

_MODULES = {
    "RUN_AXES": "grid",
    "Grid": "grid",
    "cells": "grid",
    "load_grid": "grid",
    "make_grid": "grid",
    "bundle_for": "cell",
    "done_cells": "execute",
    "sweep": "execute",
    "configurations": "results",
    "offered_machines": "results",
    "stored_tables": "results",
    "varied_axes": "results",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
