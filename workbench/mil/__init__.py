"""MIL programs as PyTorch computations: `.mlpackage` → `Program` → results. Knows no bundle, no model family."""

from .interpret import PRECISIONS, Executable, make_state
from .program import Program, Type, read

__all__ = ["PRECISIONS", "Executable", "Program", "Type", "make_state", "read"]
