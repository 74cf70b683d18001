"""The experiment log: rows flow in from runs, DataFrames flow out to notebooks, reports and
comparisons.

Append-only Parquet, one immutable file per run per table, so any number of processes write without
a lock and a killed one leaves nothing half-written. Null means "not measured". Knows nothing of
bundles, runtimes or how a figure came about.
"""

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
    "project",
    "summary",
    "whole",
]
