"""Shards that follow one another on the portable decode path, in one compiled call."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from workbench.runtime.base import Model, State

if TYPE_CHECKING:
    from miltorch.fast.chain import Chain


class ShardChain:
    """Runs shards together for shapes of which each has run a call by itself, which
    validates them; see `miltorch.fast.program`.

    Args:
        models: loaded shards of any runtime.
        links: by the name of an output, the input that it is of the next shards.
    """

    def __init__(self, models: Sequence[Model], links: Mapping[str, str]):
        self.models, self.links = models, links
        shards = [model.shard for model in models]
        # between routers run experts, and each function of a shard has its own program
        self.apart = any(each.kind == "router" or each.functions for each in shards)
        self.chains: dict[tuple, Chain] = {}  # by the shapes of their inputs

    def run(
        self, inputs: Mapping[str, np.ndarray], states: Sequence[State]
    ) -> "Chain | None":
        """Runs every shard once and advances the states.

        Returns:
            The chain, which has the outputs of each shard until it runs again, and its
            times; None, with nothing done, where the shards have to run one by one.
        """
        if self.apart or not all(map(_compiled, self.models)):
            return None
        shapes = tuple([(name, value.shape) for name, value in inputs.items()])
        if shapes not in self.chains:
            from miltorch.fast.chain import linked

            programs = [model.fast for model in self.models]
            chain = linked(programs, dict(shapes), self.links)
            if chain is None:
                return None
            self.chains[shapes] = chain
        chain = self.chains[shapes]
        if chain.run(inputs, [state.raw.cells for state in states]):
            return chain
        return None


def _compiled(model: Model) -> bool:
    """Whether calls take the portable decode path."""
    return getattr(model, "fast", None) is not None and model.hook is None
