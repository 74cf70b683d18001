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
SWAPPED_PAIRS = (
    (ast.Lt, ast.GtE),
    (ast.Gt, ast.LtE),
    (ast.Eq, ast.NotEq),
    (ast.In, ast.NotIn),
    (ast.Is, ast.IsNot),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.And, ast.Or),
)
# operator → the one that is put in its place, both ways
SWAPPED = dict(SWAPPED_PAIRS) | {second: first for first, second in SWAPPED_PAIRS}


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
            other.value = 2 * other.value or 1.0  # twice zero would be no change
        case _:
            return None
    return other


@dataclass(frozen=True)
class Change:
    """A change of one expression of a module.

    Args:
        line: the expression's.
        before: the expression.
        after: what it is changed to.
        module: the source of the changed module.
    """

    line: int
    before: str
    after: str
    module: str


def list_changes(source: str) -> Iterator[Change]:
    """Yields every change of a module."""
    # ast counts columns in bytes of UTF-8
    text = source.encode()
    line_starts = [0]
    for line in source.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line.encode()))
    for node in ast.walk(ast.parse(source)):
        if not hasattr(node, "end_col_offset"):  # such as an operator
            continue
        changed_node = change_node(node)
        if changed_node is None:
            continue
        start = line_starts[node.lineno - 1] + node.col_offset
        end = line_starts[node.end_lineno - 1] + node.end_col_offset
        after = ast.unparse(changed_node)
        changed_module = text[:start] + f"({after})".encode() + text[end:]
        try:
            ast.parse(changed_module)
        except SyntaxError:  # within an f-string
            continue
        before = text[start:end].decode()
        yield Change(node.lineno, before, after, changed_module.decode())


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


def copy_checkout(folder: Path) -> None:
    """Copies the tracked files of the checkout into a folder."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True)
    for name in listed.stdout.decode().splitlines():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)


def list_changes_of(rooms: list[str]) -> list[tuple[Path, Change]]:
    """Every change of the modules of rooms, with the module's path in the checkout."""
    changes = []
    for room in rooms:
        for path in sorted((ROOT / "workbench" / room).glob("*.py")):
            for change in list_changes(path.read_text()):
                changes.append((path.relative_to(ROOT), change))
    return changes


def is_caught(folder: Path, module: Path, change: Change) -> bool:
    """Whether a test of a module fails for a change, which is made in a copy of the checkout
    and taken back."""
    (folder / module).write_text(change.module)
    has_failed = any(tests_fail(folder, tests) for tests in find_tests(module))
    shutil.copy(ROOT / module, folder / module)
    return has_failed


def main(count: int = 60, seed: int = 0, rooms: str = ",".join(ROOMS)) -> None:
    """Makes `count` changes, drawn with `seed`, in rooms of `workbench`."""
    chosen_rooms = rooms.split(",")
    for room in chosen_rooms:
        # a folder that is not there has no files, so that `glob` would skip it silently
        if not (ROOT / "workbench" / room).is_dir():
            raise SystemExit(f"mutate: workbench has no room {room}")
    changes = random.Random(seed).sample(list_changes_of(chosen_rooms), count)
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_checkout(Path(folder))
        for module, change in changes:
            result = "SURVIVED"
            if is_caught(Path(folder), module, change):
                result = "caught "
                caught += 1
            edit = f"{change.before} → {change.after}"
            print(f"{result} {module}:{change.line}: {edit}", flush=True)
    print(f"{caught} of {count} caught")


if __name__ == "__main__":
    cyclopts.run(main)
