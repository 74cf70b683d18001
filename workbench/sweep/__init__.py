"""Cross products of options, measured cell by cell in fresh processes and logged.

Words of this room:

    cell      what is measured once: one bundle, one way to run it, one round
    round     every round of a grid has each bundle and each way to run it once
    run       the measurement of a cell in a process of its own, and its row in the log's
              table `runs`; `Run` of a grid has lists of settings, `RunSettings` of a
              cell one value of each
    setting   what decides the times of a run on one machine, as a hash: the runs of all
              rounds share it (`configurations` has a row per setting, `processes` a
              row per run)

To measure:

    grid_file    the file of a grid, read without its schema
    grid         such a file → its cells, each one bundle, one way to run it and one
                 round
    identity     the columns and the hashes by which a run is found again in the log
    run          exports, measures and logs the cells that the log lacks
    lock         one measurement of a log at a time on a machine
    cluster      the same on the workers of a Dask cluster
    timing       the times of one measurement
    energy       the Neural Engine's energy during one
    seeded       the shipped grids of first light
    error_split  the error split of a bundle, measured and logged as a cell is

To read what the log has:

    results      the log's tables of a grid
    summary      the whole log as one table, with a row per setting
    table        that table as lines as wide as the terminal
    conclude     sentences on the differences of settings

The names below are imported when they are first used, so that a child process starts
without torch."""

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
