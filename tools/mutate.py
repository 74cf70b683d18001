"""Makes small changes of the code, which some test must notice: `python tools/mutate.py`.

Each change is made alone, in a copy of the checkout. The test file of the changed module runs;
where it passes or does not exist, all tests of the module's room run. Prints every change, and how
many were caught."""

import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cyclopts

ROOT = Path(__file__).parents[1]
ROOMS = ("check", "decode", "exporter", "sweep")
TIMEOUT_S = 600  # tests that run longer have noticed the change
SWAPPED = {
    **{ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.And: ast.Or, ast.Or: ast.And, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
}


def change_node(node: ast.AST) -> ast.AST | None:
    """A changed copy of a node; None for a node that is not changed."""
    other = copy.deepcopy(node)
    match other:
        case ast.Compare(ops=[op]) if type(op) in SWAPPED:
            other.ops = [SWAPPED[type(op)]()]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPPED:
            other.op = SWAPPED[type(op)]()
        case ast.UnaryOp(op=ast.Not()):
            return other.operand
        case ast.Constant(value=bool()):
            other.value = not other.value
        case ast.Constant(value=int()):
            other.value += 1
        case ast.Constant(value=float()):
            other.value = 2 * other.value or 1.0
        case _:
            return None
    return other


@dataclass(frozen=True)
class Change:
    """A change of one expression of a module."""

    line: int
    before: str
    """The expression."""
    after: str
    module: str
    """The source of the changed module."""


def list_changes(source: str) -> Iterator[Change]:
    """Yields every change of a module."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    for node in ast.walk(ast.parse(source)):
        if not hasattr(node, "end_col_offset") or (other := change_node(node)) is None:
            continue
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[node.end_lineno - 1] + node.end_col_offset
        text, after = source.encode(), ast.unparse(other)
        whole = text[:first] + f"({after})".encode() + text[last:]
        try:
            ast.parse(whole)
        except SyntaxError:  # within an f-string
            continue
        before = text[first:last].decode()
        yield Change(node.lineno, before, after, whole.decode())


def find_tests(module: Path) -> list[Path]:
    """The tests of a module, those of its file before those of its room, relative to the
    checkout."""
    room = Path("tests") / module.parent.name
    file = room / f"test_{module.stem}.py"
    return [path for path in (file, room) if (ROOT / path).exists()]


def tests_fail(folder: Path, tests: Path) -> bool:
    """Whether tests fail in a copy of the checkout."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        result = subprocess.run(
            [*command, str(tests)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)},
            capture_output=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return True
    return result.returncode != 0


def main(count: int = 60, seed: int = 0, rooms: str = ",".join(ROOMS)) -> None:
    """Makes `count` changes, drawn with `seed`, in rooms of `workbench`."""
    chosen_rooms = rooms.split(",")
    for room in chosen_rooms:
        # a folder that is not there has no files, so that `glob` would skip it silently
        if not (ROOT / "workbench" / room).is_dir():
            raise SystemExit(f"mutate: workbench has no room {room}")
    possible = [
        (path.relative_to(ROOT), change)
        for room in chosen_rooms
        for path in sorted((ROOT / "workbench" / room).glob("*.py"))
        for change in list_changes(path.read_text())
    ]
    drawn = random.Random(seed).sample(possible, count)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True)
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in listed.stdout.decode().splitlines():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(folder) / name)
        for path, change in drawn:
            (Path(folder) / path).write_text(change.module)
            is_caught = any(
                tests_fail(Path(folder), tests) for tests in find_tests(path)
            )
            shutil.copy(ROOT / path, Path(folder) / path)
            caught += is_caught
            word = "caught " if is_caught else "SURVIVED"
            edit = f"{change.before} → {change.after}"
            print(f"{word} {path}:{change.line}: {edit}", flush=True)
    print(f"{caught} of {count} caught")


if __name__ == "__main__":
    cyclopts.run(main)
