"""A seeded sample of what `make prove` asks of every case: faults are RED, clean bundles are
not."""

import cases
import clean
import numpy as np
import prove
import pytest
from copies import Copy

from workbench import Bundle

DISK, MEMORY, DRAWS = 4, 2, 2


@pytest.fixture(scope="module")
def prover(shared):
    return cases.Prover(shared / "prove")


def sample(kind: str, count: int, seed: int) -> list[str]:
    names = [case for case in cases.all_cases() if case.startswith(f"{kind}/")]
    return np.random.default_rng(seed).choice(names, count, replace=False).tolist()


@pytest.mark.matrix(1, wide=5)
@pytest.mark.parametrize(
    "case", [*sample("disk", DISK, 0), *sample("memory", MEMORY, 1)]
)
def test_a_planted_fault_is_red(prover, case):
    found = prover.record(case)
    assert found["error"] is None
    assert found["red"]


@pytest.mark.wide
@pytest.mark.parametrize(
    "fault", [n for n, f in cases.PLANTED.items() if f.bundle == "functions"]
)
def test_a_fault_in_one_of_two_functions_is_red_by_the_gate_that_is_made_for_it(
    prover, fault
):
    found = prover.record(f"disk/{fault}/int8-tensor")
    assert found["error"] is None and cases.PLANTED[fault].gate in found["red"]


@pytest.mark.matrix(1, wide=2)
@pytest.mark.parametrize("case", [*sample("clean", DRAWS, 2), "massive/-/int8-tensor"])
def test_no_bug_gate_is_red_on_a_clean_bundle(prover, case):
    found = prover.record(case)
    assert found["error"] is None
    assert found["red"] == []


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


def line(case: str, *gates: tuple, error: str | None = None) -> dict:
    """A stored case; gates as (name, verdict, value, limit)."""
    names = ("name", "verdict", "value", "threshold")
    gates = [dict(zip(names, gate, strict=True)) for gate in gates]
    red = [gate["name"] for gate in gates if gate["verdict"] == "RED"]
    return {"case": case, "red": red, "error": error, "gates": gates}


LINES = [
    line(
        "clean/3/fp16",
        ("weights", "GREEN", 0.5, 1.05),
        ("program", "GREEN", 2e-6, 1e-5),
    ),
    line(
        "clean/3/lut4",
        ("weights", "GREEN", 0.9, 1.001),
        ("program", "GREEN", 1e-6, 1e-5),
    ),
    line("disk/keys_times_1_2/fp16", ("weights", "RED", 21.0, 1.05)),
    line(
        "disk/keys_times_1_2/lut4",
        ("weights", "RED", 5.005, 1.001),
        ("host", "RED", 2.0, 2e-5),
    ),
    line("disk/rms_epsilon_left_out/fp16", ("program", "GREEN", 9e-6, 1e-5)),
]


def test_tables_show_every_limit_of_a_gate_and_how_many_cases_ran():
    records = {record["case"]: record for record in LINES}
    sound_table = prove.clean_table(records)
    sound, faulty = (clean.COUNT + len(cases.TRAINED) + 2) * 6, len(cases.PLANTED) * 5
    assert f"2 of {sound} cases on sound bundles, 3 of {faulty} cases" in sound_table
    assert "1 of them are not as they should be" in sound_table
    rows = prove.gate_table(records).splitlines()
    assert rows[2:5] == [
        "| `weights` | 1.001, 1.05 | 0.899 (clean/3/lut4) | 5 (disk/keys times 1 2/lut4) | 1 | 1 |",
        "| `host` | 2e-05 | – | 1e+05 (disk/keys times 1 2/lut4) | 0 | 0 |",
        "| `program` | 1e-05 | 0.2 (clean/3/fp16) | – | 0 | 0 |",
    ]
    assert rows[-1] == "Of these gates `weights` alone show every fault that ran."
    keys, epsilon = prove.fault_table(records).splitlines()[2:]
    assert (
        keys == "| keys times 1 2 | files | 2 of 2 | 20 | `weights`, `host` (1 of 2) |"
    )
    assert epsilon == "| rms epsilon left out | files | 0 of 1 | 0 | – |"
    assert all(
        table in prove.tables(records) for table in (sound_table, rows[-1], keys)
    )


def test_few_gates_are_named_that_show_every_fault():
    shown = {
        1: {"weights"},
        2: {"weights", "program"},
        3: {"program", "host"},
        4: {"program"},
        5: {"budget", "device"},
        6: set(),
    }
    assert prove.sufficient(shown) == ["weights", "program", "budget"]


def test_a_case_fails_when_a_fault_is_green_a_sound_bundle_red_or_a_gate_broken():
    assert [prove.fails(record) for record in LINES] == [
        False,
        False,
        False,
        False,
        True,
    ]
    assert prove.fails(line("clean/3/fp16", ("budget", "RED", 9.0, 8.0)))
    assert prove.fails(
        line("disk/keys_times_1_2/fp16", ("weights", "RED", 9.0, 1), error="broke")
    )


def test_batches_hold_every_case_once_and_one_bundle_each():
    names = cases.all_cases()
    parts = prove.batches(names)
    assert sorted(sum(parts, [])) == sorted(names)
    assert all(len({cases.bundle_of(case) for case in part}) == 1 for part in parts)


def test_comments_and_docstrings_do_not_make_a_case_old():
    source = 'def f(x):\n    """Doc."""\n    return x  # one\n'
    assert cases.without_prose(source) == cases.without_prose(
        "def f(x):\n    return (x)\n"
    )
    assert cases.without_prose(source) != cases.without_prose(
        "def f(x):\n    return x + 1\n"
    )


def test_a_fault_meets_every_gate(prover, tmp_path):
    checkpoint, source = prover.base("llama", "fp16")
    copy = Copy(source, tmp_path / "copy")
    cases.PLANTED["rms_epsilon_times_100"].plant(copy)
    found = {g.name: g.verdict for g in cases.Faulty(copy.seal(), checkpoint).gates()}
    assert list(found) == [name for names in cases.STEPS for name in names]
    assert found["program"] == found["budget"] == "RED"
    assert found["interface"] == found["weights"] == found["undo"] == "GREEN"
