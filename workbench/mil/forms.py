"""Forms that the decode path recognises in a program, and what stands for them: `Graph(program).special`.

A form is a function of the graph and one operation. It returns None, or the calls that stand for the operation:
(function, names of its operands, name of its result, or None for the operation's own).
"""

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from . import kernels
from .interpret import _plain, _tensor
from .ops import RULES
from .program import Op, Program, Ref

FEW = 8  # vectors that an fp16 product takes before a float32 one overtakes it
BLOCKED = -1e4  # an additive mask at or below this gives a weight of exactly 0 beside any attended column


class Graph:
    """What produces and what reads each value, which are constant, and which forms are recognised."""

    def __init__(self, program: Program):
        self.program, self.ops = program, [op for op in program.block.ops if op.kind != "const"]
        self.made = {name: op for op in program.block.ops for name, _ in op.outputs}
        self.types = program.inputs | {name: kind for op in program.block.ops for name, kind in op.outputs}
        self.order = {id(op): i for i, op in enumerate(self.ops)}
        self.folded: dict[str, torch.Tensor] = {}
        self.special: dict = {}  # first output (or id) of an operation → the calls that stand for it
        for op in self.ops:
            for form in (linear, cache_write, attention):
                found = form(self, op)
                if found is not None:
                    self.special[op.outputs[0][0] if op.outputs else id(op)] = found

    def live(self) -> list[Op]:
        """Operations that outputs and state writes still need once the forms stand for theirs, in order."""
        needed, kept = set(self.program.outputs), []
        for op in reversed(self.ops):
            special = self.special.get(op.outputs[0][0] if op.outputs else id(op))
            if op.outputs and not any(name in needed for name, _ in op.outputs):
                continue
            if op.kind.startswith("constexpr_"):
                continue
            kept.append(op)
            if special is not None:
                needed.update(name for _, names, _ in special for name in names)
            else:
                needed.update(ref.name for ref in _refs(op))
        return kept[::-1]

    def settled(self, read: Op) -> bool:
        """Whether nothing writes the state that `read` reads after it."""
        writes = [o for o in self.ops if o.kind == "write_state" and o.inputs["input"] == read.inputs["input"]]
        return all(self.order[id(o)] < self.order[id(read)] for o in writes)

    def producer(self, source, kind: str | None = None) -> Op | None:
        """The operation that makes `source`, when it is of `kind`."""
        op = self.made.get(source.name) if isinstance(source, Ref) else None
        return op if op is not None and kind in (None, op.kind) else None

    def constant(self, source):
        """The float32 (or integer) value of a constant, decompressed; None for anything computed."""
        if isinstance(source, list):
            known = [self.constant(s) for s in source]
            return None if any(k is None for k in known) else known
        if not isinstance(source, Ref):
            return _tensor(source)
        op = self.made.get(source.name)
        if op is None or not (op.kind == "const" or op.kind.startswith("constexpr_")):
            return None
        if op.kind == "const":
            return _tensor(op.inputs["val"])
        if source.name not in self.folded:
            made = RULES[op.kind].function(**_arguments(self, op))
            for (name, declared), value in zip(op.outputs, made if isinstance(made, tuple) else (made,), strict=True):
                self.folded[name] = value.half().float() if declared.dtype == "FLOAT16" else value
        return self.folded[source.name]

    def dtype(self, name: str) -> str | None:
        """Declared dtype of a value; None for one without a name."""
        return self.types[name].dtype if name in self.types else None

    def attribute(self, op: Op, name: str, default=None):
        value = self.constant(op.inputs[name]) if name in op.inputs else None
        return default if value is None else _plain(value)


def _arguments(graph: Graph, op: Op) -> dict:
    rule = RULES[op.kind]
    known = {name: graph.constant(source) for name, source in op.inputs.items()}
    return {name: _plain(v) if name in rule.attributes else v for name, v in known.items()}


def _refs(op: Op):
    for source in op.inputs.values():
        yield from (s for s in (source if isinstance(source, list) else [source]) if isinstance(s, Ref))


def linear(graph: Graph, op: Op):
    """A 1×1 convolution, over [B, K, T, 1] or [B, K, 1, T], with constant fp16 or int8 weights."""
    if op.kind != "conv" or op.outputs[0][1].dtype != "FLOAT16" or not isinstance(op.inputs["x"], Ref):
        return None
    padded = graph.attribute(op, "pad_type", "valid") not in ("valid", "custom") or any(graph.attribute(op, "pad", []))
    if padded or graph.attribute(op, "groups", 1) != 1 or max(graph.attribute(op, "strides", [1])) != 1:
        return None
    weight = _int8_weight(graph, op.inputs["weight"]) or _half_weight(graph, op.inputs["weight"])
    bias = graph.constant(op.inputs["bias"]) if "bias" in op.inputs else None
    if weight is None or ("bias" in op.inputs and bias is None):
        return None
    return [(partial(_linear, weight, bias), [op.inputs["x"].name], None)]


def _linear(product, bias, x):
    if x.numel() == x.shape[0] * x.shape[1] == x.shape[1]:
        y = product(x.reshape(1, -1))
        return (y if bias is None else y + bias).half().reshape(1, -1, 1, 1)
    spatial = x.shape[2:]
    y = product(x.flatten(2).transpose(1, 2).reshape(-1, x.shape[1]))
    y = (y if bias is None else y + bias).half()
    return y.reshape(x.shape[0], -1, y.shape[-1]).transpose(1, 2).reshape(x.shape[0], -1, *spatial)


def _half_weight(graph: Graph, source):
    """A product with a constant [R, K, 1, 1] as fp16; one that is stored as fp16 stays mapped to its file."""
    op = graph.producer(source)
    stored = op.inputs["val"] if op is not None and op.kind == "const" else source
    if isinstance(stored, np.ndarray) and stored.dtype == np.float16:
        weight = torch.from_numpy(np.array(stored))  # out of the file's small pages: a third faster to read
    else:
        known = graph.constant(source)
        weight = known.half() if known is not None else None
        graph.folded.pop(getattr(source, "name", None), None)
    if weight is None or weight[0, 0].numel() != 1:
        return None
    return partial(_half_product, weight.flatten(1))


def _half_product(weight, x):
    """x [N, K] by weight [R, K]: torch's fp16 products are fast for few vectors only."""
    return F.linear(x, weight) if len(x) < FEW else F.linear(x.float(), weight.float())


def _int8_weight(graph: Graph, source):
    """A product with symmetric int8 data scaled per tensor or per row; None for any other compression."""
    op = graph.producer(source, "constexpr_blockwise_shift_scale")
    if op is None or "offset" in op.inputs:
        return None
    stored = [graph.made[s.name].inputs["val"] if isinstance(s, Ref) else s for s in (op.inputs["data"], op.inputs["scale"])]
    data, scale = (np.asarray(s) for s in stored)
    if data.dtype != np.int8 or op.inputs["data"] is None or data[0, 0].size != 1 or scale.size not in (1, len(data)):
        return None
    scale = np.ascontiguousarray(np.broadcast_to(scale.reshape(-1).astype(np.float32), len(data)))
    return partial(kernels.int8_product, np.array(data.reshape(len(data), -1)), scale)


def cache_write(graph: Graph, op: Op):
    """write_state of state·(1 − Σ mask) + mask @ rows, whole or through a slice_update that covers the state."""
    if op.kind != "write_state":
        return None
    data = graph.producer(op.inputs["data"])
    if data is not None and data.kind == "slice_update":
        data = graph.producer(data.inputs["update"]) if _covers(graph, data) else None
    kept, placed = _operands(graph, data, "add", "mul", "matmul")
    old, left = _operands(graph, kept, "mul", "read_state", "sub")
    total = graph.producer(left.inputs["y"], "reduce_sum") if left is not None else None
    if None in (placed, old, total) or "x" in _transposed(graph, placed) or old.inputs["input"] != op.inputs["input"]:
        return None
    mask, rows = placed.inputs["x"], placed.inputs["y"]
    if not (isinstance(mask, Ref) and isinstance(rows, Ref)):
        return None
    one = graph.attribute(left, "x")
    sums = total.inputs["x"] == mask and graph.attribute(total, "axes") in ([-1], [3]) and graph.attribute(total, "keep_dims")
    if not sums or one != 1 or mask.name not in graph.program.inputs:
        return None
    slots, write = f"{mask.name}.slots", partial(_write_rows, bool(_transposed(graph, placed)))
    return [(_slots, [mask.name], slots), (write, [op.inputs["input"].name, mask.name, slots, rows.name], None)]


def _slots(mask):
    return kernels.one_hot(mask[:, 0])


def _write_rows(transposed, cell, mask, slots, rows):
    """Writes rows [B, H, T, D] into the state [B, H, S, D]: those the mask names, or by the formula itself."""
    rows = rows.transpose(-1, -2) if transposed else rows
    if slots is not None:
        kernels.write(cell.value.numpy(), slots, rows.float().numpy())
        return ()
    mask = mask.float()
    kept = (cell.value * (1 - mask.sum(-1, keepdim=True).half().float())).half().float()
    cell.value = (kept + (mask @ rows.float()).half().float()).half().float()
    return ()


def attention(graph: Graph, op: Op):
    """softmax(q @ kᵀ + mask) @ v over two states, heads of a group side by side; found at its last product."""
    if op.kind != "matmul" or _transposed(graph, op) or op.outputs[0][1].dtype != "FLOAT16":
        return None
    value = graph.producer(op.inputs["y"], "read_state")
    weights = graph.producer(_through(graph, op.inputs["x"]), "softmax")
    masked = graph.producer(weights.inputs["x"], "add") if weights is not None else None
    if value is None or masked is None or graph.attribute(weights, "axis", -1) not in (-1, 3):
        return None
    scores, mask = graph.producer(_through(graph, masked.inputs["x"]), "matmul"), masked.inputs["y"]
    key = graph.producer(scores.inputs["y"], "read_state") if scores is not None else None
    if key is None or _transposed(graph, scores) != "y" or getattr(mask, "name", None) not in graph.program.inputs:
        return None
    if not all(graph.settled(read) for read in (key, value)):
        return None
    span, states = f"{mask.name}.span", [read.inputs["input"].name for read in (key, value)]
    return [(_span, [mask.name], span), (_attend, [scores.inputs["x"].name, *states, mask.name, span], None)]


def _span(mask):
    return kernels.visible(mask.flatten(0, 2), BLOCKED)


def _attend(q, key, value, mask, span):
    """q [B, H_kv, G·T, D], states [B, H_kv, S, D], mask [B, 1, T, S] → [B, H_kv, G·T, D]."""
    (first, last), (B, _, T, _) = span, mask.shape
    key, value, mask = key.value, value.value, mask[..., first:last]
    if B == T == 1:
        return kernels.attend(q.reshape(-1, q.shape[-1]), key[0], value[0], mask[0, 0, 0], first).half().view(q.shape)
    key, value = key[:, :, first:last], value[:, :, first:last]
    scores = torch.matmul(q.float(), key.transpose(-1, -2)).half()
    weights = torch.softmax(scores.view(B, -1, T, last - first) + mask, -1)
    return torch.matmul(weights.view(scores.shape).float(), value).half()


def _operands(graph: Graph, op: Op | None, kind: str, first: str, second: str):
    """The producers of a two-operand operation of `kind`, in the order of the kinds asked for; Nones when it is not that."""
    if op is None or op.kind != kind:
        return None, None
    made = {p.kind: p for p in (graph.producer(op.inputs["x"]), graph.producer(op.inputs["y"])) if p is not None}
    return (made[first], made[second]) if made.keys() == {first, second} else (None, None)


def _transposed(graph: Graph, op: Op) -> str:
    return "".join(axis for axis in "xy" if graph.attribute(op, f"transpose_{axis}", False))


def _covers(graph: Graph, op: Op) -> bool:
    """Whether a slice_update replaces the whole of its operand."""
    shape, rank = op.outputs[0][1].shape, len(op.outputs[0][1].shape)
    begin, end = graph.attribute(op, "begin"), graph.attribute(op, "end")
    open_begin, open_end = (graph.attribute(op, f"{side}_mask", [False] * rank) for side in ("begin", "end"))
    strides, squeezed = graph.attribute(op, "stride", [1] * rank), graph.attribute(op, "squeeze_mask", [False])
    if None in (begin, end) or strides != [1] * rank or any(squeezed):
        return False
    return all(o or b == 0 for o, b in zip(open_begin, begin, strict=True)) and all(
        o or e == n for o, e, n in zip(open_end, end, shape, strict=True)
    )


def _through(graph: Graph, source):
    """What a reshape reshapes, or `source` itself."""
    reshape = graph.producer(source, "reshape")
    return reshape.inputs["x"] if reshape is not None else source
