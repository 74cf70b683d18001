"""Fixtures of the tests of `workbench/check`, and a map of this folder.

    faults/      what can be planted: rows of tables, each with the gate that must be RED
    recipe.py    what the bundle of a case is exported from
    clean.py     random recipes of sound bundles
    cases.py     a case: a recipe, perhaps with a fault, and the gates that run on it
    faults.md    what `python -m tests.prove` (tests/prove.py) measured on every case

test_faults runs some of these cases. The other files test one module of `workbench/check` each, or
plant a fault by its name with the fixture `broken`.
"""

import shutil

import cases
import pytest
from faults import find_fault
from faults.copies import Copy

from workbench import Bundle


@pytest.fixture
def bundle(llama_bundle, tmp_path):
    return Bundle.open(shutil.copytree(llama_bundle.root, tmp_path / "b"))


@pytest.fixture
def broken(exports, tmp_path):
    """Plants a fault, by its name or as a function of a `Copy`, in a copy of a bundle. Returns the
    copy's folder and its checkpoint."""

    def plant_fault(fault, preset: str = "fp16", base: str = "llama"):
        plant = fault
        if isinstance(fault, str):
            named = find_fault("disk", fault)
            base, plant = named.bundle, named.plant_in
        sound = cases.Case("base", base, preset)
        source, checkpoint = cases.export_sound(exports, sound)
        copy = Copy(source, tmp_path / "copy")
        plant(copy)
        return copy.seal(), checkpoint

    return plant_fault
