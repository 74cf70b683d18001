"""Gate `interface`: `bundle.json`, the packages' descriptions and their programs agree.

Core ML reads the description and runs the program, and the host fills the buffers that
the manifest names. The gate reads each of the three from its file as facts by name and
reports the facts that differ; nothing is run. A package that no runtime would load is
RED."""

from collections.abc import Iterator
from dataclasses import dataclass

from miltorch.coremltools_import import protobuf_module
from miltorch.program import read_spec
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
    PER_LAYER,
    POS,
    V_STATE,
    X0,
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
# in the name of a router's matrix, which every preset leaves in fp16
ROUTER_MATRIX = ".gate."
MAX_LISTED = 8  # differences in the reason
# Sizes in the checkpoint's configuration → dimensions of the manifest.
CONFIG_SIZES = {
    "hidden_size": "C",
    "num_attention_heads": "H",
    "num_key_value_heads": "H_kv",
    "num_hidden_layers": "L",
    "vocab_size": "V",
}
Facts = dict[str, object]  # "input x" → "FLOAT16 [1, 64, 1..4, 1]"


@dataclass(frozen=True)
class TokenRange:
    """The tokens of the calls that a function takes: from `low` to `high`, which are equal
    for a fixed size; both are "T" in a program that takes any number."""

    low: int | str
    high: int | str

    @classmethod
    def exactly(cls, T: int | str) -> "TokenRange":
        return cls(T, T)


@dataclass(frozen=True)
class FactPair:
    """The same facts as two places state them; a fact that one place lacks is a
    difference."""

    expected: Facts
    actual: Facts

    def __or__(self, other: "FactPair") -> "FactPair":
        """The facts of both pairs."""
        return FactPair(self.expected | other.expected, self.actual | other.actual)

    def differences(self, expected_place: str, actual_place: str) -> Iterator[str]:
        """One clause for each fact that differs; the clauses name the two places."""
        for name in sorted(self.expected.keys() | self.actual.keys()):
            a = self.expected.get(name, "missing")
            b = self.actual.get(name, "missing")
            if a != b:
                yield f"{name}: {a} in the {expected_place}, {b} in the {actual_place}"


def interface_gate(bundle: Bundle, checkpoint: Checkpoint | None = None) -> Gate:
    """Compares the manifest with every package and, if a checkpoint is given, with the
    checkpoint's tokens and sizes."""
    manifest = bundle.manifest
    faults = [*shard_list_facts(manifest).differences("options", "list of shards")]
    for shard in manifest.shards:
        try:
            for fault in package_differences(bundle, shard):
                faults.append(f"{shard.name}: {fault}")
        except (IndexError, KeyError, ValueError) as problem:
            # an InputError, or a protobuf message that lacks parts
            faults.append(f"{shard.name}: {problem}")
    origins = "no checkpoint given: tokens and tokenizer not compared"
    if checkpoint is not None:
        origins = "tokens, tokenizer and sizes are the checkpoint's"
        facts = checkpoint_facts(manifest, checkpoint)
        faults += facts.differences("manifest", "checkpoint")
    count = sum(len(s.foreign.parts) if s.foreign else 1 for s in manifest.shards)
    packages = "1 package" if count == 1 else f"{count} packages"
    reason = f"manifest, description and program agree in {packages}; {origins}"
    if faults:
        reason = "; ".join(faults[:MAX_LISTED])
    if len(faults) > MAX_LISTED:
        reason += f"; and {len(faults) - MAX_LISTED} more"
    return gates.at_most("interface", float(len(faults)), 0.0, reason)


def shard_list_facts(manifest: Manifest) -> FactPair:
    """Facts about the shards: as options and dimensions require them, and as the manifest
    lists them."""
    return _layout_facts(manifest) | _shape_facts(manifest)


def layer_shards(manifest: Manifest) -> list[Shard]:
    """The shards that hold the caches of layers."""
    return [shard for shard in manifest.shards if shard.kind in ("layers", "router")]


def _layout_facts(manifest: Manifest) -> FactPair:
    """Which layers and experts the shards have."""
    L = manifest.dims.L
    step = manifest.options.layers_per_shard
    kind = "router" if manifest.options.moe == "routed" else "layers"
    shards_of_layers = layer_shards(manifest)
    experts = {shard.layers: [] for shard in shards_of_layers}
    for shard in manifest.shards:
        if shard.kind == "expert":
            experts.setdefault(shard.layers, []).append(shard.rows)
    count = max(1, *map(len, experts.values())) if kind == "router" else 0
    required = {
        "kinds of shards": {kind},
        "layers of shards": [(i, min(i + step, L)) for i in range(0, L, step)],
        "experts": dict.fromkeys(experts, [(e, e + 1) for e in range(count)]),
    }
    listed = {
        "kinds of shards": {shard.kind for shard in shards_of_layers},
        "layers of shards": [shard.layers for shard in shards_of_layers],
        "experts": {layers: sorted(rows) for layers, rows in experts.items()},
    }
    return FactPair(required, listed)


def _shape_facts(manifest: Manifest) -> FactPair:
    """The shapes of the inputs, outputs and caches of every shard. Shapes that only one
    side states are left out, except in a shard of layers those of caches and of what
    selects their rows: a missing or an unexpected one is a difference too."""
    required, listed = {}, {}
    shards_of_layers = layer_shards(manifest)
    for shard in manifest.shards:
        required_shapes = _required_shapes(manifest, shard)
        listed_shapes = _listed_shapes(shard)
        compared = required_shapes.keys() & listed_shapes.keys()
        if shard in shards_of_layers:
            all_names = required_shapes.keys() | listed_shapes.keys()
            compared |= {name for name in all_names if _is_of_cache(name)}
        for name in compared & required_shapes.keys():
            required[f"{shard.name} {name}"] = required_shapes[name]
        for name in compared & listed_shapes.keys():
            listed[f"{shard.name} {name}"] = listed_shapes[name]
    return FactPair(required, listed)


def _listed_shapes(shard: Shard) -> Facts:
    """The shapes of a shard's inputs, outputs and states as the manifest lists them, and
    the rows of each ring."""
    shapes = shard.inputs | shard.outputs
    for name, state in shard.states.items():
        shapes |= {name: state.shape, f"ring of {name}": state.ring}
    return shapes


def _is_of_cache(name: str) -> bool:
    """Whether a shape belongs to a cache, or to an input that selects the rows that a
    call writes."""
    return is_cache(name) or name == POS or name.startswith(KV_WRITE_MASK)


def _required_shapes(manifest: Manifest, shard: Shard) -> Facts:
    """Shapes of a shard's inputs, outputs and caches as dimensions and options require
    them."""
    options = manifest.options
    dims = manifest.dims
    widths = dict.fromkeys((X, X0, HIDDEN, BASE, EXPERT_IN, ACC), dims.C)
    widths[PER_LAYER] = (shard.layers[1] - shard.layers[0]) * dims.P
    widths |= {EXPERT_WEIGHT: 1, LOGITS: shard.rows[1] - shard.rows[0]}
    shapes = {name: options.activation_shape(width) for name, width in widths.items()}
    halves = {rope.name: len(rope.inv_freq) for rope in manifest.rope}
    for i in shard.layer_range:
        layer = manifest.layers[i]
        masked = layer.attends and options.kv_write == "mask"
        for name, shape in options.layer_inputs(layer, halves[layer.rope]).items():
            if masked or not _is_of_cache(name):
                shapes[name] = shape
        if layer.attends:
            shapes |= {} if masked else {POS: [1]}
            H_kv, D = layer.heads(dims)
            for leaf in (K_STATE, V_STATE):
                if shard.foreign and layer.source is not None:
                    continue  # packages of other exporters read the source's cache
                cache = f"layers.{i}.{leaf}"
                shapes[cache] = [
                    options.batch,
                    H_kv,
                    options.cache_rows(layer.window),
                    D,
                ]
                shapes[f"ring of {cache}"] = options.ring_rows(layer.window)
            for name in layer.shared_rows:
                shapes[name] = [options.batch, H_kv, "T", D]
    return shapes


def package_differences(bundle: Bundle, shard: Shard) -> Iterator[str]:
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
    is_comparable = True
    for place, by_name in functions.items():
        if sorted(by_name) != expected:
            is_comparable = False
            yield f"functions: {expected} in the manifest, {sorted(by_name)} in the {place}"
    if not is_comparable:
        return
    for name in expected:
        T = shard.functions.get(name, options.t_max)
        if options.fixed_sizes:
            described_range = program_range = TokenRange.exactly(T)
        else:
            described_range = TokenRange(1, T)
            program_range = TokenRange.exactly("T")
        described = description_facts(shard, descriptions[name], described_range)
        faults = [*described.differences("manifest", "description")]
        function = functions["program"][name]
        program = program_facts(shard, function, program_range, bundle.manifest)
        faults += program.differences("manifest", "program")
        for fault in faults:
            yield f"function {name}: {fault}" if shard.functions else fault


def manifest_facts(shard: Shard, tokens: TokenRange) -> Facts:
    """Facts of a shard in the manifest: inputs of these tokens, outputs of the most of
    them, and states."""
    facts = {}
    for name, shape in shard.inputs.items():
        dtype = "INT32" if name == POS else "FLOAT16"
        facts[f"input {name}"] = _fact(
            dtype, shape_at(shape, tokens.low), shape_at(shape, tokens.high)
        )
    for name, shape in shard.outputs.items():
        facts[f"output {name}"] = _fact("FLOAT16", shape_at(shape, tokens.high))
    for state in shard.states.values():
        facts[f"state {state.tensor}"] = _fact("FLOAT16", state.shape)
    return facts


def _fact(dtype: str, low: list, high: list | None = None) -> str:
    """A type in words: the dtype and the size of each axis, `low..high` where it is a
    range."""
    axes = [str(a) if a == b else f"{a}..{b}" for a, b in zip(low, high or low)]
    return f"{dtype} [{', '.join(axes)}]"


def description_facts(shard: Shard, description, tokens: TokenRange) -> FactPair:
    """Inputs, outputs and states in the manifest and in a package's description, for calls
    of these tokens. An output without a shape in the description takes the
    manifest's."""
    facts = {}
    dtype_name = protobuf_module("FeatureTypes_pb2").ArrayFeatureType.ArrayDataType.Name
    for kind in ("input", "output", "state"):
        for value in getattr(description, kind):
            array = value.type.multiArrayType
            if kind == "state":
                array = value.type.stateType.arrayType
            default = list(array.shape)
            if kind == "output" and not default:
                default = shape_at(shard.outputs.get(value.name, []), tokens.high)
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
    return FactPair(manifest_facts(shard, tokens), facts)


def program_facts(
    shard: Shard, function, tokens: TokenRange, manifest: Manifest
) -> FactPair:
    """What the manifest says, and a program for calls of these tokens has: the interface,
    the values that hold the layers' hidden outputs, and how weights are stored."""
    block = function.block_specializations[function.opset]
    facts, types = _interface_facts(function, block)
    interface = FactPair(manifest_facts(shard, tokens), facts)
    return interface | _tap_facts(shard, types) | _storage_facts(shard, block, manifest)


def _interface_facts(function, block) -> tuple[Facts, dict[str, object]]:
    """Facts about a program's inputs, states and outputs, and the types of all its
    values by name."""
    facts: Facts = {}
    types = {}
    for operand in function.inputs:
        kind, message = "input", operand.type
        if message.WhichOneof("type") == "stateType":
            kind, message = "state", message.stateType.wrappedType
        types[operand.name] = message
        facts[f"{kind} {operand.name}"] = _describe_type(message)
    for op in block.operations:
        types |= {out.name: out.type for out in op.outputs}
    facts |= {f"output {name}": _describe_type(types[name]) for name in block.outputs}
    return facts, types


def _tap_facts(shard: Shard, types: dict[str, object]) -> FactPair:
    """For each layer of a shard, the type of the value that the manifest names as its
    hidden output: as it should be, and as the program has it. The last layer's value is
    the shard's output."""
    declared: Facts = {}
    facts: Facts = {}
    if shard.kind != "layers":
        return FactPair(declared, facts)
    *inner, last = shard.layer_range
    for layer in inner:
        declared[f"tap of layer {layer}"] = _describe_type(types[HIDDEN])
    declared[f"tap of layer {last}"] = HIDDEN
    for layer, name in shard.taps.items():
        is_inner = name in types and layer != last
        facts[f"tap of layer {layer}"] = (
            _describe_type(types[name]) if is_inner else name
        )
    return FactPair(declared, facts)


def _storage_facts(shard: Shard, block, manifest: Manifest) -> FactPair:
    """How a program's weights are stored: matrices of convolutions as the manifest says,
    other weights in fp16."""
    conv_weights = set()
    for op in block.operations:
        if op.type == "conv":
            conv_weights.update(bound.name for bound in op.inputs["weight"].arguments)
    tensors = {constant: tensor for tensor, constant in shard.weights.items()}
    declared: Facts = {}
    facts: Facts = {}
    for op in block.operations:
        if op.type != "const" and not op.type.startswith("constexpr_"):
            continue
        name, shape = op.outputs[0].name, _axes_of_type(op.outputs[0].type)
        fact = f"storage of {name}"
        is_matrix = shape[2:] == [1, 1] and min(shape[:2]) > 1
        is_router = ROUTER_MATRIX in tensors.get(name, "")
        if name in conv_weights and is_matrix and not is_router:
            if name in tensors:
                preset = manifest.preset_of(tensors[name])
            else:  # a matrix of zeros, which comes from no tensor
                preset = manifest.options.preset.for_rows(shape[0])
            declared[fact] = expected_storage(preset, shape)
        elif op.type != "const" or name in tensors:
            declared[fact] = ("const", "FLOAT16")
        if fact in declared:
            facts[fact] = storage_of(op)
    return FactPair(declared, facts)


def _describe_type(message) -> str:
    """dtype and sizes of a tensor type."""
    return _fact(_dtype_of_type(message), _axes_of_type(message))


def _axes_of_type(message) -> list[int | str]:
    """The sizes of a tensor type in MIL; "T" for an axis of no fixed size."""
    return [
        d.constant.size if d.WhichOneof("dimension") == "constant" else "T"
        for d in message.tensorType.dimensions
    ]


def _dtype_of_type(message) -> str:
    """The name of a tensor type's dtype in MIL, such as FLOAT16."""
    return protobuf_module("MIL_pb2").DataType.Name(message.tensorType.dataType)


def storage_of(op) -> tuple:
    """How a constant is stored: its operation, then the dtype of each operand and, for
    scales and tables, its shape."""
    if op.type == "const":
        return "const", _dtype_of_type(op.attributes["val"].type)
    operands = []
    for name in sorted(op.inputs):
        kind = op.inputs[name].arguments[0].value.type
        shape = _axes_of_type(kind) if name in ("scale", "lut") else []
        operands.append((name, _dtype_of_type(kind), *shape))
    return op.type, *operands


def expected_storage(preset: Preset, shape: list[int]) -> tuple:
    """`storage_of` of a matrix [outputs, inputs, 1, 1] under a preset."""
    if preset == FP16:
        return "const", "FLOAT16"
    if not preset.is_integer:
        groups = shape[0] // preset.group if preset.group else 1
        table = ("lut", "FLOAT16", groups, 1, 1, 1, 1 << preset.bits, 1)
        return "constexpr_lut_to_dense", ("indices", f"UINT{preset.bits}"), table
    rows = 1 if preset.granularity == "per_tensor" else shape[0]
    blocks = shape[1] // preset.block if preset.block else 1
    scale = ("scale", "FLOAT16", rows, blocks, 1, 1)
    return "constexpr_blockwise_shift_scale", ("data", f"INT{preset.bits}"), scale


def checkpoint_facts(manifest: Manifest, checkpoint: Checkpoint) -> FactPair:
    """Tokens, tokenizer, family and sizes in the manifest and in the checkpoint."""
    config = checkpoint.config
    in_manifest = {
        "family": manifest.family,
        "bos": manifest.tokens.bos,
        "eos": manifest.tokens.eos,
        "suppressed": manifest.tokens.suppressed,
    }
    in_checkpoint = {
        "family": config.model_type,
        "bos": config.bos_token_id,
        "eos": checkpoint.tokens.eos,
        "suppressed": checkpoint.tokens.suppressed,
    }
    sizes_of_model = dict(CONFIG_SIZES)
    if getattr(config, "is_heterogeneous", False):
        del sizes_of_model["num_key_value_heads"]  # each layer has its own
        in_manifest |= _layer_facts(manifest)
        in_checkpoint |= _configured_layers(config)
    for name, size in sizes_of_model.items():
        in_manifest[size] = getattr(manifest.dims, size)
        in_checkpoint[size] = getattr(config, name)
    for entry in manifest.tokens.files:
        name = entry.path.rpartition("/")[2]
        in_manifest[f"tokenizer file {name}"] = entry.sha256[:12]
    for path in checkpoint.tokens.files():
        in_checkpoint[f"tokenizer file {path.name}"] = sha256(path)[:12]
    return FactPair(in_manifest, in_checkpoint)


def _layer_facts(manifest: Manifest) -> Facts:
    """Key heads, head size and source of every layer of the manifest."""
    return {
        f"key heads, head size and source of layer {i}": (
            *layer.heads(manifest.dims),
            layer.source,
        )
        for i, layer in enumerate(manifest.layers)
    }


def _configured_layers(config) -> Facts:
    """What `_layer_facts` gives, read from a configuration whose layers differ."""
    facts = {}
    modes = getattr(config, "kv_sharing_modes", [None] * config.num_hidden_layers)
    for i, mode in enumerate(modes):
        layer, source = config.per_layer_config[i], None
        if mode == "reuse":
            source = max(
                j
                for j in range(i)
                if modes[j] != "reuse"
                and config.layer_types[j] == config.layer_types[i]
            )
        name = f"key heads, head size and source of layer {i}"
        facts[name] = layer.num_key_value_heads, layer.head_dim, source
    return facts


def shape_at(shape: list, T: int | str) -> list:
    """A shape of the manifest with `T`, a number or "T", in the place of its "T"."""
    return [T if n == "T" else n for n in shape]
