"""Stateful Core ML shards of transformer layers: export them, prove them, decode them, measure them.

Heavy imports (torch, coremltools) happen when a name is first used.
"""

from importlib import import_module

_HOME = {"Bundle": "workbench.bundle", "Decoder": "workbench.decode", "InputError": "workbench.errors"}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
