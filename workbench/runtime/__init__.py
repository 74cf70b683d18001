"""The runtimes that execute shards: `portable` anywhere, `coreml` on macOS 15 or later,
and elsewhere `stand-in`, the same code over a strict imitation of Core ML's binding.
An argument selects one; `auto` reads the
variable WORKBENCH_RUNTIME where it is set. Programs of a plug-in's target run on its
runtime and on no other."""

import os
import platform
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np

from workbench import plugins
from workbench.bundle import Bundle, Shard
from workbench.errors import InputError, check_choice
from workbench.plugins import Target
from workbench.runtime.base import Model
from workbench.runtime.base import State as State

MODELS = {  # name → the module of its models, and their class
    "portable": ("portable", "PortableModel"),
    "coreml": ("coreml", "CoreMLModel"),
    "stand-in": ("standin", "StandInModel"),
}
COMPUTE_UNITS = ("CPU_AND_NE", "CPU_ONLY", "CPU_AND_GPU", "ALL")


def coreml_available() -> bool:
    """Whether Core ML can run stateful models here: macOS 15 or later."""
    version = platform.mac_ver()[0].partition(".")[0]
    return platform.system() == "Darwin" and int(version or 0) >= 15


def check_runtime(name: str) -> str:
    """`name`, if there is such a runtime.

    Raises:
        InputError: there is none.
    """
    names = ["auto", *MODELS, *plugins.offered("runtimes")]
    check_choice("runtime", name, names, "choose one of these")
    return name


def model_class(name: str) -> type[Model]:
    """The class of a runtime's models."""
    if name not in MODELS:
        return plugins.load("runtimes", name)
    module, model = MODELS[name]
    return getattr(import_module(f"workbench.runtime.{module}"), model)


def is_device(runtime: str) -> bool:
    """Whether a runtime's values depend on the hardware that runs it."""
    return model_class(check_runtime(runtime)).is_device


def resolve(runtime: str = "auto", target: Target | None = None) -> str:
    """The runtime to load shards with: the one named, if this machine has it; what
    `auto` stands for here. `target` is the plug-in's whose programs the bundle holds
    (None: Core ML's).

    Raises:
        InputError: no such runtime; `coreml` where there is none, `stand-in` where
            there is; a runtime for programs of another target.
    """
    name, own = check_runtime(runtime), target.runtime if target else None
    if own and name in ("auto", own):
        return own
    if own or (name in plugins.offered("runtimes") and not is_device(name)):
        raise InputError(
            f"runtime {runtime!r}",
            f"a bundle whose programs run on {own or 'Core ML and portable'}",
            "the runtime of the target that the bundle was exported for",
            "leave out --runtime, or export with another --target",
        )
    if name == "auto":
        chosen = check_runtime(os.environ.get("WORKBENCH_RUNTIME", "auto"))
        here = "coreml" if coreml_available() else "portable"
        return here if chosen == "auto" else resolve(chosen)
    found, needed, is_mac = platform.platform(), "", platform.system() == "Darwin"
    # off a Mac only the shim provides this module
    is_shimmed = not is_mac and "coremltools.libcoremlpython" in sys.modules
    if name == "coreml" and not (coreml_available() or is_shimmed):
        needed = "macOS 15 or later"
    if name == "stand-in" and is_mac:
        found, needed = "macOS, which has Core ML itself", "a machine without Core ML"
    if needed:
        step = "choose portable, or run this on such a machine"
        raise InputError(f"runtime {runtime!r}", found, needed, step)
    return runtime


def check_compute_units(name: str) -> None:
    """Raises an InputError unless the name is one of Core ML's compute units."""
    check_choice("compute units", name, COMPUTE_UNITS, "choose one")


def open_model(
    package: Path,
    runtime: str = "auto",
    *shard,
    precision: str = "declared",
    fast: bool = False,
    reads: str = "used",
    compute_units: str = "CPU_AND_NE",
    hints: dict | None = None,
    function: str | None = None,
    compiled: Path | None = None,
) -> Model:
    """Loads a package.

    Args:
        shard: the shard that it is and the bundle's t_max, unless it is of no bundle.
        precision, fast, reads: see `PortableModel`.
        compute_units, hints, compiled: see `CoreMLModel`.
        function: the one function to run (default: that of each call's T, or the
            package's own default).

    Raises:
        InputError: no such package or function, an operation or a state that the runtime
            does not know.
    """
    name = resolve(runtime)
    check_compute_units(compute_units)
    model = partial(model_class(name), package, *(shard or (None, 0)), function)
    if name == "portable":
        return model(precision=precision, fast=fast, reads=reads)
    return model(compute_units=compute_units, hints=hints, compiled=compiled)


def load_shard(bundle: Bundle, shard: Shard, runtime: str = "auto", **how) -> Model:
    """Loads one shard of a bundle, or the packages of another exporter that together
    are one; options as of `open_model`. What a device compiles is kept beside the
    bundle."""
    options = bundle.manifest.options
    runtime = resolve(runtime, options.plugin)
    if options.plugin:
        return model_class(runtime)(bundle, shard)

    def load(package: Path, *about, **more) -> Model:
        if is_device(runtime):
            from workbench.runtime.coreml import compiled_path

            more["compiled"] = compiled_path(bundle, shard, package)
        return open_model(package, runtime, *about, **how | more)

    if shard.foreign:
        from workbench.runtime.foreign import ForeignModel

        return ForeignModel(bundle, shard, load, how.get("fast", False))
    return load(bundle.package(shard), shard, options.t_max)


def constants(bundle: Bundle, shard: Shard) -> Callable:
    """Place of a weight in a shard, as the manifest names it → its values [rows, ..] as
    a tensor, decompressed, fp16 or float32."""
    if shard.foreign:
        from workbench.runtime import foreign

        return foreign.constants(bundle, shard)
    package = bundle.package(shard)
    if target := bundle.manifest.options.plugin:
        import torch

        return lambda place: torch.from_numpy(np.float32(target.dense(package, place)))
    import miltorch
    from miltorch.steps import Constants

    return Constants(miltorch.read(package)).__getitem__
