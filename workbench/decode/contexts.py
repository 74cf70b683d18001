"""What holds of a decoder within a `with` statement or a call, and ends with it, however that ends."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps

from workbench.bundle import Shard
from workbench.runtime import Model


@contextmanager
def of_models(decoder, context_of: Callable[[Model], AbstractContextManager]) -> Iterator[None]:
    """Enters `context_of(model)` for every model of a decoder, those of experts that are loaded
    meanwhile included."""
    experts = decoder.experts
    load = experts.load
    with ExitStack() as contexts:

        def loaded(shard: Shard) -> Model:
            model = load(shard)
            contexts.enter_context(context_of(model))
            return model

        for model in (*decoder.layers, *decoder.heads, *experts.models.values()):
            contexts.enter_context(context_of(model))
        contexts.callback(setattr, experts, "load", load)
        experts.load = loaded
        yield


def literal(gate: Callable) -> Callable:
    """Decorates a gate, a function whose first argument is a decoder: it runs the literal graph
    (`Decoder.literal`) on sequences of its own (`Decoder.set_aside`)."""

    @wraps(gate)
    def run(decoder, *arguments, **options):
        with decoder.literal(), decoder.set_aside():
            return gate(decoder, *arguments, **options)

    return run
