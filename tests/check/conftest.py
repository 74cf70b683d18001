import shutil

import cases
import pytest

from workbench import Bundle


@pytest.fixture
def bundle(llama_bundle, tmp_path):
    return Bundle.open(shutil.copytree(llama_bundle.root, tmp_path / "b"))


@pytest.fixture
def broken(exports, tmp_path):
    """Plants a fault, by name or as a function of a `Copy`, in a copy of a bundle:
    (the bundle on disk, its checkpoint)."""

    def plant(fault, preset: str = "fp16", base: str = "llama"):
        if isinstance(fault, str):
            named = cases.FAULTS[f"disk/{fault}"]
            base, fault = named.bundle, named.plant
        source, checkpoint = cases.unharmed(exports, f"base/{base}/{preset}")
        copy = cases.Copy(source, tmp_path / "copy")
        fault(copy)
        return copy.seal(), checkpoint

    return plant
