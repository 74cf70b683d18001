"""The experiment log: runs append rows; notebooks, reports and comparisons load
DataFrames.

The log is append-only Parquet with one immutable file per run and table, so that any
number of processes write without a lock and a killed one leaves no partial file. Null
means "not measured". The log knows nothing of bundles and runtimes."""

from workbench.log.machine import environment
from workbench.log.schema import SCHEMAS
from workbench.log.stats import Comparison, compare, flags, summary
from workbench.log.store import (
    SHIPPED,
    adopt,
    append,
    default_root,
    files,
    load,
    new_run_id,
    plain,
    project,
    whole,
)

__all__ = [
    "SCHEMAS",
    "SHIPPED",
    "Comparison",
    "adopt",
    "append",
    "compare",
    "default_root",
    "environment",
    "files",
    "flags",
    "load",
    "new_run_id",
    "plain",
    "project",
    "summary",
    "whole",
]
