"""Makes a bundle of another exporter's packages: they are linked into its folder, and
its manifest describes them.

Inputs, outputs and functions are recognised by their names, as the tables of
`bundle.foreign` say. Which cache each plane of a state is, and whether rows move, is
recognised by values: the keys and values of one token are compared with the
checkpoint's. At position 0 neither rope nor masks matter, so that a fault of an export
rarely hides them."""

import math
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel

import miltorch
from miltorch.program import read_spec
from workbench import paths
from workbench.adopt.weights import found_weights
from workbench.bundle import (
    PRESETS,
    Bundle,
    Embedding,
    Layer,
    Manifest,
    Options,
    Shard,
    StateEntry,
    file_entries,
    new_bundle,
)
from workbench.bundle.foreign import (
    INPUTS,
    OUTPUTS,
    Foreign,
    Function,
    Part,
    Role,
    Tensor,
)
from workbench.bundle.names import HANDED_ON, IDS, K_STATE, LOGITS, V_STATE, X
from workbench.check import compare, hf
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.export import versions, write_embedding
from workbench.export.shards import layers_spec
from workbench.files import link
from workbench.models import family_of
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan

LARGEST_CALL = 64  # tokens of a call where a package takes any number
LOCAL = re.compile(r"local|sliding")  # in names of what sliding layers read


class Package:
    """A package: its programs by function, the shapes of its states, and the order that
    packages run in: one that looks tokens up, those with states, the head; then by the
    numbers in their names."""

    def __init__(self, path: Path):
        names = sorted(read_spec(path).mlProgram.functions)
        names = names if len(names) > 1 else [None]
        self.path, self.states, roles = path.resolve(), {}, set()
        self.programs = {name: miltorch.read(path, name) for name in names}
        for program in self.programs.values():
            self.states |= {name: kind.shape for name, kind in program.states.items()}
            roles |= {recognised(INPUTS, name) for name in program.inputs}
        self.infinite = (path.resolve().parent / "meta.yaml").is_file()
        self.is_head = not self.states and "ids" not in roles
        self.order = self.is_head, bool(self.states), natural(path.name)


def propose(
    packages: Sequence[Path], checkpoint: Checkpoint, out: Path
) -> tuple[Bundle, list[dict]]:
    """The bundle of `packages`, or those in folders, at `out`, and what was assumed:
    `about`, `assumed`, `why` of each row.

    Raises:
        InputError: packages that cannot be read, or whose caches are not those of the
            checkpoint's model; a model family that bundles do not have; something is at
            `out`.
    """
    found = []
    for source in packages:
        inside = source.glob("[!.]*.mlpackage")
        found += map(Package, [source] if paths.is_package(source) else inside)
    found.sort(key=lambda package: package.order)
    # a vision model's text has the configuration of the text model alone
    config = hf.empty_model(checkpoint.config).config
    with new_bundle(out) as root:
        manifest = described(found, checkpoint, family_of(config).plan(config), root)
        manifest, error = probed(manifest, checkpoint, root)
        manifest.save(root)
    return Bundle.open(out), list(assumed(manifest, checkpoint, error))


def described(
    packages: list[Package], checkpoint: Checkpoint, plan: Plan, root: Path
) -> Manifest:
    """The manifest of packages, which are linked into the folder `root`, with their
    caches in any order."""
    d = plan.dims
    body = [package for package in packages if not package.is_head]
    foreign, planes = joined(body, plan), {}
    for part, package in zip(foreign.parts, body):
        for name, shape in package.states.items():
            tensors = [f"{part.state}/{name}/{plane}" for plane in range(shape[0])]
            planes |= dict.fromkeys(tensors, [1, *shape[-3:]])
    found = [(H, D) for _, H, _, D in planes.values()]
    if found != [(d.H_kv, d.D)] * 2 * d.L:
        raise InputError(
            "packages",
            f"{len(found)} caches, of heads and widths {sorted(set(found))}",
            f"{2 * d.L} of {d.H_kv} heads of width {d.D}",
            "name all packages, and the checkpoint that was exported",
        )
    rows = [shape[2] for shape in planes.values()]
    files = [file for package in packages for file in package.path.rglob("*.bin")]
    stored = 8 * sum(file.stat().st_size for file in files)
    bits = stored / sum(map(math.prod, map(checkpoint.shape, checkpoint.header)))
    # the last token of a call goes through a function that gives logits
    largest = max(f.t_max + (not f.logits) for f in foreign.functions)
    options = Options(
        max_seq_len=max(rows),
        tokens=f"1-{min(largest, max(rows))}",
        kv_write="slice",
        compress=min(PRESETS, key=lambda name: abs(PRESETS[name].stored_bits - bits)),
        sliding="mask" if min(rows) == max(rows) else "window",
        layers_per_shard=d.L,
    )
    own = layers_spec(plan, Options(kv_write="slice"), 0, d.L).inputs
    inputs = {name: shape for name, shape in own.items() if "mask" not in name}
    inputs[IDS] = [1, "T"]
    states = {}
    names = [f"layers.{i}.{leaf}" for leaf in (K_STATE, V_STATE) for i in range(d.L)]
    for name, (tensor, shape) in zip(names, planes.items()):
        ring = shape[2] if shape[2] < max(rows) else None
        states[name] = StateEntry(tensor=tensor, shape=shape, ring=ring)
    layers = {"layers": (0, d.L), "inputs": inputs, "states": states}
    shards = [shard("layers", body, foreign, checkpoint, plan, root, layers)]
    if heads := [package for package in packages if package.is_head]:
        about = checkpoint, plan, root, {"inputs": {X: inputs[X]}}
        shards.append(shard("head", heads, joined(heads, plan), *about))
    table = write_embedding(checkpoint, plan, root)
    return Manifest(
        family=checkpoint.config.model_type,
        dims=d,
        options=options,
        rope=plan.rope,
        layers=plan.layers,
        shards=shards,
        embedding=Embedding(file=table, scale=plan.embedding_scale),
        tokens=checkpoint.save_tokenizer(root),
        checkpoint=checkpoint.facts,
        packages=versions(options),
    )


def shard(
    kind: str,
    packages: list[Package],
    foreign: Foreign,
    checkpoint: Checkpoint,
    plan: Plan,
    root: Path,
    interface: dict,
) -> Shard:
    """A shard of packages, which are linked into a folder of its kind; `interface`:
    what it reads and keeps."""
    files = []
    for package in packages:
        target = root / kind / package.path.name
        shutil.copytree(package.path, target, copy_function=link)
        files += file_entries(root, target)
    given = {tensor.role for tensor in foreign.tensors.values()}
    outputs = {"outputs": {HANDED_ON: [1, plan.dims.C, "T", 1]}}
    if given & {"logits", "top"}:
        V = plan.dims.V
        outputs = {"outputs": {LOGITS: [1, V, "T", 1]}, "rows": (0, V)}
    found = found_weights([package.programs for package in packages], checkpoint)
    return Shard(
        name=kind,
        kind=kind,
        path=kind,
        template=kind,
        foreign=foreign,
        weights={name: pieces for name, pieces in found.items() if pieces},
        bytes=sum(file.bytes for file in files),
        files=files,
        **interface | outputs,
    )


def joined(packages: list[Package], plan: Plan) -> Foreign:
    """The description of packages that run one after another."""
    parts, tensors, functions = [], {}, []
    sliding = next((layer for layer in plan.layers if layer.window), Layer())
    for index, package in enumerate(packages):
        planes = sum(shape[0] for shape in package.states.values())
        # packages that each declare all layers share one state
        number = 0 if planes == 2 * plan.dims.L else index
        part = {"package": package.path.name, "state": number if planes else None}
        parts.append(Part(functions=list(package.programs), **part))
        for name, shape in package.states.items():
            axes = f"L{'1' * (len(shape) - 4)}HSD"
            tensors[name] = Tensor(role="cache", axes=axes)
        for program in package.programs.values():
            for name, kind in program.inputs.items():
                tensors[name] = read(name, kind.shape, sliding, package.infinite)
            types = dict(pair for op in program.block.ops for pair in op.outputs)
            for name in sorted(program.outputs, key=natural):
                tensors[name] = given(name, types[name].shape, plan.dims.V)
    named = [name for package in packages for name in package.programs if name]
    rotates = "rotate" in " ".join(named)
    for name in dict.fromkeys(named or [None]):
        programs = [
            package.programs.get(name) or next(iter(package.programs.values()))
            for package in packages
        ]
        sizes = [size for program in programs for size in calls(program, tensors)]
        limits = {"t_min": max(n for n, _ in sizes), "t_max": min(n for _, n in sizes)}
        if rotates:
            limits["first" if "rotate" in name else "until"] = sliding.window
        logits = "prefill" not in str(name)
        functions.append(Function(name=name, logits=logits, **limits))
    moves = {sliding.window: "shift"} if rotates else {}
    return Foreign(parts=parts, tensors=tensors, functions=functions, moves=moves)


def read(name: str, shape: tuple, sliding: Layer, infinite: bool) -> Tensor:
    """An input, by its name; those of sliding layers say so."""
    role, fields = recognised(INPUTS, name), {}
    local = LOCAL.search(name.lower())
    if role == "mask":
        fields["blocked"] = -np.inf if infinite or shape[-1] is None else -1e4
        fields["window"] = sliding.window if local else None
    if role.startswith("rope") and sliding.rope:
        fields["rope"] = "local" if local else "global"
    return Tensor(role=role, axes=axes(INPUTS[role], len(shape)), **fields)


def given(name: str, shape: tuple, V: int) -> Tensor:
    """An output, by its name."""
    role = recognised(OUTPUTS, name)
    slices = shape[-1] if role == "top" and shape else 1
    offsets = [int(rows[0]) for rows in np.array_split(np.arange(V), slices or 1)]
    return Tensor(role=role, axes=axes(OUTPUTS[role], len(shape)), offsets=offsets)


def axes(role: Role, rank: int) -> str:
    """The letters of a role on the last axes; channels or vocabulary before tokens in
    rank 4 alone."""
    if rank == len(role.axes):
        return role.axes
    letters = role.axes.strip("1")
    letters = {"CT": "TC", "VT": "TV"}.get(letters, letters)
    return ("1" * rank + letters)[len(letters) :]


def calls(program, tensors: dict[str, Tensor]) -> Iterator[tuple[int, int]]:
    """The fewest and the most tokens that each input of a program takes."""
    for feature in program.description.input:
        axis = tensors[feature.name].axes.find("T")
        if axis >= 0:
            T = program.inputs[feature.name].shape[axis]
            ranges = feature.type.multiArrayType.shapeRange.sizeRanges
            bounds = [LARGEST_CALL, *(r.upperBound for r in ranges[axis : axis + 1])]
            yield T or 1, T or min(n for n in bounds if n > 0)


def probed(
    manifest: Manifest, checkpoint: Checkpoint, root: Path
) -> tuple[Manifest, float]:
    """The manifest with every cache in the plane whose row of one token is nearest to
    the checkpoint's, and with rows that move to the right if these are nearer; and the
    largest relative RMS."""
    from scipy.optimize import linear_sum_assignment

    token, trials = manifest.dims.V // 2, []
    values = hf.Reference(checkpoint).run([token], head=False)
    for moves in ({}, {manifest.options.max_seq_len: "right"}):
        raw = manifest.model_dump()
        shard = raw["shards"][0]
        shard["foreign"]["moves"] |= moves
        decoder = Decoder(Bundle(root, Manifest(**raw)), "portable", "exact")
        decoder.decode_one_token(token)
        (state,) = decoder.seqs.states
        names, entries = zip(*shard["states"].items())
        expected = [values[re.sub(r"layers\.(\d+)\.(.).*", r"\2.\1", n)] for n in names]
        rows = [state.read(name)[0, :, 0] for name in names]
        errors = [[compare.relative_rms(e, row) for row in rows] for e in expected]
        caches, planes = linear_sum_assignment(errors)
        shard["states"] = {names[i]: entries[j] for i, j in zip(caches, planes)}
        trials.append((max(errors[i][j] for i, j in zip(caches, planes)), raw))
    error, raw = min(trials, key=lambda trial: trial[0])
    return Manifest(**raw), error


def assumed(manifest: Manifest, checkpoint: Checkpoint, error: float) -> Iterator[dict]:
    """What no interface tells, by `about`, `assumed`, `why`."""
    values = f"a token's keys and values, {error:.2g} off the checkpoint's"
    rows = []
    for shard in manifest.shards:
        foreign = shard.foreign
        rows += [(*row, "its name and its shape") for row in foreign.tensors.items()]
        for function in foreign.functions:
            rows.append((f"function {function.name}", function, "its inputs and name"))
        rows += [(name, entry.tensor, values) for name, entry in shard.states.items()]
        for count, move in foreign.moves.items():
            rows.append((f"caches of {count} rows", move, values))
    rows.append(("options.compress", manifest.options.compress, "the stored bits"))
    held = set().union(*(shard.weights for shard in manifest.shards))
    missing = [name for name in checkpoint.matrices if name not in held]
    count = len(checkpoint.matrices)
    why = f"not found: {', '.join(missing[:3])}" if missing else "all of them"
    found = f"{count - len(missing)} of {count}"
    rows.append(("matrices found by their values", found, why))
    for about, value, why in rows:
        if isinstance(value, BaseModel):
            value = value.model_dump_json(exclude_defaults=True)
        yield {"about": about, "assumed": value, "why": why}


def recognised(roles: dict[str, Role], name: str) -> str:
    """The first role whose pattern is in a name."""
    found = (r for r, about in roles.items() if re.search(about.names, name.lower()))
    return next(found)


def natural(name: str) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
