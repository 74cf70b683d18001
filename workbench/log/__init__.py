"""The experiment log: runs append rows; notebooks, reports and comparisons load
DataFrames.

The log is append-only Parquet with one immutable file per run and table, so that any
number of processes can write without a lock, and a killed one leaves no partial file. A
null was not measured. The log knows nothing of bundles and runtimes. The names below
are imported when they are first used, so that a process that measures starts without
pandas."""

from importlib import import_module

_MODULES = {
    "definitions": ("DEFINITION", "select_current"),
    "machine": ("disturbance", "environment", "state"),
    "packed": ("pack", "unpack"),
    "places": ("SHIPPED", "Root", "default_root", "new_run_id", "project"),
    "runs": ("record",),
    "schema": ("SCHEMAS", "SETTINGS"),
    "stats": ("compare", "find"),
    "store": ("append", "load", "plain"),
    "times": (
        "Difference",
        "vary_too_much",
        "by_process",
        "difference",
        "disturbed",
        "select_undisturbed",
        "speeds",
        "summarize",
    ),
}
__all__ = sorted(name for names in _MODULES.values() for name in names)


def __getattr__(name: str):
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"workbench.log.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
