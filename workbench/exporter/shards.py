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
    CONV_STATE,
    EXPERT_IN,
    EXPERT_WEIGHT,
    HIDDEN,
    KV_WRITE_MASK,
    LOGITS,
    MATRIX_STATE,
    ORDER,
    PER_LAYER,
    POS,
    ROUTER_PROBS,
    ROUTER_SCORES,
    ROUTER_STATE,
    ROUTER_STATE_OUT,
    TAIL_KEEP,
    TAIL_SELECT,
    X0,
    X,
    is_cache,
    split_layer,
)
from workbench.models.family import LAYER_INPUT, Plan

HEAD_ROWS = 16_384
"""The most rows of the LM head in one shard."""


@dataclass
class Spec:
    """One shard to write: its contents and the interface of its module. Its fields are
    those of the same names in `bundle.Shard`. A shape has ints and "T", the tokens of a
    call.

    Args:
        kind: `layers`, `router`, `expert` or `head`.
        layers: the decoder layers [start, stop); (0, 0) in a head.
        rows: the rows [start, stop) of the tensors that the shard holds in part. `head`:
            rows of the vocabulary. `expert`: [expert, expert + 1). `layers`: rows of
            Gemma 4's projection per layer. (0, 0) where it holds no tensor in part.
        states: logical state (`layers.3.k_state`) → its entry.
    """

    name: str
    kind: str
    inputs: dict[str, list]
    outputs: dict[str, list]
    layers: tuple[int, int] = (0, 0)
    rows: tuple[int, int] = (0, 0)
    states: dict[str, StateEntry] = field(default_factory=dict)


def specs(plan: Plan, options: Options) -> Iterator[Spec]:
    """Every shard of the model, in the order in which the decoder runs them."""
    for first in range(0, plan.dims.L, options.layers_per_shard):
        last = min(first + options.layers_per_shard, plan.dims.L)
        yield layers_spec(plan, options, first, last)
        if options.moe == "routed":
            for expert in range(plan.experts):
                yield _expert_spec(plan, options, first, expert)
    for index, start in enumerate(range(0, plan.dims.V, HEAD_ROWS)):
        stop = min(start + HEAD_ROWS, plan.dims.V)
        yield _head_spec(plan, options, index, start, stop)


def _expert_spec(plan: Plan, options: Options, layer: int, expert: int) -> Spec:
    """The shard of one expert of a layer."""
    C = options.activation_shape(plan.dims.C)
    return Spec(
        name=f"expert_{layer:02d}_{expert:02d}",
        kind="expert",
        inputs={EXPERT_IN: C, EXPERT_WEIGHT: options.activation_shape(1), ACC: C},
        outputs={HIDDEN: C},
        layers=(layer, layer + 1),
        rows=(expert, expert + 1),
    )


def _head_spec(plan: Plan, options: Options, index: int, start: int, stop: int) -> Spec:
    """The shard of the rows [start, stop) of the vocabulary, slice `index` of the
    head."""
    return Spec(
        name=f"head_{index:02d}",
        kind="head",
        inputs={X: options.activation_shape(plan.dims.C)},
        outputs={LOGITS: options.activation_shape(stop - start)},
        rows=(start, stop),
    )


def layers_spec(plan: Plan, options: Options, first: int, last: int) -> Spec:
    """The shard of decoder layers [first, last); with routed experts, of one layer up
    to its router.

    Its inputs are x, each rope table with its masks, write addresses, side inputs; their
    order here is that of the program. Each state is a separate tensor; in a shard of
    several layers its name begins with the number of its layer in the shard."""
    C = options.activation_shape(plan.dims.C)
    E = options.activation_shape(plan.experts + 1)
    B = options.batch
    # layers of one rope table have the same inputs: one of them stands for all
    layer_of_rope = {}
    for layer in plan.layers[first:last]:
        if layer.attends:
            layer_of_rope[layer.rope] = layer
    inputs = {X: C}
    for rope in plan.rope:
        if rope.name in layer_of_rope:
            layer = layer_of_rope[rope.name]
            inputs |= options.layer_inputs(layer, len(rope.inv_freq))
    if options.kv_write == "slice" and layer_of_rope:
        del inputs[KV_WRITE_MASK]
        inputs[POS] = [1]
    side_states = [states for states in plan.side_states[first:last] if states]
    if side_states:
        n = side_states[0][CONV_STATE][0]
        inputs[TAIL_SELECT] = [B, n, "T"]
        if n > 2:
            inputs[TAIL_KEEP] = [B, n, n]
    if any(MATRIX_STATE in states for states in side_states):
        inputs[ORDER] = [B, 1, "T", 1]
    if P := plan.dims.P:
        inputs |= {X0: C, PER_LAYER: options.activation_shape((last - first) * P)}
    kind = "layers"
    name = f"layers_{first:02d}_{last - 1:02d}"
    outputs = {HIDDEN: C}
    if options.moe == "routed":
        kind = "router"
        name = f"router_{first:02d}"
        outputs = {BASE: C, EXPERT_IN: C, ROUTER_PROBS: E, ROUTER_SCORES: E}
    if plan.router_width:
        R = options.activation_shape(plan.router_width)
        inputs[ROUTER_STATE] = outputs[ROUTER_STATE_OUT] = R
    _add_shared_rows(plan, options, first, last, inputs, outputs)
    return Spec(
        name=name,
        kind=kind,
        inputs=inputs,
        outputs=outputs,
        layers=(first, last),
        rows=(first * P, last * P),
        states=_state_entries(plan, options, first, last),
    )


def _add_shared_rows(
    plan: Plan, options: Options, first: int, last: int, inputs: dict, outputs: dict
) -> None:
    """Adds cache rows that a layer copies from another one: to the inputs of a shard that
    has only the copying layer, and to the outputs of one that has only the source."""
    for i, layer in enumerate(plan.layers):
        if layer.source is None:
            continue
        has_copy = first <= i < last
        has_source = first <= layer.source < last
        if has_copy == has_source:  # the rows stay inside the shard, or outside
            continue
        H_kv, D = layer.heads(plan.dims)
        interface = inputs if has_copy else outputs
        interface |= dict.fromkeys(layer.shared_rows, [options.batch, H_kv, "T", D])


def _state_entries(
    plan: Plan, options: Options, first: int, last: int
) -> dict[str, StateEntry]:
    """Logical state → its entry, of the layers [first, last)."""
    states = {}
    for i in range(first, last):
        prefix = f"layers_{i - first}_" if last - first > 1 else ""
        for leaf, sizes in plan.states(i, options).items():
            ring = options.ring_rows(plan.layers[i].window) if is_cache(leaf) else None
            shape = [options.batch, *sizes]
            entry = StateEntry(tensor=prefix + leaf, shape=shape, ring=ring)
            states[f"layers.{i}.{leaf}"] = entry
    return states


class LayerStack(nn.Module):
    """Decoder layers that run one after the other, each on its own states. Inputs and
    outputs are in the order of the spec.

    Args:
        shared: computes the input `LAYER_INPUT` of each layer from the shard's inputs;
            None: the family has no such input.
    """

    def __init__(
        self, blocks: list[nn.Module], spec: Spec, shared: nn.Module | None = None
    ):
        super().__init__()
        self.shared = shared
        self.blocks = nn.ModuleList(blocks)
        self.inputs = list(spec.inputs)
        self.outputs = list(spec.outputs)
        self.states = [{} for _ in blocks]
        for name, state in spec.states.items():
            self.register_buffer(state.tensor, torch.zeros(state.shape))
            layer, leaf = split_layer(name)
            self.states[layer - spec.layers[0]][leaf] = state.tensor

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        io = dict(zip(self.inputs, tensors, strict=True))
        x = io[X]
        layer_inputs = self.shared(io) if self.shared else [None] * len(self.blocks)
        for block, states, layer_input in zip(
            self.blocks, self.states, layer_inputs, strict=True
        ):
            io[LAYER_INPUT] = layer_input
            cache = {leaf: self.get_buffer(name) for leaf, name in states.items()}
            x = block(x, cache, io)
        io[HIDDEN] = x
        return tuple(io[name] for name in self.outputs)
