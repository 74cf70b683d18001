"""The names of the precision modes, which `execute.py` explains. Imports no torch, so that
a command refuses another name at once."""

from miltorch.errors import check_choice

PRECISIONS = ("declared", "exact", "narrow")


def check_precision(precision: str) -> None:
    """Raises an InputError unless `precision` is one of `PRECISIONS`."""
    check_choice("precision", precision, PRECISIONS, "choose one of these")
