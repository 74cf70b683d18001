"""Gate `interface`: `bundle.json`, the packages' descriptions and their programs agree.

Core ML reads the description, computes the program, and the host fills the buffers that
the manifest names. All three are read from the files, none is run: a package that no
runtime would load is RED here, with the first differences by name."""

from collections.abc import Iterator
from itertools import combinations, product
from math import prod

import numpy as np

from miltorch.program import read_spec
from miltorch.quiet import messages
from workbench.bundle import Bundle, Options, Shard
from workbench.bundle.manifest import Manifest
from workbench.bundle.names import (
    HIDDEN,
    K_STATE,
    KV_STATE,
    KV_WRITE_MASK,
    POS,
    SIDE_STATE,
    V_STATE,
)
from workbench.bundle.presets import FP16, Preset
from workbench.check import gates
from workbench.check.gates import Gate
from workbench.files import sha256
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import load_shard

FUNCTION = "main"
SPECIFICATION = 9  # the first that has states and blockwise weights (macOS 15)
OUTSIDE = ".gate."  # matrices of routers stay fp16 under every preset
SHOWN = 8  # differences that the reason names
SIZES = {
    "hidden_size": "C",
    "num_attention_heads": "H",
    "num_key_value_heads": "H_kv",
    "num_hidden_layers": "L",
    "vocab_size": "V",
}


def interface_gate(bundle: Bundle, checkpoint: Checkpoint | None = None) -> Gate:
    """Compares the manifest with every package and, where there is one, the
    checkpoint's tokens and sizes with it."""
    differences = list(_options(bundle.manifest))
    for shard in bundle.manifest.shards:
        try:
            differences += [f"{shard.name}: {text}" for text in _package(bundle, shard)]
        except (IndexError, ValueError) as problem:
            # an InputError, or a protobuf message that lacks parts
            differences.append(f"{shard.name}: {problem}")
    asked = "no checkpoint given: tokens and tokenizer not compared"
    if checkpoint is not None:
        asked = "tokens, tokenizer and sizes are the checkpoint's"
        differences += _checkpoint(bundle.manifest, checkpoint)
    count = len(differences)
    packages = len(bundle.manifest.shards)
    reason = f"manifest, description and program agree in {packages} packages; {asked}"
    if differences:
        reason = "; ".join(differences[:SHOWN])
    if count > SHOWN:
        reason += f"; and {count - SHOWN} more"
    return gates.at_most("interface", float(count), 0.0, reason)


def _options(m: Manifest) -> Iterator[str]:
    """What the manifest's options say against the shards that it lists."""
    o = m.options
    blocks = [s for s in m.shards if s.kind in ("layers", "router")]
    kinds = {s.kind for s in blocks}
    if kinds != {"router" if o.moe == "routed" else "layers"}:
        yield f"moe = {o.moe} over shards of kind {', '.join(sorted(kinds))}"
    for first, shard in zip(range(0, m.dims.L, o.layers_per_shard), blocks):
        expected = (first, min(first + o.layers_per_shard, m.dims.L))
        if shard.layers != expected:
            yield f"layers_per_shard = {o.layers_per_shard} over {shard.name} of {shard.layers}"
    rows_of = {block.layers: [] for block in blocks}
    for shard in m.shards:
        if shard.kind == "expert":
            rows_of.setdefault(shard.layers, []).append(shard.rows)
    experts = [sorted(rows) for rows in rows_of.values()]
    numbers = [(e, e + 1) for e in range(max(map(len, experts), default=0))]
    alike = experts == [numbers] * len(experts)
    if not alike or bool(numbers) != (o.moe == "routed"):
        yield f"moe = {o.moe} over experts {experts[:2]}"
    for shard in blocks:
        yield from _block_options(m, shard)


def _block_options(m: Manifest, shard: Shard) -> Iterator[str]:
    """The same of one shard of layers: how it writes its caches, and how it names its
    states."""
    o = m.options
    attending = [i for i in range(*shard.layers) if m.layers[i].attends]
    slices = o.kv_write == "slice"
    masks = any(n.startswith(KV_WRITE_MASK) for n in shard.inputs)
    if (POS in shard.inputs) != (slices and bool(attending)) or (slices and masks):
        yield f"kv_write = {o.kv_write} over inputs {', '.join(shard.inputs)} of {shard.name}"
    tensors = {entry.tensor for entry in shard.states.values()}
    packed = all(tensor.startswith((KV_STATE, SIDE_STATE)) for tensor in tensors)
    if packed != (o.states == "packed"):
        yield f"states = {o.states} over {', '.join(sorted(tensors))} of {shard.name}"
    for i, leaf in product(attending, (K_STATE, V_STATE)):
        if f"layers.{i}.{leaf}" not in shard.states:
            yield f"{shard.name}: no state layers.{i}.{leaf}"


def _package(bundle: Bundle, shard: Shard) -> Iterator[str]:
    """Differences between a shard of the manifest, the description of its package and
    the program in it."""
    if bundle.manifest.options.target == "coreai":
        # compares the interface, and refuses what differs first
        load_shard(bundle, shard)
        return
    spec = read_spec(bundle.package(shard))
    o = bundle.manifest.options
    described = spec.description
    functions = spec.mlProgram.functions
    if spec.specificationVersion < SPECIFICATION:
        yield f"specification version {spec.specificationVersion} for a program of {SPECIFICATION}"
    descriptions = {f.name: f for f in described.functions}
    named = sorted(descriptions) or [described.defaultFunctionName or FUNCTION]
    expected = sorted(shard.functions) or [FUNCTION]
    if sorted(functions) != expected or named != expected:
        text = ", ".join(expected)
        if not shard.functions:
            text += " alone"
        yield f"functions {sorted(functions)}, described {named}, not {text}"
        return
    for name in expected:
        description = descriptions.get(name, described)
        t_max = shard.functions.get(name, o.t_max)
        faults = _function(shard, functions[name], description, t_max, o)
        if shard.functions:
            faults = (f"function {name}: {fault}" for fault in faults)
        yield from faults


def _function(
    shard: Shard, function, described, t_max: int, o: Options
) -> Iterator[str]:
    """The same of one function of the program and its description; with a fixed T it is
    `t_max`."""
    if function.opset not in function.block_specializations:
        yield f"no block for opset {function.opset!r}"
        return
    block = function.block_specializations[function.opset]
    types = {}
    inputs = {}
    states = {}
    for operand in function.inputs:
        name = operand.name
        kind = operand.type
        types[name] = kind
        if kind.WhichOneof("type") == "stateType":
            states[name] = _tensor(kind.stateType.wrappedType)
        else:
            inputs[name] = _tensor(kind)
    for op in block.operations:
        types |= {out.name: out.type for out in op.outputs}
    outputs = dict.fromkeys(block.outputs, ("nothing", []))
    for name in outputs.keys() & types.keys():
        outputs[name] = _tensor(types[name])
    tensors = {entry.tensor: shard for entry in shard.states.values()}
    interfaces = (
        ("input", shard.inputs, described.input, inputs, _input),
        ("output", shard.outputs, described.output, outputs, _output),
        ("state", tensors, described.state, states, _state),
    )
    for kind, declared, values, packaged, _ in interfaces:
        described = [value.name for value in values]
        for place, names in (("description", described), ("program", packaged)):
            if sorted(names) != sorted(declared):
                yield f"{kind}s {sorted(declared)} in the manifest, {sorted(names)} in the {place}"
    low = t_max if o.t == "fixed" else 1
    for _, declared, values, packaged, differences in interfaces:
        for value in values:
            name = value.name
            if name in declared and name in packaged:
                yield from differences(
                    value, declared[name], packaged[name], low, t_max
                )
    yield from _taps(shard, types)
    yield from _compression(shard, block, o.preset)


def _taps(shard: Shard, types: dict) -> Iterator[str]:
    """What is wrong with the values that hold the layers' hidden outputs: the last
    layer's is the shard's own, an inner one has its shape."""
    layers = []
    if shard.kind == "layers":
        layers = [*range(*shard.layers)]
    if sorted(shard.taps) != layers:
        yield f"taps of layers {sorted(shard.taps)}, not of {layers}"
    for layer, name in shard.taps.items():
        if layer in layers[-1:] and name != HIDDEN:
            yield f"the tap of layer {layer} is {name}, not the output {HIDDEN}"
        if (
            not {name, HIDDEN} <= types.keys()
            or _tensor(types[name])[1] != _tensor(types[HIDDEN])[1]
        ):
            yield f"the tap of layer {layer}, {name}, is no value like {HIDDEN}"


def _input(value, shape: list, packaged: tuple, low: int, high: int) -> Iterator[str]:
    """Differences between an input's description, its type in the program and the
    `shape` in the manifest, for T from `low` to `high`."""
    array = value.type.multiArrayType
    name = f"input {value.name}"
    dtype = "INT32" if value.name == POS else "FLOAT16"
    yield from _type(name, dtype, shape, array, packaged, low, high)
    described = list(array.shape)
    flexible = array.WhichOneof("ShapeFlexibility")
    expected = list(zip(sizes(shape, low), sizes(shape, high)))
    ranges = [(r.lowerBound, r.upperBound) for r in array.shapeRange.sizeRanges]
    if len(described) != len(shape) or any(
        not a <= n <= b for n, (a, b) in zip(described, expected)
    ):
        yield f"{name} is described as {described}, not {shape}"
    if flexible == "shapeRange" and ranges != expected:
        yield f"{name} takes sizes {ranges}, not {expected}"
    elif flexible != "shapeRange" and (flexible or any(a != b for a, b in expected)):
        yield f"{name} has {flexible or 'no shape range'} for T from 1 to {high}"


def _output(value, shape: list, packaged: tuple, low: int, high: int) -> Iterator[str]:
    """The same of an output, the description of which may leave its shape out."""
    array = value.type.multiArrayType
    name = f"output {value.name}"
    yield from _type(name, "FLOAT16", shape, array, packaged, low, high)
    if list(array.shape) not in ([], sizes(shape, high)):
        yield f"{name} is described as {list(array.shape)}, not {shape}"


def _type(
    name, dtype: str, shape: list, array, packaged: tuple, low, high
) -> Iterator[str]:
    """Differences of a value's dtype and, in the program, its sizes: those of T are
    open there where it varies."""
    expected = dtype, sizes(shape, high if low == high else None)
    if packaged != expected:
        yield f"{name} is {packaged} in the program, not {expected}"
    if _dtype(array) != dtype:
        yield f"{name} is described as {_dtype(array)}, not {dtype}"


def _state(value, shard: Shard, packaged: tuple, *_) -> Iterator[str]:
    """The same of a state tensor, and whether the manifest's logical states fill it."""
    array = value.type.stateType.arrayType
    described = (_dtype(array), list(array.shape))
    if packaged != described or described[0] != "FLOAT16":
        yield f"state {value.name} is {packaged} in the program, described as {described}"
    else:
        yield from _regions(value.name, described[1], shard)


def _regions(tensor: str, shape: list[int], shard: Shard) -> Iterator[str]:
    """Where the logical states of a tensor leave it, overlap, or leave a part of it to
    no state."""
    spans = {}
    filled = 0
    for name, state in shard.states.items():
        if state.tensor != tensor:
            continue
        part = np.array(state.part or [(0, size) for size in state.shape])
        if len(part) != len(shape) or (part[:, 1] > shape).any():
            yield f"state {name} {state.shape} lies outside {tensor} {shape}"
            return
        spans[name] = part
        filled += prod(np.diff(part).ravel().tolist())
    for (a, p), (b, q) in combinations(spans.items(), 2):
        if (np.maximum(p, q)[:, 0] < np.minimum(p, q)[:, 1]).all():
            yield f"states {a} and {b} overlap in {tensor}"
    if filled != prod(shape):
        yield f"states fill {filled} of the {prod(shape)} elements of {tensor} {shape}"


def _compression(shard: Shard, block, preset: Preset) -> Iterator[str]:
    """Constants that are stored in another way than `options.compress` says: matrices
    as the preset, all else as fp16."""
    makers = {out.name: op for op in block.operations for out in op.outputs}
    routers = {value for name, value in shard.weights.items() if OUTSIDE in name}
    matrices = _matrices(block, makers) - routers
    for name, op in makers.items():
        actual = _stored_as(op)
        if name in matrices:
            expected = _expected(preset, _tensor(op.outputs[0].type)[1])
            if actual != expected:
                yield f"{name} is stored as {actual}, not {expected} of {preset.name}"
        elif op.type.startswith("constexpr_"):
            yield f"{name} is stored as {actual}, though {preset.name} is for matrices alone"
        if (
            name in shard.weights.values()
            and op.type == "const"
            and actual != ("const", "FLOAT16")
        ):
            yield f"{name} is stored as {actual}, not FLOAT16"


def _matrices(block, makers: dict) -> set[str]:
    """Names of the constants that are matrices [outputs, inputs, 1, 1] of a
    convolution."""
    names = set()
    for op in block.operations:
        if op.type == "conv":
            names.update(bound.name for bound in op.inputs["weight"].arguments)
    matrices = set()
    for name in names & makers.keys():
        shape = _tensor(makers[name].outputs[0].type)[1]
        if shape[2:] == [1, 1] and min(shape[:2]) > 1:
            matrices.add(name)
    return matrices


def _stored_as(op) -> tuple:
    """How a constant is stored: its operation, then the dtype of each operand and, for
    scales and tables, its shape."""
    if op.type == "const":
        return "const", _tensor(op.attributes["val"].type)[0]
    operands = []
    for name in sorted(op.inputs):
        dtype, shape = _tensor(op.inputs[name].arguments[0].value.type)
        if name not in ("scale", "lut"):
            shape = []
        operands.append((name, dtype, *shape))
    return op.type, *operands


def _expected(preset: Preset, shape: list[int]) -> tuple:
    """`_stored_as` of a matrix [outputs, inputs, 1, 1] under `preset`."""
    if preset == FP16:
        return "const", "FLOAT16"
    if not preset.is_integer:
        table = ("lut", "FLOAT16", 1, 1, 1, 1, 1 << preset.bits, 1)
        return "constexpr_lut_to_dense", ("indices", f"UINT{preset.bits}"), table
    rows = shape[0]
    blocks = 1
    if preset.granularity == "per_tensor":
        rows = 1
    if preset.block:
        blocks = shape[1] // preset.block
    scale = ("scale", "FLOAT16", rows, blocks, 1, 1)
    return "constexpr_blockwise_shift_scale", ("data", f"INT{preset.bits}"), scale


def _checkpoint(m: Manifest, checkpoint: Checkpoint) -> Iterator[str]:
    """Differences between the manifest and the checkpoint's tokens, tokenizer, family
    and sizes."""
    config = checkpoint.config
    tokens = m.tokens
    pairs = [
        ("family", m.family, config.model_type),
        ("bos", tokens.bos, config.bos_token_id),
        ("eos", tokens.eos, checkpoint.eos),
    ]
    for name, size in SIZES.items():
        pairs.append((size, getattr(m.dims, size), getattr(config, name)))
    for name, declared, actual in pairs:
        if declared != actual:
            yield f"{name} {declared} in the manifest, {actual} in the checkpoint"
    declared = {entry.path.rpartition("/")[2]: entry.sha256 for entry in tokens.files}
    actual = {path.name: sha256(path) for path in checkpoint.tokenizer_files()}
    for name in sorted(declared.keys() | actual.keys()):
        if declared.get(name) != actual.get(name):
            yield f"tokenizer file {name} differs from the checkpoint's"


def _tensor(message) -> tuple[str, list[int | None]]:
    """dtype and sizes of a tensor type; a size left open is None."""
    tensor = message.tensorType
    sizes = []
    for dimension in tensor.dimensions:
        size = None
        if dimension.WhichOneof("dimension") == "constant":
            size = dimension.constant.size
        sizes.append(size)
    return messages("MIL_pb2").DataType.Name(tensor.dataType), sizes


def _dtype(array) -> str:
    """dtype of an array in a description, as the program spells it."""
    return messages("FeatureTypes_pb2").ArrayFeatureType.ArrayDataType.Name(
        array.dataType
    )


def sizes(shape: list, T: int | None) -> list[int | None]:
    """A shape of the manifest with its T."""
    return [{"T": T}.get(n, n) for n in shape]
