"""The targets `coreai` and `coreai-fp32`, which the workbench finds by their entry
points."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.bundle import Options
from workbench.errors import InputError
from workbench_coreai.aimodel import dense, read_weight


@dataclass(frozen=True)
class Target:
    """Core AI programs whose values have one dtype; see `workbench.plugins.Target`.

    Apple's interpreter rounds an fp16 product after every term; the portable runtime's
    arithmetic next to that is `narrow`."""

    precision: str
    arithmetic: str
    runtime = "coreai"
    packages = ("coreai-core", "coreai-torch", "workbench-coreai")

    def template(self, spec, plan, options, weights):
        # imports torch, which opening a bundle does not need
        from workbench_coreai.template import CoreAITemplate

        return CoreAITemplate(spec, plan, options, weights)

    def check(self, options: Options) -> None:
        """Raises an InputError for options that no Core AI program has."""
        subject, step = f"target {options.target}", "leave this option out"
        if options.kv_write == "slice":
            needed = "kv_write = mask: its exporter supports no index that is an input"
            raise InputError(subject, "kv_write = slice", needed, step)
        if options.tiling.functions:
            needed = "one range: its programs run every T"
            raise InputError(subject, f"tokens = {options.tokens}", needed, step)

    parts = staticmethod(read_weight)

    def dense(self, package: Path, place: str) -> np.ndarray:
        return dense(read_weight(package, place))


FP16 = Target(precision="declared", arithmetic="narrow")
FP32 = Target(precision="exact", arithmetic="exact")
