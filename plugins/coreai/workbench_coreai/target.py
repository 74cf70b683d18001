"""The targets that the workbench finds by their entry points."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.bundle import Options
from workbench.errors import InputError
from workbench_coreai import aimodel


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
        from workbench_coreai.template import CoreAITemplate

        return CoreAITemplate(spec, plan, options, weights)

    def check(self, options: Options) -> None:
        """Raises an InputError for options that no Core AI program has."""
        option = needed = None
        if options.kv_write == "slice":
            option = "kv_write = slice"
            needed = "kv_write = mask: its exporter supports no index that is an input"
        elif options.functions:
            option = f"tokens = {options.tokens}"
            needed = "one range: its programs run every T"
        if option:
            subject = f"target {options.target}"
            raise InputError(subject, option, needed, "leave this option out")

    def parts(self, package: Path, place: str) -> dict[str, np.ndarray]:
        return aimodel.read_weight(package, place)

    def dense(self, package: Path, place: str) -> np.ndarray:
        return aimodel.dense(self.parts(package, place))


HALF = Target("declared", "narrow")
WHOLE = Target("exact", "exact")
