"""Programs changed by one edit, on both paths: `python -m tests.mil.mutants N [SEED]` edits real
exported packages N times.

An edit concerns the program and not its bytes: a type, a name, an attribute, a shape, an operand,
the kind or the place of an operation, a constant's value. The plain steps and the fused ones
then run each program on the inputs that the sound package takes: one token twice (the second call
may come from a tape), then three tokens twice, where the axis T is free.

Outcomes
    refused    both paths end in an InputError
    equal      all outputs and states agree within TOLERANCE, with the same non-finite places
    unstable   they do not, and neither does the literal path with itself after a change of x by half a unit in the last place
    differ     they do not, or one path alone refuses
    exception  a path ends in something else than an InputError
    crash      the process died: every edit runs in a child process
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import miltorch
from miltorch.quiet import coremltools
from workbench.errors import InputError

ROOT = Path(__file__).parents[2]
MODEL, WEIGHTS = (
    "Data/com.apple.CoreML/model.mlmodel",
    "Data/com.apple.CoreML/weights/weight.bin",
)
FAMILIES = [
    ("llama", {}),
    ("llama", {"kv_write": "slice", "layout": "bc1t"}),
    ("qwen2", {"compress": "int8-tensor"}),
    ("qwen3", {"compress": "int4-block32"}),
    ("gemma3_text", {"sliding": "ring"}),
    ("zaya", {}),
]
TOLERANCE = 1e-2  # relative RMS, of fp16 results
SECONDS = 600  # for a batch of edits, which takes 20 s on an idle machine
BATCH = 100
GOOD = ("refused", "equal", "unstable")
SPECIALS = [0.0, -1.0, 2.0, 1e-3, 1e4, float("nan"), float("inf")]


def edit(spec, random: np.random.Generator) -> str:
    """Changes one thing in the program of `spec`; returns what."""
    function = spec.mlProgram.functions["main"]
    block = function.block_specializations[function.opset]
    kind = random.choice(list(EDITS), p=[weight for _, weight in EDITS.values()])
    return f"{kind}: {EDITS[kind][0](function, block, random)}"


def _any(items, random):
    items = list(items)
    return items[random.integers(len(items))] if items else None


def _operation(block, random):
    """One operation; constants are the majority, so one in three is enough."""
    computed = [op for op in block.operations if op.type != "const"]
    constants = [op for op in block.operations if op.type == "const"]
    return _any(constants if random.random() < 1 / 3 else computed, random)


def _tensor_type(message):
    which = message.WhichOneof("type")
    return (
        message.tensorType
        if which == "tensorType"
        else message.stateType.wrappedType.tensorType
    )


def _some_type(function, block, random):
    """The type of an operation's result, or of an input or state of the function; and whose it
    is."""
    if random.random() < 0.15:
        value = _any(function.inputs, random)
    else:
        op = _operation(block, random)
        value = _any(op.outputs, random) or _any(function.inputs, random)
    return value.name, _tensor_type(value.type)


def _dtype(function, block, random):
    name, tensor = _some_type(function, block, random)
    # MIL's numbers of dtypes
    tensor.dataType = random.choice([10, 11, 12, 1, 2, 23, 22, 21, 31, 33])
    return f"{name} {tensor.dataType}"


def _shape(function, block, random):
    name, tensor = _some_type(function, block, random)
    dimension, change = _any(tensor.dimensions, random), random.integers(5)
    if dimension is None or change == 0:
        tensor.dimensions.add().constant.size = int(random.integers(1, 4))
    elif change == 1:
        dimension.unknown.SetInParent()
    elif change == 2:
        del tensor.dimensions[int(random.integers(len(tensor.dimensions)))]
    else:
        size = dimension.constant.size
        dimension.constant.size = int(
            random.choice(
                [size + 1, max(size - 1, 0), 2 * size, 0, 1, 1 << 40, size // 2]
            )
        )
    tensor.rank = len(tensor.dimensions)
    return f"{name} {change}"


def _names(function, block, random):
    return (
        [v.name for op in block.operations for v in op.outputs]
        + [v.name for v in function.inputs]
        + ["nothing"]
    )


def _rename(function, block, random):
    values = [v for op in block.operations for v in op.outputs] + list(function.inputs)
    value, before = _any(values, random), None
    before, value.name = value.name, str(_any(_names(function, block, random), random))
    return f"{before} → {value.name}"


def _operand(function, block, random):
    """An operand becomes another value, is swapped with another of the same operation, is left out,
    or is doubled."""
    op, change = _operation(block, random), random.integers(5)
    named = [
        (key, i)
        for key in sorted(op.inputs)
        for i in range(len(op.inputs[key].arguments))
    ]
    if not named:
        return f"{op.type} takes nothing"
    key, i = _any(named, random)
    if change == 0:
        del op.inputs[key].arguments[i]
    elif change == 1:
        other, j = _any(named, random)
        copy = type(op.inputs[key].arguments[i])()
        copy.CopyFrom(op.inputs[key].arguments[i])
        op.inputs[key].arguments[i].CopyFrom(op.inputs[other].arguments[j])
        op.inputs[other].arguments[j].CopyFrom(copy)
    elif change == 2:
        op.inputs[key].arguments.add().CopyFrom(op.inputs[key].arguments[i])
    else:
        op.inputs[key].arguments[i].name = str(
            _any(_names(function, block, random), random)
        )
    return f"{op.type}.{key}.{i} {change}"


def _parameter(function, block, random):
    """A parameter is left out, or goes by another name."""
    op, change = (
        _any([o for o in block.operations if o.inputs], random),
        random.integers(2),
    )
    key = _any(sorted(op.inputs), random)
    if change:
        other = str(
            _any(
                [
                    "x",
                    "y",
                    "values",
                    "axis",
                    "axes",
                    "input",
                    "data",
                    "begin",
                    "update",
                    "nothing",
                ],
                random,
            )
        )
        op.inputs[other].CopyFrom(op.inputs[key])
    del op.inputs[key]
    return f"{op.type}.{key} {change}"


def _kind(function, block, random):
    op = _operation(block, random)
    before, op.type = (
        op.type,
        str(
            _any(
                sorted(
                    {o.type for o in block.operations}
                    | set(miltorch.execute.OPERATIONS)
                ),
                random,
            )
            if random.random() < 0.5
            else _any(sorted({o.type for o in block.operations}), random)
        ),
    )
    return f"{before} → {op.type}"


def _order(function, block, random):
    """An operation is left out, doubled, or changes places with another."""
    places, change = range(len(block.operations)), random.integers(3)
    i, j = int(_any(places, random)), int(_any(places, random))
    kind = block.operations[i].type
    if change == 0:
        del block.operations[i]
    elif change == 1:
        block.operations.add().CopyFrom(block.operations[i])
    else:
        copy = type(block.operations[i])()
        copy.CopyFrom(block.operations[i])
        block.operations[i].CopyFrom(block.operations[j])
        block.operations[j].CopyFrom(copy)
    return f"{kind} {i} {j} {change}"


def _immediates(block):
    """Every constant that stands in the program itself: (whose, value)."""
    for op in block.operations:
        for key in sorted(op.attributes):
            if (
                key != "name"
                and op.attributes[key].WhichOneof("value") == "immediateValue"
            ):
                yield f"{op.type} {op.outputs[0].name}", op.attributes[key]


def _constant(function, block, random):
    """A constant's value: a number changed, one more or one less of them, a string or a flag
    turned."""
    whose, value = _any(_immediates(block), random)
    tensor = value.immediateValue.tensor
    which = tensor.WhichOneof("value")
    if which == "bytes":  # fp16 scalars
        data = np.frombuffer(tensor.bytes.values, np.float16).copy()
        if len(data):
            data[random.integers(len(data))] = np.float16(random.choice(SPECIALS))
        tensor.bytes.values = data.tobytes()
        return f"{whose} {data[:3]}"
    values = getattr(tensor, which).values if which else []
    change = random.integers(6)
    if not len(values) or change == 0:
        tensor.ints.values.append(int(random.integers(-2, 3)))
    elif change == 1:
        del values[int(random.integers(len(values)))]
    else:
        i = int(random.integers(len(values)))
        if which == "strings":
            values[i] = str(
                random.choice(
                    [
                        "",
                        "valid",
                        "same",
                        "custom",
                        "fp16",
                        "fp32",
                        "int32",
                        "bool",
                        "exact",
                    ]
                )
            )
        elif which == "bools":
            values[i] = not values[i]
        elif which == "floats":
            values[i] = float(random.choice(SPECIALS))
        else:
            values[i] = int(
                random.choice(
                    [
                        values[i] + 1,
                        values[i] - 1,
                        -values[i],
                        0,
                        2 * values[i],
                        1 << 20,
                        -(1 << 20),
                        3,
                    ]
                )
            )
    return f"{whose} {change} {list(values)[:4]}"


def _blob(function, block, random):
    """A constant reads another constant's bytes, or has another's type."""
    blobs = [
        v
        for op in block.operations
        for v in op.attributes.values()
        if v.WhichOneof("value") == "blobFileValue"
    ]
    if not blobs:
        return "none"
    one, other = _any(blobs, random), _any(blobs, random)
    if random.random() < 0.5:
        one.blobFileValue.offset = other.blobFileValue.offset
        return "offset"
    one.type.CopyFrom(other.type)
    return "type"


def _results(function, block, random):
    """What the function gives back: another value, one twice, one less."""
    change = random.integers(3)
    if change == 0:
        block.outputs[0] = str(_any(_names(function, block, random), random))
    elif change == 1:
        block.outputs.append(str(_any(_names(function, block, random), random)))
    else:
        del block.outputs[0]
    return str(change)


EDITS = {
    "dtype": (_dtype, 0.16),
    "shape": (_shape, 0.18),
    "rename": (_rename, 0.08),
    "operand": (_operand, 0.18),
    "parameter": (_parameter, 0.06),
    "kind": (_kind, 0.1),
    "order": (_order, 0.06),
    "constant": (_constant, 0.14),
    "blob": (_blob, 0.03),
    "results": (_results, 0.01),
}


def damage_weights(path: Path, random: np.random.Generator) -> None:
    """Sixteen values in a row of the weight file become one of `SPECIALS`, as fp16."""
    data = bytearray(path.read_bytes())
    first = int(random.integers(64, max(len(data) - 32, 65))) // 2 * 2
    data[first : first + 32] = np.full(
        16, random.choice(SPECIALS), np.float16
    ).tobytes()
    path.write_bytes(bytes(data))


def calls(
    program: miltorch.Program, random: np.random.Generator
) -> list[dict[str, torch.Tensor]]:
    """Inputs of the calls that a program gets: positions 3, 4, then 5 to 7 and 8 to 10 where T is
    free, by the names of the contract."""
    free = any(None in t.shape for t in program.inputs.values())
    return [
        _inputs(program, position, T, random)
        for position, T in ((3, 1), (4, 1), (5, 3), (8, 3))[: 4 if free else 2]
    ]


def _inputs(
    program: miltorch.Program, position: int, T: int, random: np.random.Generator
) -> dict[str, torch.Tensor]:
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
            value[:] = position
        inputs[name] = torch.from_numpy(
            value.astype(np.int32) if declared.dtype == "INT32" else value
        )
    return inputs


def played(
    program, runner, inputs: list[dict], states: dict[str, np.ndarray]
) -> list[dict[str, torch.Tensor]]:
    """Outputs and states after each of the calls."""
    cells = miltorch.make_state(program)
    for name, cell in cells.items():
        if name in states and tuple(cell.value.shape) == states[name].shape:
            cell.value = torch.from_numpy(states[name].copy()).to(cell.value.dtype)
    seen = []
    for one in inputs:
        outputs = runner.run(
            {name: value.clone() for name, value in one.items()}, cells
        )
        seen.append(
            {name: value.clone() for name, value in outputs.items()}
            | {f"state {name}": cell.value.clone() for name, cell in cells.items()}
        )
    return seen


def plain_steps(package: Path, inputs, states):
    program = miltorch.read(package)
    return played(program, miltorch.Executable(program), inputs, states)


def fused_steps(package: Path, inputs, states):
    program = miltorch.read(package)
    return played(program, miltorch.Executable(program, fuse=True), inputs, states)


def difference(found: list[dict], wanted: list[dict]) -> str | None:
    """What differs between the results of two paths, or None."""
    for call, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if one.keys() != other.keys():
            return f"call {call}: names {sorted(one.keys() ^ other.keys())}"
        for name in one:
            a, b = (np.asarray(v, np.float64) for v in (one[name], other[name]))
            if a.shape != b.shape:
                return f"call {call}: {name} of shape {a.shape} and {b.shape}"
            finite = np.isfinite(a)
            if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(
                a[~finite], b[~finite], equal_nan=True
            ):
                return f"call {call}: {name} not finite in other places"
            rms = np.sqrt(((a - b)[finite] ** 2).sum()) / max(
                np.sqrt((b[finite] ** 2).sum()), 1e-6
            )
            if rms > TOLERANCE:
                return f"call {call}: {name} differs by {rms:.2g}"
    return None


def outcome(package: Path, inputs, states) -> tuple[str, str]:
    """How both paths end, and where they part."""
    ends = []
    for path in (plain_steps, fused_steps):
        try:
            ends.append(path(package, inputs, states))
        except InputError as problem:
            ends.append(problem)
        except Exception as problem:
            return "exception", f"{path.__name__}: {type(problem).__name__}: {problem}"
    refused = [isinstance(end, InputError) for end in ends]
    if all(refused):
        return "refused", ""
    if any(refused):
        return (
            "differ",
            f"{'literal' if refused[0] else 'decode'} path alone: {ends[refused.index(True)]}",
        )
    where = difference(*ends[::-1])
    if where and "differs by" in where:
        random = np.random.default_rng(0)
        nudged = [
            one
            | {
                "x": one["x"]
                * (
                    1
                    + 2**-11
                    * torch.from_numpy(
                        random.choice([-1.0, 1.0], one["x"].shape).astype(np.float32)
                    )
                )
            }
            for one in inputs
        ]
        try:
            moved = difference(plain_steps(package, nudged, states), ends[0])
        except InputError:
            moved = None
        if moved and "differs by" in moved and rms_of(moved) >= rms_of(where) / 4:
            return "unstable", f"{where}, the literal path by {rms_of(moved)}"
    return ("differ", where) if where else ("equal", "")


def rms_of(where: str) -> float:
    return float(where.rpartition(" ")[2])


def batch(packages: list[Path], first: int, last: int, seed: int) -> None:
    """Runs edits `first` to `last` and prints one line of JSON for each, before the next one
    begins."""
    torch.set_num_threads(1)
    sound = {}
    for package in packages:
        program, random = miltorch.read(package), np.random.default_rng(0)
        states = {
            n: random.normal(size=t.shape).astype(np.float16).astype(np.float32)
            for n, t in program.states.items()
        }
        sound[package] = (
            miltorch.program.read_spec(package),
            calls(program, random),
            states,
        )
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, last):
            random = np.random.default_rng([seed, number])
            package = packages[number % len(packages)]
            spec, inputs, states = sound[package]
            copy = shutil.copytree(package, Path(folder) / f"{number}.mlpackage")
            changed = type(spec)()
            changed.CopyFrom(spec)
            if random.random() < 0.06:
                damage_weights(copy / WEIGHTS, random)
                what = "weights"
            else:
                try:
                    what = edit(changed, random)
                # a value that protobuf itself does not hold
                except ValueError as problem:
                    what = f"nothing ({problem})"
            (copy / MODEL).write_bytes(changed.SerializeToString())
            kind, where = outcome(copy, inputs, states)
            print(
                json.dumps([number, kind, f"{package.parent.name} {what}", where]),
                flush=True,
            )
            shutil.rmtree(copy)


def run(
    packages: list[Path], attempts: int, seed: int = 0
) -> list[tuple[int, str, str, str]]:
    """(number, outcome, edit, where the paths part) of every edit; a child that dies counts as a
    crash and is replaced."""
    rows, first = [], 0
    while first < attempts:
        last = min(first + BATCH, attempts)
        command = [
            sys.executable,
            __file__,
            "--batch",
            str(first),
            str(last),
            str(seed),
            *map(str, packages),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT
            )
            text, why = done.stdout, f"exit {done.returncode}: {done.stderr[-300:]}"
        except subprocess.TimeoutExpired as late:
            text, why = (late.stdout or b"").decode(), f"over {SECONDS} s"
        lines = [
            tuple(json.loads(line))
            for line in text.splitlines()
            if line.startswith("[")
        ]
        rows += lines
        first += len(lines)
        if first < last:
            rows.append((first, "crash", "", why))
            first += 1
    return rows


def main(attempts: int, seed: int = 0) -> None:
    from tests.tiny import Exports

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        exports = Exports(Path(folder))
        rows = run(packages_of(exports), attempts, seed)
    for row in rows:
        if row[1] not in GOOD:
            print(*row, sep=" | ")
    counts = Counter(kind for _, kind, *_ in rows)
    print(f"{attempts} changed programs: {dict(counts)}")
    if counts.keys() - set(GOOD):
        sys.exit(1)


def packages_of(exports, families=FAMILIES) -> list[Path]:
    """The package of the first layers of each family."""
    bundles = [
        exports.bundle(exports.checkpoint(family), **options)
        for family, options in families
    ]
    return [bundle.package(bundle.shards("layers")[0]) for bundle in bundles]


if __name__ == "__main__":
    coremltools()
    if sys.argv[1] == "--batch":
        batch([Path(p) for p in sys.argv[5:]], *map(int, sys.argv[2:5]))
    else:
        main(*map(int, sys.argv[1:]))
