"""Stateful Core ML shards of transformer layers: export, validate, decode, measure.

The modules and names below are the front door. Each is imported when it is first used,
so `import workbench` loads neither torch nor coremltools."""

import os
from importlib import import_module

from miltorch.coremltools_import import without_gc
from workbench.heap import keep_freed_memory

# Threads of OpenMP that wait spinning take the processor from each other beside another
# process: a step took ten times as long. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# large arrays are freed and made again in every layer
keep_freed_memory()
_MODULES = {
    "gates": "workbench.check.gates",
    "golden": "workbench.check.golden",
    "log": "workbench.log",
    "plots": "workbench.plots",
    "roofline": "workbench.ane.roofline",
    "sweep": "workbench.sweep",
    "widgets": "workbench.widgets",
}
_NAMES = {
    "Bundle": "workbench.bundle",
    "Checkpoint": "workbench.models.checkpoint",
    "Decoder": "workbench.decode",
    "Experiment": "workbench.experiment",
    "Golden": "workbench.check.golden",
    "InputError": "workbench.errors",
    "export": "workbench.exporter",
    "validate": "workbench.check.validate",
}
__all__ = sorted([*_MODULES, *_NAMES])


def __getattr__(name: str):
    with without_gc():
        if name in _MODULES:
            return import_module(_MODULES[name])
        if name in _NAMES:
            return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'workbench' has no attribute {name!r}")
