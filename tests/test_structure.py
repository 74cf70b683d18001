"""Parts import one way only, light names stay light, and the public surface is what the design
says."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import workbench

ROOT = Path(workbench.__file__).parents[1]
PACKAGES = ("miltorch", "workbench")
# modules at the root that every room may import; they import no room
STANDALONE_MODULES = set(
    "checkpoint_checks core_ml_log errors escape files heap nbformat_import paths plugins "
    "process progress".split()
)
LEAVES = {
    "miltorch.errors",
    "miltorch.coremltools_import",
    *(f"workbench.{name}" for name in STANDALONE_MODULES),
}
RUN = "runtime miltorch bundle"  # what running a bundle needs
ANYTHING = None
# room → the rooms that it may import, besides LEAVES. miltorch has no row: it may import none
MAY_IMPORT = {
    "bundle": "",
    "models": "bundle",
    "exporter": "models bundle",
    "runtime": "miltorch bundle",
    "decode": "runtime bundle",
    "ane": f"exporter models {RUN}",
    "check": f"ane decode models {RUN}",
    "explain": f"check ane decode models {RUN}",
    "adopt": f"exporter check decode models {RUN}",
    "recommend": "exporter check decode models bundle",
    "log": "",
    "plots": "",
    "kernel": "",
    "sweep": "log explain check ane decode runtime exporter models bundle",
    "doctor": "sweep log runtime",
    "experiment": "kernel sweep log plots check decode models bundle",
    "widgets": "bundle experiment sweep log plots ane decode exporter models",
    "cli": ANYTHING,
    "harness": "decode",
    "lab": "",
}
ROOMS_OF_ONE_FILE = set("doctor harness kernel lab".split())


def dotted(path: Path) -> str:
    """The name of the module in a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(p): p for name in PACKAGES for p in (ROOT / name).rglob("*.py")}


def names_imported(source: str, package: str | None = None) -> set[str]:
    """Dotted names that code of a package imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def imported(module: str) -> set[str]:
    """Modules of both packages that a module imports."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names = names_imported(path.read_text(), package)
    targets = {n if n in MODULES else n.rpartition(".")[0] for n in names}
    return targets & MODULES.keys() - {module}


def room(module: str) -> str:
    parts = module.split(".")
    return parts[0] if parts[0] == "miltorch" else parts[1]


def test_imports_go_one_way_and_every_room_has_a_rule():
    for module in MODULES.keys() - LEAVES - {"workbench"}:
        allowed = MAY_IMPORT.get(room(module), "")
        if allowed is not ANYTHING:
            rooms = {*map(room, imported(module) - LEAVES - {"workbench"})}
            assert rooms <= {room(module), *allowed.split()}, module
    folders = {p.parent.name for p in (ROOT / "workbench").glob("*/__init__.py")}
    assert folders | ROOMS_OF_ONE_FILE == set(MAY_IMPORT)
    names = {p.stem for p in (ROOT / "workbench").glob("*.py")}
    assert names <= {"__init__", *STANDALONE_MODULES, *ROOMS_OF_ONE_FILE}


def test_no_two_files_import_each_other_in_a_circle():
    # raises a CycleError that names them
    TopologicalSorter({module: imported(module) for module in MODULES}).prepare()


def test_nothing_names_a_plug_in():
    named = re.compile("coreai|core ai|aimodel|crosscheck", re.IGNORECASE)
    files = (p for package in PACKAGES for p in (ROOT / package).rglob("*"))
    readable = (p for p in files if p.is_file() and p.parent.name != "__pycache__")
    naming = [p for p in readable if named.search(p.read_text(errors="ignore"))]
    assert naming == []


def test_public_names():
    names = "Bundle Decoder InputError export log plots sweep validate"
    assert {*names.split()} <= set(workbench.__all__)
    assert all(getattr(workbench, name) for name in workbench.__all__)


CELL = "coremltools transformers pandas scipy".split()
LIGHT = {
    "miltorch.errors, workbench, workbench.cli.app": [*CELL, "numpy", "torch"],
    # what a cell of a sweep imports before its first call
    "workbench.sweep.run, workbench.runtime.portable": CELL,
}


def test_importing_what_starts_often_stays_light():
    for modules, heavy in LIGHT.items():
        code = f"import sys, {modules}; print({{*{heavy}}} & sys.modules.keys())"
        said = subprocess.check_output([sys.executable, "-c", code], text=True)
        assert said == "set()\n", modules


def test_the_code_is_formatted():
    command = [sys.executable, "-m", "ruff", "format", "--check", "."]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def test_no_two_files_of_tests_have_one_name():
    """pytest imports a file by its name alone, and refuses a second one of that name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
