"""Plug-ins: entry points of installed packages in the groups `workbench.targets`,
`workbench.runtimes` and `workbench.commands`."""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol

from workbench.errors import InputError


class Target(Protocol):
    """A value of the export option `target`: another kind of program than Core ML's.

    Attributes:
        runtime: the only runtime that runs such programs; it is no device. Its models
            are made as Model(bundle, shard), see `workbench.runtime.model_class`.
        precision: `exact` for programs in fp32, `declared` for programs in fp16.
        arithmetic: the portable arithmetic whose tolerances apply to them.
        packages: the distributions whose versions decide the bytes of a program.
    """

    runtime: str
    precision: str
    arithmetic: str
    packages: tuple[str, ...]

    def check(self, options) -> None:
        """Raises an InputError for export options that these programs do not support."""
        ...

    def template(self, spec, plan, options, weights):
        """An object like `workbench.exporter.template.Template`, which writes the shards of
        the shape of `spec`."""
        ...

    def parts(self, package: Path, place: str) -> dict[str, Any]:
        """The stored NumPy arrays of the weight at a place that the manifest names: `val`,
        or `data` and `scale`, or `indices` and `lut`."""
        ...

    def dense(self, package: Path, place: str) -> Any:
        """The values of the weight, fp16 or float32."""
        ...


# reading the metadata of every installed package takes tens of milliseconds
@cache
def find_plugins(kind: str) -> dict[str, EntryPoint]:
    """Finds every installed plug-in of a kind, "targets", "runtimes" or "commands": its
    name → its entry point."""
    return {entry.name: entry for entry in entry_points(group=f"workbench.{kind}")}


def load(kind: str, name: str) -> Any:
    """Loads the object of an installed plug-in.

    Raises:
        InputError: no installed package offers this name.
    """
    entries = find_plugins(kind)
    if name not in entries:
        raise InputError(
            f"{kind.removesuffix('s')} {name!r}",
            "no installed package that offers it",
            f"the workbench's own, or one of an installed package "
            f"({', '.join(entries) or 'none is installed'})",
            "install the plug-in that offers it, or choose another",
        )
    return entries[name].load()
