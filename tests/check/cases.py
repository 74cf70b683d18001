"""The cases of a proof: sound bundles and bundles with a planted fault, each in a preset, and the
verdicts of every gate on each."""

import hashlib
import json
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import clean  # noqa: E402
import tiny  # noqa: E402
from faults import FAULTS  # noqa: E402
from faults.copies import Copy  # noqa: E402
from faults.fault import Fault  # noqa: E402
from faults.weights import FITTED  # noqa: E402
from recipe import Recipe  # noqa: E402

from workbench import Bundle, Decoder, InputError  # noqa: E402
from workbench.check import distinct, host, interface, program, states, weights  # noqa: E402
from workbench.check.device import DeviceReference, device_gate, device_reference  # noqa: E402
from workbench.check.fidelity import measure, measure_budget  # noqa: E402
from workbench.check.gates import GREEN, RED, Gate  # noqa: E402
from workbench.check.golden import Golden, make_golden  # noqa: E402
from workbench.check.trace import Trace  # noqa: E402
from workbench.models.checkpoint import Checkpoint  # noqa: E402

ROOT = Path(__file__).parents[2]
PROVE_FOLDER = (
    ROOT / "build" / "prove"
)  # of the records and of the bundles that cases run on
PRESETS = ("fp16", "int8-tensor", "int8-channel", "int4-block32", "lut6-g16")
TRAINED = [f"tiny-{name}" for name in "llama qwen2 gemma3 zaya lfm2 qwen3_5".split()]
LLAMA = "data/tiny-llama"


# Bundles that faults are planted in.
BASES: dict[str, Recipe] = {
    "llama": Recipe(LLAMA, {}, {"max_seq_len": 64}),
    "fixed": Recipe(LLAMA, {}, {"tokens": "4"}),
    "functions": Recipe(LLAMA, {}, {"tokens": "1,4"}),
    "batch": Recipe(LLAMA, {}, {"batch": 3}),
    "slice": Recipe(LLAMA, {}, {"kv_write": "slice"}),
    "qwen2": Recipe("qwen2", {}, {}),
    "pairs": Recipe("qwen2", {}, {"layers_per_shard": 2}),
    "qwen3": Recipe("qwen3", {}, {}),
    "gemma": Recipe("gemma3_text", {}, {}),
    "ring": Recipe("gemma3_text", {}, {"sliding": "ring"}),
    "zaya": Recipe("zaya", {}, {}),
    "routed": Recipe(
        "zaya",
        {"num_hidden_layers": 2, "num_experts": 2},
        {"moe": "routed", "tokens": "1-2"},
    ),
    "ministral3": Recipe("ministral3", {}, {}),
    "smollm3": Recipe("smollm3", {}, {}),
    "olmo2": Recipe("olmo2", {}, {}),
    "phi3": Recipe("phi3", {}, {}),
    "lfm2": Recipe("lfm2", {"conv_L_cache": 4}, {}),
    "qwen3_5": Recipe("qwen3_5_text", {}, {"tokens": "1-8"}),
    "granite": Recipe("granitemoehybrid", {}, {}),
    "gemma4": Recipe("gemma4_text", {}, {}),
    "gemma4_dense": Recipe("gemma4_unified_text", {}, {}),
    "small_scalar": Recipe("small_scalar", {}, {}),
    "fitted": Recipe(
        LLAMA, {}, {"max_seq_len": 64, "calibration": tiny.random_text(256)}
    ),
    "wide": Recipe(
        "llama", {"vocab_size": 2 * 16_384, "num_hidden_layers": 1}, {"max_seq_len": 16}
    ),
}
# Layers of these bundles whose shards have one program, with other weights. A bundle without a
# fault of one layer needs no entry.
ALL_ALIKE = [(0, 1, 2, 3)]
ONE_DIFFERS = [(0, 2), (1,)]
ALIKE: dict[str, list[tuple[int, ...]]] = {
    "llama": ALL_ALIKE,
    "fitted": ALL_ALIKE,
    "fixed": ALL_ALIKE,
    "functions": ALL_ALIKE,
    "batch": ALL_ALIKE,
    "slice": ALL_ALIKE,
    "qwen2": [(0, 1)],
    "qwen3": [(0, 1)],
    "gemma": ONE_DIFFERS,
    "ring": ONE_DIFFERS,
    "zaya": [(0,), (1, 2)],
    "ministral3": [(0, 1)],
    "smollm3": ONE_DIFFERS,
    "olmo2": [(0, 1)],
    "phi3": [(0, 1)],
    "lfm2": ONE_DIFFERS,
    "qwen3_5": ONE_DIFFERS,
    "granite": ONE_DIFFERS,
    # layers 4 and 5 copy the rows of layers 2 and 3
    "gemma4": [(0, 1), (2,), (3,), (4,), (5,)],
    "gemma4_dense": [(0, 1), (2,)],
    "small_scalar": [(0, 1), (2,), (3,), (4,), (5,)],
}
# The kinds of sound bundles.
SOUND = {
    "clean": "random draws",
    "trained": "trained checkpoints",
    "massive": "one massive activation",
    "deep": "24 random layers",
    "base": "the bundles of faults",
}
# Code that exported bundles depend on, and further code that verdicts depend on.
EXPORT_CODE = (
    "workbench/bundle",
    "workbench/models",
    "workbench/exporter",
    "tests/tiny.py",
)
GATE_CODE = (
    "miltorch",
    "workbench/runtime",
    "workbench/decode",
    "workbench/check",
    "tests/check",
)
PROMPT = 24  # tokens of the golden behind `budget` and `device`


@cache
def code_version(*places: str) -> str:
    """The first 16 digits of the SHA-256 of these Python files, and of those in these folders."""
    digest = hashlib.sha256()
    for place in places:
        for file in sorted((ROOT / place).rglob("*.py")) or [ROOT / place]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def version() -> str:
    """`code_version` of all code that the verdicts on a case depend on."""
    return code_version(*EXPORT_CODE, *GATE_CODE)


@dataclass(frozen=True)
class Case:
    """A bundle in a preset. As text it is KIND/NAME/PRESET, or KIND/NAME@LAYER/PRESET for a fault
    that is planted in another layer than its row names.

    | kind | name | the bundle |
    |---|---|---|
    | clean | a seed | one of `clean.draw` |
    | trained | a folder of data/ | a trained checkpoint's |
    | massive, deep | - | one with a huge activation, one of 24 layers |
    | base | a key of `BASES` | one that faults are planted in |
    | disk, memory | a fault | one with this fault in its files, or in a loaded decoder |
    """

    kind: str
    name: str
    preset: str
    layer: int | None = None

    def __str__(self) -> str:
        place = "" if self.layer is None else f"@{self.layer}"
        return f"{self.kind}/{self.name}{place}/{self.preset}"

    @classmethod
    def parse(cls, text: str) -> "Case":
        kind, place, preset = text.split("/")
        name, _, layer = place.partition("@")
        return cls(kind, name, preset, int(layer) if layer else None)

    @property
    def is_sound(self) -> bool:
        return self.kind in SOUND

    @property
    def fault(self) -> Fault | None:
        if self.is_sound:
            return None
        fault = FAULTS[f"{self.kind}/{self.name}"]
        return fault if self.layer is None else replace(fault, layer=self.layer)

    @property
    def recipe(self) -> Recipe:
        """What the bundle is exported from, and how, in the case's preset."""
        match self.kind:
            case "clean":
                return clean.draw(int(self.name), self.preset)
            case "trained":
                recipe = Recipe(f"data/{self.name}", {}, {})
            case "massive":
                recipe = Recipe("massive", {}, {})
            case "deep":
                recipe = Recipe("llama", {"num_hidden_layers": 24}, {})
            case "base":
                recipe = BASES[self.name]
            case "disk" | "memory":
                recipe = BASES[self.fault.bundle]
        options = recipe.options | {"compress": self.preset}
        return recipe._replace(options=options)


@dataclass(frozen=True)
class Record:
    """The verdicts on a case, as a line of the store.

    Attributes:
        version: `version` of the code that ran the case.
        red: names of the gates that are RED.
        error: the exception that ended the case; None: no gate broke.
        gates: `Gate.json` of every gate that ran.
    """

    case: Case
    version: str
    red: list[str]
    error: str | None
    seconds: float
    gates: list[dict]

    @property
    def fails(self) -> bool:
        """Whether a sound bundle is RED, every gate is GREEN on a fault, or a gate broke."""
        return bool(self.error) or self.case.is_sound == bool(self.red)

    def to_line(self) -> str:
        return json.dumps(vars(self) | {"case": str(self.case)}, default=str)

    @classmethod
    def parse(cls, line: str) -> "Record":
        fields = json.loads(line)
        return cls(**fields | {"case": Case.parse(fields["case"])})


def presets_of(base: str) -> tuple[str, ...]:
    """The presets of a bundle that faults are planted in."""
    return FITTED if base == "fitted" else PRESETS


def sound_cases() -> list[Case]:
    names = {
        "clean": [str(seed) for seed in range(clean.COUNT)],
        "trained": TRAINED,
        "massive": ["-"],
        "deep": ["-"],
        "base": list(BASES),
    }
    return [
        Case(kind, name, preset)
        for kind in SOUND
        for name in names[kind]
        for preset in (presets_of(name) if kind == "base" else clean.PRESETS)
    ]


def faulty_cases() -> list[Case]:
    return [
        Case.parse(f"{name}/{preset}")
        for name, fault in FAULTS.items()
        for preset in fault.presets or presets_of(fault.bundle)
    ]


def relocated_cases() -> list[Case]:
    """Every fault of one layer, planted in the first, a middle and the last layer of the same
    program instead, in the fault's first preset. A gate that tests one shard in the place of all
    with the same program could miss the fault there."""
    cases = []
    for name, fault in FAULTS.items():
        if fault.layer is None:
            continue
        (alike,) = (layers for layers in ALIKE[fault.bundle] if fault.layer in layers)
        places = sorted({alike[0], alike[len(alike) // 2], alike[-1]} - {fault.layer})
        case = Case.parse(f"{name}/{fault.first_preset}")
        cases += [replace(case, layer=layer) for layer in places]
    return cases


def export_sound(exports: tiny.Exports, case: Case) -> tuple[Path, Checkpoint]:
    """Exports the bundle of a case without its fault. Returns its folder and its checkpoint."""
    recipe = case.recipe
    path = find_checkpoint(exports, recipe)
    return exports.bundle(path, **recipe.options).root, Checkpoint(path)


def find_checkpoint(exports: tiny.Exports, recipe: Recipe) -> Path:
    """The folder of a recipe's checkpoint, which is made if it does not exist."""
    if recipe.source.startswith("data/"):
        return ROOT / recipe.source
    if recipe.source in MAKERS:
        return MAKERS[recipe.source](exports)
    compress = recipe.options["compress"]
    sizes = tiny.fit_to_blocks(recipe.source, recipe.changes, compress)
    return exports.checkpoint(recipe.source, **sizes)


def make_massive(exports: tiny.Exports) -> Path:
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


def make_small_scalar(exports: tiny.Exports) -> Path:
    """A checkpoint of Gemma 4 whose layers 0 and 1 multiply their outputs by 0.02."""
    source = exports.checkpoint("gemma4_text")

    def make(folder: Path) -> None:
        shutil.copytree(source, folder)
        with tiny.edited_weights(folder) as tensors:
            for layer in (0, 1):
                tensors[f"model.layers.{layer}.layer_scalar"][:] = 0.02

    return tiny.once(exports.root / "small_scalar", make)


# `Recipe.source` → a function that makes the checkpoint
MAKERS: dict[str, Callable[[tiny.Exports], Path]] = {
    "massive": make_massive,
    "small_scalar": make_small_scalar,
}


class Subject:
    """A bundle that gates run on.

    Args:
        folder: of the bundle.
        fault: planted in every decoder of the bundle that is opened; None where the bundle is
            sound or has the fault in its files.
        is_sound: whether no gate may be RED.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint: Checkpoint,
        fault: Fault | None = None,
        is_sound: bool = False,
    ):
        self.folder = folder
        self.checkpoint = checkpoint
        self.fault = fault
        self.is_sound = is_sound
        self.bundle = Bundle.open(folder)
        self.decoders: dict[str, Decoder] = {}

    @cached_property
    def weights_gate(self) -> Gate:
        return weights.weights_gate(self.bundle, self.checkpoint)

    @cached_property
    def representatives(self) -> set[str] | None:
        """The shards that `bug_gates` would test in full."""
        if self.weights_gate.verdict != GREEN:
            return None
        return distinct.representatives(self.bundle, self.checkpoint)

    def decoder(self, precision: str = "declared") -> Decoder:
        if precision not in self.decoders:
            decoder = Decoder(Bundle.open(self.folder), "portable", precision)
            if self.fault:
                self.fault.plant_in(decoder)
            self.decoders[precision] = decoder
        return self.decoders[precision]

    def gates(self) -> list[Gate]:
        """Runs every gate. Gates that read files alone are left out where the fault is in a
        decoder."""
        gates = []
        for step in STEPS:
            if self.fault and step.reads_files_alone:
                continue
            try:
                gates += step.run(self)
            except InputError:
                # no decoder opens or runs a bundle whose interface is RED
                if RED not in [gate.verdict for gate in gates]:
                    raise
                break
        return gates


@contextmanager
def open_subject(exports: tiny.Exports, case: Case) -> Iterator[Subject]:
    """The bundle of a case with its fault."""
    folder, checkpoint = export_sound(exports, case)
    with (
        # faults divide by zero and overflow on purpose; draws have odd widths
        warnings.catch_warnings(action="ignore"),
        np.errstate(all="ignore"),
        tempfile.TemporaryDirectory() as temporary,
    ):
        if case.kind == "disk":
            copy = Copy(folder, Path(temporary) / "bundle")
            case.fault.plant_in(copy)
            yield Subject(copy.seal(), checkpoint)
        else:
            yield Subject(folder, checkpoint, case.fault, case.is_sound)


def interface_gates(subject: Subject) -> list[Gate]:
    return [interface.interface_gate(subject.bundle, subject.checkpoint)]


def weights_gates(subject: Subject) -> list[Gate]:
    return [subject.weights_gate]


def host_gates(subject: Subject) -> list[Gate]:
    return [host.host_gate(subject.decoder(), subject.checkpoint)]


def program_gates(subject: Subject) -> list[Gate]:
    decoder = subject.decoder("exact")
    return [program.program_gate(decoder, subject.checkpoint, subject.representatives)]


def state_gates(subject: Subject) -> list[Gate]:
    return states.state_gates(subject.decoder(), subject.representatives)


def budget_gates(subject: Subject) -> list[Gate]:
    """`budget` of a decoder against a golden of `PROMPT` tokens."""
    decoder, paths = subject.decoder(), (subject.folder, subject.checkpoint.path)
    Ts = None if decoder.options.fixed_sizes else (1, decoder.options.t_max)
    cost = measure(decoder, golden_of(*paths), Ts, budget_of(*paths))
    # the cost is also judged by `max_kl`, which is about the quality and not about the export
    return [gate for gate in cost.judge() if gate.name == "budget"]


def device_gates(subject: Subject) -> list[Gate]:
    """`device` of a decoder that looks like one on Core ML from now on. A sound bundle runs in exact
    arithmetic, which differs more from the reference's `declared` than a second `declared` run."""
    paths = subject.folder, subject.checkpoint.path
    decoder = subject.decoder("exact" if subject.is_sound else "declared")
    tiny.as_device(decoder)
    return [device_gate(decoder, golden_of(*paths), reference_of(*paths))]


@dataclass(frozen=True)
class Step:
    """One or several gates that run together.

    Attributes:
        names: of the gates that `run` returns, in this order.
        reads_files_alone: no fault in a loaded decoder can turn these gates RED.
    """

    names: tuple[str, ...]
    run: Callable[[Subject], list[Gate]]
    reads_files_alone: bool = False


# in the order in which they run
STEPS = [
    Step(("interface",), interface_gates, reads_files_alone=True),
    Step(("weights",), weights_gates, reads_files_alone=True),
    Step(("host",), host_gates),
    Step(("program",), program_gates),
    Step(tuple(states.STATE_GATES), state_gates),
    Step(("budget",), budget_gates),
    Step(("device",), device_gates),
]
GATE_NAMES = [name for step in STEPS for name in step.names]


def run_gate(subject: Subject, name: str) -> Gate:
    """Runs the gate of this name, and with it the others of its step."""
    for step in STEPS:
        if name in step.names:
            gates = {gate.name: gate for gate in step.run(subject)}
            return gates[name]
    raise LookupError(name)


def golden_of(bundle: Path, checkpoint: Path) -> Golden:
    """The golden of a prompt behind BOS."""
    manifest = Bundle.open(bundle).manifest
    count = min(PROMPT, manifest.options.max_seq_len) - 1
    ids = manifest.tokens.bos or 0, *tiny.prompt(manifest.dims.V, count)
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


def run_case(exports: tiny.Exports, case: Case) -> Record:
    """Runs every gate on the bundle of a case."""
    start = time.perf_counter()
    try:
        with open_subject(exports, case) as subject:
            gates, error = subject.gates(), None
    except Exception as problem:  # a gate that breaks fails the case
        gates, error = [], f"{type(problem).__name__}: {problem}"
    return Record(
        case=case,
        version=version(),
        red=[gate.name for gate in gates if gate.verdict == RED],
        error=error,
        seconds=round(time.perf_counter() - start, 2),
        gates=[gate.json() for gate in gates],
    )
