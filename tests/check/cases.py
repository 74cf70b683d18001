"""What a proof is made of: checkpoints, clean bundles, faulty bundles, and the verdicts of every
bug gate on each.

A case is a name: clean/SEED/PRESET, trained/CHECKPOINT/PRESET, massive/-/PRESET, deep/-/PRESET,
disk/FAULT/PRESET, memory/FAULT/PRESET. Sound and faulty bundles meet every gate.
"""

import hashlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import clean  # noqa: E402
import faults_lfm2  # noqa: E402, F401  (registers its faults)
import faults_matrix  # noqa: E402, F401
import faults_model  # noqa: E402, F401
import faults_undo  # noqa: E402, F401
import faults_zaya  # noqa: E402, F401
import tiny  # noqa: E402
from copies import Copy  # noqa: E402
from faults import FAULTS  # noqa: E402
from planted import PLANTED  # noqa: E402

from workbench import Bundle, Decoder, InputError  # noqa: E402
from workbench.check import host, interface, program, states, weights  # noqa: E402
from workbench.check.gates import RED, Gate  # noqa: E402
from workbench.check.golden import Golden, make_golden  # noqa: E402
from workbench.check.hf import Values  # noqa: E402
from workbench.check.validate import (  # noqa: E402
    bug_gates,
    device_gate,
    device_reference,
    measure,
    measure_budget,
    unopened_gates,
)
from workbench.models.checkpoint import Checkpoint  # noqa: E402

ROOT = Path(__file__).parents[2]
STORE = ROOT / "build" / "prove"
PRESETS = ("fp16", "int8-tensor", "int8-channel", "int4-block32", "lut4")
TRAINED = (
    *("tiny-llama", "tiny-qwen2", "tiny-gemma3", "tiny-zaya"),
    *("tiny-lfm2", "tiny-qwen3_5"),
)
# Bundles that faults are planted in: a checkpoint and options of its export.
BASES = {
    "llama": ("data/tiny-llama", {"max_seq_len": 64}),
    "fixed": ("data/tiny-llama", {"max_seq_len": 32, "tokens": "4"}),
    "functions": ("data/tiny-llama", {"max_seq_len": 32, "tokens": "1,4"}),
    "batch": ("data/tiny-llama", {"max_seq_len": 32, "batch": 3}),
    "slice": ("data/tiny-llama", {"max_seq_len": 32, "kv_write": "slice"}),
    "qwen2": ({"family": "qwen2"}, {"max_seq_len": 32}),
    "pairs": ({"family": "qwen2"}, {"max_seq_len": 32, "layers_per_shard": 2}),
    "qwen3": ({"family": "qwen3"}, {"max_seq_len": 32}),
    "gemma": ({"family": "gemma3_text"}, {"max_seq_len": 32}),
    "zaya": ({"family": "zaya"}, {"max_seq_len": 32}),
    "routed": (
        {"family": "zaya", "num_hidden_layers": 2, "num_experts": 2},
        {"max_seq_len": 32, "moe": "routed", "tokens": "1-2"},
    ),
    "ministral3": ({"family": "ministral3"}, {"max_seq_len": 32}),
    "smollm3": ({"family": "smollm3"}, {"max_seq_len": 32}),
    "olmo2": ({"family": "olmo2"}, {"max_seq_len": 32}),
    "phi3": ({"family": "phi3"}, {"max_seq_len": 32}),
    "lfm2": ({"family": "lfm2", "conv_L_cache": 4}, {"max_seq_len": 32}),
    "ring": ({"family": "gemma3_text"}, {"max_seq_len": 32, "sliding": "ring"}),
    "qwen3_5": ({"family": "qwen3_5_text"}, {"max_seq_len": 32, "tokens": "1-8"}),
    "granite": ({"family": "granitemoehybrid"}, {"max_seq_len": 32}),
    "wide": (
        {"family": "llama", "vocab_size": 2 * 16_384, "num_hidden_layers": 1},
        {"max_seq_len": 16},
    ),
}
# Code that exported bundles depend on, and what verdicts depend on besides.
EXPORT = ("workbench/bundle", "workbench/models", "workbench/export", "tests/tiny.py")
GATES = (
    *("miltorch", "workbench/runtime", "workbench/decode", "workbench/check"),
    "tests/check",
)
ON_FILES = ("interface", "weights")
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


def fault_of(case: str):
    """The planted fault of a case, None of a clean one."""
    kind, name, _ = case.split("/")
    return {"disk": PLANTED, "memory": FAULTS}.get(kind, {}).get(name)


def bundle_of(case: str) -> str:
    """Cases of one bundle, or of one checkpoint's bundles, have the same name here."""
    kind, name, preset = case.split("/")
    fault = fault_of(case)
    return f"{fault.bundle}/{preset}" if fault else f"{kind}/{name}"


def all_cases() -> list[str]:
    """Every case of the full matrices."""
    return [
        *(
            f"clean/{seed}/{preset}"
            for seed in range(clean.COUNT)
            for preset in clean.PRESETS
        ),
        *(
            f"{kind}/-/{preset}"
            for kind in ("massive", "deep")
            for preset in clean.PRESETS
        ),
        *(f"trained/{name}/{preset}" for name in TRAINED for preset in clean.PRESETS),
        *(f"disk/{fault}/{preset}" for fault in PLANTED for preset in PRESETS),
        *(f"memory/{fault}/{preset}" for fault in FAULTS for preset in PRESETS),
    ]


class Prover:
    """Runs cases. Exports lie in `store`, so that each is made once for one version of the code."""

    def __init__(self, store: Path = STORE):
        self.store = store

    def checkpoint(self, changes: dict) -> Checkpoint:
        """A random checkpoint; `massive`: with a first token whose embedding has two huge
        channels."""

        def make(folder: Path) -> None:
            sizes = {n: v for n, v in changes.items() if n not in ("family", "massive")}
            tiny.random(folder, changes["family"], **sizes)
            if changes.get("massive"):
                plant_massive_activation(folder)

        return Checkpoint(self._stored("checkpoints", changes, make))

    def bundle(self, checkpoint: Checkpoint, options: dict) -> Path:
        from workbench.export import export

        def make(folder: Path) -> None:
            export(checkpoint.path, folder, progress=False, **options)

        return self._stored(
            "bundles", options | {"checkpoint": checkpoint.sha256}, make
        )

    def base(self, name: str, preset: str) -> tuple[Checkpoint, Path]:
        """The unharmed bundle that faults are planted in."""
        source, options = BASES[name]
        checkpoint = (
            Checkpoint(ROOT / source)
            if isinstance(source, str)
            else self.checkpoint(source)
        )
        return checkpoint, self.bundle(checkpoint, options | {"compress": preset})

    def _stored(self, kind: str, fields: dict, make: Callable[[Path], None]) -> Path:
        """The folder that `make` fills, once for all processes and for one version of the code."""
        text = json.dumps([code_version(*EXPORT), fields], sort_keys=True, default=str)
        folder = self.store / kind / hashlib.sha256(text.encode()).hexdigest()[:16]
        return tiny.once(folder, make)

    def gates(self, case: str) -> list[Gate]:
        """The gates that were asked about a case, in that order."""
        kind, name, preset = case.split("/")
        fault = fault_of(case)
        with quiet(), tempfile.TemporaryDirectory(dir=self._scratch()) as folder:
            if fault is None:
                checkpoint, source = self.clean(kind, name, preset)
                return all_bug_gates(Bundle.open(source), checkpoint)
            checkpoint, source = self.base(fault.bundle, preset)
            if kind == "memory":
                return Faulty(source, checkpoint, fault.plant).gates()
            copy = Copy(source, Path(folder) / "bundle")
            fault.plant(copy)
            return Faulty(copy.seal(), checkpoint).gates()

    def clean(self, kind: str, name: str, preset: str) -> tuple[Checkpoint, Path]:
        if kind == "clean":
            family, changes, options = clean.draw(int(name), preset)
            checkpoint = self.checkpoint({"family": family} | changes)
            return checkpoint, self.bundle(checkpoint, options)
        options = {"max_seq_len": 32, "compress": preset}
        if kind == "trained":
            checkpoint = Checkpoint(ROOT / "data" / name)
            return checkpoint, self.bundle(checkpoint, options)
        changes = {
            "massive": {
                "massive": True,
                "tie_word_embeddings": False,
                "num_hidden_layers": 3,
            },
            "deep": {"num_hidden_layers": 24},
        }[kind]
        checkpoint = self.checkpoint({"family": "llama"} | changes)
        return checkpoint, self.bundle(checkpoint, options)

    def _scratch(self) -> Path:
        folder = self.store / "scratch"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def record(self, case: str) -> dict:
        """A case's line in the store: its gates, those that are RED, and how long it took."""
        start = time.perf_counter()
        try:
            gates, error = self.gates(case), None
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


def plant_massive_activation(folder: Path) -> None:
    """Gives the first token two huge channels, as trained models have on their BOS."""
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    row = tensors["model.embed_tokens.weight"].copy()
    bos = json.loads((folder / "config.json").read_text()).get("bos_token_id") or 1
    row[bos, [5, 40]] = 1500, -820
    tensors["model.embed_tokens.weight"] = row
    save_file(tensors, path, {"format": "pt"})


@contextmanager
def quiet():
    """Faults divide by zero and overflow on purpose; draws have odd widths."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


class Faulty:
    """A faulty bundle: its files are, or `plant` is applied to each decoder that is opened."""

    def __init__(
        self,
        folder: Path,
        checkpoint: Checkpoint,
        plant: Callable[[Decoder], None] | None = None,
    ):
        self.folder, self.checkpoint, self.plant = folder, checkpoint, plant
        self.decoders: dict[str, Decoder] = {}

    def decoder(self, precision: str = "declared") -> Decoder:
        if precision not in self.decoders:
            decoder = Decoder(Bundle.open(self.folder), "portable", precision)
            if self.plant:
                self.plant(decoder)
            self.decoders[precision] = decoder
        return self.decoders[precision]

    def gates(self) -> list[Gate]:
        """Every gate, those on files only of a fault in files."""
        try:
            Bundle.open(self.folder)
        except InputError as problem:
            return [Gate("open", RED, None, None, str(problem))]
        gates = []
        try:
            for names, ask in STEPS.items():
                if not (self.plant and names[0] in ON_FILES):
                    gates += ask(self)
        # no decoder opens or runs a bundle whose interface is RED
        except InputError as problem:
            if not any((g.name, g.verdict) == ("interface", RED) for g in gates):
                raise
            gates += unopened_gates(problem, ["decoder"])
        return gates


# What is asked of a faulty bundle, by the names of the gates that it gives.
STEPS = {
    ("interface",): lambda faulty: [
        interface.interface_gate(Bundle.open(faulty.folder), faulty.checkpoint)
    ],
    ("weights",): lambda faulty: [
        weights.weights_gate(Bundle.open(faulty.folder), faulty.checkpoint)
    ],
    ("host",): lambda faulty: [host.host_gate(faulty.decoder(), faulty.checkpoint)],
    ("program",): lambda faulty: [
        program.program_gate(faulty.decoder("exact"), faulty.checkpoint)
    ],
    states.STATE_GATES: lambda faulty: states.state_gates(faulty.decoder()),
    ("budget",): lambda faulty: budget_gates(faulty.decoder(), faulty.checkpoint),
    ("device",): lambda faulty: device_gates(faulty.decoder(), faulty.checkpoint),
}


def all_bug_gates(bundle: Bundle, checkpoint: Checkpoint) -> list[Gate]:
    """Every gate of a sound bundle; `budget` and `device` at last."""
    declared = Decoder(bundle, "portable")
    exact = Decoder(bundle, "portable", "exact")
    return [
        *bug_gates(bundle, checkpoint, decoder=declared),
        *budget_gates(declared, checkpoint),
        *device_gates(exact, checkpoint),
    ]


def budget_gates(declared: Decoder, checkpoint: Checkpoint) -> list[Gate]:
    """`budget` of a decoder against a golden of `PROMPT` tokens."""
    options = declared.options
    Ts = (1, options.t_max) if not options.shapes else None
    golden, budget = measured(declared.bundle.root, checkpoint.path)
    return measure(declared, golden, Ts, budget).gates()[1:]


def device_gates(decoder: Decoder, checkpoint: Checkpoint) -> list[Gate]:
    """`device` of a decoder that is seen as Core ML is seen from now on."""
    root = decoder.bundle.root
    tiny.as_device(decoder)
    golden = measured(root, checkpoint.path)[0]
    return [device_gate(decoder, golden, reference(root, checkpoint.path))]


@lru_cache(maxsize=4)
def measured(bundle: Path, checkpoint: Path) -> tuple[Golden, Values]:
    """A golden of a prompt behind BOS, and the budget of a bundle in its own files."""
    opened, source = Bundle.open(bundle), Checkpoint(checkpoint)
    bos, S = opened.manifest.tokens.bos, opened.manifest.options.max_seq_len
    ids = [bos or 0, *tiny.prompt(opened.manifest.dims.V, min(PROMPT, S) - 1)]
    golden = make_golden(source, ids)
    return golden, measure_budget(opened, source, golden)


@lru_cache(maxsize=4)
def reference(bundle: Path, checkpoint: Path) -> Values:
    return device_reference(Bundle.open(bundle), measured(bundle, checkpoint)[0])
