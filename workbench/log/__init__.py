"""The experiment log: runs append rows; notebooks, reports and comparisons load
DataFrames.

The log is append-only Parquet with one immutable file per run and table, so that any
number of processes can write without a lock, and a killed one leaves no partial file. A
null was not measured. The log knows nothing of bundles and runtimes.

    schema       the tables, their columns, and the words that a column allows
    places       the folders of a log, and new run ids
    machine      columns that describe this machine now
    anonymous    removes what identifies a machine or its user from text

    runs         writes one run: `record` adds the machine's columns and the figures that
                 sum up its tables, and calls `store.append` for each table
    store        rows → checked Arrow tables → files (`append`); files → rows (`load`)
    parquet      reads and writes one file
    cache        the rows of the table `runs` that were read before
    condition    the text filters of `load`, such as ``T == 4 and depth > 0``
    verdicts     the two verdicts of rows that were written with one
    definitions  which rows of `fidelity` still mean what rows written now mean

    times        one value for each process; what disturbed it; the ratio of two settings
    comparison   two runs: the settings that differ, and the ratios of their times
    packed       a log as one anonymous file, and back

The names below are imported when they are first used, so that a process that measures
starts without pandas."""

from importlib import import_module

_MODULES = {
    "comparison": ("compare", "find_run"),
    "definitions": ("DEFINITION", "select_current"),
    "machine": (
        "environment",
        "identify_machine",
        "machine_state",
        "measure_disturbance",
    ),
    "packed": ("pack", "unpack"),
    "places": (
        "SHIPPED",
        "Root",
        "default_root",
        "new_run_id",
        "project",
        "shipped_runs",
    ),
    "runs": ("record",),
    "schema": ("SCHEMAS", "SETTINGS"),
    "store": ("append", "load", "plain"),
    "times": (
        "RatioEstimate",
        "by_process",
        "compare_settings",
        "disturbance_reasons",
        "select_undisturbed",
        "speeds",
        "summarize",
        "vary_too_much",
    ),
}
__all__ = sorted(name for names in _MODULES.values() for name in names)


def __getattr__(name: str):
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"workbench.log.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
