"""Which shards a model is cut into, and each one as a traced module with its interface. Knows no Core ML."""

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
    K_STATE,
    KV_STATE,
    KV_WRITE_MASK,
    LOGITS,
    POS,
    ROUTER_PROBS,
    ROUTER_SCORES,
    ROUTER_STATE,
    ROUTER_STATE_OUT,
    SIDE_STATE,
    TAIL_SELECT,
    V_STATE,
    X,
    is_cache,
    split_layer,
)
from workbench.models.cache import Cache
from workbench.models.family import Plan

HEAD_ROWS = 16_384
SymbolicShape = list  # of int and "T"


@dataclass
class Spec:
    """One shard to be made: what it holds and the interface its module has.

    `rows` as in `bundle.Shard`. `states` maps a logical state (`layers.3.k_state`) to where it lives, `buffers` each Core
    ML state to its shape.
    """

    name: str
    kind: str
    inputs: dict[str, SymbolicShape]
    outputs: dict[str, SymbolicShape]
    layers: tuple[int, int] = (0, 0)
    rows: tuple[int, int] = (0, 0)
    states: dict[str, StateEntry] = field(default_factory=dict)
    buffers: dict[str, list[int]] = field(default_factory=dict)


def specs(plan: Plan, options: Options) -> Iterator[Spec]:
    """Every shard of the model, in the order the decoder runs them."""
    L, C, V = plan.dims.L, options.plane(plan.dims.C), plan.dims.V
    for first in range(0, L, options.layers_per_shard):
        yield layers_spec(plan, options, first, min(first + options.layers_per_shard, L))
        if options.moe == "routed":
            inputs = {EXPERT_IN: C, EXPERT_WEIGHT: options.plane(1), ACC: C}
            for e in range(plan.experts):
                yield Spec(
                    f"expert_{first:02d}_{e:02d}",
                    "expert",
                    inputs,
                    {HIDDEN: C},
                    (first, first + 1),
                    (e, e + 1),
                )
    for i, start in enumerate(range(0, V, HEAD_ROWS)):
        stop = min(start + HEAD_ROWS, V)
        yield Spec(
            f"head_{i:02d}",
            "head",
            {X: C},
            {LOGITS: options.plane(stop - start)},
            rows=(start, stop),
        )


def layers_spec(plan: Plan, options: Options, first: int, last: int) -> Spec:
    """The shard of decoder layers [first, last); with routed experts, of one layer up to its router."""
    C, E = options.plane(plan.dims.C), options.plane(plan.experts + 1)
    kind, name, outputs = "layers", f"layers_{first:02d}_{last - 1:02d}", {HIDDEN: C}
    if options.moe == "routed":
        kind, name = "router", f"router_{first:02d}"
        outputs = {BASE: C, EXPERT_IN: C, ROUTER_PROBS: E, ROUTER_SCORES: E}
    if plan.router_width:
        outputs |= {ROUTER_STATE_OUT: options.plane(plan.router_width)}
    states, buffers = (packed_states if options.states == "packed" else separate_states)(
        plan, options, first, last
    )
    return Spec(
        name,
        kind,
        layer_inputs(plan, options, first, last),
        outputs,
        (first, last),
        states=states,
        buffers=buffers,
    )


def layer_inputs(plan: Plan, options: Options, first: int, last: int) -> dict[str, SymbolicShape]:
    """Inputs of a shard of layers [first, last): x, each rope table with its masks, write addresses, side inputs."""
    layers = {layer.rope: layer for layer in plan.layers[first:last]}
    inputs = {X: options.plane(plan.dims.C)}
    for rope in plan.rope:
        if rope.name in layers:
            inputs |= options.layer_inputs(layers[rope.name], len(rope.inv_freq))
    if options.kv_write == "slice":
        del inputs[KV_WRITE_MASK]
        inputs |= {POS: [1]}
    if plan.side_states:
        inputs |= {TAIL_SELECT: [options.batch, 2, "T"]}
    if plan.router_width:
        inputs |= {ROUTER_STATE: options.plane(plan.router_width)}
    return inputs


def separate_states(plan: Plan, options: Options, first: int, last: int):
    """Every state a tensor of its own, named by its layer where the shard has several; (states, buffers)."""
    states = {}
    for i, name, shape, ring in layer_states(plan, options, first, last):
        tensor = name if last - first == 1 else f"layers_{i}_{name}"
        states[f"layers.{i}.{name}"] = StateEntry(tensor=tensor, shape=shape, ring=ring)
    return states, {state.tensor: state.shape for state in states.values()}


def packed_states(plan: Plan, options: Options, first: int, last: int):
    """One tensor `kv_state` [B, 2·H_kv·l, S, D] (and one for rings, of their size), one `side_state` [B, l, width]."""
    states, buffers, column = {}, {}, {}
    width = sum(rows * columns for rows, columns in plan.side_states.values())
    for i, name, shape, ring in layer_states(plan, options, first, last):
        if is_cache(name):
            tensor = KV_STATE + (plan.layers[i].suffix if ring else "")
            B, heads, rows, D = shape
            start = buffers.get(tensor, [0, 0])[1]
            buffers[tensor] = [B, start + heads, rows, D]
            part = [(0, B), (start, start + heads), (0, rows), (0, D)]
        else:
            tensor, (B, rows, columns), start = SIDE_STATE, shape, column.get(i, 0)
            column[i] = start + rows * columns
            buffers[tensor] = [B, last - first, width]
            part = [(0, B), (i - first, i - first + 1), (start, column[i])]
        states[f"layers.{i}.{name}"] = StateEntry(tensor=tensor, shape=shape, part=part, ring=ring)
    return states, buffers


def layer_states(plan: Plan, options: Options, first: int, last: int):
    """(layer, state name, shape, ring size or None) of every state of layers [first, last)."""
    d, B = plan.dims, options.batch
    for i in range(first, last):
        window = plan.layers[i].window
        for name in (K_STATE, V_STATE):
            yield i, name, [B, d.H_kv, options.slots(window), d.D], options.ring(window)
        for name, shape in plan.side_states.items():
            yield i, name, [B, *shape], None


class LayerStack(nn.Module):
    """Decoder layers run one after the other, each on its own states; inputs and outputs in the order of the spec."""

    def __init__(self, blocks: list[nn.Module], spec: Spec):
        super().__init__()
        self.blocks, self.inputs, self.outputs = (
            nn.ModuleList(blocks),
            list(spec.inputs),
            list(spec.outputs),
        )
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
