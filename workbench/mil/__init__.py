"""MIL programs as PyTorch computations: `.mlpackage` → `Program` → results. Knows no bundle, no model family."""

from .interpret import Executable
from .program import Program, read

__all__ = ["Executable", "Program", "read"]
