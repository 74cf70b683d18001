"""Runs a shard for several calls whose tokens are known from the start, such as those
of a prompt: one shard after another, each for all calls."""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np

from workbench.bundle.names import HIDDEN, ROUTER_STATE, ROUTER_STATE_OUT, X
from workbench.bundle.states import MATRIX
from workbench.runtime import Model

# by the name of an output of a layer shard, the input that it is of the next one
LINKS = {HIDDEN: X, ROUTER_STATE_OUT: ROUTER_STATE}


def predict_calls(
    model: Model, calls: Sequence[dict[str, np.ndarray]]
) -> tuple[list[dict[str, np.ndarray]], list[float | None]]:
    """Outputs of `model.predict` for one call after another, without a state, and the
    native ms of every call. The portable runtime reads each weight once for all of
    them."""
    if len(calls) > 1 and getattr(model, "predict_calls", None):
        return model.predict_calls(calls), [model.last_native_ms] * len(calls)
    outputs, native_ms = [], []
    for inputs in calls:
        outputs.append(model.predict(inputs))
        native_ms.append(model.last_native_ms)
    return outputs, native_ms


def run_layers(
    decoder,
    index: int,
    ios: Sequence[dict[str, np.ndarray]],
    counts: Sequence[np.ndarray],
    hooks: Sequence | None = None,
) -> list[dict[str, np.ndarray]]:
    """`decoder.run_layers` of shard `index` for one call after another, with a hook for
    each where the runtime has hooks. As every shard has states of its own, the results
    are those of running all shards call by call.

    A matrix state carries the rounding of every earlier token on: shards that have one
    run call by call, so that their sums are those of decoding."""
    model = decoder.layers[index]
    shard = model.shard
    apart = shard.kind == "router" or MATRIX in map(shard.kind_of, shard.states)
    if not apart and getattr(model, "predict_calls", None):
        calls = [{name: io[name] for name in shard.inputs} for io in ios]
        outputs = model.predict_calls(calls, decoder.states[index], hooks)
        return [io | following(out) for io, out in zip(ios, outputs, strict=True)]
    results = []
    for call, (io, count) in enumerate(zip(ios, counts, strict=True)):
        with model.hooked(hooks[call]) if hooks else nullcontext():
            results.append(decoder.run_layers(index, io, count))
    return results


def following(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the next shard reads of a layer shard's outputs: `x`, and `router_state`
    where the family has one."""
    return {
        name: outputs[output] for output, name in LINKS.items() if output in outputs
    }
