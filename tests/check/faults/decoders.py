"""How a fault is planted in a loaded decoder: edits of the steps and constants of a shard's program,
of the host's inputs, and of what a shard does in a call.

Nothing is exported again, so that a gate can be tried against a fault in seconds. Functions named
`edit_…`, `replace_…` or `clear_…` return the `plant` of a `Fault` (`Plant` or `LayerPlant`). The
others, such as `change_result`, edit at once; they serve plants that need several edits. `layer` is
the index of a shard of one layer; `module` is a suffix of the path of the torch module that a step
came from, such as "self_attn" or "layers.{layer}".
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from miltorch.program import Ref
from workbench import Decoder
from workbench.decode import Sequences

Plant = Callable[[Decoder], None]
LayerPlant = Callable[[Decoder, int], None]
"""The `plant` of a `Fault` in memory, and that of a fault in the shard of one layer."""
ArrayChange = Callable[[np.ndarray], np.ndarray]
TensorChange = Callable[[torch.Tensor], torch.Tensor]


# Steps of a shard's program


def find_steps(decoder: Decoder, layer: int, kind: str, module: str = "") -> list:
    """The steps of a layer with this MIL operation, at least one."""
    model = decoder.layer_shards[layer]
    module = module.format(layer=layer)
    steps = []
    for step in model.executable.body.steps:
        name = step.outputs[0].name if step.outputs else ""
        if step.op.kind == kind and model.shard.modules.get(name, "").endswith(module):
            steps.append(step)
    assert steps, (kind, module)
    return steps


def find_step_returning(decoder: Decoder, layer: int, name: str):
    """The step whose first result has this name."""
    steps = decoder.layer_shards[layer].executable.body.steps
    return next(step for step in steps if step.outputs and step.outputs[0].name == name)


def declared_shape(step) -> tuple[int | None, ...]:
    """The shape that the program declares for the first result of a step; None stands for T."""
    _, declared = step.op.outputs[0]
    return declared.shape


def change_result(step, change: TensorChange) -> None:
    """Changes what a step returns."""
    original = step.function
    step.function = lambda **arguments: change(original(**arguments))


def change_arguments(step, change: Callable[[dict], dict]) -> None:
    """Changes the arguments that a step's function is called with, by MIL's names."""
    original = step.function
    step.function = lambda **arguments: original(**change(arguments))


def edit_result(
    kind: str, module: str, change: TensorChange, index: int = 0
) -> LayerPlant:
    """Changes the result of a step; `index` chooses among the steps of this kind and module."""

    def plant(decoder, layer):
        change_result(find_steps(decoder, layer, kind, module)[index], change)

    return plant


def edit_arguments(
    kind: str, module: str, change: Callable[[dict], dict]
) -> LayerPlant:
    """Changes the arguments of the first step of this kind and module."""

    def plant(decoder, layer):
        change_arguments(find_steps(decoder, layer, kind, module)[0], change)

    return plant


def replace_function(kind: str, module: str, function: Callable) -> LayerPlant:
    """Puts another function in the place of the first step of this kind and module."""

    def plant(decoder, layer):
        find_steps(decoder, layer, kind, module)[0].function = function

    return plant


def edit_scalar(
    kind: str, module: str, parameter: str, change: TensorChange
) -> LayerPlant:
    """Changes a parameter wherever a step of this kind and module has a constant of one element
    for it."""

    def plant(decoder, layer):
        for step in find_steps(decoder, layer, kind, module):
            value = step.constants.get(parameter)
            if value is not None and value.numel() == 1:
                step.constants[parameter] = change(value)

    return plant


# Constants of a shard's program


def replace_constant(model, name: str, change: TensorChange) -> None:
    """Changes a constant of a loaded shard, in its table and in every step that uses it."""
    new = change(model.executable.constants[name].clone())
    model.executable.constants.values[name] = new
    for step in model.executable.body.steps:
        for parameter, value in step.constants.items():
            if step.op.inputs.get(parameter) == Ref(name):
                step.constants[parameter] = new.to(value.dtype)


def read_weight(decoder: Decoder, layer: int, tensor: str) -> torch.Tensor:
    """A copy of a weight as the program stores it; `tensor` is its name within the layer."""
    model = decoder.layer_shards[layer]
    name = model.shard.weights[f"model.layers.{layer}.{tensor}"]
    return model.executable.constants[name].clone()


def edit_weight(tensor: str, change: TensorChange) -> LayerPlant:
    """Changes a weight; `tensor` is its name within the layer."""

    def plant(decoder, layer):
        model = decoder.layer_shards[layer]
        name = model.shard.weights[f"model.layers.{layer}.{tensor}"]
        replace_constant(model, name, change)

    return plant


# The host's inputs


def change_inputs(
    decoder: Decoder, change: Callable[[dict, np.ndarray, np.ndarray, int], None]
) -> None:
    """Changes the inputs that the host computes for a call. `change(inputs, offsets, counts, T)`
    edits copies of the arrays in the dictionary `inputs`; `offsets` and `counts` hold the first
    position and the number of tokens of each sequence."""
    original = decoder.host.inputs

    def changed(offsets, counts, T):
        inputs = {
            name: array.copy() for name, array in original(offsets, counts, T).items()
        }
        change(inputs, offsets, counts, T)
        return inputs

    decoder.host.inputs = changed


def edit_input(name: str, change: ArrayChange) -> Plant:
    """Changes one of the host's inputs."""
    return edit_inputs([name], change)


def edit_inputs(names: Sequence[str], change: ArrayChange) -> Plant:
    """Changes several of the host's inputs in the same way."""

    def plant(decoder):
        def changed(inputs, offsets, counts, T):
            for name in names:
                inputs[name] = np.float32(change(inputs[name]))

        change_inputs(decoder, changed)

    return plant


# Sequences


def change_sequences(decoder: Decoder, change: Callable[[Sequences], None]) -> None:
    """Changes the current sequences of a decoder and all that it makes from now on."""
    original = decoder.new_sequences

    def new_sequences(after=None):
        seqs = original(after)
        change(seqs)
        return seqs

    change(decoder.seqs)
    decoder.new_sequences = new_sequences


# Calls of a shard


def wrap_calls(model, change: Callable[[Callable, dict, object], dict]) -> None:
    """Replaces what a loaded shard does in each call: `change(predict, inputs, state)` returns the
    outputs, where `predict(inputs, state)` is the original call."""
    original = model.predict_calls

    def predict_calls(calls, states, hooks):
        outputs = []
        for inputs, state, hook in zip(calls, states, hooks):

            def predict(inputs, state, hook=hook):
                return original([inputs], [state], [hook])[0]

            outputs.append(change(predict, inputs, state))
        return outputs

    model.predict_calls = predict_calls


def edit_shard_input(layers: Sequence[int], name: str, change: ArrayChange) -> Plant:
    """Changes an input of the shards of some layers, whoever computes it."""

    def call(predict, inputs, state):
        return predict(inputs | {name: change(inputs[name])}, state)

    def plant(decoder):
        for layer in layers:
            wrap_calls(decoder.layer_shards[layer], call)

    return plant


def clear_state(layers: Sequence[int], name: str) -> Plant:
    """Zeros a state of some layers after each call."""

    def plant_in_shard(model, state_name):
        def call(predict, inputs, state):
            outputs = predict(inputs, state)
            state.write(state_name, np.zeros_like(state.read(state_name)))
            return outputs

        wrap_calls(model, call)

    def plant(decoder):
        for layer in layers:
            plant_in_shard(decoder.layer_shards[layer], f"layers.{layer}.{name}")

    return plant
