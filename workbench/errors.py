"""The error of the workbench, `miltorch.errors.InputError`, and its helpers under the
names that its parts import."""

from miltorch.errors import InputError, check_choice, last_message, one_line

__all__ = ["InputError", "check_choice", "last_message", "one_line"]
