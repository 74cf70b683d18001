"""Gate `interface`: `bundle.json`, the packages' descriptions and their programs agree.

Core ML reads the description, computes the program, and the host fills the buffers that
the manifest names. Each of the three is read from its file as facts by name, none is
run, and facts that differ are named: a package that no runtime would load is RED."""

from collections.abc import Iterator

from miltorch.program import read_spec
from miltorch.quiet import messages
from workbench.bundle import Bundle, Options, Shard
from workbench.bundle.manifest import Manifest
from workbench.bundle.names import (
    ACC,
    BASE,
    EXPERT_IN,
    EXPERT_WEIGHT,
    HANDED_ON,
    HIDDEN,
    K_STATE,
    KV_WRITE_MASK,
    LOGITS,
    POS,
    V_STATE,
    X,
)
from workbench.bundle.presets import FP16, Preset
from workbench.check import gates
from workbench.check.gates import Gate
from workbench.files import sha256
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import load_shard

MAIN = "main"
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
Facts = dict[str, object]  # "input x" → "FLOAT16 [1, 64, 1..4, 1]"
Sizes = list[tuple]  # (smallest, largest) of each axis
UNKNOWN = ("?", "?")


def interface_gate(bundle: Bundle, checkpoint: Checkpoint | None = None) -> Gate:
    """Compares the manifest with every package and, where there is one, the
    checkpoint's tokens and sizes with it."""
    manifest = bundle.manifest
    faults = list(_options(manifest))
    for shard in manifest.shards:
        try:
            faults += [f"{shard.name}: {fault}" for fault in _package(bundle, shard)]
        except (IndexError, KeyError, ValueError) as problem:
            # an InputError, or a protobuf message that lacks parts
            faults.append(f"{shard.name}: {problem}")
    asked = "no checkpoint given: tokens and tokenizer not compared"
    if checkpoint is not None:
        asked = "tokens, tokenizer and sizes are the checkpoint's"
        faults += _checkpoint(manifest, checkpoint)
    reason = "manifest, description and program agree in "
    reason += f"{len(manifest.shards)} packages; {asked}"
    if faults:
        reason = "; ".join(faults[:SHOWN])
    if len(faults) > SHOWN:
        reason += f"; and {len(faults) - SHOWN} more"
    return gates.at_most("interface", float(len(faults)), 0.0, reason)


def _different(a: Facts, b: Facts, in_a: str, in_b: str) -> Iterator[str]:
    for name in sorted(a.keys() | b.keys()):
        one, other = a.get(name, "missing"), b.get(name, "missing")
        if one != other:
            yield f"{name}: {one} in the {in_a}, {other} in the {in_b}"


def _options(m: Manifest) -> Iterator[str]:
    """What the options promise against the shards that the manifest lists."""
    o, L = m.options, m.dims.L
    blocks = [s for s in m.shards if s.kind in ("layers", "router")]
    steps = range(0, L, o.layers_per_shard)
    experts = {block.layers: [] for block in blocks}
    for shard in m.shards:
        if shard.kind == "expert":
            experts.setdefault(shard.layers, []).append(shard.rows)
    count = max(map(len, experts.values()), default=0)
    routed = o.moe == "routed"
    numbers = [(e, e + 1) for e in range(max(1, count) if routed else 0)]
    promised = {
        "kinds of shards": ["router" if routed else "layers"],
        "layers of shards": [(i, min(i + o.layers_per_shard, L)) for i in steps],
        "experts": dict.fromkeys(experts, numbers),
    }
    listed = {
        "kinds of shards": sorted({block.kind for block in blocks}),
        "layers of shards": [block.layers for block in blocks],
        "experts": {layers: sorted(rows) for layers, rows in experts.items()},
    }
    for shard in blocks:
        attending = [i for i in range(*shard.layers) if m.layers[i].attends]
        masks = any(name.startswith(KV_WRITE_MASK) for name in shard.inputs)
        name = f"cache writes of {shard.name}"
        promised[name] = [o.kv_write] if attending else []
        listed[name] = ["mask"] * (masks and bool(attending))
        listed[name] += ["slice"] * (POS in shard.inputs)
        caches = [
            f"layers.{i}.{leaf}" for i in attending for leaf in (K_STATE, V_STATE)
        ]
        name = f"caches of {shard.name}"
        promised[name] = caches
        listed[name] = [cache for cache in caches if cache in shard.states]
    for shard in m.shards:
        found = shard.inputs | shard.outputs
        for name, state in shard.states.items():
            found |= {name: state.shape, f"ring of {name}": state.ring}
        expected = _shapes(m, shard)
        for name in found.keys() & expected.keys():
            promised[f"{shard.name} {name}"] = expected[name]
            listed[f"{shard.name} {name}"] = found[name]
    yield from _different(promised, listed, "options", "list of shards")


def _shapes(m: Manifest, shard: Shard) -> dict:
    """Shapes of a shard's inputs, outputs and caches that follow from dimensions and
    options."""
    o, d = m.options, m.dims
    widths = dict.fromkeys((X, HIDDEN, HANDED_ON, BASE, EXPERT_IN, ACC), d.C)
    widths |= {EXPERT_WEIGHT: 1, LOGITS: shard.rows[1] - shard.rows[0]}
    shapes = {name: o.plane(width) for name, width in widths.items()}
    halves = {rope.name: len(rope.inv_freq) for rope in m.rope}
    for i in range(*shard.layers):
        layer = m.layers[i]
        shapes |= o.layer_inputs(layer, halves[layer.rope])
        for leaf in (K_STATE, V_STATE):
            cache = f"layers.{i}.{leaf}"
            shapes[cache] = [o.batch, d.H_kv, o.slots(layer.window), d.D]
            shapes[f"ring of {cache}"] = o.ring(layer.window)
    return shapes


def _package(bundle: Bundle, shard: Shard) -> Iterator[str]:
    """Differences between a shard of the manifest, the description of its package and
    the program in it."""
    o = bundle.manifest.options
    if not bundle.manifest.own_programs:
        # compares the interface, and refuses what differs first
        load_shard(bundle, shard)
        return
    spec = read_spec(bundle.package(shard))
    if spec.specificationVersion < SPECIFICATION:
        yield f"specification version {spec.specificationVersion} for a program of {SPECIFICATION}"
    descriptions = {each.name: each for each in spec.description.functions}
    if not descriptions:
        default = spec.description.defaultFunctionName or MAIN
        descriptions = {default: spec.description}
    expected = sorted(shard.functions) or [MAIN]
    places = {"description": descriptions, "program": spec.mlProgram.functions}
    found = {place: sorted(names) for place, names in places.items()}
    if faults := [place for place in found if found[place] != expected]:
        for place in faults:
            yield f"functions: {expected} in the manifest, {found[place]} in the {place}"
        return
    for name in expected:
        function = spec.mlProgram.functions[name]
        t_max = shard.functions.get(name, o.t_max)
        low = t_max if o.shapes else 1
        for fault in _function(shard, function, descriptions[name], low, t_max, o):
            yield f"function {name}: {fault}" if shard.functions else fault


def _function(
    shard: Shard, function, description, low: int, high: int, options: Options
) -> Iterator[str]:
    """Differences between a shard of the manifest and one function of its program with
    its description, for T from `low` to `high`."""
    if function.opset not in function.block_specializations:
        yield f"no block for opset {function.opset!r}"
        return
    block = function.block_specializations[function.opset]
    declared = {}
    for kind, values in (("input", shard.inputs), ("output", shard.outputs)):
        for name, shape in values.items():
            declared[f"{kind} {name}"] = list(
                zip(sizes(shape, low), sizes(shape, high))
            )
    for state in shard.states.values():
        declared[f"state {state.tensor}"] = [(n, n) for n in state.shape]
    ours = {}
    for name, shape in declared.items():
        dtype = "INT32" if name == f"input {POS}" else "FLOAT16"
        ours[name] = _fact(dtype, shape)
    described = _described(description, declared)
    yield from _different(ours, described, "manifest", "description")
    programmed, types = _programmed(function, block, declared)
    yield from _different(ours, programmed, "manifest", "program")
    yield from _taps(shard, types)
    yield from _compression(shard, block, options.preset)


def _fact(dtype: str, shape: Sizes) -> str:
    axes = [str(a) if a == b else f"{a}..{b}" for a, b in shape]
    return f"{dtype} [{', '.join(axes)}]"


def _described(description, declared: dict[str, Sizes]) -> Facts:
    """Facts of a description. An output may leave its shape out, or give that of the
    largest T."""
    facts = {}
    kinds = {"input": description.input, "output": description.output}
    for kind, values in (kinds | {"state": description.state}).items():
        for value in values:
            name = f"{kind} {value.name}"
            array = value.type.multiArrayType
            if kind == "state":
                array = value.type.stateType.arrayType
            expected, default = declared.get(name, []), list(array.shape)
            flexible = array.WhichOneof("ShapeFlexibility")
            ranges = [(r.lowerBound, r.upperBound) for r in array.shapeRange.sizeRanges]
            shape = ranges if flexible == "shapeRange" else [(n, n) for n in default]
            if kind == "output" and default in ([], [high for _, high in expected]):
                shape = expected
            fact = _fact(_dtype(array), shape)
            if flexible not in (None, "shapeRange"):
                fact += f" of {flexible}"
            inside = [a <= n <= b for n, (a, b) in zip(default, shape)]
            if flexible == "shapeRange" and not all(inside):
                fact += f" by default {default}"
            if name in facts:
                fact = f"{facts[name]} and {fact}"
            facts[name] = fact
    return facts


def _programmed(function, block, declared: dict[str, Sizes]) -> tuple[Facts, dict]:
    """Facts of a program and the types of its values; a size that it leaves open is the
    declared range."""
    types = {operand.name: operand.type for operand in function.inputs}
    for op in block.operations:
        types |= {out.name: out.type for out in op.outputs}
    values = {}
    for operand in function.inputs:
        state = operand.type.WhichOneof("type") == "stateType"
        kind = operand.type.stateType.wrappedType if state else operand.type
        values[f"{'state' if state else 'input'} {operand.name}"] = kind
    for name in types.keys() & block.outputs:
        values[f"output {name}"] = types[name]
    facts = {}
    for name, kind in values.items():
        dtype, found = _tensor(kind)
        shape = declared.get(name, [])
        ranges = {axis: r for axis, r in enumerate(shape) if r[0] < r[1]}
        own = [(n, n) if n else ranges.get(i, UNKNOWN) for i, n in enumerate(found)]
        facts[name] = _fact(dtype, own)
    return facts, types


def _taps(shard: Shard, types: dict) -> Iterator[str]:
    """What is wrong with the values that hold the layers' hidden outputs: the last
    layer's is the shard's own, an inner one has its shape."""
    layers = [*range(*shard.layers)] if shard.kind == "layers" else []
    if sorted(shard.taps) != layers:
        yield f"taps of layers {sorted(shard.taps)}, not of {layers}"
    for layer, name in shard.taps.items():
        if layer in layers[-1:] and name != HIDDEN:
            yield f"the tap of layer {layer} is {name}, not the output {HIDDEN}"
        known = {name, HIDDEN} <= types.keys()
        if not known or _tensor(types[name])[1] != _tensor(types[HIDDEN])[1]:
            yield f"the tap of layer {layer}, {name}, is no value like {HIDDEN}"


def _compression(shard: Shard, block, preset: Preset) -> Iterator[str]:
    """Constants that are stored in another way than the preset says: matrices of
    convolutions as it stores them, other weights as fp16."""
    makers = {out.name: op for op in block.operations for out in op.outputs}
    routers = {value for name, value in shard.weights.items() if OUTSIDE in name}
    read = set()
    for op in block.operations:
        if op.type == "conv":
            read.update(bound.name for bound in op.inputs["weight"].arguments)
    promised, stored = {}, {}
    for name, op in makers.items():
        shape = _tensor(op.outputs[0].type)[1] if op.outputs else []
        matrix = shape[2:] == [1, 1] and min(shape[:2]) > 1
        if name in read - routers and matrix:
            promised[name] = _expected(preset, shape)
        elif op.type.startswith("constexpr_") or (
            name in shard.weights.values() and op.type == "const"
        ):
            promised[name] = ("const", "FLOAT16")
        else:
            continue
        stored[name] = _stored_as(op)
    for name, expected in promised.items():
        if stored[name] != expected:
            yield f"{name} is stored as {stored[name]}, not {expected} of {preset.name}"


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
    """`_stored_as` of a matrix [outputs, inputs, 1, 1] under a preset."""
    if preset == FP16:
        return "const", "FLOAT16"
    if not preset.is_integer:
        table = ("lut", "FLOAT16", 1, 1, 1, 1, 1 << preset.bits, 1)
        return "constexpr_lut_to_dense", ("indices", f"UINT{preset.bits}"), table
    rows = 1 if preset.granularity == "per_tensor" else shape[0]
    blocks = shape[1] // preset.block if preset.block else 1
    scale = ("scale", "FLOAT16", rows, blocks, 1, 1)
    return "constexpr_blockwise_shift_scale", ("data", f"INT{preset.bits}"), scale


def _checkpoint(m: Manifest, checkpoint: Checkpoint) -> Iterator[str]:
    """Differences between the manifest and the checkpoint's tokens, tokenizer, family
    and sizes."""
    config, tokens = checkpoint.config, m.tokens
    ours = {"family": m.family, "bos": tokens.bos, "eos": tokens.eos}
    theirs = {"family": config.model_type, "bos": config.bos_token_id}
    theirs["eos"] = checkpoint.eos
    for name, size in SIZES.items():
        ours[size], theirs[size] = getattr(m.dims, size), getattr(config, name)
    for entry in tokens.files:
        ours[f"tokenizer file {entry.path.rpartition('/')[2]}"] = entry.sha256[:12]
    for path in checkpoint.tokenizer_files():
        theirs[f"tokenizer file {path.name}"] = sha256(path)[:12]
    yield from _different(ours, theirs, "manifest", "checkpoint")


def _tensor(message) -> tuple[str, list[int | None]]:
    """dtype and sizes of a tensor type; a size left open is None."""
    tensor = message.tensorType
    found = []
    for dimension in tensor.dimensions:
        constant = dimension.WhichOneof("dimension") == "constant"
        found.append(dimension.constant.size if constant else None)
    return messages("MIL_pb2").DataType.Name(tensor.dataType), found


def _dtype(array) -> str:
    """dtype of an array in a description, as the program spells it."""
    return messages("FeatureTypes_pb2").ArrayFeatureType.ArrayDataType.Name(
        array.dataType
    )


def sizes(shape: list, T: int) -> list[int]:
    """A shape of the manifest with its T."""
    return [{"T": T}.get(n, n) for n in shape]
