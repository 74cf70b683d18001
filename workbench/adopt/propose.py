"""Makes a bundle of another exporter's packages: they are linked into its folder, and
its manifest describes them.

What names, shapes and functions leave open is assumed, with a row for each assumption:
what it is about, what was assumed, and why."""

import os
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from workbench.adopt.describe import Description, Package, expand, read, run_order
from workbench.adopt.weights import found_weights
from workbench.bundle import (
    PRESETS,
    Bundle,
    Embedding,
    Manifest,
    Options,
    Shard,
    StateEntry,
    Tokens,
    Writer,
    file_entries,
)
from workbench.bundle.foreign import Foreign, PackedState, Part
from workbench.bundle.manifest import first_fault
from workbench.bundle.names import (
    EMBEDDING,
    HANDED_ON,
    IDS,
    LOGITS,
    POS,
    ROPE_COS,
    ROPE_SIN,
    X,
)
from workbench.check import hf, metrics
from workbench.decode import Decoder
from workbench.decode.snapshot import take
from workbench.errors import InputError
from workbench.files import save_arrays
from workbench.models import family_of
from workbench.models.checkpoint import Checkpoint

LARGEST_CALL = 64  # tokens of the bundle's calls where a package takes any number
PROBED = 4  # tokens whose keys and values decide what no interface tells


def propose(
    packages: Sequence[Path], checkpoint: Checkpoint, out: Path
) -> tuple[Bundle, list[dict]]:
    """The bundle of `packages` at `out`, and what was assumed: `about`, `assumed`,
    `why` of each row.

    Raises:
        InputError: no packages, one that cannot be read, none with a state, a model
            family or a cache that bundles do not have; something is at `out`.
    """
    found = sorted(map(read, expand(packages)), key=run_order)
    with Writer(out) as writer:
        proposal = Proposal(checkpoint, found, writer.root)
        manifest = proposal.probed(proposal.manifest())
        bundle = writer.finish(proposal.with_weights(manifest))
    return bundle, proposal.description.notes


class Proposal:
    """The manifest of packages, made shard by shard in the folder `root`."""

    def __init__(self, checkpoint: Checkpoint, packages: list[Package], root: Path):
        self.checkpoint, self.packages, self.root = checkpoint, packages, root
        # a vision model's text has the configuration of the text model alone
        self.config = hf.empty_model(checkpoint.config).config
        self.plan = family_of(self.config).plan(self.config)
        self.description = Description(self.plan, packages)
        self.note = self.description.note

    def manifest(self) -> Manifest:
        """The manifest without the matrices that the packages hold; packages, embedding
        and tokenizer are in the folder."""
        states = self.description.states()
        body = [package for package in self.packages if package.kind != "head"]
        heads = [package for package in self.packages if package.kind == "head"]
        shards = [self.shard("layers", body, states)]
        if heads:
            shards.append(self.shard("head", heads, []))
        tokenizer = self.root / "tokenizer"
        for file in self.checkpoint.tokenizer_files():
            tokenizer.mkdir(exist_ok=True)
            shutil.copyfile(file, tokenizer / file.name)
        stored = sum(f.bytes for s in shards for f in s.files if f.path.endswith("bin"))
        try:
            return Manifest(
                family=self.checkpoint.config.model_type,
                dims=self.plan.dims,
                options=self.options(shards[0].foreign, stored),
                rope=self.plan.rope,
                layers=self.plan.layers,
                shards=shards,
                embedding=self.embedding(),
                tokens=Tokens(
                    bos=self.config.bos_token_id,
                    eos=self.checkpoint.eos,
                    files=file_entries(self.root, tokenizer),
                ),
                checkpoint={
                    "name": self.checkpoint.name,
                    "sha256": self.checkpoint.sha256,
                    "dtype": self.checkpoint.dtype,
                },
                packages={"workbench": version("workbench")},
            )
        except ValidationError as problem:
            where, fault = first_fault(problem, "packages")
            raise InputError(
                f"packages: {where}",
                fault["msg"],
                "caches and inputs that a bundle of this checkpoint has",
                "check that --checkpoint is what was exported, and name all packages",
            ) from None

    def options(self, foreign: Foreign, stored: int) -> Options:
        largest = 1
        for part, package in zip(foreign.parts, self.packages):
            for f in part.functions if package.states else ():
                size = f.t_max if f.t_min == f.t_max else min(f.t_max, LARGEST_CALL)
                # the last token of a call goes through a function that gives logits
                largest = max(largest, size + (not f.logits))
        elements = 0
        for name in self.checkpoint.header:
            elements += int(np.prod(self.checkpoint.shape(name)))
        bits = 8 * stored / elements
        nearest = min(PRESETS, key=lambda name: abs(PRESETS[name].stored_bits - bits))
        self.note("options.compress", nearest, f"{bits:.1f} bits a weight are stored")
        return Options(
            max_seq_len=self.description.context,
            tokens=f"1-{min(largest, self.description.context)}",
            kv_write="slice",
            compress=nearest,
            sliding="window" if self.description.moves else "mask",
            layers_per_shard=self.plan.dims.L,
        )

    def shard(
        self, kind: str, packages: list[Package], states: list[PackedState]
    ) -> Shard:
        """A shard of packages, which are linked into a folder of its name."""
        folder, files = self.root / kind, []
        for package in packages:
            target = folder / package.path.name
            shutil.copytree(package.path, target, copy_function=_linked)
            files += file_entries(self.root, target)
        parts = [self.description.part(package) for package in packages]
        foreign = Foreign(parts=parts, states=states)
        dims = self.plan.dims
        kinds = {entry.kind for part in parts for entry in part.outputs.values()}
        output, rows = {HANDED_ON: [1, dims.C, "T", 1]}, (0, 0)
        if kinds & {"logits", "top"}:
            output, rows = {LOGITS: [1, dims.V, "T", 1]}, (0, dims.V)
        logical = {}
        for state in states:
            sized = dict(
                zip(state.axes, self.description.shapes[state.part, state.name])
            )
            shape = [1, sized["H"], sized["S"], sized["D"]]
            ring = sized["S"] if state.rows != "absolute" else None
            for tensor in state.planes:
                logical[tensor] = StateEntry(tensor=tensor, shape=shape, ring=ring)
        return Shard(
            name=kind,
            kind=kind,
            path=kind,
            layers=(0, dims.L) if kind == "layers" else (0, 0),
            rows=rows,
            foreign=foreign,
            inputs=self.shard_inputs(kind, parts),
            outputs=output,
            states=logical,
            template=kind,
            bytes=sum(file.bytes for file in files),
            files=files,
        )

    def shard_inputs(self, kind: str, parts: list[Part]) -> dict[str, list]:
        """The bundle's inputs that those of the packages follow from."""
        plane = {X: [1, self.plan.dims.C, "T", 1]}
        if kind == "head":
            return plane
        first = {entry.kind for entry in parts[0].inputs.values()}
        inputs = {IDS: [1, "T"]} if "ids" in first else plane
        halves = {rope.name: len(rope.inv_freq) for rope in self.plan.rope}
        for part in parts:
            for entry in part.inputs.values():
                if entry.kind in ("cos", "sin"):
                    name = {"cos": ROPE_COS, "sin": ROPE_SIN}[entry.kind]
                    name += f"_{entry.rope}" if entry.rope else ""
                    inputs[name] = [1, 1, "T", halves[entry.rope]]
        return inputs | {POS: [1]}

    def embedding(self) -> Embedding:
        """The checkpoint's table in fp16, or that of the first file of its size beside
        the packages."""
        name = f"{self.checkpoint.prefix}embed_tokens.weight"
        dims, table = self.plan.dims, None
        for folder in sorted({package.path.parent for package in self.packages}):
            for file in sorted(path for path in folder.iterdir() if path.is_file()):
                if table is None and file.stat().st_size == 2 * dims.C * dims.V:
                    table = np.fromfile(file, np.float16).reshape(dims.V, dims.C)
                    why = "it has the size of an fp16 table"
                    self.note("embedding", file.name, why)
        if table is None:
            table = self.checkpoint.tensor(name).half().numpy()
        path = self.root / "embedding.safetensors"
        save_arrays(path, {"weight": table}, {})
        (entry,) = file_entries(self.root, path)
        return Embedding(file=entry, scale=self.plan.embedding_scale)

    def probed(self, manifest: Manifest) -> Manifest:
        """The manifest with the order of packed planes, and the rows of caches that
        nothing says where to write, whose keys and values are nearest to the
        checkpoint's over a few tokens."""
        shard = manifest.shards[0]
        foreign = shard.foreign
        orders, rules = ["halves"], ["absolute"]
        if any(state.holds == "kv" for state in foreign.states):
            orders.append("pairs")
        kinds = {entry.kind for part in foreign.parts for entry in part.inputs.values()}
        if not self.description.moves and not kinds & {"start", "end", "write"}:
            rules.append("right")
        ids = np.random.default_rng(0).integers(0, self.plan.dims.V, PROBED)
        expected = hf.Reference(self.checkpoint).run(ids, head=False)
        errors, trials = {}, {}
        for order, rule in product(orders, rules):
            changed = _changed(foreign, order, rule if len(rules) > 1 else None)
            shards = [shard.model_copy(update={"foreign": changed})]
            trial = manifest.model_copy(update={"shards": shards + manifest.shards[1:]})
            trials[order, rule] = trial
            states = _run(Bundle(self.root, trial), ids)
            errors[order, rule] = max(
                metrics.relative_rms(
                    expected[f"{leaf}.{i}"],
                    # [H_kv, n, D] → a row for each token
                    np.float32(states[f"layers.{i}.{leaf}_state"])
                    .transpose(1, 0, 2)
                    .reshape(len(ids), -1),
                )
                for i in range(self.plan.dims.L)
                for leaf in "kv"
            )
        best = min(errors, key=errors.get)
        why = "nearest to the checkpoint's keys and values"
        if len(orders) > 1:
            self.note("order of planes", best[0], why)
        if len(rules) > 1:
            self.note("rows of caches", best[1], why)
        about = f"keys and values of {PROBED} tokens"
        self.note(about, f"{errors[best]:.2g} off", "relative RMS to the checkpoint's")
        return trials[best]

    def with_weights(self, manifest: Manifest) -> Manifest:
        """The manifest with the checkpoint's matrices that the packages hold."""
        shards, found, names = [], set(), set()
        bundle = Bundle(self.root, manifest)
        for shard in manifest.shards:
            weights, names = found_weights(bundle, shard, self.checkpoint)
            found |= weights.keys()
            foreign = shard.foreign.model_copy(update={"weights": weights})
            places = {tensor: tensor for tensor in weights}
            update = {"foreign": foreign, "weights": places}
            shards.append(shard.model_copy(update=update))
        missing = sorted(names - found)
        self.note(
            "matrices found by their values",
            f"{len(names & found)} of {len(names)}",
            f"not found: {', '.join(missing[:3])}" if missing else "all of them",
        )
        if EMBEDDING in found:
            self.note("table of tokens", "the packages'", "a gather reads it")
        return Manifest(**manifest.model_copy(update={"shards": shards}).model_dump())


def _changed(foreign: Foreign, order: str, rule: str | None) -> Foreign:
    """The description with another order of planes and, unless None, another rule of
    rows for caches, masks and write addresses."""
    states = [s.model_copy(update={"order": order}) for s in foreign.states]
    if rule is None:
        return foreign.model_copy(update={"states": tuple(states)})
    states = [s.model_copy(update={"rows": rule}) for s in states]
    parts = []
    for part in foreign.parts:
        inputs = {}
        for name, entry in part.inputs.items():
            masks = entry.kind in ("mask", "write")
            inputs[name] = entry.model_copy(update={"rows": rule} if masks else {})
        parts.append(part.model_copy(update={"inputs": inputs}))
    update = {"states": tuple(states), "parts": tuple(parts)}
    return foreign.model_copy(update=update)


def _run(bundle: Bundle, ids: np.ndarray) -> dict[str, np.ndarray]:
    """The caches after tokens, one a call: state → [H_kv, n, D]."""
    decoder = Decoder(bundle, "portable")
    for token in ids.tolist():
        decoder.advance(decoder.seqs, [[token]])
    return take(decoder.seqs).states


def _linked(source: str, target: str) -> None:
    """A hard link, or a copy where the folder is on another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
