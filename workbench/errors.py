"""The errors of the workbench: `InputError`, from `miltorch.errors` with its helpers
under the names that parts import, and `CellError`."""

from miltorch.errors import InputError, check_choice, last_message, one_line, visible

__all__ = [
    "CellError",
    "InputError",
    "check_choice",
    "last_message",
    "one_line",
    "visible",
]


class CellError(RuntimeError):
    """A notebook did not run to its end: a cell raised another error than InputError,
    or the kernel failed."""
