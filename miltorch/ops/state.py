"""State: a mutable cell that outlives a call. The rules never write a value in it in
place, they replace it; fused steps may (`miltorch.fuse`)."""


class StateCell:
    """One state tensor. Replacing `value` is the only write of the rules, so a value that
    they hand out can never change."""

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
