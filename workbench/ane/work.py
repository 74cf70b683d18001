"""The weights, caches and states that one call of an export reads. Those of a bundle are
read from the programs in its packages (`_bundle_shard`), those of a checkpoint's export
are computed from its configuration (`_planned_shard`). Both give a `ShardWork` for each
shard, and `call_work` joins them to the `Work` of the call.

Weights are those of products (convolutions, linear layers, products with a constant
matrix), counted as elements of each storage format. Embeddings are looked up, not
streamed, and norms, biases and rotary tables are too small to count. Recurrent bytes
are those of matrix states; the states of short convolutions are a few kB."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

import miltorch
from miltorch import Program
from miltorch.graph import Graph
from miltorch.program import Op, Ref
from workbench.bundle import Bundle, Dims, Options, Shard, StateEntry
from workbench.bundle.foreign import PlaneName
from workbench.bundle.names import MATRIX_STATE, ROUTER_STATE, is_cache
from workbench.bundle.presets import Preset

if TYPE_CHECKING:
    from workbench.exporter.shards import Spec
    from workbench.models.checkpoint import Checkpoint
    from workbench.models.family import Plan

VALUE_BYTES = {"fp16": 2, "fp32": 4}  # of a program's inputs, states and results
WEIGHT_INPUT = {"conv": "weight", "conv_transpose": "weight", "linear": "weight"}
"""A product with weights → the name of the input that has them."""
STORED_REPEATED = "spread_bytes"
"""The key of `repeated_cache_bytes` in logged runs."""
# operations that pass rows of a cache on: they move values, or write new rows by a mask
MOVES_CACHE_ROWS = frozenset(
    """
    read_state coreml_update_state slice_update slice_by_index slice_by_size select split
    concat stack tile expand_dims squeeze reshape reshape_like transpose identity cast
    add sub mul
""".split()
)


@dataclass(frozen=True)
class ShardWork:
    """The work of a shard, or of several that are counted as one.

    Args:
        weights: format → elements of the weights of products.
        cache_bytes: bytes of K and V that the attention products read, as the program
            builds them.
        repeated_cache_bytes: the same, if K and V were repeated for each query head, as
            the programs of published exporters do before the products.
        recurrent_bytes: bytes of matrix states.
        cache_rows: the longest cache, in rows.
        calls: calls that wait for each other; weights and bytes are those of all of them.
    """

    name: str
    weights: dict[str, int]
    cache_bytes: int = 0
    repeated_cache_bytes: int = 0
    recurrent_bytes: int = 0
    cache_rows: int = 0
    calls: int = 1

    @property
    def is_head(self) -> bool:
        """Whether it is of the head, or of a slice of it (see `joined_name`)."""
        return self.name.startswith("head")


@dataclass(frozen=True)
class Work:
    """The work of one call of `T` tokens for each of `batch` sequences through all
    shards. `ranged_experts`: experts in one program that takes a range of T."""

    shards: tuple[ShardWork, ...]
    T: int = 1
    batch: int = 1
    ranged_experts: bool = False

    def json(self) -> dict:
        """The work by the keys of logged runs."""
        fields = asdict(self)
        for shard in fields["shards"]:
            shard[STORED_REPEATED] = shard.pop("repeated_cache_bytes")
        return fields

    @classmethod
    def from_json(cls, fields: dict) -> "Work":
        """The work that `json` gave."""
        shards = []
        for stored in fields["shards"]:
            shard = dict(stored)
            repeated = shard.pop(STORED_REPEATED)
            shards.append(ShardWork(**shard, repeated_cache_bytes=repeated))
        return cls(**fields | {"shards": tuple(shards)})

    @property
    def calls(self) -> int:
        """Calls that wait for each other."""
        return sum(shard.calls for shard in self.shards)

    @property
    def weights(self) -> dict[str, int]:
        """Format → elements."""
        total = Counter()
        for shard in self.shards:
            total.update(shard.weights)
        return dict(total)

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V that the attention products of all shards read."""
        return sum(shard.cache_bytes for shard in self.shards)

    @property
    def repeated_cache_bytes(self) -> int:
        """The same, if K and V were repeated for each query head."""
        return sum(shard.repeated_cache_bytes for shard in self.shards)

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of matrix states."""
        return sum(shard.recurrent_bytes for shard in self.shards)

    @property
    def cache_rows(self) -> int:
        """Rows of the longest cache."""
        return max(shard.cache_rows for shard in self.shards)


def stored_format(preset: Preset) -> str:
    """The format that a preset stores matrices in."""
    if preset.is_table:
        return f"lut{preset.bits}"  # tables are few beside the indices
    if preset.is_integer and preset.bits == 8 and not preset.block:
        return "int8"  # with a scale for each channel or for each tensor
    return preset.name


def stored_bits(format: str) -> float:
    """Bits of a weight as stored, with the scales of blocks: `int4-block32` has 4.5."""
    kind, _, block = format.partition("-block")
    # fp16, int8, lut4, int4-channel: a word and the number of bits
    bits = int(re.match(r"[a-z]+(\d+)", kind)[1])
    return bits + 16 / int(block) if block else bits


def call_work(
    source: "Bundle | Checkpoint", options: Options | None = None, T: int = 1
) -> Work:
    """The work of one call of T tokens for each sequence: of a bundle, or of a
    checkpoint's export with `options`.

    All slices of the head count as one call. Routed experts are counted at their most: the
    T · batch tokens of the call all choose different experts of a layer, up to the number
    that it has, and each of these is as large as the largest."""
    if isinstance(source, Bundle):
        shards, options = source.manifest.shards, source.manifest.options
        works = [_bundle_shard(source, shard, T) for shard in shards]
    else:
        from workbench.exporter.shards import specs

        plan = source_plan(source)
        shards = list(specs(plan, options))
        works = [_planned_shard(source, spec, plan, options) for spec in shards]
    expert_calls = min(T * options.batch, _expert_count(shards))
    expert_names = {joined_name(shard) for shard in shards if shard.kind == "expert"}
    members: dict[str, list[ShardWork]] = {}  # joined name → works
    for shard, work in zip(shards, works):
        members.setdefault(joined_name(shard), []).append(work)
    joined = []
    for name, group in members.items():
        if name in expert_names:
            joined.append(_largest_expert(name, group, expert_calls))
        else:
            joined.append(join_shards(name, group))
    # other exporters may have the head in the last layer's package
    joined = [work for work in joined if work.weights]
    is_mixture = any(ROUTER_STATE in shard.inputs for shard in shards)
    ranged = is_mixture and options.moe == "dense" and not options.fixed_sizes
    return Work(tuple(joined), T, options.batch, ranged)


def _expert_count(shards: "Iterable[Shard | Spec]") -> int:
    """The number of experts of a layer; 0 without routed experts."""
    # the shard of expert n has the rows n to n + 1 of the experts
    return max((shard.rows[1] for shard in shards if shard.kind == "expert"), default=0)


def joined_name(shard: "Shard | Spec") -> str:
    """The name under which the work of a shard is counted: all slices of the head share
    one, and all experts of a layer share one."""
    names = {"head": "head", "expert": f"expert of layer {shard.layers[0]}"}
    return names.get(shard.kind, shard.name)


def _largest_expert(name: str, works: Sequence[ShardWork], calls: int) -> ShardWork:
    """The work of `calls` calls of the expert with most weights."""
    largest = max(works, key=lambda work: sum(work.weights.values()))
    weights = {format: n * calls for format, n in largest.weights.items()}
    return ShardWork(name, weights, calls=calls)


def join_shards(name: str, works: Sequence[ShardWork]) -> ShardWork:
    """Adds up the work of shards, or of the packages of one shard (another exporter may
    have written several), that count as one call: `calls` of the result is 1."""
    weights = Counter()
    for work in works:
        weights.update(work.weights)
    return ShardWork(
        name=name,
        weights=dict(weights),
        cache_bytes=sum(work.cache_bytes for work in works),
        repeated_cache_bytes=sum(work.repeated_cache_bytes for work in works),
        recurrent_bytes=sum(work.recurrent_bytes for work in works),
        cache_rows=max(work.cache_rows for work in works),
    )


# --- of a checkpoint


def source_plan(checkpoint: "Checkpoint") -> "Plan":
    """The plan of a checkpoint's family."""
    from workbench.models import family_of

    return family_of(checkpoint.config).plan(checkpoint.config)


def _planned_shard(
    source: "Checkpoint", spec: "Spec", plan: "Plan", options: Options
) -> ShardWork:
    """The work of a shard that an export would write. Its attention products read every
    cache as it is stored."""
    from workbench.exporter.weights import weight_sources

    weights = Counter()
    for weight in weight_sources(spec, source, plan, options):
        if is_product_matrix(weight.shape):
            weights[stored_format(weight.preset)] += prod(weight.shape)
    caches = [state for name, state in spec.states.items() if is_cache(name)]
    matrices = [state for name, state in spec.states.items() if is_matrix(name)]
    return ShardWork(
        name=spec.name,
        weights=dict(weights),
        cache_bytes=sum(state_bytes(state, options) for state in caches),
        repeated_cache_bytes=_repeated_bytes(caches, plan.dims, options),
        recurrent_bytes=sum(state_bytes(state, options) for state in matrices),
        cache_rows=_longest(caches),
    )


# --- of a package


def _bundle_shard(bundle: Bundle, shard: Shard, T: int) -> ShardWork:
    """The work of a shard, read from its programs."""
    dims, options = bundle.manifest.dims, bundle.manifest.options
    cache_names, matrix_names = set(), set()  # of states in the programs
    for name, state in shard.states.items():
        if is_cache(name):
            cache_names.add(_name_in_program(shard, state))
        elif is_matrix(name):
            matrix_names.add(_name_in_program(shard, state))
    width = options.tiling.width(T)
    # `functions` is function → the T that it computes; empty where a package has only one
    matching = [name for name, tokens in shard.functions.items() if tokens == width]
    function = matching[0] if matching else None
    works = [
        program_work(miltorch.read(package, function), cache_names, matrix_names)
        for package in bundle.packages(shard).values()
    ]
    work = join_shards(shard.name, works)
    caches = [state for name, state in shard.states.items() if is_cache(name)]
    return replace(
        work,
        # `cache_bytes` is the larger one where the program itself repeats K and V
        repeated_cache_bytes=max(
            work.cache_bytes, _repeated_bytes(caches, dims, options)
        ),
        cache_rows=_longest(caches),
    )


def _name_in_program(shard: Shard, state: StateEntry) -> str:
    """The name of the program's state that holds a state of the bundle. Another exporter
    may keep several states of the bundle as planes of one."""
    return PlaneName.parse(state.tensor).tensor if shard.foreign else state.tensor


# --- of states


def is_matrix(state: str) -> bool:
    """Whether a state of this name is the matrix of a recurrence."""
    return state.endswith(f".{MATRIX_STATE}")


def state_bytes(state: StateEntry, options: Options) -> int:
    """The bytes of a state, as the program stores it."""
    return VALUE_BYTES[options.program_dtype] * prod(state.shape)


def _repeated_bytes(caches: list[StateEntry], dims: Dims, options: Options) -> int:
    """The bytes of caches [.., H_kv, rows, D] whose heads are repeated for each query
    head. Layers may differ in H_kv."""
    return sum(
        state_bytes(cache, options) * dims.H // cache.shape[-3] for cache in caches
    )


def _longest(caches: list[StateEntry]) -> int:
    """The rows of the longest of caches [.., H_kv, rows, D]; 0 without one."""
    return max((cache.shape[-2] for cache in caches), default=0)


# --- of a program


def program_work(
    program: Program, cache_names: set[str], matrix_names: set[str]
) -> ShardWork:
    """The work of one program: its products' weights, the operands of its attention
    products, its matrix states.

    Args:
        cache_names: of the states that hold keys or values.
        matrix_names: of the matrix states.
    """
    graph = Graph(program)
    matrices = matrix_names & program.states.keys()
    recurrent = sum(_bytes(program.states[name]) for name in matrices)
    return ShardWork(
        name=program.function,
        weights=_product_weights(graph),
        cache_bytes=_attended_bytes(graph, cache_names),
        recurrent_bytes=recurrent,
    )


def _product_weights(graph: Graph) -> dict[str, int]:
    """Format → elements of the matrices of a program's products, each matrix once."""
    matrices = {
        source.name: source
        for op in graph.ops
        for source in _constant_operands(graph, op)
        if is_product_matrix(graph.shape_of(source))
    }
    weights = Counter()
    for matrix in matrices.values():
        format = weight_format(graph, graph.producer(matrix))
        weights[format] += prod(graph.shape_of(matrix))
    return dict(weights)


def _attended_bytes(graph: Graph, cache_names: set[str]) -> int:
    """The bytes of K and V that a program's attention products read.

    Args:
        cache_names: of the states that hold keys or values.
    """
    states = graph.program.states
    caches = [states[name] for name in cache_names & states.keys()]
    # a call may read the cache only up to its own end; the longest read is counted
    longest = max((cache.shape[-2] for cache in caches), default=1)
    total = 0
    # names of values that consist of rows of the cache
    values_of_cache = set(cache_names)
    for op in graph.ops:
        operands = values_of_cache.intersection(op.reads())
        if op.kind in MOVES_CACHE_ROWS and operands:
            values_of_cache.update(name for name, _ in op.outputs)
        elif op.kind in ("matmul", "scaled_dot_product_attention"):
            total += sum(_bytes(graph.types[name], longest) for name in operands)
    return total


def _constant_operands(graph: Graph, op: Op) -> list[Ref]:
    """Operands of a product that are constants or compressed weights."""
    names = [WEIGHT_INPUT[op.kind]] if op.kind in WEIGHT_INPUT else []
    if op.kind == "matmul":
        names = ["x", "y"]
    sources = [op.inputs.get(name) for name in names]
    producers = [graph.producer(source) for source in sources]
    return [s for s, op in zip(sources, producers) if op and op.is_constant]


def _bytes(type: miltorch.Type, varying: int = 1) -> int:
    """The bytes of a value in fp16, fp32 or int32; a size that varies counts as `varying`."""
    value_bytes = 4 if "32" in type.dtype else 2
    return value_bytes * prod(n or varying for n in type.shape)


def is_product_matrix(shape: tuple) -> bool:
    """Whether a product's weight of this shape, outputs first, has several outputs and
    several inputs."""
    return len(shape) > 1 and shape[0] > 1 and sum(n > 1 for n in shape) > 1


def weight_format(graph: Graph, weight: Op) -> str:
    """The format of a constant or compressed weight, such as lut4 or int4-block32."""
    if weight.kind == "constexpr_lut_to_dense":
        return f"lut{(palette_entries(graph, weight) - 1).bit_length()}"
    if weight.kind == "const":
        return "fp16"
    bits = 4 if is_int4(graph, weight) else 8
    scale = graph.shape_of(weight.inputs.get("scale"))
    if not is_blocked(scale):
        return "int8" if bits == 8 else "int4-channel"
    sizes = graph.shape_of(weight.inputs["data"])
    # along the output channels a block has one, along the inputs as many as share a scale
    block = max(size // scales for size, scales in zip(sizes, scale))
    return f"int{bits}-block{block}"


def palette_entries(graph: Graph, weight: Op) -> int:
    """The number of entries of a palette [groups…, entries, vector] or [entries]; 0 for
    a weight without one."""
    shape = graph.shape_of(weight.inputs.get("lut"))
    if not shape:  # the palette is no constant of known shape
        return 0
    return shape[-2] if len(shape) > 1 else shape[0]


def is_blocked(scale: tuple) -> bool:
    """Whether scales of a shape vary along more than the output channels."""
    return sum(n > 1 for n in scale) > 1


def is_int4(graph: Graph, weight: Op) -> bool:
    """Whether a weight is stored in 4 bits, by the range of its values, since the
    program's reader returns one value per byte. An int8 weight whose values all fit 4
    bits is taken for one in 4 bits."""
    data = graph.literal(weight.inputs.get("data"))
    if data is None or not data.size:
        return False
    largest = 15 if data.dtype == np.uint8 else 7
    return -8 <= int(data.min()) and int(data.max()) <= largest
