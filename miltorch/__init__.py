"""Runs MIL programs on PyTorch: `.mlpackage` → `Program` → `Executable` → outputs. See
README.md.

The names below are imported when they are first used, so that `miltorch.errors` loads
no torch."""

from importlib import import_module

_NAMES = {
    "PRECISIONS": "execute",
    "Executable": "execute",
    "InputError": "errors",
    "Program": "program",
    "Type": "program",
    "fuse": "fusion",
    "make_state": "execute",
    "read": "program",
    "run_calls": "joined",
}
__all__ = list(_NAMES)


def __getattr__(name: str):
    if name in _NAMES:
        return getattr(import_module(f"miltorch.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'miltorch' has no attribute {name!r}")
