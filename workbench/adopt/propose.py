"""Makes a bundle of another exporter's packages: they are linked into its folder, and
its manifest describes them.

Inputs, outputs and functions are recognised by their names. Which cache a plane of a
state holds is recognised by values: the keys and values of one token are compared with
the checkpoint's. At position 0 neither rope nor masks matter, so that a fault of the
export rarely prevents this.

`propose` is the entry; below it the file has the steps in order: `open_packages` reads
the packages, finds the roles of their inputs and outputs and sorts them as they run;
`link_and_describe` links them and makes a manifest in which caches and planes of equal sizes may
be confused; `match_caches` runs one token and puts them right; `list_assumptions` lists
what was guessed. weights.py finds the checkpoint's matrices among the constants.

The manifest only names roles; `workbench/runtime/foreign_call.py` computes what an input
with a role is fed. For a new convention add a pattern to `INPUTS` or `OUTPUTS`, and a branch
where `describe_functions`, `describe_calls` or `count_tokens` decide by names."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

import miltorch
from miltorch.program import files, read_spec
from workbench import paths
from workbench.adopt.weights import find_weights
from workbench.bundle import (
    PRESETS,
    Bundle,
    Embedding,
    Manifest,
    Options,
    Shard,
    StateEntry,
    file_entries,
    new_bundle,
)
from workbench.bundle.foreign import TOKEN_AXIS, Foreign, Function, Part, plane_shapes
from workbench.bundle.names import IDS, LOGITS, PER_LAYER, X0, split_layer
from workbench.check import compare, hf
from workbench.check.stretches import state_rows
from workbench.check.weights import HOST_TENSORS
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.exporter.shards import Spec, layers_spec
from workbench.exporter.writing import versions, write_embedding
from workbench.files import link
from workbench.models import family_of, layerwise
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan

LARGEST_CALL = 64  # tokens of a call where a package takes any number
# Pattern in the lower-case name of an input or an output → its role; the first one that
# occurs in the name decides. So a special pattern stands before a general one that it
# contains: `write|update` before `mask` (update_mask), `cos_s$` before `cos`,
# `current_?pos` before `position` (current_position).
INPUTS = {
    "write|update": "write",
    "per_layer_raw": "per_layer",
    "causalmask": "mask_inf",
    "mask": "mask",
    "cos_s$": "rope_cos_local",
    "sin_s$": "rope_sin_local",
    "cos_f$": "rope_cos_global",
    "sin_f$": "rope_sin_global",
    "cos": "rope_cos",
    "sin": "rope_sin",
    "ring_?pos": "ring_start",
    "current_?pos|start|^pos$|offset": "start",
    "position": "positions",
    "ids?$|tokens?$": "ids",
    "hidden|embed|^x$": "x",
    # any other input is what an earlier package outputs under its name, or is fed zeros;
    # the table of assumptions names it
    "": "zeros",
}
OUTPUTS = {
    "val|token_logit|max_logit": "top_value",
    "idx|token|argmax": "top",
    "logit": "logits",
    # any other output is the stream, which the next package takes
    "": "x",
}
# parts of the names that ANEMLL gives functions: one that moves the rows of full caches,
# and one that gives no logits
ROTATE = "rotate"
PREFILL = "prefill"
UNMATCHED = 1e9  # in place of an error that is not finite; larger than any other
# a file that ANEMLL writes beside its packages, whose causal masks are of 0 and −inf
ANEMLL_FILE = "meta.yaml"


@dataclass(frozen=True)
class Assumption:
    """Something in the manifest that had to be guessed: that `subject` is `value`, because
    of `reason`."""

    subject: str
    value: str
    reason: str

    def json(self) -> dict:
        """The row as `workbench adopt` prints it."""
        return {"about": self.subject, "assumed": self.value, "why": self.reason}


@dataclass(frozen=True)
class Package:
    """A package of another exporter.

    Args:
        name: of the folder that was given, which may be a link to `path`.
        programs: function → its program; a single function has the name None.
        program: that of the default function.
        input_roles: input → its role, a value of `INPUTS` or `carried` (see `connect`).
        output_roles: output → its role, a value of `OUTPUTS` or `carried`.
    """

    name: str
    path: Path
    programs: dict[str | None, miltorch.Program]
    program: miltorch.Program
    input_roles: dict[str, str]
    output_roles: dict[str, str]

    @property
    def roles(self) -> dict[str, str]:
        """Input or output → its role."""
        return self.input_roles | self.output_roles


def open_package(path: Path) -> Package:
    """Reads the programs of a package and the roles of its inputs and outputs."""
    names = sorted(read_spec(path).mlProgram.functions)
    if len(names) == 1:
        names = [None]
    program = miltorch.read(path)
    patterns = INPUTS
    if (path.resolve().parent / ANEMLL_FILE).is_file():
        patterns = INPUTS | {"mask": "mask_inf"}
    outputs = sorted(program.outputs, key=natural_key)
    return Package(
        name=path.name,
        path=path.resolve(),
        programs={name: miltorch.read(path, name) for name in names},
        program=program,
        input_roles={name: find_role(patterns, name) for name in program.inputs},
        output_roles={name: find_role(OUTPUTS, name) for name in outputs},
    )


def running_order(package: Package) -> tuple[bool, bool, list]:
    """The key that sorts packages as they run: first one that looks tokens up, then
    those with states, then the head; among these by the numbers in their names."""
    looks_up = "ids" in package.input_roles.values()
    # False sorts before True
    return not looks_up, not package.program.states, natural_key(package.name)


def connect(packages: list[Package]) -> list[Package]:
    """Gives the role `carried` to every input without a known role that an earlier
    package outputs, under the same name or with `_out` behind it, and to that output.

    Args:
        packages: in the order in which they run.
    """
    earlier_outputs: set[str] = set()
    carried: set[str] = set()  # names of inputs
    for package in packages:
        for name, role in package.input_roles.items():
            if role == "zeros" and {name, f"{name}_out"} & earlier_outputs:
                carried.add(name)
        earlier_outputs |= package.output_roles.keys()
    return [
        replace(
            package,
            input_roles=with_carried(package.input_roles, carried),
            output_roles=with_carried(package.output_roles, carried),
        )
        for package in packages
    ]


def with_carried(roles: dict[str, str], carried: set[str]) -> dict[str, str]:
    """Roles by name, with the role `carried` in place of those of the inputs in `carried`
    and of the outputs of the same names, with or without `_out`."""
    return {
        name: "carried" if name.removesuffix("_out") in carried else role
        for name, role in roles.items()
    }


def propose(
    packages: Sequence[Path], checkpoint: Checkpoint, out: Path
) -> tuple[Bundle, list[dict]]:
    """The bundle of `packages`, or of those in folders, at `out`, and what was assumed:
    `about`, `assumed`, `why` of each row.

    Raises:
        InputError: packages that cannot be read, or whose caches are not those of the
            checkpoint's model; a model family that bundles do not have; something is at
            `out`.
    """
    opened_packages = open_packages(packages)
    # a vision model's text has the configuration of the text model alone
    config = layerwise.empty_model(checkpoint.config).config
    plan = family_of(config).plan(config)
    with new_bundle(out) as root:
        manifest = link_and_describe(opened_packages, checkpoint, plan, root)
        manifest, error = match_caches(manifest, checkpoint, root)
        manifest.save(root)
    assumptions = list_assumptions(manifest, checkpoint, error)
    return Bundle.open(out), [row.json() for row in assumptions]


def open_packages(sources: Sequence[Path]) -> list[Package]:
    """The packages at `sources`, or in folders there, in the order in which they run.

    Raises:
        InputError: two packages have one name.
    """
    packages = []
    for source in sources:
        package_paths = [source]
        if not paths.is_package(source):
            package_paths = source.glob("[!.]*.mlpackage")
        packages += map(open_package, package_paths)
    packages.sort(key=running_order)
    names = [package.path.name for package in packages]
    if len({*names}) < len(names):
        step = "rename one of them, or leave it out"
        raise InputError("packages", str(names), "a name for each", step)
    return connect(packages)


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


def describe_shard(
    plan: Plan, options: Options, cache_shapes: dict[str, tuple[int, ...]]
) -> Spec:
    """The one shard that all packages are: from token ids to logits, with all layers.

    Args:
        cache_shapes: of the planes, by their names.
    """
    spec = layers_spec(plan, options, 0, plan.dims.L)
    # packages keep no copies of caches, and compute from x what layers add to the stream
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
    spec.inputs.pop(X0, None)
    spec.inputs = {n: shape for n, shape in spec.inputs.items() if "mask" not in n}
    spec.inputs[IDS] = [1, "T"]
    spec.outputs = {LOGITS: [1, plan.dims.V, "T", 1]}
    spec.rows = 0, plan.dims.V  # of the head: all of them
    return spec


def link_packages(
    packages: list[Package], plan: Plan, root: Path
) -> tuple[list[Part], dict[str, tuple[int, ...]]]:
    """Links packages into the folder `root`.

    Returns:
        The part of the manifest for each package; the shapes of all caches by the names
        of their planes.
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


def state_number(package: Package, index: int, plan: Plan) -> int:
    """The number of the state that a package reads. Packages that each declare all
    caches of the model share state 0; otherwise each has the state of its index."""
    planes = plane_shapes(0, package.program.states)
    declares_all = len(planes) == len(cache_sizes(plan))
    return 0 if declares_all else index


def describe_options(
    functions: list[Function],
    cache_shapes: dict[str, tuple[int, ...]],
    plan: Plan,
    compress: str,
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


def link_package(source: Path, target: Path) -> None:
    """Links every file of a package into the folder `target`."""
    for file in files(source):
        path = target / file
        path.parent.mkdir(parents=True, exist_ok=True)
        link(str(source / file), str(path))


def source_layer(plan: Plan, state: str) -> int | None:
    """The layer whose cache rows the layer of a logical state copies; None: it has its
    own."""
    layer, _ = split_layer(state)
    return plan.layers[layer].source


def cache_sizes(plan: Plan) -> list[tuple[int, int]]:
    """Heads and head width of the keys and of the values of every layer that has
    some."""
    sizes = [layer.heads(plan.dims) for layer in plan.layers if layer.source is None]
    return sorted(sizes + sizes)


def check_caches(shapes: dict[str, tuple[int, ...]], plan: Plan) -> None:
    """Raises an InputError unless there are keys and values of every layer that has
    some, of its heads and head width, or padded to the largest width."""
    # Heads and width of [1, heads, rows, width]. A state of another rank gives another
    # number of sizes, so that it is refused below.
    sizes = sorted(tuple(shape[1::2]) for shape in shapes.values())
    needed = cache_sizes(plan)
    largest = max(width for _, width in needed)
    padded = sorted((heads, largest) for heads, _ in needed)
    if sizes not in (needed, padded):
        kinds = [f"{heads} heads of width {width}" for heads, width in {*needed}]
        raise InputError(
            "packages",
            f"{len(sizes)} caches, of heads and widths {sorted(set(sizes))}",
            f"{len(needed)} of {' and '.join(sorted(kinds))}",
            "name all packages, and the checkpoint that was exported",
        )


class Calls(NamedTuple):
    """The functions of packages with states, and the moves of their caches' rows.

    Attributes:
        moves: rows of a cache → `shift` or `right` (see `Foreign`).
    """

    functions: list[Function]
    moves: dict[int, str]


def describe_calls(
    packages: list[Package],
    plan: Plan,
    cache_shapes: dict[str, tuple[int, ...]],
    roles: set[str],
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
    # functions are in the order of their names: `infer` before `infer_rotate`
    if functions[0].until:
        return Calls(functions, {window: "shift"})
    if "mask" in roles and not roles & {"start", "write", "ring_start"}:
        # nothing says where to write: the newest row is always the last one
        rows = max(shape[2] for shape in cache_shapes.values())
        return Calls(functions, {rows: "right"})
    return Calls(functions, {})


def nearest_preset(entries: Sequence, checkpoint: Checkpoint) -> str:
    """The preset whose bits per weight are nearest to those of files of weights."""
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


def describe_functions(
    programs: dict[str | None, miltorch.Program], window: int | None
) -> list[Function]:
    """The functions of packages with states. If some rotate caches, these serve the
    positions from `window` on, and the others those before."""
    # a single function has the name None
    has_rotating = any(ROTATE in str(name) for name in programs)
    functions = []
    for name, program in programs.items():
        fewest, most = count_tokens(program)
        limits = {"t_min": fewest, "t_max": most}
        if has_rotating and ROTATE in name:
            limits["first"] = window
        elif has_rotating:
            limits["until"] = window
        logits = PREFILL not in str(name)
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
    step = "for a new convention add a pattern to INPUTS in adopt/propose.py"
    raise InputError("inputs", str(actual), needed, step)


def match_caches(
    manifest: Manifest, checkpoint: Checkpoint, root: Path
) -> tuple[Manifest, float]:
    """Assigns every cache to the plane whose row of one token is nearest to the
    checkpoint's.

    Returns:
        The manifest, and the largest relative RMS of these rows.
    """
    from scipy.optimize import linear_sum_assignment

    # an ordinary token: the first ids are special ones
    token = manifest.dims.V // 2
    trace = hf.trace_reference(checkpoint, None, [token], head=False)
    decoder = Decoder(Bundle(root, manifest), "portable", "exact")
    decoder.decode_one_token(token)
    (state,), (shard,) = decoder.seqs.states, manifest.shards
    names, entries = zip(*shard.states.items())
    planes = [read_first_row(state.read_plane(entry.tensor)) for entry in entries]
    errors = np.full((len(names), len(planes)), UNMATCHED)
    for i, (name, entry) in enumerate(zip(names, entries)):
        expected = state_rows(trace, name)
        for j, plane in enumerate(planes):
            errors[i, j] = row_error(expected, entry, plane)
    nearest = linear_sum_assignment(errors)
    states = {
        names[i]: entries[i].model_copy(update={"tensor": entries[j].tensor})
        for i, j in zip(*nearest)
    }
    shards = [shard.model_copy(update={"states": states})]
    manifest = manifest.model_copy(update={"shards": shards})
    return manifest, errors[nearest].max()


@dataclass(frozen=True)
class FirstRow:
    """The first row of a plane, copied: the plane itself may be a large state.

    Args:
        values: [heads, width].
        rows: of the whole plane.
    """

    values: np.ndarray
    rows: int


def read_first_row(plane: np.ndarray) -> FirstRow:
    """The first row of a plane [1, heads, rows, width]."""
    return FirstRow(plane[0, :, 0].copy(), plane.shape[2])


def row_error(expected: np.ndarray, cache: StateEntry, plane: FirstRow) -> float:
    """The relative RMS of a plane's first row, against the row that a cache should have.
    `UNMATCHED` where it is not finite, or where the plane cannot hold the cache.

    Args:
        expected: the checkpoint's keys or values of the token at position 0.
        cache: of shape [1, heads, rows, width].
    """
    _, heads, rows, width = cache.shape
    plane_heads, plane_width = plane.values.shape
    # a plane holds a cache of as many heads and rows, and may be wider
    if (plane_heads, plane.rows) != (heads, rows) or plane_width < width:
        return UNMATCHED
    error = compare.relative_rms(expected, plane.values[:, :width])
    return error if np.isfinite(error) else UNMATCHED


def list_assumptions(
    manifest: Manifest, checkpoint: Checkpoint, error: float
) -> list[Assumption]:
    """What the manifest says that no interface states.

    Args:
        error: of the rows by which caches were recognised, see `match_caches`.
    """
    (shard,) = manifest.shards
    foreign = shard.foreign
    rows = []
    for name, role in foreign.roles.items():
        reason = "its name and shape"
        if role == "mask_inf" and find_role(INPUTS, name) != role:
            reason = f"{ANEMLL_FILE} beside the packages, whose exporter has such masks"
        rows.append(Assumption(name, role, reason))
    for function in foreign.functions:
        limits = function.model_dump_json(exclude_defaults=True)
        reason = "its inputs and name" if function.name else "its inputs"
        rows.append(Assumption(function.label, limits, reason))
    for count, move in foreign.moves.items():
        reason = "names of functions and inputs"
        rows.append(Assumption(f"caches of {count} rows", move, reason))
    reason = f"a token's keys and values, {error:.2g} off the checkpoint's"
    for name, entry in shard.states.items():
        rows.append(Assumption(name, entry.tensor, reason))
    compress = manifest.options.compress
    rows.append(Assumption("options.compress", compress, "the stored bits"))
    for name in checkpoint.matrices:
        if name not in shard.weights:
            reason = "not among the constants"
            rows.append(Assumption(name, "the checkpoint's values", reason))
    return rows


def find_role(roles: dict[str, str], name: str) -> str:
    """The first role whose pattern occurs in a name."""
    lower_name = name.lower()
    return next(
        role for pattern, role in roles.items() if re.search(pattern, lower_name)
    )


def natural_key(name: str) -> list:
    """Sorts names by the numbers in them: 2 before 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
