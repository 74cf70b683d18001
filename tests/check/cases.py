"""What a proof is made of: sound bundles, bundles with a planted fault, and the verdicts of every
gate on each.

A case is a name: clean/SEED/PRESET, trained/CHECKPOINT/PRESET, massive/-/PRESET, deep/-/PRESET and
base/BUNDLE/PRESET are sound, disk/FAULT/PRESET and memory/FAULT/PRESET are not.
"""

import hashlib
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property, lru_cache
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import clean  # noqa: E402
import faults_hybrids  # noqa: E402, F401  (registers its faults)
import faults_model  # noqa: E402, F401
import faults_undo  # noqa: E402, F401
import faults_zaya  # noqa: E402, F401
import planted  # noqa: E402, F401
import planted_programs  # noqa: E402, F401
import tiny  # noqa: E402
from copies import Copy  # noqa: E402
from registry import FAULTS  # noqa: E402

from workbench import Bundle, Decoder, InputError  # noqa: E402
from workbench.check import distinct, host, interface, program, states, weights  # noqa: E402
from workbench.check.gates import GREEN, RED, Gate  # noqa: E402
from workbench.check.golden import Golden, make_golden  # noqa: E402
from workbench.check.trace import Trace  # noqa: E402
from workbench.check.validate import (  # noqa: E402
    DeviceReference,
    device_gate,
    device_reference,
    measure,
    measure_budget,
)
from workbench.models.checkpoint import Checkpoint  # noqa: E402

ROOT = Path(__file__).parents[2]
STORE = ROOT / "build" / "prove"
PRESETS = ("fp16", "int8-tensor", "int8-channel", "int4-block32", "lut4")
TRAINED = [f"tiny-{n}" for n in "llama qwen2 gemma3 zaya lfm2 qwen3_5".split()]
LLAMA = "data/tiny-llama"
# Bundles that faults are planted in: a checkpoint's folder or its family, changes of
# that family's tiny dimensions, and options of the export.
BASES = {
    "llama": (LLAMA, {}, {"max_seq_len": 64}),
    "fixed": (LLAMA, {}, {"tokens": "4"}),
    "functions": (LLAMA, {}, {"tokens": "1,4"}),
    "batch": (LLAMA, {}, {"batch": 3}),
    "slice": (LLAMA, {}, {"kv_write": "slice"}),
    "qwen2": ("qwen2", {}, {}),
    "pairs": ("qwen2", {}, {"layers_per_shard": 2}),
    "qwen3": ("qwen3", {}, {}),
    "gemma": ("gemma3_text", {}, {}),
    "ring": ("gemma3_text", {}, {"sliding": "ring"}),
    "zaya": ("zaya", {}, {}),
    "routed": (
        "zaya",
        {"num_hidden_layers": 2, "num_experts": 2},
        {"moe": "routed", "tokens": "1-2"},
    ),
    "ministral3": ("ministral3", {}, {}),
    "smollm3": ("smollm3", {}, {}),
    "olmo2": ("olmo2", {}, {}),
    "phi3": ("phi3", {}, {}),
    "lfm2": ("lfm2", {"conv_L_cache": 4}, {}),
    "qwen3_5": ("qwen3_5_text", {}, {"tokens": "1-8"}),
    "granite": ("granitemoehybrid", {}, {}),
    "wide": (
        "llama",
        {"vocab_size": 2 * 16_384, "num_hidden_layers": 1},
        {"max_seq_len": 16},
    ),
}
SOUND = {
    "clean": "random draws",
    "trained": "trained checkpoints",
    "massive": "one massive activation",
    "deep": "24 random layers",
    "base": "the bundles of faults",
}
# Code that exported bundles depend on, and what verdicts depend on besides.
EXPORT = ("workbench/bundle", "workbench/models", "workbench/exporter", "tests/tiny.py")
ROOMS = ("runtime", "decode", "check")
GATES = ("miltorch", *(f"workbench/{room}" for room in ROOMS), "tests/check")
PROMPT = 24  # tokens of the golden behind `budget` and `device`


@cache
def code_version(*places: str) -> str:
    """SHA-256 of code."""
    digest = hashlib.sha256()
    for place in places:
        for file in sorted((ROOT / place).rglob("*.py")) or [ROOT / place]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def version() -> str:
    """That of everything a case's verdicts depend on."""
    return code_version(*EXPORT, *GATES)


def sound_cases() -> list[str]:
    names = {
        "clean": range(clean.COUNT),
        "trained": TRAINED,
        "massive": "-",
        "deep": "-",
        "base": BASES,
    }
    return [
        f"{kind}/{name}/{preset}"
        for kind in SOUND
        for name in names[kind]
        for preset in (PRESETS if kind == "base" else clean.PRESETS)
    ]


def faulty_cases() -> list[str]:
    return [f"{name}/{preset}" for name in FAULTS for preset in PRESETS]


def recipe(case: str) -> tuple[str, dict, dict]:
    """A checkpoint's folder or its family, changes of its dimensions, options."""
    kind, name, preset = case.split("/")
    if f"{kind}/{name}" in FAULTS:
        kind, name = "base", FAULTS[f"{kind}/{name}"].bundle
    if kind == "clean":
        return clean.draw(int(name), preset)
    sound = {
        "trained": (f"data/{name}", {}, {}),
        "massive": ("massive", {}, {}),
        "deep": ("llama", {"num_hidden_layers": 24}, {}),
    }
    family, changes, options = sound.get(kind) or BASES[name]
    return family, changes, options | {"compress": preset}


def unharmed(exports: tiny.Exports, case: str) -> tuple[Path, Checkpoint]:
    """The bundle of a case without its fault, and the bundle's checkpoint."""
    family, changes, options = recipe(case)
    if family == "massive":
        path = massive(exports)
    elif "/" in family:
        path = ROOT / family
    else:
        path = exports.checkpoint(family, **changes)
    return exports.bundle(path, **options).root, Checkpoint(path)


def massive(exports: tiny.Exports) -> Path:
    """A checkpoint whose first token has two huge channels, as trained models have on their
    BOS."""
    sizes = {"tie_word_embeddings": False, "num_hidden_layers": 3}
    source = exports.checkpoint("llama", **sizes)

    def make(folder: Path) -> None:
        shutil.copytree(source, folder)
        bos = Checkpoint(source).config.bos_token_id
        with tiny.edited_weights(folder) as tensors:
            row = tensors["model.embed_tokens.weight"][bos]
            row[5], row[40] = 1500, -820

    return tiny.once(exports.root / "massive", make)


class Subject:
    """A bundle that gates are asked about: `fault` is planted in each decoder that is
    opened, None where the bundle is sound or its files are faulty."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, fault=None, sound=False):
        self.folder, self.checkpoint = folder, checkpoint
        self.fault, self.sound = fault, sound
        self.bundle = Bundle.open(folder)
        self.decoders: dict[str, Decoder] = {}

    @cached_property
    def weights(self) -> Gate:
        return weights.weights_gate(self.bundle, self.checkpoint)

    @cached_property
    def whole(self) -> set[str] | None:
        """The shards that `bug_gates` would test whole."""
        if self.weights.verdict != GREEN:
            return None
        return distinct.representatives(self.bundle, self.checkpoint)

    def decoder(self, precision: str = "declared") -> Decoder:
        if precision not in self.decoders:
            decoder = Decoder(Bundle.open(self.folder), "portable", precision)
            if self.fault:
                self.fault.plant(decoder)
            self.decoders[precision] = decoder
        return self.decoders[precision]

    def gates(self) -> list[Gate]:
        """Every gate, those on files only where no decoder is faulty."""
        found = []
        for names, ask in STEPS.items():
            if self.fault and names[0] in ("interface", "weights"):
                continue
            try:
                found += ask(self)
            except InputError:
                # no decoder opens or runs a bundle whose interface is RED
                if RED not in [gate.verdict for gate in found]:
                    raise
                break
        return found


@contextmanager
def subject(exports: tiny.Exports, case: str) -> Iterator[Subject]:
    """The bundle of a case, its fault planted."""
    folder, checkpoint = unharmed(exports, case)
    fault = FAULTS.get(case.rpartition("/")[0])
    with (
        # faults divide by zero and overflow on purpose; draws have odd widths
        warnings.catch_warnings(action="ignore"),
        np.errstate(all="ignore"),
        tempfile.TemporaryDirectory() as copies,
    ):
        if case.startswith("disk/"):
            copy = Copy(folder, Path(copies) / "bundle")
            fault.plant(copy)
            yield Subject(copy.seal(), checkpoint)
        else:
            yield Subject(folder, checkpoint, fault, sound=fault is None)


def budget_gates(subject: Subject) -> list[Gate]:
    """`budget` of a decoder against a golden of `PROMPT` tokens."""
    declared, places = subject.decoder(), (subject.folder, subject.checkpoint.path)
    Ts = None if declared.options.shapes else (1, declared.options.t_max)
    cost = measure(declared, golden_of(*places), Ts, budget_of(*places))
    return cost.gates()[1:]


def device_gates(subject: Subject) -> list[Gate]:
    """`device` of a decoder that is seen as Core ML is seen from now on; of a sound
    bundle one in exact arithmetic, which is further from `declared`."""
    places = subject.folder, subject.checkpoint.path
    decoder = subject.decoder("exact" if subject.sound else "declared")
    tiny.as_device(decoder)
    return [device_gate(decoder, golden_of(*places), reference_of(*places))]


# What is asked, by the names of the gates that it gives.
STEPS = {
    ("interface",): lambda it: [interface.interface_gate(it.bundle, it.checkpoint)],
    ("weights",): lambda it: [it.weights],
    ("host",): lambda it: [host.host_gate(it.decoder(), it.checkpoint)],
    ("program",): lambda it: [
        program.program_gate(it.decoder("exact"), it.checkpoint, it.whole)
    ],
    tuple(states.STATE_GATES): lambda it: states.state_gates(it.decoder(), it.whole),
    ("budget",): budget_gates,
    ("device",): device_gates,
}


def golden_of(bundle: Path, checkpoint: Path) -> Golden:
    """That of a prompt behind BOS."""
    manifest = Bundle.open(bundle).manifest
    n = min(PROMPT, manifest.options.max_seq_len) - 1
    ids = manifest.tokens.bos or 0, *tiny.prompt(manifest.dims.V, n)
    return golden_of_ids(checkpoint, ids)


@lru_cache(maxsize=8)
def golden_of_ids(checkpoint: Path, ids: tuple[int, ...]) -> Golden:
    return make_golden(Checkpoint(checkpoint), list(ids))


@lru_cache(maxsize=8)
def budget_of(bundle: Path, checkpoint: Path) -> Trace:
    golden = golden_of(bundle, checkpoint)
    return measure_budget(Bundle.open(bundle), Checkpoint(checkpoint), golden)


@lru_cache(maxsize=8)
def reference_of(bundle: Path, checkpoint: Path) -> DeviceReference:
    return device_reference(Bundle.open(bundle), golden_of(bundle, checkpoint))


def record(exports: tiny.Exports, case: str) -> dict:
    """A case's line in the store: its gates, those that are RED, and how long it took."""
    start = time.perf_counter()
    try:
        with subject(exports, case) as asked:
            gates, error = asked.gates(), None
    except Exception as problem:  # a gate that breaks is a finding of its own
        gates, error = [], f"{type(problem).__name__}: {problem}"
    return {
        "case": case,
        "version": version(),
        "red": [gate.name for gate in gates if gate.verdict == RED],
        "error": error,
        "seconds": round(time.perf_counter() - start, 2),
        "gates": [g.json() for g in gates],
    }
