"""The runtimes that execute shards: `portable` anywhere, `coreml` on macOS 15 or later,
and elsewhere `stand-in`, the same code over a strict imitation of Core ML's binding
that can simulate a fault (`stand-in:kill`). An argument selects one; `auto` reads the
variable WORKBENCH_RUNTIME where it is set. Core AI programs run on `coreai` and on no
other runtime."""

import os
import platform
import sys
from functools import partial

from workbench.bundle import Bundle, Shard
from workbench.errors import InputError, check_choice
from workbench.runtime.base import Model, State

RUNTIMES = ("auto", "portable", "coreml", "stand-in", "coreai")
COMPUTE_UNITS = ("CPU_AND_NE", "CPU_ONLY", "CPU_AND_GPU", "ALL")


def coreml_available() -> bool:
    """Whether Core ML can run stateful models here: macOS 15 or later."""
    return (
        platform.system() == "Darwin"
        and int(platform.mac_ver()[0].split(".")[0] or 0) >= 15
    )


def _shimmed() -> bool:
    """Whether the shim replaces coremltools' native layer; off a Mac only the shim
    provides this module."""
    return (
        platform.system() != "Darwin" and "coremltools.libcoremlpython" in sys.modules
    )


def named(runtime: str) -> tuple[str, str]:
    """The runtime and the fault that a stand-in simulates (`stand-in:kill`), "" for
    none.

    Raises:
        InputError: there is no such runtime or no such fault.
    """
    name, colon, fault = runtime.partition(":")
    if name not in RUNTIMES or (colon and name != "stand-in"):
        known = f"one of {', '.join(RUNTIMES)}; stand-in:FAULT plays a fault"
        raise InputError("runtime", repr(runtime), known, "choose one of these")
    if colon:
        from workbench.runtime.standin import check_fault

        check_fault(fault)
    return name, fault


def resolve(runtime: str = "auto", target: str = "coreml") -> str:
    """The runtime to load shards with: the one named, if this machine has it; what
    `auto` stands for here. `target` is the bundle's option.

    Raises:
        InputError: no such runtime; `coreml` where there is none, `stand-in` where
            there is; a runtime for programs of another target.
    """
    name, _ = named(runtime)
    if target == "coreai" and name == "auto":
        return "coreai"
    if (name == "coreai") != (target == "coreai"):
        raise InputError(
            f"runtime {runtime!r}",
            f"a bundle exported with --target {target}",
            "runtime coreai for --target coreai, the others for --target coreml",
            "leave out --runtime, or export with the other --target",
        )
    if name == "auto":
        chosen = os.environ.get("WORKBENCH_RUNTIME", "auto")
        if named(chosen)[0] != "auto":
            return resolve(chosen)
        if coreml_available():
            return "coreml"
        return "portable"
    if name == "coreml" and not (coreml_available() or _shimmed()):
        raise InputError(
            "runtime 'coreml'",
            platform.platform(),
            "macOS 15 or later",
            "choose portable, or run this on such a Mac",
        )
    if name == "stand-in" and platform.system() == "Darwin":
        raise InputError(
            f"runtime {runtime!r}",
            "macOS, which has Core ML itself",
            "a machine without Core ML",
            "choose coreml or portable",
        )
    return runtime


def check_compute_units(name: str) -> None:
    """Raises an InputError unless the name is one of Core ML's compute units."""
    check_choice("compute units", name, COMPUTE_UNITS, "choose one")


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
    """Loads one shard of `bundle`; `precision` and `fast` concern the portable runtime,
    what follows them Core ML.

    A shard of several functions is one model that runs the function of each call's T,
    unless one `function` is named."""
    if shard.functions and function is None:
        from workbench.runtime.functions import FunctionsModel

        load = partial(
            load_shard,
            bundle,
            shard,
            runtime,
            precision=precision,
            fast=fast,
            compute_units=compute_units,
            hints=hints,
        )
        return FunctionsModel(bundle, shard, load)
    name, fault = named(resolve(runtime, bundle.manifest.options.target))
    if name == "coreai":
        from workbench.runtime.coreai import CoreAIModel

        return CoreAIModel(bundle, shard)
    if name == "portable":
        from workbench.runtime.portable import PortableModel

        return PortableModel(bundle, shard, precision, fast, function)
    check_compute_units(compute_units)
    if name == "stand-in":
        from workbench.runtime.standin import StandInModel

        return StandInModel(bundle, shard, compute_units, hints, function, fault=fault)
    from workbench.runtime.coreml import CoreMLModel

    return CoreMLModel(bundle, shard, compute_units, hints, function)


__all__ = [
    "COMPUTE_UNITS",
    "Model",
    "RUNTIMES",
    "State",
    "check_compute_units",
    "coreml_available",
    "load_shard",
    "named",
    "resolve",
]
