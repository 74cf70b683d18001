"""The coreml runtime without Core ML: the same code over `miltorch.shim`, which is as
strict as the native binding, with faults of Core ML that it can simulate. No result of
a stand-in is a measurement of Core ML: its rows are labelled `stand-in`, and made-up
placements `simulated`."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from miltorch import faults, shim
from workbench.errors import check_choice
from workbench.runtime.coreml import CoreMLModel

FAULTS: dict[str, str] = {
    name: " ".join(layer.__doc__.split()) for name, layer in faults.FAULTS.items()
}
"""What each fault does, in a sentence."""

_one_at_a_time = threading.RLock()  # coremltools is replaced for the whole process


def check_fault(fault: str) -> None:
    """Raises an InputError unless the name is that of a fault."""
    check_choice("fault", fault, FAULTS, "choose one")


@contextmanager
def installed(fault: str = "") -> Iterator[None]:
    """Context manager inside which coremltools' native layer is the stand-in's, with a
    fault ("": none). Models that are loaded inside can predict afterwards."""
    layer = shim.Proxy
    if fault:
        layer = faults.FAULTS[fault]
    with _one_at_a_time, shim.replaced(layer):
        yield


class StandInModel(CoreMLModel):
    """One shard as the coreml runtime loads and runs it, over the stand-in; see
    `CoreMLModel`."""

    def __init__(self, *arguments, fault: str = ""):
        with installed(fault):
            super().__init__(*arguments)
