"""State: a mutable cell that outlives a call. The rules replace the value in it and never
write into the value; fused steps may (`miltorch.fuse`).

Every function without an underscore is a rule, see `registry`.
"""


class StateCell:
    """One state tensor. The rules only replace `value`, so that a value which they have
    returned never changes."""

    def __init__(self, value):
        self.value = value


def read_state(input):
    return input.value


def write_state(input, data):
    coreml_update_state(input, data)


def coreml_update_state(state, value):
    if value.shape != state.value.shape:
        raise ValueError(
            f"shape {list(value.shape)} for a state of shape {list(state.value.shape)}"
        )
    state.value = value
    return value
