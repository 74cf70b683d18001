"""Describes packages of another exporter in the manifest of a bundle."""

import math
from pathlib import Path
from typing import NamedTuple

import miltorch
from miltorch.program import files
from workbench.adopt.packages import Package
from workbench.adopt.roles import INPUTS, find_role
from workbench.adopt.weights import find_weights
from workbench.bundle import (
    PRESETS,
    Embedding,
    FileEntry,
    Manifest,
    Options,
    Shard,
    file_entries,
)
from workbench.bundle.foreign import TOKEN_AXIS, Foreign, Function, Part, plane_shapes
from workbench.bundle.names import IDS, LOGITS, PER_LAYER, X0, split_layer
from workbench.check.weights import HOST_TENSORS
from workbench.errors import InputError
from workbench.exporter.shards import Spec, layers_spec
from workbench.exporter.writing import versions, write_embedding
from workbench.files import link
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan

LARGEST_CALL = 64  # tokens of a call where a package takes any number
# parts of the names that ANEMLL gives functions: one that moves the rows of full caches,
# and one that gives no logits
ROTATE = "rotate"
PREFILL = "prefill"
CacheShapes = dict[str, list[int]]
"""The name of a plane → its shape [1, heads, rows, width]."""


def link_and_describe(
    packages: list[Package], checkpoint: Checkpoint, plan: Plan, root: Path
) -> Manifest:
    """Links packages into the folder `root`, writes the embedding table and the tokenizer
    there, and describes them; caches of equal sizes may still be confused."""
    parts, cache_shapes = link_packages(packages, plan, root)
    check_caches(cache_shapes, plan)
    roles = {}
    for package in packages:
        roles |= package.roles
    calls = describe_calls(packages, plan, cache_shapes, {*roles.values()})
    entries = file_entries(root, root / "layers")
    compress = nearest_preset(entries, checkpoint)
    options = describe_options(calls.functions, cache_shapes, plan, compress)
    spec = describe_shard(plan, options, cache_shapes)
    shard = Shard(
        **vars(spec),
        path="layers",
        template="layers",
        foreign=Foreign(
            parts=parts, roles=roles, functions=calls.functions, moves=calls.moves
        ),
        weights=find_weights([package.program for package in packages], checkpoint),
        bytes=sum(file.bytes for file in entries),
        files=entries,
    )
    table = write_embedding(checkpoint, plan, root)
    return Manifest(
        family=checkpoint.config.model_type,
        dims=plan.dims,
        options=options,
        rope=plan.rope,
        layers=plan.layers,
        shards=[shard],
        embedding=Embedding(file=table, scale=plan.embedding_scale),
        tokens=checkpoint.tokens.save(root),
        checkpoint=checkpoint.manifest_entry,
        packages=versions(options),
    )


# --- packages and their caches ------------------------------------------------------------


def link_packages(
    packages: list[Package], plan: Plan, root: Path
) -> tuple[list[Part], CacheShapes]:
    """Links packages into the folder `root`.

    Returns:
        The part of the manifest for each package; the shapes of all caches.
    """
    parts, cache_shapes = [], {}
    for index, package in enumerate(packages):
        states = package.program.states
        number = state_number(package, index, plan)
        cache_shapes |= plane_shapes(number, states)
        name = package.path.name
        if states:
            part = Part(package=name, state=number)
        else:
            part = Part(package=name, functions=tuple(filter(None, package.programs)))
        parts.append(part)
        link_package(package.path, root / "layers" / name)
    return parts, cache_shapes


def link_package(source: Path, target: Path) -> None:
    """Links every file of a package into the folder `target`."""
    for file in files(source):
        path = target / file
        path.parent.mkdir(parents=True, exist_ok=True)
        link(str(source / file), str(path))


def state_number(package: Package, index: int, plan: Plan) -> int:
    """The number of the state that a package reads. Packages that each declare all
    caches of the model share state 0; otherwise each has the state of its index."""
    planes = plane_shapes(0, package.program.states)
    declares_all = len(planes) == len(cache_sizes(plan))
    return 0 if declares_all else index


def cache_sizes(plan: Plan) -> list[tuple[int, int]]:
    """Heads and head width of every cache, sorted: two for each layer, its keys and its
    values, except for layers that copy those of another one."""
    sizes = [layer.heads(plan.dims) for layer in plan.layers if layer.source is None]
    return sorted(sizes + sizes)


def check_caches(shapes: CacheShapes, plan: Plan) -> None:
    """Compares the packages' caches with those of the model, each of its own width or all
    padded to the largest.

    Raises:
        InputError: other caches.
    """
    # Heads and width. A state of fewer axes has a shorter shape, which equals no size.
    sizes = sorted(tuple(shape[1::2]) for shape in shapes.values())
    needed = cache_sizes(plan)
    largest = max(width for _, width in needed)
    padded = sorted((heads, largest) for heads, _ in needed)
    if sizes not in (needed, padded):
        raise InputError(
            "packages",
            f"{len(sizes)} caches of {_describe_sizes(sizes)}",
            f"{len(needed)} of {_describe_sizes(needed)}",
            "name all packages, and the checkpoint that was exported",
        )


def _describe_sizes(sizes: list[tuple[int, ...]]) -> str:
    """The heads and widths of caches, each pair once."""
    kinds = {
        f"{size[0]} heads of width {size[1]}" if len(size) == 2 else f"axes {size}"
        for size in sizes
    }
    return " and ".join(sorted(kinds)) or "no heads"


# --- calls --------------------------------------------------------------------------------


class Calls(NamedTuple):
    """How the packages with states are called.

    Attributes:
        moves: rows of a cache → `shift` or `right` (see `Foreign`).
    """

    functions: list[Function]
    moves: dict[int, str]


def describe_calls(
    packages: list[Package], plan: Plan, cache_shapes: CacheShapes, roles: set[str]
) -> Calls:
    """The functions of packages with states, and the moves of their caches' rows.

    Exporters move rows in one of three ways, which are told apart by names:

        a function's name contains `rotate`    caches of a window's rows: `shift`
        an input is a mask, and none says      the largest caches: `right`
        where rows are written
        anything else                          no row moves: an input says where rows
                                               are written

    Args:
        roles: of all inputs and outputs.
    """
    windows = [layer.window for layer in plan.layers if layer.window]
    window = max(windows, default=None)
    first_with_states = next(package for package in packages if package.program.states)
    functions = describe_functions(first_with_states.programs, window)
    # only beside functions that rotate does another one end at a position
    if any(function.until for function in functions):
        return Calls(functions, {window: "shift"})
    if "mask" in roles and not roles & {"start", "write", "ring_start"}:
        # nothing says where to write: the newest row is always the last one
        rows = max(shape[2] for shape in cache_shapes.values())
        return Calls(functions, {rows: "right"})
    return Calls(functions, {})


def describe_functions(
    programs: dict[str | None, miltorch.Program], window: int | None
) -> list[Function]:
    """The functions of packages with states. If some rotate caches, these serve the
    positions from `window` on, and the others those before.

    Args:
        programs: of one of these packages, see `Package`.
    """
    has_rotating = any(name and ROTATE in name for name in programs)
    functions = []
    for name, program in programs.items():
        fewest, most = count_tokens(program)
        limits = {"t_min": fewest, "t_max": most}
        if has_rotating and ROTATE in name:
            limits["first"] = window
        elif has_rotating:
            limits["until"] = window
        logits = name is None or PREFILL not in name
        functions.append(Function(name=name, logits=logits, **limits))
    return functions


def count_tokens(program: miltorch.Program) -> tuple[int, int]:
    """The fewest and the most tokens that a program takes."""
    for feature in program.description.input:
        axis = TOKEN_AXIS.get(find_role(INPUTS, feature.name))
        if axis is None:
            continue
        if size := program.inputs[feature.name].shape[axis]:
            return size, size
        ranges = feature.type.multiArrayType.shapeRange.sizeRanges
        most = ranges[axis].upperBound if ranges else LARGEST_CALL
        return 1, most if 0 < most < LARGEST_CALL else LARGEST_CALL
    actual, needed = [*program.inputs], "names such as input_ids, hidden_states"
    step = "for a new convention add a pattern to INPUTS in adopt/roles.py"
    raise InputError("inputs", str(actual), needed, step)


# --- options and the shard ----------------------------------------------------------------


def nearest_preset(entries: list[FileEntry], checkpoint: Checkpoint) -> str:
    """The preset that stores about as many bits per weight as the packages do.

    Args:
        entries: the packages' files.
    """
    stored = sum(file.bytes for file in entries if file.path.endswith(".bin"))
    # the host looks second embeddings up, and towers are no part of the text model
    lookup = HOST_TENSORS[PER_LAYER]
    count = sum(
        math.prod(checkpoint.shape(name))
        for name in checkpoint.header
        if (name.startswith(checkpoint.prefix) or name == checkpoint.head)
        and not name.endswith(lookup)
    )
    bits = 8 * stored / count
    return min(PRESETS, key=lambda name: abs(PRESETS[name].stored_bits - bits))


def describe_options(
    functions: list[Function], cache_shapes: CacheShapes, plan: Plan, compress: str
) -> Options:
    """The options of an export with which a bundle has these functions and caches."""
    rows = [shape[2] for shape in cache_shapes.values()]
    # the last token of a call goes through a function that gives logits
    largest = max(f.t_max if f.logits else f.t_max + 1 for f in functions)
    return Options(
        max_seq_len=max(rows),
        tokens=f"1-{min(largest, max(rows))}",
        kv_write="slice",
        compress=compress,
        sliding="mask" if min(rows) == max(rows) else "window",
        layers_per_shard=plan.dims.L,
    )


def describe_shard(plan: Plan, options: Options, cache_shapes: CacheShapes) -> Spec:
    """The one shard that all packages are: from token ids to logits, with all layers."""
    spec = layers_spec(plan, options, 0, plan.dims.L)
    # packages keep no copies of caches
    states = {
        name: entry
        for name, entry in spec.states.items()
        if source_layer(plan, name) is None
    }
    # Provisional: any one-to-one mapping between caches and planes of equal heads and
    # rows will do, since `match_caches` only exchanges planes. Sorting both sides by
    # their shape gives one.
    planes = sorted(cache_shapes, key=cache_shapes.get)
    names = sorted(states, key=lambda name: states[name].shape)
    spec.states = {
        name: states[name].model_copy(update={"tensor": plane})
        for name, plane in zip(names, planes)
    }
    # packages compute from x what layers add to the stream
    spec.inputs.pop(X0, None)
    # `ForeignCall` makes masks in the form of each package
    spec.inputs = {n: shape for n, shape in spec.inputs.items() if "mask" not in n}
    spec.inputs[IDS] = [1, "T"]
    spec.outputs = {LOGITS: [1, plan.dims.V, "T", 1]}
    spec.rows = 0, plan.dims.V  # of the head: all of them
    return spec


def source_layer(plan: Plan, state: str) -> int | None:
    """The layer whose cache rows the layer of a logical state copies; None: it has its
    own."""
    layer, _ = split_layer(state)
    return plan.layers[layer].source
