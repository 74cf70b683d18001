"""The states of another exporter's packages, shown under the names and in the row order of
a bundle. Some packages move the rows of their caches from call to call; a `ForeignState`
moves them back when the bundle's order is read or written."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from workbench.bundle import Shard
from workbench.bundle.foreign import PlaneName
from workbench.runtime.base import PackageModel, State, interrupted_error

# the number of tokens after which the rows of every cache are in the order of a bundle
BUNDLE_ORDER = 0


class ForeignState(State):
    """The states of all packages of a shard under the logical names of a bundle,
    `layers.i.k_state` and `layers.i.v_state` [1, H_kv, rows, D].

    Args:
        models: a model of a package that has the state, by the state's number (see
            `bundle.foreign.Part`).

    Attributes:
        states: the packages' states, by their numbers.
        tensors: (state, name in it) of every tensor.
        rows_arranged_after: the number of tokens after which the packages have their
            rows in the present order, or `BUNDLE_ORDER`.
        is_interrupted: whether a call or a move of rows began and did not end, so that
            the order is not known. Packages that move no row can continue all the same.
    """

    def __init__(self, shard: Shard, models: Mapping[int, PackageModel]):
        super().__init__(shard)
        self.foreign = shard.foreign
        self.states = {number: model.make_state() for number, model in models.items()}
        self.tensors = [
            (self.states[number], name)
            for number, model in models.items()
            for name in model.program.states
        ]
        # how many channels of each plane belong to the heads of its layer
        self._head_widths = {
            entry.tensor: entry.shape[-1] for entry in shard.states.values()
        }
        self.rows_arranged_after = BUNDLE_ORDER
        self.is_interrupted = False

    def read_tensor(self, tensor: str) -> np.ndarray:
        return self.read_plane(tensor)[..., : self._head_widths[tensor]]

    def read_plane(self, tensor: str) -> np.ndarray:
        """A plane [1, H_kv, rows, width] with all its channels, which may be more than
        the heads of its layer have."""
        self.arrange_rows(BUNDLE_ORDER)
        plane = PlaneName.parse(tensor)
        value = self.states[plane.state].read(plane.tensor)
        planes = value.reshape(-1, *value.shape[-3:])
        return planes[[plane.index]]

    def write_tensor(self, tensor: str, value: np.ndarray) -> None:
        self.arrange_rows(BUNDLE_ORDER)
        plane = PlaneName.parse(tensor)
        state = self.states[plane.state]
        whole = state.read(plane.tensor)
        planes = whole.reshape(-1, *whole.shape[-3:])  # a view of `whole`
        planes[plane.index][..., : self._head_widths[tensor]] = value[0]
        state.write(plane.tensor, whole)

    def arrange_rows(self, token_count: int) -> None:
        """Moves every row to its place in the packages after `token_count` tokens, or,
        with `BUNDLE_ORDER`, to its place in a bundle.

        Raises:
            InputError: the present order is not known.
        """
        if not self.foreign.moves:
            return
        if self.is_interrupted:
            raise interrupted_error("sequence")
        if token_count == self.rows_arranged_after:
            return
        shift = self.foreign.row_shift
        with self.changing_order(token_count):
            for state, name in self.tensors:
                value = state.read(name)
                rows = value.shape[-2]
                # down by the present shift is the bundle's order, from there up by the
                # new shift the order that is wanted
                rows_down = shift(rows, self.rows_arranged_after)
                rows_up = shift(rows, token_count)
                state.write(name, np.roll(value, rows_down - rows_up, axis=-2))

    @contextmanager
    def changing_order(self, token_count: int) -> Iterator[None]:
        """Context manager for a block after which the rows are in the order after
        `token_count` tokens. If the block does not end, the order is not known."""
        # without `finally`: an exception must leave `is_interrupted` True
        self.is_interrupted = True
        yield
        self.is_interrupted = False
        self.rows_arranged_after = token_count

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager for a block after which all values and their order are those
        from before it. If the block does not end, they stay as it left them."""
        # Without `finally`: an exception leaves the states as after any call that did not
        # end. `is_interrupted` and `Sequences` then say whether a call can follow.
        before = [state.read(name) for state, name in self.tensors]
        rows_arranged_after = self.rows_arranged_after
        yield
        for (state, name), value in zip(self.tensors, before):
            state.write(name, value)
        self.rows_arranged_after = rows_arranged_after
