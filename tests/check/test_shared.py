"""Results that validations share: those of equal files under another manifest are not taken over,
and a shared result is the one that the validation would compute."""

from copy import deepcopy
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import cases
import numpy as np
import pytest
from circle import wide
from faults import find_fault
from faults.copies import Copy
from tiny import prompt

from workbench import Bundle, Decoder
from workbench.bundle.manifest import Calibration, FileEntry, Manifest, Selection
from workbench.check import bug_gates, fidelity, program, validate, weights
from workbench.check.golden import Golden, stored_weights
from workbench.check.hf import Reference
from workbench.check.shared import SharedResults, StoredKey, golden_digest
from workbench.check.stretches import reference_stretches


def plant_of(name):
    return find_fault("disk", name).plant_in


def shorten_rings(copy):
    """Every ring buffer is one row shorter in the manifest, and as long in the packages."""
    for shard in copy.manifest["shards"]:
        for state in shard["states"].values():
            if state.get("ring"):
                state["ring"] -= 1


@pytest.fixture
def pair(exports, tmp_path):
    """A sound bundle, a copy with a fault planted in its manifest alone, and the checkpoint."""

    def make(base, plant):
        source, checkpoint = cases.export_sound(
            exports, cases.Case("base", base, "fp16")
        )
        copy = Copy(source, tmp_path / "copy")
        plant(copy)
        faulty = Bundle.open(copy.seal())
        return Bundle.open(source), faulty, checkpoint

    return make


def gates_by_name(bundle, checkpoint, shared=None):
    """Runs the bug gates. Returns each gate's JSON by its name."""
    results = bug_gates.bug_gates(bundle, checkpoint, shared=shared)
    return {gate.name: gate.json() for gate in results}


@pytest.mark.slow("runs every bug gate of two bundles, with and without sharing")
@pytest.mark.parametrize(
    ("base", "plant", "red"),
    [
        ("llama", plant_of("attention limited to the last 40 rows"), "host"),
        # the field that the first one changes, of a layer that has a window
        wide("gemma", plant_of("window one token too wide"), "host"),
        ("ring", shorten_rings, "write_address"),
        ("llama", plant_of("one frequency off by a hundredth"), "host"),
    ],
    ids=["window", "wider_window", "ring", "frequencies"],
)
def test_a_manifest_over_the_same_packages_is_judged_as_without_sharing(
    pair, base, plant, red
):
    sound, faulty, checkpoint = pair(base, plant)
    for one, other in zip(sound.manifest.shards, faulty.manifest.shards, strict=True):
        assert one.files == other.files
    shared = SharedResults()
    before = gates_by_name(sound, checkpoint, shared)
    assert {gate["verdict"] for gate in before.values()} == {"GREEN"}
    after = gates_by_name(faulty, checkpoint, shared)
    assert after == gates_by_name(faulty, checkpoint)
    assert after[red]["verdict"] == "RED"
    assert gates_by_name(sound, checkpoint, shared) == before


ZEROS = "0" * 64
FILE = FileEntry(path="ids.npy", bytes=1, sha256=ZEROS)
TEXT = {"file": FILE, "ids_sha256": ZEROS, "tokens": 4, "window": 4, "source": "t"}
CHANGES = {
    "format": "another-bundle",
    "version": 99,
    "family": "another",
    "dims": lambda dims: dims.model_copy(update={"V": dims.V + 1}),
    "options": lambda options: options.model_copy(update={"max_seq_len": 8}),
    "rope": lambda rope: [rope[0].model_copy(update={"inv_freq": [1.0]}), *rope[1:]],
    "layers": lambda layers: [layers[0].model_copy(update={"window": 8}), *layers[1:]],
    "embedding": lambda embedding: embedding.model_copy(update={"scale": 2.0}),
    "tokens": lambda tokens: tokens.model_copy(update={"bos": 7}),
    "checkpoint": lambda checkpoint: checkpoint | {"name": "another"},
    "packages": lambda packages: packages | {"torch": "0"},
    "residual_exponent": 1,
    "formats": {"model.layers.0.mlp.up_proj.weight": "fp16"},
    "calibration": Calibration(seed=0, **TEXT),
    "selection": Selection(allocation=FILE, **TEXT),
    "shards": lambda shards: [
        shards[0].model_copy(
            update={"files": [shards[0].files[0].model_copy(update={"sha256": ZEROS})]}
        ),
        *shards[1:],
    ],
}
"""A field of the manifest → another value of it, or a function that gives one."""


# this release has one value of `format` and of `version`
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
@pytest.mark.parametrize("name", Manifest.model_fields)
def test_every_field_but_the_frequencies_is_a_part_of_the_key(
    llama_bundle, tiny_llama, name
):
    bundle = Bundle.open(llama_bundle.root)
    key = StoredKey.of(bundle, tiny_llama)
    value = CHANGES[name]
    if callable(value):
        value = value(getattr(bundle.manifest, name))
    assert value != getattr(bundle.manifest, name)
    bundle.manifest = bundle.manifest.model_copy(update={name: value})
    assert (StoredKey.of(bundle, tiny_llama) == key) == (name == "rope")


def test_another_checkpoint_has_another_key(llama_bundle, tiny_llama):
    another = SimpleNamespace(sha256=ZEROS)
    key = StoredKey.of(llama_bundle, tiny_llama)
    assert StoredKey.of(llama_bundle, another) != key


def test_frequencies_of_packages_of_another_exporter_are_a_part_of_the_key(
    llama_bundle, tiny_llama, monkeypatch
):
    bundle = Bundle.open(llama_bundle.root)
    monkeypatch.setattr(Manifest, "foreign", SimpleNamespace())
    key = StoredKey.of(bundle, tiny_llama)
    rope = CHANGES["rope"](bundle.manifest.rope)
    bundle.manifest = bundle.manifest.model_copy(update={"rope": rope})
    assert StoredKey.of(bundle, tiny_llama) != key


def test_stretches_are_shared_by_the_bundle_and_by_how_the_end_is_compared(
    llama_bundle, tiny_llama, monkeypatch
):
    """The stretches of a stored key and a `chained_end` are computed once, and those of
    another one are not taken over."""
    computed = []

    def compute(inputs, chained_end):
        computed.append((inputs.stored_key, chained_end))
        return computed[-1]

    monkeypatch.setattr(bug_gates.GateInputs, "compute_stretches", compute)
    monkeypatch.setattr(program, "program_gate", lambda *arguments: arguments[-1])
    monkeypatch.setattr(program, "can_feed_layers", lambda decoder: decoder.can_feed)
    shared = SharedResults()
    stored = StoredKey("a", ZEROS), StoredKey("b", ZEROS)
    for facts in [*product(stored, (True, False))] * 2:
        inputs = bug_gates.GateInputs(llama_bundle, tiny_llama, shared=shared)
        inputs.stored_key, chained_end = facts
        inputs.program_decoder = SimpleNamespace(
            precision="exact", can_feed=not chained_end
        )
        inputs.representatives = None
        assert bug_gates.run_program_gate(inputs) == facts
    assert len(computed) == len({*computed}) == 4


def test_a_budget_is_shared_by_the_bundle_the_golden_and_the_layers_that_are_seen(
    llama_bundle, tiny_llama, llama_golden, monkeypatch
):
    """The budget of a stored key, a golden and `shows_inner_layers` is measured once, and
    that of another one is not taken over."""
    measured, rounded = [], []

    def measure_budget(bundle, source, golden, inner, weights):
        measured.append((bundle.manifest.family, golden.ids.tolist(), inner))
        return measured[-1]

    def measure_rounding(checkpoint, golden, stream_scale):
        rounded.append(golden.ids.tolist())
        return rounded[-1]

    def measure(decoder, golden, Ts, budget, rounding_kl):
        return SimpleNamespace(
            judge=lambda max_kl: [], budget=budget, rounding_kl=rounding_kl
        )

    monkeypatch.setattr(validate, "measure_budget", measure_budget)
    monkeypatch.setattr(validate, "measure_rounding", measure_rounding)
    monkeypatch.setattr(validate, "measure", measure)
    monkeypatch.setattr(validate, "load_or_run_gates", lambda *_, **__: [])
    monkeypatch.setattr(validate, "stored_weights", lambda *_, **__: None)
    monkeypatch.setattr(validate, "check_fits", lambda *_: None)
    monkeypatch.setattr(validate, "run_device_gate", lambda *_: None)
    first = Bundle.open(llama_bundle.root)
    second = Bundle.open(llama_bundle.root)
    second.manifest = second.manifest.model_copy(update={"family": "another"})
    golden = replace(llama_golden, source=tiny_llama)
    goldens = golden, replace(golden, ids=golden.ids[::-1])
    shared = SharedResults()
    for facts in [*product((first, second), goldens, (True, False))] * 2:
        bundle, golden, inner = facts
        decoder = SimpleNamespace(bundle=bundle, shows_inner_layers=inner)
        result = validate.validate(decoder, golden, shared=shared)
        expected = bundle.manifest.family, golden.ids.tolist(), inner
        assert result.cost.budget == expected
        assert result.cost.rounding_kl == golden.ids.tolist()
    assert len(measured) == 8
    # no weights of a bundle take part in it
    assert len(rounded) == 2


def test_no_shared_result_reads_the_frequencies_of_the_host(
    llama_bundle, tiny_llama, llama_golden
):
    bundle = Bundle.open(llama_bundle.root)
    del bundle.manifest.__dict__["rope"]
    with pytest.raises(AttributeError):
        _ = bundle.manifest.rope
    assert weights.weights_gate(bundle, tiny_llama).verdict == "GREEN"
    values = stored_weights(tiny_llama, bundle, keep_dtype=True)
    reference = Reference(tiny_llama, values)
    reference_stretches(bundle.manifest, reference, chained_end=False)
    fidelity.measure_budget(bundle, tiny_llama, llama_golden, weights=values)


@pytest.mark.slow("validates four times")
def test_a_second_decoder_and_other_frequencies_take_over_what_is_the_same(
    pair, monkeypatch
):
    sound, faulty, checkpoint = pair(
        "llama", plant_of("one frequency off by a hundredth")
    )
    golden = Golden.of(checkpoint, prompt(64, 8), sound.root.parent / "golden")
    without_shared = validate.validate(
        Decoder(faulty, "portable"), golden, ignore_stored=True
    )
    calls = []

    def counted(module, name):
        function = getattr(module, name)

        def count(*arguments, **options):
            calls.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, count)

    counted(weights, "weights_gate")
    counted(bug_gates, "reference_stretches")
    counted(validate, "measure_budget")
    shared = SharedResults()
    decoders = [Decoder(bundle, "portable") for bundle in (sound, sound, faulty)]
    *_, last = (
        validate.validate(decoder, golden, ignore_stored=True, shared=shared)
        for decoder in decoders
    )
    assert sorted(calls) == ["measure_budget", "reference_stretches", "weights_gate"]
    assert last.json() == without_shared.json()
    assert last.rows.equals(without_shared.rows)


def change_ids(golden):
    return replace(golden, ids=golden.ids[::-1])


def change_least_bit(golden):
    hidden = golden.trace.layers[1].hidden
    hidden[0, 0] = np.nextafter(hidden[0, 0], np.float32(np.inf))
    return golden


def widen(golden):
    golden.trace.logits = golden.trace.logits.astype(np.float64)
    return golden


def reshape(golden):
    """The same bytes in another shape."""
    golden.trace.layers[0].x = golden.trace.layers[0].x.reshape(1, -1)
    return golden


def exchange(golden):
    """The same arrays under each other's names."""
    layer = golden.trace.layers[0]
    layer.k, layer.v = layer.v, layer.k
    return golden


def leave_out(golden):
    golden.trace.normed = None
    return golden


@pytest.mark.parametrize(
    "change", [change_ids, change_least_bit, widen, reshape, exchange, leave_out]
)
def test_another_golden_has_another_digest(llama_golden, change):
    copy = replace(llama_golden, trace=deepcopy(llama_golden.trace))
    assert golden_digest(copy) == golden_digest(llama_golden)
    assert golden_digest(change(copy)) != golden_digest(llama_golden)
