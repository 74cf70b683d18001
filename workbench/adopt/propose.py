"""Makes a bundle of another exporter's packages: they are linked into its folder, and
its manifest describes them.

Inputs, outputs and functions are recognised by their names. Which cache each plane of a
state is, and whether rows move, is recognised by values: the keys and values of one
token are compared with the checkpoint's. At position 0 neither rope nor masks matter,
so that a fault of an export rarely hides them."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import miltorch
from miltorch.program import files, read_spec
from workbench import paths
from workbench.adopt.weights import found_weights
from workbench.bundle import (
    PRESETS,
    Bundle,
    Embedding,
    Manifest,
    Options,
    Shard,
    file_entries,
    new_bundle,
)
from workbench.bundle.foreign import TOKENS, Foreign, Function, Part, caches
from workbench.bundle.names import IDS, LOGITS
from workbench.check import compare, hf
from workbench.check.program import value_name
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.exporter import versions, write_embedding
from workbench.exporter.shards import layers_spec
from workbench.files import link
from workbench.models import family_of
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan

LARGEST_CALL = 64  # tokens of a call where a package takes any number
# pattern in the lower-case name of an input or an output → its role; the first decides
INPUTS = {
    "write|update": "write",
    "causalmask": "mask_inf",
    "mask": "mask",
    "cos": "rope_cos",
    "sin": "rope_sin",
    "current_?pos|start|^pos$|offset": "start",
    "position": "positions",
    "ids?$|tokens?$": "ids",
    "hidden|embed|^x$": "x",
    "": "zeros",
}
OUTPUTS = {
    "val|token_logit|max_logit": "top_value",
    "idx|token|argmax": "top",
    "logit": "logits",
    "": "x",
}


class Package:
    """A package, its functions, and the place in the order that packages run in: one
    that looks tokens up, those with states, the head; then by numbers in names."""

    def __init__(self, path: Path):
        names = sorted(read_spec(path).mlProgram.functions)
        names = names if len(names) > 1 else [None]
        self.path = path.resolve()
        self.programs = {name: miltorch.read(path, name) for name in names}
        self.program = miltorch.read(path)
        inputs = INPUTS
        if (self.path.parent / "meta.yaml").is_file():  # of ANEMLL, which masks by −inf
            inputs = INPUTS | {"mask": "mask_inf"}
        self.roles = {name: recognised(inputs, name) for name in self.program.inputs}
        looks_up = "ids" in self.roles.values()
        self.order = not looks_up, not self.program.states, natural(path.name)
        for name in sorted(self.program.outputs, key=natural):
            self.roles[name] = recognised(OUTPUTS, name)


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
    names = [package.path.name for package in found]
    if len({*names}) < len(names):
        step = "rename one of them, or leave it out"
        raise InputError("packages", str(names), "a name for each", step)
    # a vision model's text has the configuration of the text model alone
    config = hf.empty_model(checkpoint.config).config
    with new_bundle(out) as root:
        manifest = described(found, checkpoint, family_of(config).plan(config), root)
        manifest, error = probed(manifest, checkpoint, root)
        manifest.save(root)
    return Bundle.open(out), assumed(manifest, checkpoint, error)


def described(
    packages: list[Package], checkpoint: Checkpoint, plan: Plan, root: Path
) -> Manifest:
    """The manifest of packages, which are linked into the folder `root`, with their
    caches in any order."""
    parts, held, roles = [], {}, {}
    for index, package in enumerate(packages):
        states = package.program.states
        # packages that each declare all caches share one state
        number = 0 if len(caches(0, states)) == 2 * plan.dims.L else index
        held |= caches(number, states)
        name = package.path.name
        parts.append(Part(package=name, state=number if states else None))
        for file in files(package.path):
            target = root / "layers" / name / file
            target.parent.mkdir(parents=True, exist_ok=True)
            link(str(package.path / file), str(target))
        roles |= package.roles
    found = [tuple(shape[1::2]) for shape in held.values()]
    if found != [(plan.dims.H_kv, plan.dims.D)] * 2 * plan.dims.L:
        raise InputError(
            "packages",
            f"{len(found)} caches, of heads and widths {sorted(set(found))}",
            f"{2 * plan.dims.L} of {plan.dims.H_kv} heads of width {plan.dims.D}",
            "name all packages, and the checkpoint that was exported",
        )
    windows = [layer.window for layer in plan.layers if layer.window]
    body = next(package for package in packages if package.program.states)
    window = max(windows, default=None)
    functions = called(body.programs, window)
    rows = [shape[2] for shape in held.values()]
    given, moves = {*roles.values()}, {}
    if functions[0].until:
        moves = {window: "shift"}
    elif "mask" in given and not given & {"start", "write"}:
        moves = {max(rows): "right"}  # nothing says where to write
    entries = file_entries(root, root / "layers")
    stored = sum(file.bytes for file in entries if file.path.endswith(".bin"))
    bits = 8 * stored / sum(map(math.prod, map(checkpoint.shape, checkpoint.header)))
    # the last token of a call goes through a function that gives logits
    largest = max(f.t_max + (not f.logits) for f in functions)
    options = Options(
        max_seq_len=max(rows),
        tokens=f"1-{min(largest, max(rows))}",
        kv_write="slice",
        compress=min(PRESETS, key=lambda name: abs(PRESETS[name].stored_bits - bits)),
        sliding="mask" if min(rows) == max(rows) else "window",
        layers_per_shard=plan.dims.L,
    )
    spec = layers_spec(plan, options, 0, plan.dims.L)
    theirs = sorted(held, key=held.get)
    ours = sorted(spec.states.items(), key=lambda state: state[1].shape)
    spec.states = {
        name: entry.model_copy(update={"tensor": tensor})
        for (name, entry), tensor in zip(ours, theirs)
    }
    spec.inputs = {n: shape for n, shape in spec.inputs.items() if "mask" not in n}
    spec.inputs[IDS] = [1, "T"]
    spec.outputs = {LOGITS: [1, plan.dims.V, "T", 1]}
    spec.rows = 0, plan.dims.V
    shard = Shard(
        **vars(spec),
        path="layers",
        template="layers",
        foreign=Foreign(parts=parts, roles=roles, functions=functions, moves=moves),
        weights=found_weights([package.program for package in packages], checkpoint),
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
        tokens=checkpoint.save_tokenizer(root),
        checkpoint=checkpoint.facts,
        packages=versions(options),
    )


def called(
    programs: dict[str | None, miltorch.Program], window: int | None
) -> list[Function]:
    """The ways to call the functions of packages with states, those that rotate caches
    from position `window` on."""
    rotates = any("rotate" in str(name) for name in programs)
    functions = []
    for name, program in programs.items():
        least, most = tokens(program)
        limits = {"t_min": least, "t_max": most}
        if rotates:
            limits["first" if "rotate" in name else "until"] = window
        logits = "prefill" not in str(name)
        functions.append(Function(name=name, logits=logits, **limits))
    return functions


def tokens(program: miltorch.Program) -> tuple[int, int]:
    """The fewest and the most tokens that a program takes."""
    for feature in program.description.input:
        axis = TOKENS.get(recognised(INPUTS, feature.name))
        if axis is None:
            continue
        if size := program.inputs[feature.name].shape[axis]:
            return size, size
        ranges = feature.type.multiArrayType.shapeRange.sizeRanges
        most = ranges[axis].upperBound if ranges else LARGEST_CALL
        return 1, most if 0 < most < LARGEST_CALL else LARGEST_CALL
    found, needed = [*program.inputs], "names such as input_ids, hidden_states"
    step = "add a pattern to INPUTS in adopt/propose.py"
    raise InputError("inputs", str(found), needed, step)


def probed(
    manifest: Manifest, checkpoint: Checkpoint, root: Path
) -> tuple[Manifest, float]:
    """The manifest with every cache in the plane whose row of one token is nearest to
    the checkpoint's, and the largest relative RMS."""
    from scipy.optimize import linear_sum_assignment

    token = manifest.dims.V // 2
    values = hf.Reference(checkpoint).run([token], head=False)
    decoder = Decoder(Bundle(root, manifest), "portable", "exact")
    decoder.decode_one_token(token)
    (state,), (shard,) = decoder.seqs.states, manifest.shards
    names, entries = zip(*shard.states.items())
    rows = [state.read(name)[0, :, 0] for name in names]
    expected = [values[value_name(name)] for name in names]
    errors = [[compare.relative_rms(e, row) for row in rows] for e in expected]
    errors = np.nan_to_num(errors, nan=1e9, posinf=1e9)
    nearest = linear_sum_assignment(errors)
    states = {names[i]: entries[j] for i, j in zip(*nearest)}
    shards = [shard.model_copy(update={"states": states})]
    manifest = manifest.model_copy(update={"shards": shards})
    return manifest, errors[nearest].max()


def assumed(manifest: Manifest, checkpoint: Checkpoint, error: float) -> list[dict]:
    """What no interface tells, by `about`, `assumed`, `why`."""
    (shard,) = manifest.shards
    foreign = shard.foreign
    why = f"a token's keys and values, {error:.2g} off the checkpoint's"
    rows = [(name, role, "its name and shape") for name, role in foreign.roles.items()]
    for function in foreign.functions:
        takes = function.model_dump_json(exclude_defaults=True)
        rows.append((f"function {function.name}", takes, "its inputs and name"))
    for count, move in foreign.moves.items():
        rows.append((f"caches of {count} rows", move, "names of functions and inputs"))
    rows += [(name, entry.tensor, why) for name, entry in shard.states.items()]
    rows.append(("options.compress", manifest.options.compress, "the stored bits"))
    for name in checkpoint.matrices:
        if name not in shard.weights:
            rows.append((name, "the checkpoint's values", "not among the constants"))
    return [dict(zip(("about", "assumed", "why"), row)) for row in rows]


def recognised(roles: dict[str, str], name: str) -> str:
    """The first role whose pattern is in a name."""
    return next(role for p, role in roles.items() if re.search(p, name.lower()))


def natural(name: str) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
