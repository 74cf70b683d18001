"""What a proof is made of: checkpoints, clean bundles, faulty bundles, and the verdicts of every bug gate on each.

A case is a name: clean/SEED/PRESET, massive/PRESET, deep/PRESET, disk/FAULT/PRESET, memory/FAULT/PRESET.
"""

import hashlib
import inspect
import json
import shutil
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import clean  # noqa: E402
import faults_model  # noqa: E402, F401  (registers its faults)
import faults_zaya  # noqa: E402, F401
import tiny  # noqa: E402
from copies import Copy  # noqa: E402
from faults import FAULTS  # noqa: E402
from planted import PLANTED  # noqa: E402

from workbench import Bundle, Decoder, InputError  # noqa: E402
from workbench.check.gates import NOT_RUN, RED, Gate  # noqa: E402
from workbench.models.checkpoint import Checkpoint  # noqa: E402

ROOT = Path(__file__).parents[2]
STORE = ROOT / "build" / "prove"
PRESETS = ("fp16", "int8-tensor", "int8-channel", "int4-block32", "lut4")
# Bundles that faults are planted in: a checkpoint and options of its export.
BASES = {
    "llama": ("data/tiny-llama", {"max_seq_len": 64}),
    "fixed": ("data/tiny-llama", {"max_seq_len": 32, "t": "fixed"}),
    "batch": ("data/tiny-llama", {"max_seq_len": 32, "batch": 3}),
    "qwen2": ({"family": "qwen2"}, {"max_seq_len": 32}),
    "qwen3": ({"family": "qwen3"}, {"max_seq_len": 32}),
    "gemma": ({"family": "gemma3_text"}, {"max_seq_len": 32}),
    "zaya": ({"family": "zaya"}, {"max_seq_len": 32}),
    "wide": (
        {"family": "llama", "vocab_size": 2 * 16_384, "num_hidden_layers": 1},
        {"max_seq_len": 16},
    ),
}
ROOMS = (
    "miltorch",
    *(f"workbench/{r}" for r in "bundle models export runtime decode check".split()),
)
HELPERS = ("copies.py", "cases.py", "clean.py", "../tiny.py")


@cache
def code_version() -> str:
    """SHA-256 of the code that verdicts depend on."""
    digest = hashlib.sha256()
    files = [f for room in ROOMS for f in sorted((ROOT / room).rglob("*.py"))]
    for file in [*files, *(Path(__file__).parent / name for name in HELPERS)]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def version(case: str) -> str:
    """The code's version and the fault's."""
    kind, name, *_ = case.split("/")
    plant = {"disk": PLANTED, "memory": FAULTS}.get(kind, {}).get(name)
    source = inspect.getsource(plant.plant) if plant else ""
    return f"{code_version()}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


def all_cases() -> list[str]:
    """Every case of the full matrices."""
    return [
        *(f"clean/{seed}/{preset}" for seed in range(60) for preset in clean.PRESETS),
        *(f"{kind}/-/{preset}" for kind in ("massive", "deep") for preset in clean.PRESETS),
        *(f"disk/{fault}/{preset}" for fault in PLANTED for preset in PRESETS),
        *(f"memory/{fault}/{preset}" for fault in FAULTS for preset in PRESETS),
    ]


class Prover:
    """Runs cases. Exports lie in `store`, so that each is made once for one version of the code."""

    def __init__(self, store: Path = STORE):
        self.store = store

    def checkpoint(self, changes: dict) -> Checkpoint:
        """A random checkpoint; `massive`: with a first token whose embedding has two huge channels."""
        folder = self._folder("checkpoints", changes)
        if not folder.exists():
            family, made = changes["family"], folder.with_name(f"{folder.name}.part")
            massive = changes.get("massive")
            shutil.rmtree(made, ignore_errors=True)
            sizes = {n: v for n, v in changes.items() if n not in ("family", "massive")}
            tiny.random(made, family, **sizes)
            if massive:
                plant_massive_activation(made)
            made.rename(folder)
        return Checkpoint(folder)

    def bundle(self, checkpoint: Checkpoint, options: dict) -> Path:
        from workbench.export import export

        folder = self._folder("bundles", options | {"checkpoint": checkpoint.sha256})
        if not folder.exists():
            export(checkpoint.path, folder, progress=False, **options)
        return folder

    def base(self, name: str, preset: str) -> tuple[Checkpoint, Path]:
        """The unharmed bundle that faults are planted in."""
        source, options = BASES[name]
        checkpoint = (
            Checkpoint(ROOT / source) if isinstance(source, str) else self.checkpoint(source)
        )
        return checkpoint, self.bundle(checkpoint, options | {"compress": preset})

    def _folder(self, kind: str, fields: dict) -> Path:
        text = json.dumps([code_version(), fields], sort_keys=True, default=str)
        folder = self.store / kind / hashlib.sha256(text.encode()).hexdigest()[:16]
        folder.parent.mkdir(parents=True, exist_ok=True)
        return folder

    def gates(self, case: str) -> list[Gate]:
        """Every bug gate's verdict on a case."""
        kind, name, preset = case.split("/")
        with quiet(), tempfile.TemporaryDirectory(dir=self._scratch()) as folder:
            if kind == "disk":
                fault = PLANTED[name]
                checkpoint, source = self.base(fault.bundle, preset)
                copy = Copy(source, Path(folder) / "bundle")
                fault.plant(copy)
                return bug_gates_of_folder(copy.seal(), checkpoint)
            if kind == "memory":
                fault = FAULTS[name]
                checkpoint, source = self.base(fault.bundle, preset)
                decoders = open_twice(source)
                for decoder in decoders:
                    fault.plant(decoder)
                return all_bug_gates(decoders[0].bundle, checkpoint, *decoders)
            return bug_gates_of_folder(*reversed(self.clean(kind, name, preset)))

    def clean(self, kind: str, name: str, preset: str) -> tuple[Checkpoint, Path]:
        if kind == "clean":
            family, changes, options = clean.draw(int(name), preset)
            checkpoint = self.checkpoint({"family": family} | changes)
            return checkpoint, self.bundle(checkpoint, options)
        changes = {
            "massive": {"massive": True, "tie_word_embeddings": False, "num_hidden_layers": 3},
            "deep": {"num_hidden_layers": 24},
        }[kind]
        checkpoint = self.checkpoint({"family": "llama"} | changes)
        options = {"max_seq_len": 32, "compress": preset}
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
            "version": version(case),
            "red": [g.name for g in gates if g.verdict == RED],
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


def open_twice(folder: Path) -> list[Decoder]:
    """The same bundle in `exact` and in `declared` arithmetic, nothing shared between them."""
    return [Decoder(Bundle.open(folder), "portable", p) for p in ("exact", "declared")]


def bug_gates_of_folder(folder: Path, checkpoint: Checkpoint) -> list[Gate]:
    """Every bug gate on a bundle as it lies on disk; one that cannot be opened is asked what can be asked of it."""
    try:
        bundle = Bundle.open(folder)
    except InputError as problem:
        return [Gate("open", RED, None, None, str(problem))]
    try:
        decoders = open_twice(folder)
    except InputError:
        decoders = [None, None]
    return all_bug_gates(bundle, checkpoint, *decoders)


def all_bug_gates(
    bundle: Bundle, checkpoint: Checkpoint, exact: Decoder | None, declared: Decoder | None
) -> list[Gate]:
    """The gates that answer "is it a bug?": those on the bundle, those on its decoders, the probes of its states."""
    from workbench.check import checklist
    from workbench.check.validate import bug_gates

    gates = list(bug_gates(bundle, checkpoint, exact=exact, decoder=declared, progress=False))
    if declared is not None:
        probes = [g for g in checklist.check_bundle(declared) if g.name != "memory"]
        gates += [g for g in probes if g.verdict != NOT_RUN]
        gates += run_gates(declared, checkpoint)
    return gates


def run_gates(declared: Decoder, checkpoint: Checkpoint) -> list[Gate]:
    """`finite`, `routing` and `same_for_every_T`: what a validation against a golden says beside the price."""
    from workbench.check.golden import make_golden
    from workbench.check.price import measure_budget
    from workbench.check.validate import validate

    bos, dims, o = declared.manifest.tokens.bos, declared.manifest.dims, declared.options
    ids = [bos or 0, *tiny.prompt(dims.V, min(11, o.max_seq_len - 1))]
    Ts = (1, o.t_max) if o.t == "range" else None
    golden = make_golden(checkpoint, ids)
    budget = (
        measure_budget(declared.bundle, checkpoint, golden) if golden.expert is not None else None
    )
    found = validate(declared, golden, Ts, budget=budget).gates
    return [g for g in found if g.name in ("finite", "routing", "same_for_every_T")]
