"""What installed packages add to the workbench, through entry points of the groups
`workbench.targets`, `workbench.runtimes` and `workbench.commands`."""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol

from workbench.errors import InputError


class Target(Protocol):
    """Programs of another kind than Core ML's, for the export option `target`.

    Attributes:
        runtime: the one runtime that runs them, no device.
        precision: `exact` for programs in fp32, `declared` for those in fp16.
        arithmetic: the portable arithmetic whose tolerances hold for them.
        packages: the distributions on whose versions their bytes depend.
    """

    runtime: str
    precision: str
    arithmetic: str
    packages: tuple[str, ...]

    def check(self, options) -> None:
        """Raises an InputError for export options that these programs lack."""
        ...

    def template(self, spec, plan, options, weights):
        """What writes the shards of the shape of `spec`: an object like
        `workbench.exporter.template.Template`."""
        ...

    def parts(self, package: Path, place: str) -> dict[str, Any]:
        """The weight at a place that the manifest names, as the NumPy arrays that are
        stored: `val`, or `data` and `scale`, or `indices` and `lut`."""
        ...

    def dense(self, package: Path, place: str) -> Any:
        """The weight's values, fp16 or float32."""
        ...


@cache
def offered(kind: str) -> dict[str, EntryPoint]:
    """Name → entry point of every installed target, runtime or command; `kind` is the
    plural."""
    return {entry.name: entry for entry in entry_points(group=f"workbench.{kind}")}


def load(kind: str, name: str) -> Any:
    """What is installed as `name`.

    Raises:
        InputError: nothing is.
    """
    found = offered(kind)
    if name not in found:
        raise InputError(
            f"{kind.removesuffix('s')} {name!r}",
            "offered by no installed package",
            f"the workbench's own, or installed: {', '.join(found) or 'none'}",
            "install the plug-in that offers it, or choose another",
        )
    return found[name].load()
