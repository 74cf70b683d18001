"""The runtimes that execute shards: `portable` anywhere, `coreml` on macOS 15 or later,
and elsewhere `stand-in`, the same code over a strict imitation of Core ML's binding.

This file chooses a runtime (`resolve`) and loads shards with it (`load_shard`). An
argument selects the runtime; `auto` reads the variable WORKBENCH_RUNTIME where it is
set. Programs of a plug-in's target run on its runtime and on no other.

    base.py           what every runtime implements: `Model`, `State`; how a package is
                      loaded: `Package`, `Settings`, `PackageModel`
    interface.py      compares a package's interface with the manifest
    portable.py       `portable`: a package on PyTorch
    coreml.py         `coreml`: a package on Core ML; also Core ML's compute plans
    standin.py        `stand-in`: the same over `miltorch.shim`
    foreign.py        the packages of another exporter as one model, each of which one of
                      the three above runs
    foreign_call.py   the arrays of one of its calls, and the logits of its results
    foreign_state.py  its states, in the row order of a bundle"""

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from workbench import plugins
from workbench.bundle import Bundle, Shard
from workbench.errors import InputError, check_choice
from workbench.plugins import Target
from workbench.runtime.base import (
    COMPUTE_UNITS,
    Model,
    Package,
    PackageModel,
    Settings,
    State,
    check_compute_units,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "COMPUTE_UNITS",
    "Model",
    "Package",
    "PackageModel",
    "Settings",
    "State",
    "check_compute_units",
    "check_runtime",
    "constants",
    "coreml_available",
    "is_device",
    "load_package",
    "load_shard",
    "model_class",
    "resolve",
]

MODELS = {  # runtime → the module of its models, and their class
    "portable": ("portable", "PortableModel"),
    "coreml": ("coreml", "CoreMLModel"),
    "stand-in": ("standin", "StandInModel"),
}
DEFAULTS = Settings()


def coreml_available() -> bool:
    """Whether Core ML can run stateful models here: macOS 15 or later."""
    version = platform.mac_ver()[0].partition(".")[0]
    return _is_mac() and int(version or 0) >= 15


def check_runtime(name: str) -> str:
    """`name`, if there is such a runtime.

    Raises:
        InputError: there is none.
    """
    names = ["auto", *MODELS, *plugins.find_plugins("runtimes")]
    check_choice("runtime", name, names, "choose one of these")
    return name


def model_class(name: str) -> type[Model]:
    """The class of a runtime's models.

    The class of a runtime for Core ML's packages, also of a plug-in's device, is called
    as Model(package, settings), see `PackageModel`. That of a plug-in's target is called
    as Model(bundle, shard), because only the plug-in can read its packages."""
    if name not in MODELS:
        return plugins.load("runtimes", name)
    module, model = MODELS[name]
    return getattr(import_module(f"workbench.runtime.{module}"), model)


def is_device(runtime: str) -> bool:
    """Whether a runtime's values depend on the hardware that runs it."""
    return model_class(check_runtime(runtime)).is_device


def resolve(runtime: str = "auto", target: Target | None = None) -> str:
    """The runtime to load shards with: the named one, if this machine has it, or the
    one that `auto` stands for here.

    Args:
        target: the plug-in's target whose programs the bundle holds (None: Core ML's).

    Raises:
        InputError: no such runtime; `coreml` where there is none, `stand-in` where
            there is; a runtime for programs of another target.
    """
    check_runtime(runtime)
    if target:
        return _resolve_for_target(runtime, target)
    if runtime == "auto":
        runtime = check_runtime(os.environ.get("WORKBENCH_RUNTIME", "auto"))
    if runtime == "auto":
        return "coreml" if coreml_available() else "portable"
    _check_runs_here(runtime)
    return runtime


def _resolve_for_target(runtime: str, target: Target) -> str:
    """The runtime for programs of a plug-in's target, which run on its runtime alone."""
    if runtime not in ("auto", target.runtime):
        raise _wrong_target(runtime, target.runtime)
    return target.runtime


def _check_runs_here(runtime: str) -> None:
    """Raises an InputError for a runtime that does not run Core ML's programs, or that
    this machine does not have."""
    # a plug-in's device runs Core ML's programs; its other runtimes run their own targets'
    if runtime in plugins.find_plugins("runtimes") and not is_device(runtime):
        raise _wrong_target(runtime, "Core ML and portable")
    if runtime == "coreml" and not (coreml_available() or _is_shim_installed()):
        raise _unavailable(runtime, platform.platform(), "macOS 15 or later")
    if runtime == "stand-in" and _is_mac():
        actual = "macOS, which has Core ML itself"
        raise _unavailable(runtime, actual, "a machine without Core ML")


def _is_mac() -> bool:
    return platform.system() == "Darwin"


def _is_shim_installed() -> bool:
    """Whether `miltorch.shim` stands in for Core ML's binding in this process: off a Mac
    nothing else provides the module."""
    return not _is_mac() and "coremltools.libcoremlpython" in sys.modules


def _wrong_target(runtime: str, right: str) -> InputError:
    return InputError(
        f"runtime {runtime!r}",
        f"a bundle whose programs run on {right}",
        "the runtime of the target that the bundle was exported for",
        "leave out --runtime, or export with another --target",
    )


def _unavailable(runtime: str, actual: str, needed: str) -> InputError:
    step = "choose portable, or run this on such a machine"
    return InputError(f"runtime {runtime!r}", actual, needed, step)


def load_package(
    path: Path, settings: Settings = DEFAULTS, function: str | None = None
) -> PackageModel:
    """Loads a package by itself, whose states have the names of its tensors.

    Args:
        function: the one function to run (default: the package's own).

    Raises:
        InputError: no such package or function, an operation or a state that the runtime
            does not know.
    """
    return _load(Package(path, function=function), settings)


def load_shard(bundle: Bundle, shard: Shard, settings: Settings = DEFAULTS) -> Model:
    """Loads one shard of a bundle, or the packages of another exporter that together
    are one. What a device compiles is kept beside the bundle.

    Raises:
        InputError: see `load_package`; an interface that is not as the manifest says.
    """
    options = bundle.manifest.options
    settings = replace(settings, runtime=resolve(settings.runtime, options.plugin))
    # a plug-in's packages have no MIL program that the checks of `PackageModel` could read
    if options.plugin:
        return model_class(settings.runtime)(bundle, shard)
    if shard.foreign:
        return _load_foreign(bundle, shard, settings)
    path = bundle.package(shard)
    compiled = _compiled_path(bundle, shard, path, settings.runtime)
    package = Package(path, shard, options.t_max, compiled_path=compiled)
    return _load(package, settings)


def _load_foreign(bundle: Bundle, shard: Shard, settings: Settings) -> Model:
    """Loads every function of the packages that another exporter made for a shard."""
    from workbench.runtime.foreign import ForeignModel, LoadedPart

    parts = []
    for part in shard.foreign.parts:
        path = bundle.package(shard) / part.package
        compiled = _compiled_path(bundle, shard, path, settings.runtime)
        models = {
            name: _load(Package(path, function=name, compiled_path=compiled), settings)
            for name in shard.foreign.functions_of(part)
        }
        parts.append(LoadedPart(part, models))
    return ForeignModel(bundle, shard, parts, skips_missing_logits=settings.fast)


def _compiled_path(
    bundle: Bundle, shard: Shard, package: Path, runtime: str
) -> Path | None:
    """Where a device keeps the compiled package; None for a runtime that compiles
    none."""
    if not is_device(runtime):
        return None
    from workbench.runtime.coreml import compiled_path

    return compiled_path(bundle, shard, package)


def _load(package: Package, settings: Settings) -> PackageModel:
    return model_class(resolve(settings.runtime))(package, settings)


def constants(bundle: Bundle, shard: Shard) -> Callable[[str | list[str]], "Tensor"]:
    """A function that reads a weight of a shard: its place → its values [rows, ..] as a
    tensor, decompressed, fp16 or float32.

    A place is a value of `Shard.weights`: the name of a constant of the package; of
    another exporter's packages the places of the matrix's pieces, see
    `foreign.constants`; of a plug-in's target whatever `Target.dense` reads."""
    if shard.foreign:
        from workbench.runtime import foreign

        return foreign.constants(bundle, shard)
    package = bundle.package(shard)
    if target := bundle.manifest.options.plugin:
        import torch

        return lambda place: torch.from_numpy(np.float32(target.dense(package, place)))
    import miltorch
    from miltorch.constants import Constants

    return Constants(miltorch.read(package)).__getitem__
