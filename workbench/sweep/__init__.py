"""Cross products of options, measured cell by cell in fresh processes and logged.

`grid` describes the cells, and `run` measures those that the log lacks. `results` reads
the log's tables of a grid, `summary` the whole log as one table. `timing` makes one
measurement, `cluster` runs cells on other machines, and `identity` computes the columns
and the hashes of a run. The names below are imported when they are first used, so that
a child process starts without torch."""

from importlib import import_module

_MODULES = {
    "RUN_AXES": "grid",
    "Grid": "grid",
    "cells": "grid",
    "load_grid": "grid",
    "make_grid": "grid",
    "missing": "run",
    "sweep": "run",
    "configurations": "results",
    "per_process": "results",
    "processes": "results",
    "stored_tables": "results",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
