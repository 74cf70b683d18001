"""The errors of the workbench: `InputError`, from `miltorch.errors` with its helpers
under the names that parts import, `CellError`, and `is_full_disk`."""

import errno
import re

from miltorch.errors import InputError, check_choice, last_message, one_line, visible

__all__ = [
    "CellError",
    "InputError",
    "check_choice",
    "is_full_disk",
    "last_message",
    "one_line",
    "visible",
]


# libraries in Rust report an error of the system as a text
RUST_ERROR = re.compile(r"\(os error (\d+)\)")
FULL = errno.ENOSPC, errno.EDQUOT


class CellError(RuntimeError):
    """A notebook did not run to its end: a cell raised another error than InputError,
    or the kernel failed."""


def is_full_disk(problem: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, is that of a disk without
    room."""
    while problem is not None:
        number = getattr(problem, "errno", None)
        if rust := RUST_ERROR.search(str(problem)):
            number = int(rust[1])
        if number in FULL:
            return True
        problem = problem.__cause__
    return False
