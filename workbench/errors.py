"""The error of the workbench, `miltorch.errors.InputError`, under the name that its parts import."""

from miltorch.errors import InputError, last_message, one_line

__all__ = ["InputError", "last_message", "one_line"]
