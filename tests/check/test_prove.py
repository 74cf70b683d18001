"""A seeded sample of what `make prove` asks of every case: faults are RED, clean bundles are
not."""

import cases
import numpy as np
import prove
import pytest
from copies import Copy

from workbench import Bundle

DISK, MEMORY, DRAWS = 4, 2, 2
SOUND = "massive/-/lut4", "deep/-/int8-tensor"


def sample(kind: str, count: int, seed: int) -> list[str]:
    names = [case for case in cases.all_cases() if case.startswith(f"{kind}/")]
    return np.random.default_rng(seed).choice(names, count, replace=False).tolist()


@pytest.mark.matrix(2, wide=8)
@pytest.mark.parametrize(
    "case",
    [
        *sample("disk", DISK, 0),
        *sample("memory", MEMORY, 1),
        *sample("clean", DRAWS, 2),
        *SOUND,
    ],
)
def test_a_planted_fault_is_red_and_no_sound_bundle_is(prover, case):
    found = prover.record(case)
    assert not prove.fails(found), found["error"] or found["red"]


@pytest.mark.matrix(2, wide=3)
@pytest.mark.parametrize("preset", cases.PRESETS)
def test_a_copy_reads_what_the_package_holds_and_a_sealed_one_opens(
    prover, preset, tmp_path
):
    import miltorch

    _, source = prover.base("llama", preset)
    copy, bundle = Copy(source, tmp_path / "copy"), Bundle.open(source)
    shard = bundle.shards("layers")[1]
    executable = miltorch.Executable(miltorch.read(bundle.package(shard)), "exact")
    for tensor, name in shard.weights.items():
        # as the program declares it
        rounded = copy.weight(tensor).read().astype(np.float16)
        assert np.array_equal(rounded, executable.constants[name].float().numpy())
    assert Bundle.open(copy.seal()).identity == bundle.identity
    copy.weight("layers.1.mlp.up_proj.weight").scale(0.5)
    assert Bundle.open(copy.seal()).identity != bundle.identity


def record(case: str, *gates: tuple, error: str | None = None) -> dict:
    """A stored case; gates as (name, verdict, value, limit)."""
    names = ("name", "verdict", "value", "threshold")
    gates = [dict(zip(names, gate, strict=True)) for gate in gates]
    red = [gate["name"] for gate in gates if gate["verdict"] == "RED"]
    return {"case": case, "red": red, "error": error, "gates": gates}


GREEN, RED = ("program", "GREEN", 2e-6, 1e-5), ("weights", "RED", 5.005, 1.001)


def test_a_case_fails_when_a_fault_is_green_a_sound_bundle_red_or_a_gate_broken():
    assert not prove.fails(record("clean/3/fp16", GREEN))
    assert not prove.fails(record("disk/keys_times_1_2/fp16", RED))
    assert prove.fails(record("clean/3/fp16", RED))
    assert prove.fails(record("disk/keys_times_1_2/fp16", GREEN))
    assert prove.fails(record("disk/keys_times_1_2/fp16", RED, error="broke"))


def test_tables_show_the_margins_of_each_gate_and_how_many_cases_ran():
    made = record("clean/3/fp16", GREEN), record("disk/keys_times_1_2/lut4", GREEN, RED)
    tables = prove.tables({each["case"]: each for each in made})
    assert (
        "\n| `weights` | 1.001 | – | 5 (disk/keys times 1 2/lut4) | 1 | 1 |\n" in tables
    )
    assert "\n| keys times 1 2 | files | 1 of 1 | 5 | `weights` |" in tables


def test_a_fault_meets_every_gate(prover, tmp_path):
    checkpoint, source = prover.base("llama", "fp16")
    copy = Copy(source, tmp_path / "copy")
    cases.PLANTED["rms_epsilon_times_100"].plant(copy)
    found = {g.name: g.verdict for g in cases.Faulty(copy.seal(), checkpoint).gates()}
    assert list(found) == [name for names in cases.STEPS for name in names]
    assert found["program"] == found["budget"] == "RED"
    assert found["interface"] == found["weights"] == found["undo"] == "GREEN"
