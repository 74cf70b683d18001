"""The coreml runtime without Core ML: the same code over `miltorch.shim`, which is as
strict as the native binding. No result of a stand-in is a measurement of Core ML: its
rows are labelled `stand-in`, and invented placements `simulated`."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from miltorch import shim
from workbench.runtime.coreml import CoreMLModel

_one_at_a_time = threading.RLock()  # coremltools is replaced for the whole process


class StandInModel(CoreMLModel):
    """A package as the coreml runtime loads and runs it, over the stand-in; see
    `CoreMLModel`.

    Attributes:
        proxy_class: stands in the place of `_MLModelProxy`, the one class of
            coremltools' native layer.
    """

    plan_source = "simulated"
    proxy_class = shim.Proxy

    @classmethod
    @contextmanager
    def native_layer(cls) -> Iterator[None]:
        """Context manager in which coremltools loads models through `proxy_class`. A model
        that is loaded inside can predict afterwards."""
        with _one_at_a_time, shim.replaced(cls.proxy_class):
            yield
