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
        states: state name (`k_state`) → the buffer that holds it.
    """

    def __init__(self, module: nn.Module, states: dict[str, StateEntry]):
        self.module = module
        self.states = states

    def read(self, name: str):
        return self.module.get_buffer(self.states[name].tensor)

    def write(self, name: str, value) -> None:
        self.read(name)[:] = value

    def append(self, name: str, rows, io: dict, suffix: str):
        """Writes `rows` [B, H_kv, T, D] of this call and returns the whole cache [B,
        H_kv, S, D].

        With `kv_write_mask` [B, 1, S, T] (or the mask of this layer's rope table, when
        its cache is a ring), one-hot columns say which slot each token takes, a zero
        column none; with `pos` [1], tokens take slots pos … pos + T − 1."""
        if POS in io:
            pos = io[POS]
            self.read(name)[:, :, pos : pos + rows.shape[2]] = rows
        else:
            mask = io.get(KV_WRITE_MASK + suffix, io.get(KV_WRITE_MASK))
            self.write(
                name, self.read(name) * (1 - mask.sum(-1, keepdim=True)) + mask @ rows
            )
        return self.read(name)
