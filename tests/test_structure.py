"""Parts import one way only, light names stay light, files stay small, and the public surface is
what the design says."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import workbench

ROOT = Path(workbench.__file__).parents[1]
PACKAGES = ("miltorch", "workbench")
LEAVES = {
    "workbench.errors",
    "workbench.files",
    "workbench.paths",
    "workbench.process",
    "workbench.progress",
    "workbench.plugins",
    "miltorch.errors",
    "miltorch.quiet",
}
MAY_IMPORT = {
    "bundle": set(),
    "models": {"bundle"},
    "export": {"models", "bundle"},
    "runtime": {"miltorch", "bundle"},
    "decode": {"runtime", "bundle"},
    "ane": {"runtime", "miltorch", "export", "models", "bundle"},
    "check": {"ane", "decode", "runtime", "miltorch", "models", "bundle"},
    "explain": {"check", "ane", "decode", "runtime", "miltorch", "models", "bundle"},
    "adopt": {"export", "check", "decode", "runtime", "miltorch", "models", "bundle"},
    "log": set(),
    "plots": set(),
    "sweep": {
        "log",
        "explain",
        "check",
        "ane",
        "decode",
        "runtime",
        "export",
        "models",
        "bundle",
    },
    "doctor": {"sweep", "log", "runtime"},
    "experiment": {"sweep", "log", "plots", "check", "decode"},
    "widgets": {
        "bundle",
        "experiment",
        "sweep",
        "log",
        "plots",
        "ane",
        "decode",
        "export",
        "models",
    },
    "cli": None,  # anything
    "harness": {"decode"},
    "lab": set(),
}
FILES = {
    "doctor",
    "experiment",
    "harness",
    "lab",
    "plots",
    "widgets",
}  # rooms of one file at the root
MAX_TOKENS = 4000


def modules() -> dict[str, Path]:
    """Dotted name of every module of both packages → its file."""
    names = {}
    for path in (p for package in PACKAGES for p in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = modules()


def imported(module: str) -> set[str]:
    """Modules of both packages that a module imports, at any depth of its code."""
    path, targets = MODULES[module], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = (
                module.split(".")
                if path.name == "__init__.py"
                else module.split(".")[:-1]
            )
            parents = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            targets |= {
                f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base
                for a in node.names
            }
    return {target for target in targets if target in MODULES and target != module}


def room(module: str) -> str:
    parts = module.split(".")
    return parts[0] if parts[0] == "miltorch" else parts[1]


def test_imports_go_one_way():
    wrong = {}
    for module in MODULES.keys() - LEAVES - {"workbench"}:
        targets = imported(module) - LEAVES - {"workbench"}
        allowed = MAY_IMPORT.get(room(module), set())
        if allowed is not None:
            wrong[module] = {*map(room, targets)} - {room(module)} - allowed
    assert not {module: rooms for module, rooms in wrong.items() if rooms}


def test_every_room_has_a_rule():
    folders = {p.parent.name for p in (ROOT / "workbench").glob("*/__init__.py")}
    assert folders | FILES == set(MAY_IMPORT)


def test_no_two_files_import_each_other_in_a_circle():
    remaining = {module: imported(module) for module in MODULES}
    while leaves := [
        module
        for module, targets in remaining.items()
        if not targets & remaining.keys()
    ]:
        for module in leaves:
            del remaining[module]
    assert not remaining


def test_only_leaves_and_rooms_of_one_file_stand_at_the_root():
    names = {p.stem for p in (ROOT / "workbench").glob("*.py")} - {"__init__"}
    assert (
        names <= {"errors", "files", "paths", "plugins", "process", "progress"} | FILES
    )


def test_nothing_names_a_plug_in():
    named = re.compile("coreai|core ai|aimodel|crosscheck", re.IGNORECASE)
    files = (p for package in PACKAGES for p in (ROOT / package).rglob("*"))
    readable = (p for p in files if p.is_file() and p.parent.name != "__pycache__")
    found = [p for p in readable if named.search(p.read_text(errors="ignore"))]
    assert found == []


def test_public_names():
    names = {
        "Bundle",
        "Decoder",
        "InputError",
        "export",
        "log",
        "plots",
        "sweep",
        "validate",
    }
    assert names <= set(workbench.__all__) and workbench.__all__ == sorted(
        workbench.__all__
    )
    assert all(getattr(workbench, name) for name in workbench.__all__)


LIGHT = {
    "miltorch.errors, workbench, workbench.cli.app": [
        *("numpy", "torch", "coremltools", "transformers", "pandas")
    ],
    # what a cell of a sweep imports before its first call
    "workbench.sweep.run, workbench.runtime.portable": [
        *("coremltools", "transformers", "pandas", "scipy")
    ],
}


def test_importing_what_starts_often_stays_light():
    for modules, heavy in LIGHT.items():
        code = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
        output = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        assert output.strip() == "[]", modules


def test_files_stay_small():
    count = runpy.run_path(str(ROOT / "tools" / "size.py"))["python"]
    sizes = {name: count(path.read_text())[0] for name, path in MODULES.items()}
    assert not {name: size for name, size in sizes.items() if size > MAX_TOKENS}


def test_the_code_is_formatted():
    subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--check", "."],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
