"""Runs MIL programs on PyTorch: `.mlpackage` → `Program` → `Executable` → outputs. See README.md."""

from miltorch.errors import InputError
from miltorch.interpret import PRECISIONS, Executable, make_state
from miltorch.program import Program, Type, read

__all__ = ["PRECISIONS", "Executable", "InputError", "Program", "Type", "make_state", "read"]
