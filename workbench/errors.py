"""The errors of the workbench: `InputError` and its helpers, which are those of
`miltorch.errors`, `CellError`, and `is_full_disk`."""

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


# libraries in Rust (safetensors, tokenizers) report an error of the system as text
RUST_ERROR = re.compile(r"\(os error (\d+)\)")
FULL = errno.ENOSPC, errno.EDQUOT


class CellError(RuntimeError):
    """A notebook did not run to its end: a cell raised an error other than InputError, or
    the kernel failed."""


def is_full_disk(problem: BaseException | None) -> bool:
    """Whether an error, or an error that it was raised from, says that a disk is full or a
    quota is used up."""
    while problem is not None:
        number = getattr(problem, "errno", None)
        if rust := RUST_ERROR.search(str(problem)):
            number = int(rust[1])
        if number in FULL:
            return True
        problem = problem.__cause__
    return False
