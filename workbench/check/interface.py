"""Gate `interface`: `bundle.json`, the packages' descriptions and their programs agree.

Core ML reads the description and runs the program, and the host fills the buffers that
the manifest names. The gate reads each of the three from its file as facts by name,
runs none of them, and names the facts that differ. A package that no runtime would load
is RED."""

from collections.abc import Iterator

from miltorch.program import read_spec
from miltorch.quiet import messages
from workbench.bundle import Bundle, Shard
from workbench.bundle.manifest import Manifest
from workbench.bundle.names import (
    ACC,
    BASE,
    EXPERT_IN,
    EXPERT_WEIGHT,
    HIDDEN,
    K_STATE,
    KV_WRITE_MASK,
    LOGITS,
    POS,
    V_STATE,
    X,
    is_cache,
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
SHOWN = 8  # the most differences in the reason
SIZES = {
    "hidden_size": "C",
    "num_attention_heads": "H",
    "num_key_value_heads": "H_kv",
    "num_hidden_layers": "L",
    "vocab_size": "V",
}
Facts = dict[str, object]  # "input x" → "FLOAT16 [1, 64, 1..4, 1]"


def interface_gate(bundle: Bundle, checkpoint: Checkpoint | None = None) -> Gate:
    """Compares the manifest with every package and, where there is one, the
    checkpoint's tokens and sizes with it."""
    manifest = bundle.manifest
    faults = list(differences(*_lists(manifest), "options", "list of shards"))
    for shard in manifest.shards:
        try:
            for fault in _package(bundle, shard):
                faults.append(f"{shard.name}: {fault}")
        except (IndexError, KeyError, ValueError) as problem:
            # an InputError, or a protobuf message that lacks parts
            faults.append(f"{shard.name}: {problem}")
    origins = "no checkpoint given: tokens and tokenizer not compared"
    if checkpoint is not None:
        origins = "tokens, tokenizer and sizes are the checkpoint's"
        faults += differences(*_origins(manifest, checkpoint), "manifest", "checkpoint")
    reason = "manifest, description and program agree in "
    reason += f"{len(manifest.shards)} packages; {origins}"
    if faults:
        reason = "; ".join(faults[:SHOWN])
    if len(faults) > SHOWN:
        reason += f"; and {len(faults) - SHOWN} more"
    return gates.at_most("interface", float(len(faults)), 0.0, reason)


def differences(a: Facts, b: Facts, in_a: str, in_b: str) -> Iterator[str]:
    for name in sorted(a.keys() | b.keys()):
        one, other = (facts.get(name, "missing") for facts in (a, b))
        if one != other:
            yield f"{name}: {one} in the {in_a}, {other} in the {in_b}"


def _lists(m: Manifest) -> tuple[Facts, Facts]:
    """Facts about the shards that follow from options and dimensions, and the facts of
    the listed shards."""
    L, step = m.dims.L, m.options.layers_per_shard
    kind = "router" if m.options.moe == "routed" else "layers"
    blocks = [s for s in m.shards if s.kind in ("layers", "router")]
    experts = {block.layers: [] for block in blocks}
    for shard in m.shards:
        if shard.kind == "expert":
            experts.setdefault(shard.layers, []).append(shard.rows)
    count = max(1, *map(len, experts.values())) if kind == "router" else 0
    promised = {
        "kinds of shards": {kind},
        "layers of shards": [(i, min(i + step, L)) for i in range(0, L, step)],
        "experts": dict.fromkeys(experts, [(e, e + 1) for e in range(count)]),
    }
    listed = {
        "kinds of shards": {block.kind for block in blocks},
        "layers of shards": [block.layers for block in blocks],
        "experts": {layers: sorted(rows) for layers, rows in experts.items()},
    }
    for shard in m.shards:
        expected = _shapes(m, shard)
        actual = shard.inputs | shard.outputs
        for name, state in shard.states.items():
            actual |= {name: state.shape, f"ring of {name}": state.ring}
        names = expected.keys() & actual.keys()
        if shard in blocks:  # a cache that is missing or unexpected is a difference
            names |= set(filter(_is_cached, expected | actual))
        for facts, shapes in ((promised, expected), (listed, actual)):
            facts |= {f"{shard.name} {n}": shapes[n] for n in names & shapes.keys()}
    return promised, listed


def _is_cached(name: str) -> bool:
    """Whether a shape belongs to a cache, or to an input that selects the rows that a
    call writes."""
    return is_cache(name) or name == POS or name.startswith(KV_WRITE_MASK)


def _shapes(m: Manifest, shard: Shard) -> Facts:
    """Shapes of a shard's inputs, outputs and caches that follow from dimensions and
    options."""
    o, d = m.options, m.dims
    widths = dict.fromkeys((X, HIDDEN, BASE, EXPERT_IN, ACC), d.C)
    widths |= {EXPERT_WEIGHT: 1, LOGITS: shard.rows[1] - shard.rows[0]}
    shapes = {name: o.plane(width) for name, width in widths.items()}
    halves = {rope.name: len(rope.inv_freq) for rope in m.rope}
    for i in range(*shard.layers):
        layer = m.layers[i]
        masked = layer.attends and o.kv_write == "mask"
        for name, shape in o.layer_inputs(layer, halves[layer.rope]).items():
            if masked or not _is_cached(name):
                shapes[name] = shape
        if layer.attends:
            shapes |= {} if masked else {POS: [1]}
            for leaf in (K_STATE, V_STATE):
                cache = f"layers.{i}.{leaf}"
                shapes[cache] = [o.batch, d.H_kv, o.cache_rows(layer.window), d.D]
                shapes[f"ring of {cache}"] = o.ring_rows(layer.window)
    return shapes


def _package(bundle: Bundle, shard: Shard) -> Iterator[str]:
    """Differences between a shard of the manifest, the description of its package and
    the program in it."""
    options = bundle.manifest.options
    if shard.foreign or options.plugin:
        # loading compares the interface and raises on the first difference
        load_shard(bundle, shard)
        return
    spec = read_spec(bundle.package(shard))
    if spec.specificationVersion < SPECIFICATION:
        yield f"specification version {spec.specificationVersion} for a program of {SPECIFICATION}"
    descriptions = {f.name: f for f in spec.description.functions}
    if not descriptions:
        default = spec.description.defaultFunctionName or MAIN
        descriptions = {default: spec.description}
    expected = sorted(shard.functions) or [MAIN]
    functions = {"description": descriptions, "program": spec.mlProgram.functions}
    wrong = [place for place in functions if sorted(functions[place]) != expected]
    for place in wrong:
        yield f"functions: {expected} in the manifest, {sorted(functions[place])} in the {place}"
    for name in () if wrong else expected:
        T = shard.functions.get(name, options.t_max)
        described = _described(shard, descriptions[name], T if options.shapes else 1, T)
        faults = list(differences(*described, "manifest", "description"))
        free = T if options.shapes else "T"
        program = _programmed(shard, functions["program"][name], free, options.preset)
        faults += differences(*program, "manifest", "program")
        for fault in faults:
            yield f"function {name}: {fault}" if shard.functions else fault


def _declared(shard: Shard, low: int | str, high: int | str) -> Facts:
    """Facts of a shard in the manifest: inputs of `low` to `high` tokens, outputs of
    `high` tokens, and states."""
    facts = {}
    for name, shape in shard.inputs.items():
        dtype = "INT32" if name == POS else "FLOAT16"
        facts[f"input {name}"] = _fact(dtype, sizes(shape, low), sizes(shape, high))
    for name, shape in shard.outputs.items():
        facts[f"output {name}"] = _fact("FLOAT16", sizes(shape, high))
    for state in shard.states.values():
        facts[f"state {state.tensor}"] = _fact("FLOAT16", state.shape)
    return facts


def _fact(dtype: str, low: list, high: list | None = None) -> str:
    axes = [str(a) if a == b else f"{a}..{b}" for a, b in zip(low, high or low)]
    return f"{dtype} [{', '.join(axes)}]"


def _described(shard: Shard, description, low: int, high: int) -> tuple[Facts, Facts]:
    """Facts of the manifest, and facts of a description, in which an output may lack a
    shape."""
    facts = {}
    dtype_name = messages("FeatureTypes_pb2").ArrayFeatureType.ArrayDataType.Name
    for kind in ("input", "output", "state"):
        for value in getattr(description, kind):
            array = value.type.multiArrayType
            if kind == "state":
                array = value.type.stateType.arrayType
            default = list(array.shape)
            if kind == "output" and not default:
                default = sizes(shard.outputs.get(value.name, []), high)
            lowest = highest = default
            flexible = array.WhichOneof("ShapeFlexibility")
            if flexible == "shapeRange":
                ranges = array.shapeRange.sizeRanges
                lowest = [size.lowerBound for size in ranges]
                highest = [size.upperBound for size in ranges]
            fact = _fact(dtype_name(array.dataType), lowest, highest)
            if flexible not in (None, "shapeRange"):
                fact += f" of {flexible}"
            if not all(a <= n <= b for a, n, b in zip(lowest, default, highest)):
                fact += f" by default {default}"
            name = f"{kind} {value.name}"
            facts[name] = f"{facts[name]} and {fact}" if name in facts else fact
    return _declared(shard, low, high), facts


def _programmed(
    shard: Shard, function, T: int | str, preset: Preset
) -> tuple[Facts, Facts]:
    """Facts of the manifest, and those of a program of `T` tokens ("T": of any number):
    its interface, the values that hold the layers' hidden outputs, and how matrices of
    convolutions (as the preset says) and other weights (fp16) are stored."""
    block = function.block_specializations[function.opset]
    declared, facts, types, read = _declared(shard, T, T), {}, {}, set()
    for operand in function.inputs:
        kind, message = "input", operand.type
        if message.WhichOneof("type") == "stateType":
            kind, message = "state", message.stateType.wrappedType
        types[operand.name] = message
        facts[f"{kind} {operand.name}"] = _type(message)
    for op in block.operations:
        types |= {out.name: out.type for out in op.outputs}
        if op.type == "conv":
            read.update(bound.name for bound in op.inputs["weight"].arguments)
    facts |= {f"output {name}": _type(types[name]) for name in block.outputs}
    if shard.kind == "layers":
        *inner, last = range(*shard.layers)
        declared |= {f"tap of layer {i}": _type(types[HIDDEN]) for i in inner}
        declared[f"tap of layer {last}"] = HIDDEN
        for i, name in shard.taps.items():
            is_inner = name in types and i != last
            facts[f"tap of layer {i}"] = _type(types[name]) if is_inner else name
    weights = {constant: tensor for tensor, constant in shard.weights.items()}
    for op in block.operations:
        if op.type != "const" and not op.type.startswith("constexpr_"):
            continue
        name, shape = op.outputs[0].name, _sizes(op.outputs[0].type)
        fact = f"storage of {name}"
        matrix = shape[2:] == [1, 1] and min(shape[:2]) > 1
        if name in read and matrix and OUTSIDE not in weights.get(name, ""):
            declared[fact] = _expected(preset, shape)
        elif op.type != "const" or name in weights:
            declared[fact] = ("const", "FLOAT16")
        if fact in declared:
            facts[fact] = _stored_as(op)
    return declared, facts


def _type(message) -> str:
    """dtype and sizes of a tensor type."""
    return _fact(_dtype(message), _sizes(message))


def _sizes(message) -> list[int | str]:
    return [
        d.constant.size if d.WhichOneof("dimension") == "constant" else "T"
        for d in message.tensorType.dimensions
    ]


def _dtype(message) -> str:
    return messages("MIL_pb2").DataType.Name(message.tensorType.dataType)


def _stored_as(op) -> tuple:
    """How a constant is stored: its operation, then the dtype of each operand and, for
    scales and tables, its shape."""
    if op.type == "const":
        return "const", _dtype(op.attributes["val"].type)
    operands = []
    for name in sorted(op.inputs):
        kind = op.inputs[name].arguments[0].value.type
        shape = _sizes(kind) if name in ("scale", "lut") else []
        operands.append((name, _dtype(kind), *shape))
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


def _origins(m: Manifest, checkpoint: Checkpoint) -> tuple[Facts, Facts]:
    """Tokens, tokenizer, family and sizes of the manifest and of the checkpoint."""
    config = checkpoint.config
    ours = {"family": m.family, "bos": m.tokens.bos, "eos": m.tokens.eos}
    theirs = {"family": config.model_type, "bos": config.bos_token_id}
    theirs["eos"] = checkpoint.eos
    for name, size in SIZES.items():
        ours[size], theirs[size] = getattr(m.dims, size), getattr(config, name)
    for entry in m.tokens.files:
        ours[f"tokenizer file {entry.path.rpartition('/')[2]}"] = entry.sha256[:12]
    for path in checkpoint.tokenizer_files():
        theirs[f"tokenizer file {path.name}"] = sha256(path)[:12]
    return ours, theirs


def sizes(shape: list, T: int | str) -> list:
    """A shape of the manifest with its T."""
    return [{"T": T}.get(n, n) for n in shape]
