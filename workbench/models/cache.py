"""The states of a decoder layer as its traced module reads and writes them, wherever
the export stores them."""

from torch import nn

from workbench.bundle import StateEntry
from workbench.bundle.names import KV_WRITE_MASK, POS


class Cache:
    """Named states over buffers of `module`; a write is in place, so that it becomes a
    state update in Core ML.

    Args:
        module: owner of the buffers.
        states: state name (`k_state`) → the buffer, or the part of one, that holds it.
    """

    def __init__(self, module: nn.Module, states: dict[str, StateEntry]):
        self.module = module
        self.states = states

    def read(self, name: str):
        state = self.states[name]
        buffer = self.module.get_buffer(state.tensor)
        return (
            buffer if state.part is None else buffer[state.index].reshape(state.shape)
        )

    def write(self, name: str, value) -> None:
        state = self.states[name]
        if state.part is not None:
            value = value.reshape([stop - start for start, stop in state.part])
        self.module.get_buffer(state.tensor)[state.index] = value

    def append(self, name: str, rows, io: dict, suffix: str):
        """Writes `rows` [B, H_kv, T, D] of this call and returns the whole cache [B,
        H_kv, S, D].

        With `kv_write_mask` [B, 1, S, T] (or the mask of this layer's rope table, when
        its cache is a ring), one-hot columns say which slot each token takes, a zero
        column none; with `pos` [1], tokens take slots pos … pos + T − 1."""
        if POS in io:
            state = self.states[name]
            pos = io[POS]
            heads = slice(*state.part[1]) if state.part else slice(None)
            self.module.get_buffer(state.tensor)[
                :, heads, pos : pos + rows.shape[2]
            ] = rows
        else:
            mask = io.get(KV_WRITE_MASK + suffix, io.get(KV_WRITE_MASK))
            self.write(
                name, self.read(name) * (1 - mask.sum(-1, keepdim=True)) + mask @ rows
            )
        return self.read(name)
