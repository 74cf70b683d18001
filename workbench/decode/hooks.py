"""The hook that a caller of a decoder gives, and the hook that a model of a shard takes."""

from collections.abc import Callable
from functools import partial

from workbench.bundle import Shard
from workbench.runtime.base import Hook

# Called as hook(shard, op, outputs) after every operation of a program, with its results;
# it may return other results, which replace them.
ShardHook = Callable[[Shard, object, list], list | None]


def model_hook(hook: ShardHook | None, shard: Shard) -> Hook | None:
    """The hook for the model of this shard, which calls it as hook(op, outputs)."""
    return None if hook is None else partial(hook, shard)
