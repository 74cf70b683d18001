"""MIL programs as PyTorch computations: `.mlpackage` → `Program` → results. Knows no bundle, no model family."""

from miltorch.interpret import PRECISIONS, Executable, make_state
from miltorch.program import Program, Type, read

__all__ = ["PRECISIONS", "Executable", "Program", "Type", "make_state", "read"]
