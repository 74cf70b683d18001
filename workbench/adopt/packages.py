"""Reads packages of another exporter: their programs, the roles of their inputs and
outputs, and the order in which they run."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import miltorch
from miltorch.program import read_spec
from workbench import paths
from workbench.adopt.roles import INPUTS, OUTPUTS, find_role
from workbench.errors import InputError

# a file that ANEMLL writes beside its packages, whose causal masks are of 0 and −inf
ANEMLL_FILE = "meta.yaml"


@dataclass(frozen=True)
class Package:
    """A package of another exporter.

    Args:
        name: of the folder that was given, which may be a link to `path`.
        programs: function → its program. The function of a package that has only one is
            named None here and in the manifest.
        program: that of the default function.
        input_roles: input → its role, a value of `INPUTS` or `carried` (see `connect`).
        output_roles: output → its role, a value of `OUTPUTS` or `carried`.
    """

    name: str
    path: Path
    programs: dict[str | None, miltorch.Program]
    program: miltorch.Program
    input_roles: dict[str, str]
    output_roles: dict[str, str]

    @property
    def roles(self) -> dict[str, str]:
        """Input or output → its role."""
        return self.input_roles | self.output_roles


def open_packages(sources: Sequence[Path]) -> list[Package]:
    """The packages at `sources`, or in folders there, in the order in which they run.

    Raises:
        InputError: two packages have one name.
    """
    packages = []
    for source in sources:
        package_paths = [source]
        if not paths.is_package(source):
            package_paths = source.glob("[!.]*.mlpackage")
        packages += map(open_package, package_paths)
    packages.sort(key=running_order)
    names = [package.path.name for package in packages]
    if len({*names}) < len(names):
        step = "rename one of them, or leave it out"
        raise InputError("packages", str(names), "a name for each", step)
    return connect(packages)


def open_package(path: Path) -> Package:
    """Reads the programs of a package and the roles of its inputs and outputs."""
    names = sorted(read_spec(path).mlProgram.functions)
    if len(names) == 1:
        names = [None]
    program = miltorch.read(path)
    patterns = INPUTS
    if (path.resolve().parent / ANEMLL_FILE).is_file():
        # a key that is there keeps its place, before the more general patterns
        patterns = INPUTS | {"mask": "mask_inf"}
    outputs = sorted(program.outputs, key=natural_key)
    return Package(
        name=path.name,
        path=path.resolve(),
        programs={name: miltorch.read(path, name) for name in names},
        program=program,
        input_roles={name: find_role(patterns, name) for name in program.inputs},
        output_roles={name: find_role(OUTPUTS, name) for name in outputs},
    )


def running_order(package: Package) -> tuple[bool, bool, list]:
    """The key that sorts packages as they run: first one that looks tokens up, then
    those with states, then the head; among these by the numbers in their names."""
    looks_up = "ids" in package.input_roles.values()
    # False sorts before True
    return not looks_up, not package.program.states, natural_key(package.name)


def connect(packages: list[Package]) -> list[Package]:
    """Gives the role `carried` to every input without a known role that an earlier
    package outputs, under the same name or with `_out` behind it, and to that output.

    Args:
        packages: in the order in which they run.
    """
    earlier_outputs: set[str] = set()
    carried: set[str] = set()  # names of inputs
    for package in packages:
        for name, role in package.input_roles.items():
            if role == "zeros" and {name, f"{name}_out"} & earlier_outputs:
                carried.add(name)
        earlier_outputs |= package.output_roles.keys()
    return [
        replace(
            package,
            input_roles=with_carried(package.input_roles, carried),
            output_roles=with_carried(package.output_roles, carried),
        )
        for package in packages
    ]


def with_carried(roles: dict[str, str], carried: set[str]) -> dict[str, str]:
    """Roles by name, with the role `carried` in place of those of the inputs in `carried`
    and of the outputs of the same names, with or without `_out`."""
    return {
        name: "carried" if name.removesuffix("_out") in carried else role
        for name, role in roles.items()
    }


def natural_key(name: str) -> list:
    """Sorts names by the numbers in them: 2 before 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
