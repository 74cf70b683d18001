"""The parts import one way only, light names stay light, and the public surface is what the design says."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import workbench

PACKAGE = Path(workbench.__file__).parent
LEAVES = {"errors", "files", "machines", "paths", "quiet"}
MAY_IMPORT = {
    "bundle": set(),
    "mil": set(),
    "plots": set(),
    "log": set(),
    "models": {"bundle"},
    "export": {"models", "bundle"},
    "runtime": {"mil", "bundle"},
    "decode": {"runtime", "bundle"},
    "eval": {"decode", "runtime", "bundle", "mil", "models"},
    "runs": {"decode", "bundle", "log"},
    "tables": {"eval", "bundle"},
    "child": set(),
    "cell": {"child", "export", "eval", "decode", "models", "bundle", "log", "runs"},
    "farm": {"log"},
    "sweep": {"cell", "farm", "export", "models", "bundle", "log", "runs"},
    "overflow": {"export", "eval", "decode", "mil", "models", "bundle"},
    "splits": {"bundle", "eval", "models", "log", "runs", "sweep"},
    "report": {"log", "plots", "runs"},
    "study": {"bundle", "decode", "eval", "models", "doctor", "log", "plots", "report", "runs", "tables"},
    "notebook": {"report", "log"},
    "lab": set(),
    "doctor": {"runtime", "log"},
    "widgets": {"bundle", "eval", "export", "models", "log", "plots", "report", "runs", "splits", "sweep", "tables"},
}


def imports(path: Path) -> set[str]:
    """Parts of the package that a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("workbench.")}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("workbench"):
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {a.name for a in node.names}
    return found


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_imports_go_one_way(part):
    files = [PACKAGE / f"{part}.py"] if (PACKAGE / f"{part}.py").exists() else sorted((PACKAGE / part).rglob("*.py"))
    assert files
    for file in files:
        assert imports(file) - LEAVES - {part} <= MAY_IMPORT[part], file


def test_every_part_has_a_rule():
    parts = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert {p for p in parts - LEAVES - {"__init__"} if not p.startswith("cli")} == set(MAY_IMPORT)


def test_public_names():
    assert workbench.__all__ == ["Bundle", "Decoder", "InputError"]
    assert all(getattr(workbench, name) for name in workbench.__all__)


def test_importing_the_package_and_its_command_line_stays_light():
    code = "import sys, workbench.cli.app; print([m for m in ('torch', 'coremltools', 'transformers', 'pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_files_stay_readable():
    long = {str(p.relative_to(PACKAGE)): n for p in PACKAGE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert not long
