"""Stateful Core ML shards of transformer layers: export, validate, decode, measure.

Modules `export`, `sweep`, `log`, `plots` and the names below are the front door. Each is imported when
it is first used, so `import workbench` loads neither torch nor coremltools.
"""

from importlib import import_module

_MODULES = ("export", "log", "plots", "sweep")
_NAMES = {
    "Bundle": "workbench.bundle",
    "Decoder": "workbench.decode",
    "InputError": "workbench.errors",
    "validate": "workbench.check.validate",
}
__all__ = sorted([*_MODULES, *_NAMES])


def __getattr__(name: str):
    if name in _MODULES:
        return import_module(f"workbench.{name}")
    if name in _NAMES:
        return getattr(import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'workbench' has no attribute {name!r}")
