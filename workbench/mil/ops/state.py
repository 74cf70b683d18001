"""State: a mutable cell that outlives a call. Values in it are never written in place, only replaced."""

from . import rule


class Cell:
    """One state tensor. Replacing `value` is the only write, so a value handed out can never change."""

    def __init__(self, value):
        self.value = value


@rule()
def read_state(input):
    return input.value


@rule()
def write_state(input, data):
    _replace(input, data)


@rule()
def coreml_update_state(state, value):
    _replace(state, value)
    return value


def _replace(cell: Cell, value) -> None:
    if value.shape != cell.value.shape:
        raise ValueError(f"shape {list(value.shape)} for a state of shape {list(cell.value.shape)}")
    cell.value = value
