"""Which shards a model is cut into, and each one as a traced module with its interface. Knows no Core ML."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from workbench.bundle import Options, State
from workbench.bundle.contract import (
    ATTN_MASK,
    HIDDEN,
    K_STATE,
    KV_WRITE_MASK,
    LOGITS,
    POS,
    ROPE_COS,
    ROPE_SIN,
    V_STATE,
    X,
)
from workbench.models.family import Plan

HEAD_ROWS = 16_384
Shape = list  # of int and "T"


@dataclass
class Spec:
    """One shard to be made: how to build its module, and the interface that module has.

    `states` maps a buffer path to (logical name, shape); `sources` maps a parameter path of the module to the
    checkpoint tensor that fills it.
    """

    name: str
    kind: str
    layers: tuple[int, int]
    rows: tuple[int, int]
    inputs: dict[str, Shape]
    outputs: dict[str, Shape]
    states: dict[str, tuple[str, list[int]]]


def plane(width: int, options: Options) -> Shape:
    """Shape of an activation of `width` channels: [B, width, T, 1] or [B, width, 1, T]."""
    return [options.batch, width, "T", 1] if options.layout == "bct1" else [options.batch, width, 1, "T"]


def layer_inputs(plan: Plan, options: Options, first: int, last: int) -> dict[str, Shape]:
    """Inputs of a shard of layers [first, last): x, then each rope table and mask that its layers need."""
    B, S = options.batch, options.max_seq_len
    inputs = {X: plane(plan.dims.C, options)}
    used = {plan.layers[i].rope for i in range(first, last)}
    for rope in plan.rope:
        if rope.name in used:
            suffix = f"_{rope.name}" if rope.name else ""
            half = len(rope.inv_freq)
            inputs |= {n + suffix: [B, 1, "T", half] for n in (ROPE_COS, ROPE_SIN)} | {ATTN_MASK + suffix: [B, 1, "T", S]}
    return inputs | ({KV_WRITE_MASK: [B, 1, S, "T"]} if options.kv_write == "mask" else {POS: [1]})


def specs(plan: Plan, options: Options) -> Iterator[Spec]:
    """Every shard of the model, in the order the decoder runs them."""
    d, B = plan.dims, options.batch
    for first in range(0, d.L, options.layers_per_shard):
        last = min(first + options.layers_per_shard, d.L)
        kv = [B, d.H_kv, options.max_seq_len, d.D]
        states = {
            buffer_path(i - first, last - first, name): (f"layers.{i}.{name}", kv)
            for i in range(first, last)
            for name in (K_STATE, V_STATE)
        }
        yield Spec(f"layers_{first:02d}_{last - 1:02d}", "layers", (first, last), (0, 0),
                   layer_inputs(plan, options, first, last), {HIDDEN: plane(d.C, options)}, states)  # fmt: skip
    for start in range(0, d.V, HEAD_ROWS):
        stop = min(start + HEAD_ROWS, d.V)
        yield Spec(f"head_{start // HEAD_ROWS:02d}", "head", (0, 0), (start, stop),
                   {X: plane(d.C, options)}, {LOGITS: plane(stop - start, options)}, {})  # fmt: skip


def buffer_path(index: int, count: int, name: str) -> str:
    """Path of a state buffer in the traced module; Core ML's state carries it with underscores for dots."""
    return name if count == 1 else f"layers.{index}.{name}"


class Cache(nn.Module):
    """The state buffers of one decoder layer."""

    def __init__(self, states: dict[str, list[int]]):
        super().__init__()
        for name, shape in states.items():
            self.register_buffer(name, torch.zeros(shape))


class LayerStack(nn.Module):
    """Decoder layers run one after the other, each on its own cache; inputs in the order of `Spec.inputs`."""

    def __init__(self, blocks: list[nn.Module], spec: Spec, ropes: list[str]):
        super().__init__()
        self.blocks, self.names, self.ropes = nn.ModuleList(blocks), list(spec.inputs), ropes
        if len(blocks) == 1:
            for name, (_, shape) in spec.states.items():
                self.register_buffer(name, torch.zeros(shape))
        else:
            caches = [{} for _ in blocks]
            for path, (_, shape) in spec.states.items():
                _, index, name = path.split(".")
                caches[int(index)][name] = shape
            self.layers = nn.ModuleList(Cache(c) for c in caches)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        io = dict(zip(self.names, tensors, strict=True))
        x = io.pop(X)
        for i, (block, rope) in enumerate(zip(self.blocks, self.ropes, strict=True)):
            suffix = f"_{rope}" if rope else ""
            own = {n.removesuffix(suffix) if suffix else n: t for n, t in io.items()}
            x = block(x, self if len(self.blocks) == 1 else self.layers[i], own)
        return x


def state_entries(spec: Spec) -> dict[str, State]:
    """Logical state → Core ML state."""
    return {
        logical: State(tensor=path.replace(".", "_"), shape=shape) for path, (logical, shape) in spec.states.items()
    }  # fmt: skip
