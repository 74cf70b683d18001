"""State: a mutable cell that outlives a call. Values in it are never written in place, only replaced."""

from miltorch.ops.registry import operation


class StateCell:
    """One state tensor. Replacing `value` is the only write, so a value handed out can never change."""

    def __init__(self, value):
        self.value = value


@operation()
def read_state(input):
    return input.value


@operation()
def write_state(input, data):
    _replace(input, data)


@operation()
def coreml_update_state(state, value):
    _replace(state, value)
    return value


def _replace(cell: StateCell, value) -> None:
    if value.shape != cell.value.shape:
        raise ValueError(f"shape {list(value.shape)} for a state of shape {list(cell.value.shape)}")
    cell.value = value
