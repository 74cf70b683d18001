"""Runs a shard for several calls whose tokens are known from the start, such as those
of a prompt: one shard after another, each for all calls."""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np

from workbench.bundle.names import HIDDEN, LOGITS, ROUTER_STATE, ROUTER_STATE_OUT, X
from workbench.bundle.states import MATRIX
from workbench.runtime import Model, State

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
    states: Sequence[State] | None = None,
) -> list[dict[str, np.ndarray]]:
    """`decoder.run_layers` of shard `index` for one call after another, with a hook for
    each where the runtime has hooks, and a state of the shard (default: the decoder's
    for all of them). As every shard has states of its own, the results are those of
    running all shards call by call.

    A matrix state carries the rounding of every earlier token on: shards that have one
    run call by call, so that their sums are those of decoding."""
    model = decoder.layers[index]
    shard = model.shard
    own = decoder.states[index]
    states = states or [own] * len(ios)
    apart = shard.kind == "router" or MATRIX in map(shard.kind_of, shard.states)
    if not apart and getattr(model, "predict_calls", None):
        calls = [{name: io[name] for name in shard.inputs} for io in ios]
        outputs = model.predict_calls(calls, states, hooks)
        return [io | following(out) for io, out in zip(ios, outputs, strict=True)]
    results = []
    try:
        for call, (io, count) in enumerate(zip(ios, counts, strict=True)):
            decoder.states[index] = states[call]
            with model.hooked(hooks[call]) if hooks else nullcontext():
                results.append(decoder.run_layers(index, io, count))
    finally:
        decoder.states[index] = own
    return results


def head_inputs(decoder, hidden: Sequence[np.ndarray]) -> list[dict]:
    """What the head slices read for one call after another over hidden states
    [B, C, T], at most t_max columns each."""
    inputs = []
    for columns in hidden:
        dummies = decoder.options.width(columns.shape[2]) - columns.shape[2]
        if dummies:
            columns = np.pad(columns, ((0, 0), (0, 0), (0, dummies)))
        inputs.append({X: decoder.plane(columns)})
    return inputs


def head_logits(decoder, hidden: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list]:
    """Logits [B, T, V] of one call of the head after another, as `head_inputs` takes
    them, and the native ms of every call of a slice."""
    inputs, native_ms = head_inputs(decoder, hidden), []
    slices = [[] for _ in inputs]
    for model in decoder.heads:
        outputs, ms = predict_calls(model, inputs)
        native_ms += ms
        for own, output in zip(slices, outputs, strict=True):
            own.append(output[LOGITS])
    pairs = zip(slices, hidden, strict=True)
    return [joined(own, columns.shape[2]) for own, columns in pairs], native_ms


def joined(slices: Sequence[np.ndarray], T: int) -> np.ndarray:
    """Logits [B, T, V] of a call from those of the head slices, planes of T columns and
    perhaps more."""
    rows = [each.reshape(*each.shape[:2], -1) for each in slices]
    return np.concatenate(rows, axis=1)[:, :, :T].transpose(0, 2, 1)


def following(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the next shard reads of a layer shard's outputs: `x`, and `router_state`
    where the family has one."""
    return {
        name: outputs[output] for output, name in LINKS.items() if output in outputs
    }
