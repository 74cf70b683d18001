import cases
import pytest


@pytest.fixture(scope="session")
def prover(shared):
    return cases.Prover(shared / "prove")


@pytest.fixture
def broken(prover, tmp_path):
    """Plants a fault, by name or as a function of a `Copy`, in a copy of a bundle:
    (the bundle on disk, its checkpoint)."""

    def plant(fault, preset: str = "fp16", base: str = "llama"):
        if isinstance(fault, str):
            base, fault = cases.PLANTED[fault].bundle, cases.PLANTED[fault].plant
        checkpoint, source = prover.base(base, preset)
        copy = cases.Copy(source, tmp_path / "copy")
        fault(copy)
        return copy.seal(), checkpoint

    return plant
