"""Where shards run: `portable` anywhere, `coreml` on macOS 15 or later. Which one is an argument."""

import platform
import sys
from functools import partial

from workbench.bundle import Bundle, Shard
from workbench.errors import InputError
from workbench.runtime.base import Model, State

RUNTIMES = ("auto", "portable", "coreml")
COMPUTE_UNITS = ("CPU_AND_NE", "CPU_ONLY", "CPU_AND_GPU", "ALL")


def coreml_available() -> bool:
    """Whether Core ML can run stateful models here: macOS 15 or later."""
    return platform.system() == "Darwin" and int(platform.mac_ver()[0].split(".")[0] or 0) >= 15


def _shimmed() -> bool:
    """Whether the shim stands in for Core ML: off a Mac nothing else puts this module there."""
    return platform.system() != "Darwin" and "coremltools.libcoremlpython" in sys.modules


def resolve(runtime: str = "auto") -> str:
    """The runtime that `auto` stands for here; refuses `coreml` where there is none."""
    if runtime not in RUNTIMES:
        raise InputError(
            "runtime", repr(runtime), f"one of {', '.join(RUNTIMES)}", "choose one of these"
        )
    if runtime == "auto":
        return "coreml" if coreml_available() else "portable"
    if runtime == "coreml" and not (coreml_available() or _shimmed()):
        raise InputError(
            "runtime 'coreml'",
            platform.platform(),
            "macOS 15 or later",
            "choose portable, or run this on such a Mac",
        )
    return runtime


def load_shard(
    bundle: Bundle,
    shard: Shard,
    runtime: str = "auto",
    *,
    precision: str = "declared",
    fast: bool = False,
    compute_units: str = "CPU_AND_NE",
    hints: dict | None = None,
    function: str | None = None,
) -> Model:
    """Loads one shard of `bundle`; `precision` and `fast` concern the portable runtime, what
    follows them Core ML.

    A shard of several functions is one model that runs the function of each call's T, unless one
    `function` is named.
    """
    if shard.functions and function is None:
        from workbench.runtime.functions import FunctionsModel

        how = dict(precision=precision, fast=fast, compute_units=compute_units, hints=hints)
        load = partial(load_shard, bundle, shard, runtime, **how)
        return FunctionsModel(bundle, shard, lambda name: load(function=name))
    if resolve(runtime) == "portable":
        from workbench.runtime.portable import PortableModel

        return PortableModel(bundle, shard, precision, fast, function)
    if compute_units not in COMPUTE_UNITS:
        raise InputError(
            "compute units", repr(compute_units), f"one of {', '.join(COMPUTE_UNITS)}", "choose one"
        )
    from workbench.runtime.coreml import CoreMLModel

    return CoreMLModel(bundle, shard, compute_units, hints, function)


__all__ = [
    "COMPUTE_UNITS",
    "Model",
    "RUNTIMES",
    "State",
    "coreml_available",
    "load_shard",
    "resolve",
]
