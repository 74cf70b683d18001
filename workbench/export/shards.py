"""Defines the shards of a model, and each shard as a module to trace with its
interface. Nothing here depends on Core ML."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from workbench.bundle import Options, StateEntry
from workbench.bundle.names import (
    ACC,
    BASE,
    EXPERT_IN,
    EXPERT_WEIGHT,
    HIDDEN,
    KV_WRITE_MASK,
    LOGITS,
    MATRIX_STATE,
    ORDER,
    POS,
    ROUTER_PROBS,
    ROUTER_SCORES,
    ROUTER_STATE,
    ROUTER_STATE_OUT,
    TAIL_KEEP,
    TAIL_SELECT,
    X,
    is_cache,
    split_layer,
)
from workbench.models.cache import Cache
from workbench.models.family import Plan

HEAD_ROWS = 16_384


@dataclass
class Spec:
    """One shard to make: its contents and the interface of its module.

    Shapes have ints and "T"; `rows` as in `bundle.Shard`. `states` maps a logical state
    (`layers.3.k_state`) to its entry, `buffers` each Core ML state to its shape.
    """

    name: str
    kind: str
    inputs: dict[str, list]
    outputs: dict[str, list]
    layers: tuple[int, int] = (0, 0)
    rows: tuple[int, int] = (0, 0)
    states: dict[str, StateEntry] = field(default_factory=dict)
    buffers: dict[str, list[int]] = field(default_factory=dict)


def specs(plan: Plan, options: Options) -> Iterator[Spec]:
    """Every shard of the model, in the order the decoder runs them."""
    L = plan.dims.L
    C = options.plane(plan.dims.C)
    V = plan.dims.V
    for first in range(0, L, options.layers_per_shard):
        last = min(first + options.layers_per_shard, L)
        yield layers_spec(plan, options, first, last)
        if options.moe == "routed":
            inputs = {EXPERT_IN: C, EXPERT_WEIGHT: options.plane(1), ACC: C}
            for e in range(plan.experts):
                name = f"expert_{first:02d}_{e:02d}"
                layers = (first, first + 1)
                yield Spec(name, "expert", inputs, {HIDDEN: C}, layers, (e, e + 1))
    for i, start in enumerate(range(0, V, HEAD_ROWS)):
        stop = min(start + HEAD_ROWS, V)
        outputs = {LOGITS: options.plane(stop - start)}
        yield Spec(f"head_{i:02d}", "head", {X: C}, outputs, rows=(start, stop))


def layers_spec(plan: Plan, options: Options, first: int, last: int) -> Spec:
    """The shard of decoder layers [first, last); with routed experts, of one layer up
    to its router."""
    C = options.plane(plan.dims.C)
    E = options.plane(plan.experts + 1)
    kind = "layers"
    name = f"layers_{first:02d}_{last - 1:02d}"
    outputs = {HIDDEN: C}
    if options.moe == "routed":
        kind = "router"
        name = f"router_{first:02d}"
        outputs = {BASE: C, EXPERT_IN: C, ROUTER_PROBS: E, ROUTER_SCORES: E}
    if plan.router_width:
        outputs |= {ROUTER_STATE_OUT: options.plane(plan.router_width)}
    inputs = layer_inputs(plan, options, first, last)
    states, buffers = place_states(plan, options, first, last)
    return Spec(
        name, kind, inputs, outputs, (first, last), states=states, buffers=buffers
    )


def layer_inputs(
    plan: Plan, options: Options, first: int, last: int
) -> dict[str, list]:
    """Inputs of a shard of layers [first, last): x, each rope table with its masks,
    write addresses, side inputs."""
    attending = [layer for layer in plan.layers[first:last] if layer.attends]
    layers = {layer.rope: layer for layer in attending}
    inputs = {X: options.plane(plan.dims.C)}
    for rope in plan.rope:
        if rope.name in layers:
            inputs |= options.layer_inputs(layers[rope.name], len(rope.inv_freq))
    if options.kv_write == "slice" and attending:
        del inputs[KV_WRITE_MASK]
        inputs |= {POS: [1]}
    if any(plan.side_states[first:last]):
        B = options.batch
        n = plan.tail
        inputs |= {TAIL_SELECT: [B, n, "T"]}
        if n > 2:
            inputs |= {TAIL_KEEP: [B, n, n]}
    if any(MATRIX_STATE in states for states in plan.side_states[first:last]):
        inputs |= {ORDER: [options.batch, 1, "T", 1]}
    if plan.router_width:
        inputs |= {ROUTER_STATE: options.plane(plan.router_width)}
    return inputs


def place_states(plan: Plan, options: Options, first: int, last: int):
    """The states of layers [first, last), each a tensor of its own, named by its layer
    in the shard where that has several; returns (states, buffers)."""
    states = {}
    buffers = {}
    for i in range(first, last):
        for name, sizes in plan.states(i, options).items():
            tensor = name
            if last - first > 1:
                tensor = f"layers_{i - first}_{name}"
            buffers[tensor] = [options.batch, *sizes]
            ring = None
            if is_cache(name):
                ring = options.ring(plan.layers[i].window)
            entry = StateEntry(tensor=tensor, shape=buffers[tensor], ring=ring)
            states[f"layers.{i}.{name}"] = entry
    return states, buffers


class LayerStack(nn.Module):
    """Decoder layers run one after the other, each on its own states; inputs and
    outputs in the order of the spec."""

    def __init__(self, blocks: list[nn.Module], spec: Spec):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.inputs = list(spec.inputs)
        self.outputs = list(spec.outputs)
        for tensor, shape in spec.buffers.items():
            self.register_buffer(tensor, torch.zeros(shape))
        self.states = [{} for _ in blocks]
        for name, state in spec.states.items():
            layer, leaf = split_layer(name)
            self.states[layer - spec.layers[0]][leaf] = state

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        io = dict(zip(self.inputs, tensors, strict=True))
        x = io[X]
        for block, states in zip(self.blocks, self.states, strict=True):
            x = block(x, Cache(self, states), io)
        io[HIDDEN] = x
        return tuple(io[name] for name in self.outputs)
