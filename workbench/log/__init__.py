"""The experiment log: runs append rows; notebooks, reports and comparisons load
DataFrames.

The log is append-only Parquet with one immutable file per run and table, so that any
number of processes write without a lock and a killed one leaves no partial file. Null
means "not measured". The log knows nothing of bundles and runtimes."""

from workbench.log.machine import environment, state
from workbench.log.runs import pack, record, unpack
from workbench.log.schema import SCHEMAS
from workbench.log.stats import Comparison, compare, flags
from workbench.log.store import (
    SHIPPED,
    Root,
    append,
    default_root,
    find,
    load,
    new_run_id,
    plain,
    project,
    short,
    whole,
)

__all__ = [
    "SCHEMAS",
    "SHIPPED",
    "Root",
    "Comparison",
    "append",
    "compare",
    "default_root",
    "environment",
    "find",
    "flags",
    "load",
    "new_run_id",
    "pack",
    "plain",
    "project",
    "record",
    "short",
    "state",
    "unpack",
    "whole",
]
