"""A seeded sample of what `make prove` asks of every case: faults are RED, clean bundles are not."""

import cases
import numpy as np
import pytest
from copies import Copy

from workbench import Bundle

DISK, MEMORY, DRAWS = 10, 5, 2


@pytest.fixture(scope="module")
def prover(tmp_path_factory):
    return cases.Prover(tmp_path_factory.mktemp("prove"))


def sample(kind: str, count: int, seed: int) -> list[str]:
    names = [case for case in cases.all_cases() if case.startswith(f"{kind}/")]
    return np.random.default_rng(seed).choice(names, count, replace=False).tolist()


@pytest.mark.parametrize("case", [*sample("disk", DISK, 0), *sample("memory", MEMORY, 1)])
def test_a_planted_fault_is_red(prover, case):
    found = prover.record(case)
    assert found["error"] is None
    assert found["red"]


@pytest.mark.parametrize("case", [*sample("clean", DRAWS, 2), "massive/-/int8-tensor"])
def test_no_bug_gate_is_red_on_a_clean_bundle(prover, case):
    found = prover.record(case)
    assert found["error"] is None
    assert found["red"] == []


@pytest.mark.parametrize("preset", cases.PRESETS)
def test_a_copy_reads_what_the_package_holds_and_a_sealed_one_opens(prover, preset, tmp_path):
    import miltorch

    _, source = prover.base("llama", preset)
    copy, bundle = Copy(source, tmp_path / "copy"), Bundle.open(source)
    shard = bundle.shards("layers")[1]
    executable = miltorch.Executable(miltorch.read(bundle.package(shard)), "exact")
    for tensor, name in shard.weights.items():
        rounded = copy.weight(tensor).read().astype(np.float16)  # as the program declares it
        assert np.array_equal(rounded, executable.constant(name).numpy())
    assert Bundle.open(copy.seal()).identity == bundle.identity
    copy.weight("layers.1.mlp.up_proj.weight").scale(0.5)
    assert Bundle.open(copy.seal()).identity != bundle.identity
