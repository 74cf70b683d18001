"""Which shards of a bundle have the same program, so that a property of the program is
tested on one of them.

Two shards have the same program if everything in them is equal by value except the
numbers of the weights, which gate `weights` compares one by one with the checkpoint. A weight is
equal where its tensor has the same name, relative to the first layer of the shard, and
the arrays that store it have the same dtypes and shapes. Hugging Face's module of the
layer, without its parameters, must be equal too: both sides of gate `program` are then
the same function of weights, inputs and states.

All of this is read from the packages. Only `weights` is taken from the manifest, and
gate `weights` tests it: a constant wrongly listed as a weight does not match the
checkpoint."""

import hashlib

import numpy as np
from torch import nn

import miltorch
from miltorch.program import Block, Op, Program, Ref
from workbench.bundle import Bundle, Shard
from workbench.bundle.names import split_layer
from workbench.check.interface import layer_shards
from workbench.models.checkpoint import Checkpoint
from workbench.models.layerwise import empty_model

# The operands of a stored weight that gate `weights` reads; others count by value.
COMPARED = {"val", "data", "scale", "offset", "indices", "lut"}
# The place of a layer in its model, which does not change what it computes.
PLACES = {"layer_idx", "layer_index", "layer_number", "training"}


def representatives(bundle: Bundle, checkpoint: Checkpoint) -> set[str]:
    """The name of the first shard of every distinct program among the shards of layers.
    All of them if the packages' constants are not compared with the checkpoint: packages
    of another exporter and of a plug-in's target."""
    manifest = bundle.manifest
    shards = layer_shards(manifest)
    if manifest.foreign or manifest.options.plugin:
        return {shard.name for shard in shards}
    layers = empty_model(checkpoint.config).model.layers
    modules = [_hash(_module_facts(layer)) for layer in layers]
    first: dict[str, str] = {}
    for shard in shards:
        first.setdefault(program_key(bundle, shard, modules), shard.name)
    return set(first.values())


def program_key(bundle: Bundle, shard: Shard, modules: list[str]) -> str:
    """The SHA-256 of a shard's program, and of its experts'.

    Args:
        modules: by layer, a hash of Hugging Face's module.
    """
    manifest = bundle.manifest
    span = shard.layer_range
    parts = [_shard_facts(bundle, shard)]
    for expert in manifest.shards:
        if expert.kind == "expert" and expert.layers == shard.layers:
            parts.append(_shard_facts(bundle, expert))
    tables = {rope.name: rope.model_dump() for rope in manifest.rope}
    for layer in span:
        host = manifest.layers[layer]
        source = host.source  # the layer whose cache it reads
        # its number within the shard; not its distance, which differs from layer to layer
        source_place: int | str = ""
        if source is not None:
            source_place = source - span.start if source in span else "outside"
        host = host.model_copy(update={"source": None})
        rope_table = tables.get(host.rope)
        parts.append([host.model_dump(), source_place, rope_table, modules[layer]])
    return _hash(parts)


def _hash(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _shard_facts(bundle: Bundle, shard: Shard) -> list:
    """The programs of a shard's functions, and how the host calls them."""
    first = shard.layers[0]
    programs = []
    for function in sorted(shard.functions) or [None]:
        program = miltorch.read(bundle.package(shard), function)
        programs.append([function, _Canonical(shard, program).facts()])
    states = [
        [_relative(name, first), entry.model_dump()]
        for name, entry in shard.states.items()
    ]
    taps = [[layer - first, name] for layer, name in shard.taps.items()]
    offsets = [[_relative(name, first), x] for name, x in shard.offsets.items()]
    interface = [shard.inputs, shard.outputs, shard.functions]
    return [shard.kind, programs, states, taps, offsets, interface]


def _relative(name: str, first: int) -> tuple[int | None, str]:
    """A tensor's or state's name with its layer counted from the shard's first one."""
    layer, rest = split_layer(name)
    return (None, name) if layer is None else (layer - first, rest)


class _Canonical:
    """A program in a form that is equal for equal programs.

    Operations that compute stand in their order. A value is named by the place where it
    is computed, inputs and states by their names, and a constant stands where it is
    read, so that neither names of values nor the places of constants count."""

    def __init__(self, shard: Shard, program: Program):
        self.program = program
        self.tensors: dict[str, list] = {}
        for tensor, name in shard.weights.items():
            if isinstance(name, str):  # several constants: of another exporter
                relative = _relative(tensor, shard.layers[0])
                self.tensors.setdefault(name, []).append(relative)
        self.constants: dict[str, Op] = {}
        for op in program.block.walk():
            if op.is_constant:
                self.constants |= {name: op for name, _ in op.outputs}
        self.places = {name: ["input", name] for name in program.inputs}
        self.places |= {name: ["state", name] for name in program.states}

    def facts(self) -> list:
        """The interface, the description and the operations of the program."""
        program = self.program
        described = [
            value.SerializeToString(deterministic=True)
            for kind in ("input", "output", "state")
            for value in getattr(program.description, kind, ())
        ]
        interface = [program.inputs, program.states, program.outputs]
        return [interface, described, self.block_facts(program.block, ())]

    def block_facts(self, block: Block, place: tuple) -> list:
        """The types of a block's inputs, its operations, and its outputs.

        Args:
            place: indices of the operations and blocks around it, outermost first.
        """
        for i, (name, _) in enumerate(block.inputs):
            # those of the program's own block are its inputs
            self.places.setdefault(name, ["argument", *place, i])
        operations = []
        for i, op in enumerate(op for op in block.ops if not op.is_constant):
            operations.append(self.operation_facts(op, (*place, i)))
            for j, (name, _) in enumerate(op.outputs):
                self.places[name] = ["value", *place, i, j]
        types = [kind for _, kind in block.inputs]
        return [types, operations, [self.name_facts(name) for name in block.outputs]]

    def operation_facts(self, op: Op, place: tuple) -> list:
        """The kind of an operation, its types, its operands, and its blocks."""
        types = [kind for _, kind in op.outputs]
        blocks = [
            self.block_facts(b, (*place, "block", i)) for i, b in enumerate(op.blocks)
        ]
        return [op.kind, types, self.operand_facts(op), blocks]

    def operand_facts(self, op: Op) -> list:
        """The operands of an operation by their parameters."""
        return [[name, self.value_facts(x)] for name, x in sorted(op.inputs.items())]

    def name_facts(self, name: str) -> list:
        """The value that a name stands for: the place where it is computed, a weight, or
        a constant."""
        if name in self.places:
            return self.places[name]
        op = self.constants[name]
        kinds = [op.kind, [kind for _, kind in op.outputs]]
        if name in self.tensors:
            stored = [
                [role, self.stored_facts(role, x)]
                for role, x in sorted(op.inputs.items())
            ]
            return ["weight", sorted(self.tensors[name], key=repr), kinds, stored]
        return ["constant", kinds, self.operand_facts(op)]

    def value_facts(self, source) -> list:
        """An operand by value."""
        if isinstance(source, Ref):
            return self.name_facts(source.name)
        if isinstance(source, (list, tuple)):
            return [self.value_facts(item) for item in source]
        if isinstance(source, dict):
            return [
                [key, self.value_facts(item)] for key, item in sorted(source.items())
            ]
        array = np.asarray(source)
        if array.dtype.kind in "OUS":
            return ["text", array.tolist()]
        digest = hashlib.sha256(np.ascontiguousarray(array)).hexdigest()
        return ["array", str(array.dtype), array.shape, digest]

    def stored_facts(self, role: str, source) -> list:
        """An operand of a stored weight: the dtype and the shape of an array that gate
        `weights` compares, and others by value."""
        op = None
        if isinstance(source, Ref):
            op = self.constants[source.name]
        array = np.asarray(op.inputs["val"] if op else source)
        if role not in COMPARED or array.dtype.kind in "OUS" or array.ndim == 0:
            return self.value_facts(source)
        declared = [kind for _, kind in op.outputs] if op else []
        return ["form", str(array.dtype), array.shape, declared]


def _module_facts(module: nn.Module) -> list:
    """A module of Hugging Face's model without the numbers of its parameters: classes,
    attributes, shapes of parameters, buffers by value."""
    facts = []
    for name, part in module.named_modules():
        attributes = [
            [key, _attribute(value)]
            for key, value in sorted(vars(part).items())
            if key not in PLACES and not key.startswith("_")
        ]
        parameters = [
            [n, tuple(p.shape)] for n, p in part.named_parameters(recurse=False)
        ]
        buffers = [[n, _buffer(b)] for n, b in part.named_buffers(recurse=False)]
        facts.append([name, type(part).__qualname__, attributes, parameters, buffers])
    return facts


def _attribute(value: object) -> object:
    """An attribute by value where it is plain, functions and classes by name, other
    objects, which layers share, by their class."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [_attribute(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, dict):
        return [[key, _attribute(item)] for key, item in value.items()]
    return getattr(value, "__qualname__", type(value).__qualname__)


def _buffer(buffer) -> list:
    array = buffer.detach().float().numpy()
    return [array.shape, hashlib.sha256(np.ascontiguousarray(array)).hexdigest()]
