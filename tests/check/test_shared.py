"""Results that validations share: those of equal files under another manifest are not taken over,
and a shared result is the one that the validation would compute."""

from copy import deepcopy
from dataclasses import replace

import cases
import numpy as np
import pytest
from faults import FAULTS
from faults.copies import Copy
from tiny import prompt

from workbench import Bundle, Decoder
from workbench.check import program, validate, weights
from workbench.check.golden import Golden, stored_weights
from workbench.check.hf import Reference
from workbench.check.shared import SharedResults, StoredKey, golden_digest


def named_fault(slug):
    return FAULTS[f"disk/{slug}"].plant_in


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


def bug_gates(bundle, checkpoint, shared=None):
    """The bug gates by name, with their values and reasons."""
    results = validate.bug_gates(bundle, checkpoint, shared=shared)
    return {gate.name: gate.json() for gate in results}


@pytest.mark.slow("runs every bug gate of two bundles, with and without sharing")
@pytest.mark.parametrize(
    ("base", "plant", "red"),
    [
        ("llama", named_fault("attention_limited_to_the_last_40_rows"), "host"),
        ("gemma", named_fault("window_one_token_too_wide"), "host"),
        ("ring", shorten_rings, "write_address"),
        ("llama", named_fault("one_frequency_off_by_a_hundredth"), "host"),
    ],
    ids=["window", "wider_window", "ring", "frequencies"],
)
def test_a_manifest_over_the_same_packages_is_judged_as_without_sharing(
    pair, base, plant, red
):
    sound, faulty, checkpoint = pair(base, plant)
    files = [[shard.files for shard in b.manifest.shards] for b in (sound, faulty)]
    assert files[0] == files[1]
    shared = SharedResults()
    before = bug_gates(sound, checkpoint, shared)
    assert {gate["verdict"] for gate in before.values()} == {"GREEN"}
    after = bug_gates(faulty, checkpoint, shared)
    assert after == bug_gates(faulty, checkpoint)
    assert after[red]["verdict"] == "RED"
    assert bug_gates(sound, checkpoint, shared) == before


def test_every_field_but_the_frequencies_is_a_part_of_the_key(llama_bundle, tiny_llama):
    bundle = Bundle.open(llama_bundle.root)
    key = StoredKey.of(bundle, tiny_llama)
    manifest = bundle.manifest
    rope = manifest.rope[0].model_copy(update={"inv_freq": [1.0]})
    shard = manifest.shards[0]
    file = shard.files[0].model_copy(update={"sha256": "0" * 64})
    changes = {
        "rope": [rope],
        "residual_exponent": 1,
        "layers": [manifest.layers[0].model_copy(update={"window": 8})],
        "shards": [shard.model_copy(update={"files": [file]})],
        "tokens": manifest.tokens.model_copy(update={"bos": 7}),
        "options": manifest.options.model_copy(update={"max_seq_len": 8}),
    }
    equal = set()
    for name, value in changes.items():
        bundle.manifest = manifest.model_copy(update={name: value})
        if StoredKey.of(bundle, tiny_llama) == key:
            equal.add(name)
    assert equal == {"rope"}


def test_no_shared_result_reads_the_frequencies_of_the_host(
    llama_bundle, tiny_llama, llama_golden
):
    bundle = Bundle.open(llama_bundle.root)
    del bundle.manifest.__dict__["rope"]
    with pytest.raises(AttributeError):
        _ = bundle.manifest.rope
    assert weights.weights_gate(bundle, tiny_llama).verdict == "GREEN"
    values = stored_weights(tiny_llama, bundle, half=True)
    reference = Reference(tiny_llama, values)
    program.reference_stretches(bundle.manifest, reference, chained_end=False)
    validate.measure_budget(bundle, tiny_llama, llama_golden, weights=values)


@pytest.mark.slow("validates four times")
def test_a_second_decoder_and_other_frequencies_take_over_what_is_the_same(
    pair, monkeypatch
):
    sound, faulty, checkpoint = pair(
        "llama", named_fault("one_frequency_off_by_a_hundredth")
    )
    golden = Golden.of(checkpoint, prompt(64, 8), sound.root.parent / "golden")
    alone = validate.validate(Decoder(faulty, "portable"), golden, fresh=True)
    calls = []

    def counted(module, name):
        function = getattr(module, name)

        def count(*arguments, **options):
            calls.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, count)

    counted(weights, "weights_gate")
    counted(program, "reference_stretches")
    counted(validate, "measure_budget")
    shared = SharedResults()
    decoders = [Decoder(bundle, "portable") for bundle in (sound, sound, faulty)]
    *_, last = (
        validate.validate(decoder, golden, fresh=True, shared=shared)
        for decoder in decoders
    )
    assert sorted(calls) == ["measure_budget", "reference_stretches", "weights_gate"]
    assert last.json() == alone.json()
    assert last.rows.equals(alone.rows)


def test_a_golden_of_other_values_has_another_digest(llama_golden):
    changed = replace(llama_golden, trace=deepcopy(llama_golden.trace))
    assert golden_digest(changed) == golden_digest(llama_golden)
    hidden = changed.trace.layers[1].hidden
    hidden[0, 0] = np.nextafter(hidden[0, 0], np.float32(np.inf))
    assert golden_digest(changed) != golden_digest(llama_golden)
