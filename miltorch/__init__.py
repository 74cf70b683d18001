"""Runs MIL programs on PyTorch: `.mlpackage` → `Program` → `Executable` → outputs. See
README.md.

- `.mlpackage` → `Program`: `program.py` parses the protobuf, `blob.py` the file of weights.
- `Program` → `Executable`: `checks.py` checks the program, `constants.py` evaluates its
  constants, `steps.py` binds every operation to its rule in `ops`, and `execute.py` runs
  the steps. `precision.py` names its arithmetics. `joined.py` runs them for several calls at once.
- `Program` → fused `Program`: `fusion.py` replaces groups of operations, which it
  recognises by `patterns.py` with the help of `graph.py`, by the operations in
  `ops/fused.py`. `stored.py` has the weights of fused products, `kernels.py` the products.
- `shim.py` puts the executable under coremltools' `MLModel`; `coremltools_import.py` is the
  one place that imports coremltools; `errors.py` has `InputError`.

The names below are imported when they are first used, so that `miltorch.errors` loads
no torch."""

from importlib import import_module

_NAMES = {
    "PRECISIONS": "precision",
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
