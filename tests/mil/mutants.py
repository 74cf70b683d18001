"""Programs changed by one edit, on both paths: `python -m tests.mil.mutants N [SEED]` edits the
programs of exported packages N times: a type, a name, a constant, an operand, the kind or the
place of an operation.

The plain steps and the fused ones then run each program on the inputs that the sound one takes:
one token twice, then three tokens twice, where the axis T is free.

Outcomes
    refused    both paths end in an InputError
    equal      all outputs and states agree within TOLERANCE, with the same non-finite places
    unstable   they do not, and neither do the plain steps with themselves after a change of x by half a unit in the last place
    differ     they do not, or one path alone refuses
Any other exception ends the run, as do too much time or memory.
"""

import signal
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import miltorch
from miltorch.ops import OPERATIONS
from miltorch.program import NUMPY, Op, Program, Ref, Type
from workbench.errors import InputError

FAMILIES = [
    ("llama", {}),
    ("llama", {"kv_write": "slice", "layout": "bc1t"}),
    ("qwen2", {"compress": "int8-tensor"}),
    ("qwen3", {"compress": "int4-block32"}),
    ("gemma3_text", {"sliding": "ring"}),
    ("zaya", {}),
]
TOLERANCE = 1e-2  # relative RMS, of fp16 results
GOOD = ("refused", "equal", "unstable")
SPECIALS = [0.0, -1.0, 2.0, 1e-3, 1e4, np.nan, np.inf]
WORDS = ["", "valid", "same", "custom", "fp16", "fp32", "int32", "bool", "exact"]
NAMES = "x y values axis axes input data begin update nothing".split()


class Editor:
    """Changes one thing in a copy of a program."""

    def __init__(self, program: Program, random: np.random.Generator):
        copied = (
            replace(op, inputs=dict(op.inputs), outputs=list(op.outputs))
            for op in program.block.ops
        )
        self.ops, self.outputs, self.random = (
            list(copied),
            list(program.outputs),
            random,
        )
        self.inputs, self.states = dict(program.inputs), dict(program.states)
        edits = self.kind, self.operand, self.parameter, self.type, self.order
        what = str(self.any([*edits, self.constant, self.constant, self.name])())
        block = replace(program.block, ops=self.ops, outputs=self.outputs)
        changed = dict(inputs=self.inputs, states=self.states, outputs=self.outputs)
        self.program, self.what = replace(program, block=block, **changed), what

    def any(self, items):
        items = list(items)
        return items[self.random.integers(len(items))]

    def one(self) -> Op:
        """One operation; constants are the majority, so one in four is enough."""
        constant = self.random.random() < 0.25
        return self.any(op for op in self.ops if (op.kind == "const") == constant)

    def value(self) -> str:
        named = [name for op in self.ops for name, _ in op.outputs]
        return self.any([*named, *self.inputs, "nothing"])

    def kind(self) -> str:
        op, kinds = self.one(), sorted({op.kind for op in self.ops})
        before, op.kind = (
            op.kind,
            self.any([*kinds, *self.random.choice(sorted(OPERATIONS), len(kinds))]),
        )
        return f"{before} → {op.kind}"

    def operand(self) -> str:
        """An operand becomes another value, changes places with another, or becomes two."""
        op = self.one()
        if op.inputs:
            key, other, change = (
                self.any(op.inputs),
                self.any(op.inputs),
                self.random.integers(4),
            )
            if change == 0:
                op.inputs[key], op.inputs[other] = op.inputs[other], op.inputs[key]
            elif change == 1:
                op.inputs[key] = [op.inputs[key]] * 2
            else:
                op.inputs[key] = Ref(self.value())
        return f"{op.kind} {op.name} operands"

    def parameter(self) -> str:
        op = self.any(op for op in self.ops if op.inputs)
        key = self.any(op.inputs)
        value = op.inputs.pop(key)
        if self.random.random() < 0.5:
            op.inputs[self.any(NAMES)] = value
        return f"{op.kind}.{key} renamed or missing"

    def type(self) -> str:
        """Another dtype or shape of a result, an input or a state."""
        if self.random.random() < 0.2:
            of = self.any([self.inputs, self.states or self.inputs])
            name = self.any(of)
            of[name] = self.other(of[name])
        else:
            op = self.any(op for op in self.ops if op.outputs)
            (name, declared), *rest = op.outputs
            op.outputs = [(name, self.other(declared)), *rest]
        return f"type of {name}"

    def other(self, declared: Type) -> Type:
        shape, change = list(declared.shape), self.random.integers(6)
        if change < 2:
            return replace(declared, dtype=self.any(NUMPY))
        if not shape or change == 2:
            return replace(declared, shape=(*shape, int(self.random.integers(1, 4))))
        at = int(self.random.integers(len(shape)))
        size = shape[at] or 1
        sizes = [None, size + 1, max(size - 1, 0), 2 * size, 0, 1, 1 << 40, size // 2]
        shape[at : at + 1] = [] if change == 3 else [self.any(sizes)]
        return replace(declared, shape=tuple(shape))

    def order(self) -> str:
        """An operation is left out, doubled, or changes places with another."""
        i, j = self.random.integers(len(self.ops), size=2)
        kind, change = self.ops[i].kind, self.random.integers(3)
        if change == 0:
            del self.ops[i]
        elif change == 1:
            self.ops.append(self.ops[i])
        else:
            self.ops[i], self.ops[j] = self.ops[j], self.ops[i]
        return f"order of {kind}"

    def constant(self) -> str:
        """One number, flag or word of a constant, or how many there are."""
        op = self.any(op for op in self.ops if op.kind == "const")
        value = op.inputs["val"]
        if not isinstance(value, np.ndarray):
            op.inputs["val"] = self.any(WORDS)
            return f"{op.name} = {op.inputs['val']!r}"
        value = np.array(value)
        flat, at = value.reshape(-1), int(self.random.integers(max(value.size, 1)))
        if value.ndim == 1 and self.random.random() < 0.3:
            value = self.any([np.append(value, value[:1]), np.delete(value, at)])
        elif value.dtype == bool:
            flat[at] ^= True
        elif value.dtype.kind == "f":
            flat[at : at + 16] = self.any(SPECIALS)
        elif value.size:
            number = int(flat[at])
            numbers = [number + 1, number - 1, -number, 0, 2 * number, 1 << 20, 3]
            flat[at] = np.array(self.any(numbers)).astype(value.dtype)
        op.inputs["val"] = value
        return f"{op.name} {value.reshape(-1)[:4]}"

    def name(self) -> str:
        """Another name of a result, or another result of the program."""
        if self.random.random() < 0.2:
            self.outputs[self.random.integers(len(self.outputs))] = self.value()
            return "results"
        op = self.any(op for op in self.ops if op.outputs)
        (before, declared), *rest = op.outputs
        op.outputs = [(self.value(), declared), *rest]
        return f"{before} → {op.outputs[0][0]}"


def calls(
    program: Program, random: np.random.Generator
) -> list[dict[str, torch.Tensor]]:
    """Inputs of the calls that a program gets: positions 3, 4, then 5 to 7 and 8 to 10 where T is
    free, by the names of the contract."""
    free = any(None in t.shape for t in program.inputs.values())
    positions = ((3, 1), (4, 1), (5, 3), (8, 3))[: 4 if free else 2]
    return [_inputs(program, *position, random) for position in positions]


def _inputs(program, position: int, T: int, random) -> dict[str, torch.Tensor]:
    inputs = {}
    for name, declared in program.inputs.items():
        shape = [T if n is None else n for n in declared.shape]
        value = random.normal(size=shape).astype(np.float16).astype(np.float32)
        if name.startswith("kv_write_mask"):
            value[:] = 0
            for t in range(T):
                value[:, :, (position + t) % shape[2], t] = 1
        elif name.startswith("attn_mask"):
            value[:] = -1e4
            for t in range(shape[2]):
                value[:, :, t, : position + t + 1] = 0
        elif name.startswith("tail_select"):
            value[:] = np.eye(shape[1], T, T - shape[1])
        elif declared.dtype == "INT32":
            value = np.full(shape, position, np.int32)
        inputs[name] = torch.from_numpy(value)
    return inputs


def played(
    program: Program, inputs: list[dict], fuse: bool
) -> list[dict[str, torch.Tensor]]:
    """Outputs and states after each of the calls."""
    runner = miltorch.Executable(program, fuse=fuse)
    cells, seen = miltorch.make_state(program), []
    for number, cell in enumerate(cells.values()):
        drawn = np.random.default_rng(number).normal(size=cell.value.shape)
        cell.value = torch.from_numpy(drawn.astype(np.float16)).to(cell.value.dtype)
    for one in inputs:
        outputs = runner.run({n: v.clone() for n, v in one.items()}, cells)
        states = {f"state {name}": cell.value for name, cell in cells.items()}
        seen.append({n: v.clone() for n, v in (outputs | states).items()})
    return seen


def difference(found: list[dict], wanted: list[dict]) -> float:
    """The largest relative RMS between the results of two paths; infinity for other shapes or
    other places of what is not finite."""
    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        for name in one:
            a, b = (np.asarray(v, np.float64) for v in (one[name], other[name]))
            finite = np.isfinite(b)
            if a.shape != b.shape or not np.array_equal(np.isfinite(a), finite):
                return np.inf
            if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
                return np.inf
            size = max(np.sqrt((b[finite] ** 2).sum()), 1e-6)
            worst = max(worst, np.sqrt(((a - b)[finite] ** 2).sum()) / size)
    return worst


def outcome(program: Program, inputs: list[dict]) -> str:
    """How both paths end."""
    ends = []
    for fuse in (False, True):
        try:
            ends.append(played(program, inputs, fuse))
        except InputError:
            ends.append(None)
    if None in ends:
        return "refused" if ends == [None, None] else "differ"
    apart = difference(ends[1], ends[0])
    if apart <= TOLERANCE:
        return "equal"
    random, nudged = np.random.default_rng(0), []
    for one in inputs:
        signs = torch.from_numpy(random.choice([-1.0, 1.0], one["x"].shape)).float()
        nudged.append(one | {"x": one["x"] * (1 + 2**-11 * signs)})
    try:
        moved = difference(played(program, nudged, False), ends[0])
    except InputError:
        return "differ"
    return (
        "unstable" if max(TOLERANCE, apart / 4) < moved < np.inf > apart else "differ"
    )


def run(packages: list[Path], attempts: int, seed: int = 0) -> list[tuple[str, str]]:
    """(outcome, edit) of every edit."""
    from fuzz import SECONDS, limits

    rows, programs = [], list(map(miltorch.read, packages))
    with limits():
        for number in range(attempts):
            program = programs[number % len(programs)]
            edited = Editor(program, np.random.default_rng([seed, number]))
            inputs = calls(program, np.random.default_rng(0))
            signal.alarm(SECONDS)
            try:
                rows.append((outcome(edited.program, inputs), edited.what))
            except BaseException as problem:
                problem.add_note(f"edit {number} of seed {seed}: {edited.what}")
                raise
            signal.alarm(0)
    return rows


def packages_of(exports, families=FAMILIES) -> list[Path]:
    """The package of the first layers of each family."""
    bundles = [
        exports.bundle(exports.checkpoint(family), **chosen)
        for family, chosen in families
    ]
    return [bundle.package(bundle.shards("layers")[0]) for bundle in bundles]


def main(attempts: int, seed: int = 0) -> None:
    from tests.tiny import Exports

    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    with tempfile.TemporaryDirectory() as folder:
        rows = run(packages_of(Exports(Path(folder))), attempts, seed)
    for row in rows:
        if row[0] not in GOOD:
            print(*row, sep=" | ")
    counts = Counter(kind for kind, _ in rows)
    print(f"{attempts} changed programs: {dict(counts)}")
    sys.exit(bool(counts.keys() - set(GOOD)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
