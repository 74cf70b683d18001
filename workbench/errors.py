"""The error of the workbench: `miltorch.errors.InputError`, under the name that its parts import."""

from miltorch.errors import InputError

__all__ = ["InputError"]
