"""Which shards a model is cut into, and each one as a traced module with its interface. Knows no Core ML."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from workbench.bundle import Options, StateEntry
from workbench.bundle.manifest import (
    ACC,
    ATTN_MASK,
    BASE,
    EXPERT_IN,
    EXPERT_WEIGHT,
    HIDDEN,
    K_STATE,
    KV_STATE,
    KV_WRITE_MASK,
    LOGITS,
    POS,
    ROPE_COS,
    ROPE_SIN,
    ROUTER_PROBS,
    ROUTER_SCORES,
    ROUTER_STATE,
    ROUTER_STATE_OUT,
    SIDE_STATE,
    TAIL_SELECT,
    V_STATE,
    X,
    is_cache,
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
    for first in range(0, plan.dims.L, options.layers_per_shard):
        last = min(first + options.layers_per_shard, plan.dims.L)
        yield layers_spec(plan, options, first, last)
        if options.moe == "routed":
            yield from (expert_spec(plan, options, first, e) for e in range(plan.experts))
    for start in range(0, plan.dims.V, HEAD_ROWS):
        stop = min(start + HEAD_ROWS, plan.dims.V)
        yield Spec(f"head_{start // HEAD_ROWS:02d}", "head", {X: plane(plan.dims.C, options)},
                   {LOGITS: plane(stop - start, options)}, rows=(start, stop))  # fmt: skip


def layers_spec(plan: Plan, options: Options, first: int, last: int) -> Spec:
    """The shard of decoder layers [first, last); with routed experts, of one layer up to its router."""
    routed = options.moe == "routed"
    C, E, R = (plane(n, options) for n in (plan.dims.C, plan.experts + 1, plan.router_width))
    outputs = {HIDDEN: C} if not routed else {BASE: C, EXPERT_IN: C, ROUTER_PROBS: E, ROUTER_SCORES: E}
    if plan.router_width:
        outputs |= {ROUTER_STATE_OUT: R}
    states, buffers = (packed_states if options.states == "packed" else separate_states)(plan, options, first, last)
    name = f"router_{first:02d}" if routed else f"layers_{first:02d}_{last - 1:02d}"
    return Spec(name, "router" if routed else "layers", layer_inputs(plan, options, first, last), outputs,
                (first, last), states=states, buffers=buffers)  # fmt: skip


def expert_spec(plan: Plan, options: Options, layer: int, expert: int) -> Spec:
    C = plane(plan.dims.C, options)
    return Spec(f"expert_{layer:02d}_{expert:02d}", "expert", {EXPERT_IN: C, EXPERT_WEIGHT: plane(1, options), ACC: C},
                {HIDDEN: C}, (layer, layer + 1), (expert, expert + 1))  # fmt: skip


def plane(width: int, options: Options) -> SymbolicShape:
    """Shape of an activation of `width` channels: [B, width, T, 1] or [B, width, 1, T]."""
    return [options.batch, width, "T", 1] if options.layout == "bct1" else [options.batch, width, 1, "T"]


def layer_inputs(plan: Plan, options: Options, first: int, last: int) -> dict[str, SymbolicShape]:
    """Inputs of a shard of layers [first, last): x, each rope table with its masks, write addresses, side inputs."""
    B, used = options.batch, {layer.suffix: layer for layer in plan.layers[first:last]}
    inputs = {X: plane(plan.dims.C, options)}
    for rope in plan.rope:
        suffix = f"_{rope.name}" if rope.name else ""
        if suffix in used:
            slots, half = options.slots(used[suffix].window), len(rope.inv_freq)
            inputs |= {ROPE_COS + suffix: [B, 1, "T", half], ROPE_SIN + suffix: [B, 1, "T", half],
                       ATTN_MASK + suffix: [B, 1, "T", slots]}  # fmt: skip
            if options.kv_write == "mask":
                inputs |= {write_mask(used[suffix], options): [B, 1, slots, "T"]}
    if options.kv_write == "slice":
        inputs |= {POS: [1]}
    if plan.side_states:
        inputs |= {TAIL_SELECT: [B, 2, "T"]}
    if plan.router_width:
        inputs |= {ROUTER_STATE: plane(plan.router_width, options)}
    return inputs


def write_mask(layer, options: Options) -> str:
    """Name of the input that says where a layer writes: rings have their own, all other caches share one."""
    return KV_WRITE_MASK + (layer.suffix if is_ring(layer, options) else "")


def is_ring(layer, options: Options) -> bool:
    return options.sliding == "ring" and layer.window is not None


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
            B, heads, slots, D = shape
            start = buffers.get(tensor, [0, 0])[1]
            buffers[tensor] = [B, start + heads, slots, D]
            part = [(0, B), (start, start + heads), (0, slots), (0, D)]
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
        slots = options.slots(plan.layers[i].window)
        for name in (K_STATE, V_STATE):
            yield i, name, [B, d.H_kv, slots, d.D], slots if is_ring(plan.layers[i], options) else None
        for name, shape in plan.side_states.items():
            yield i, name, [B, *shape], None


class LayerStack(nn.Module):
    """Decoder layers run one after the other, each on its own states; inputs and outputs in the order of the spec."""

    def __init__(self, blocks: list[nn.Module], spec: Spec):
        super().__init__()
        self.blocks, self.inputs, self.outputs = nn.ModuleList(blocks), list(spec.inputs), list(spec.outputs)
        for tensor, shape in spec.buffers.items():
            self.register_buffer(tensor, torch.zeros(shape))
        self.states = [{name.rpartition(".")[2]: s for name, s in spec.states.items() if name.startswith(f"layers.{i}.")}
                       for i in range(*spec.layers)]  # fmt: skip

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        io = dict(zip(self.inputs, tensors, strict=True))
        x = io[X]
        for block, states in zip(self.blocks, self.states, strict=True):
            x = block(x, Cache(self, states), io)
        io[HIDDEN] = x
        return tuple(io[name] for name in self.outputs)
