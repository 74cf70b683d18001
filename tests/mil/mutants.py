"""Programs changed by one edit, on both paths: `python -m tests.mil.mutants N [SEED]` edits the
programs of exported packages N times: an operation, an operand, a result, a type or an output.

The plain and the fused program then run on the inputs that the sound one takes: one token twice,
then three tokens twice.

Outcomes
    refused    both paths end in an InputError
    equal      all outputs and states agree within TOLERANCE, with the same non-finite values
    unstable   they do not, and neither do the plain program's own results after a change of x by half a unit in the last place
    differ     they do not, or one path alone refuses
Any other exception ends the run, as do too much time or memory.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import miltorch
from miltorch.ops import FUSED, OPERATIONS
from miltorch.program import NUMPY, Op, Program, Ref, Type
from workbench.check.compare import relative_rms
from workbench.errors import InputError
from workbench.runtime.base import native_inputs

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import tiny  # noqa: E402
from fuzz import attempts  # noqa: E402

FAMILIES = [
    ("llama", {}),
    ("llama", {"kv_write": "slice", "layout": "bc1t"}),
    ("qwen2", {"compress": "int8-tensor"}),
    ("qwen3", {"compress": "int4-block32"}),
    ("gemma3_text", {"sliding": "ring"}),
    ("zaya", {}),
]
CALLS = ((3, 1), (4, 1), (5, 3), (8, 3))  # (first position, T)
TOLERANCE = 1e-2  # relative RMS, of fp16 results
FLOATS = [0.0, -1.0, 2.0, 1e-3, 1e4, np.nan, np.inf]
# kinds of operations that a package may have
MIL = [kind for kind in OPERATIONS if kind not in FUSED]
INTEGERS = [-1, 0, 1, 2, 3, 1 << 20]


def altered(value, names: list[str], draw: Callable):
    """Another value of the same form.

    Args:
        names: of the values that a program may refer to.
        draw: takes one of several items.
    """
    match value:
        case Op():
            return replace(value, kind=draw(MIL))
        case (str(name), Type() as kind):
            return draw([(draw(names), kind), (name, altered(kind, names, draw))])
        case Type(dtype, shape):
            shape = [draw([n, n, None, 0, 1, 2 * (n or 1), 1 << 40]) for n in shape]
            dtype = draw([dtype, draw(NUMPY)])
            return replace(value, dtype=dtype, shape=tuple(shape))
        case np.ndarray() if value.size:
            value, first = np.array(value), draw(range(value.size))
            number = draw(FLOATS if value.dtype.kind == "f" else INTEGERS)
            value.flat[first : first + 16] = np.array(number).astype(value.dtype)
            return value
        case str():
            return draw(names)
    return draw([Ref(draw(names)), [value, value]])


def edited(program: Program, random: np.random.Generator) -> tuple[Program, str]:
    """A program after one edit, and the edit in words. One value (an operation, an operand, a
    result, a type or an output) is left out, altered, replaced by another of its kind, or
    exchanged with it."""
    ops = [
        replace(op, inputs=dict(op.inputs), outputs=list(op.outputs))
        for op in program.block.ops
    ]
    types, outputs = (dict(program.inputs), dict(program.states)), [*program.outputs]
    # coremltools orders constants by hashes that differ between processes
    names = sorted(name for op in ops for name, _ in op.outputs)
    names += [*sorted(program.inputs), "nothing"]

    def draw(items):
        items = list(items)
        return items[random.integers(len(items))]

    # constants are the majority, so one in four is enough
    is_constant = draw([True, False, False, False])
    indices = [i for i, op in enumerate(ops) if (op.kind == "const") == is_constant]
    indices.sort(key=lambda index: ops[index].name)
    candidates = [ops[i] for i in indices]
    # a place is a container and a key into it
    places_of = {
        "operation": [(ops, i) for i in indices],
        "operand": [(op.inputs, key) for op in candidates for key in sorted(op.inputs)],
        "result": [
            (op.outputs, i) for op in candidates for i in range(len(op.outputs))
        ],
        "type": [(table, name) for table in types for name in sorted(table)],
        "output": [(outputs, i) for i in range(len(outputs))],
    }
    kind = draw(places_of)
    container, key = draw(places_of[kind])
    other_container, other_key = draw(places_of[kind])
    value = container[key]
    change = draw(["left out", "altered", "exchanged", "replaced"])
    match change:
        case "left out":
            del container[key]
        case "altered":
            container[key] = altered(value, names, draw)
        case "replaced":
            container[key] = other_container[other_key]
        case "exchanged":
            container[key] = other_container[other_key]
            other_container[other_key] = value
    block = replace(program.block, ops=ops, outputs=outputs)
    inputs, states = types
    fields = {"inputs": inputs, "states": states, "outputs": outputs}
    return replace(program, block=block, **fields), f"{kind} {value!r:.80} {change}"


def programs_of(exports, families: list) -> list[tuple[Program, list[dict]]]:
    """The program of the first layers of each family, and the inputs of its calls."""
    random, programs = np.random.default_rng(0), []
    for family, options in families:
        decoder = exports.decoder(exports.checkpoint(family), **options)
        model, calls = decoder.layer_shards[0], []
        for position, T in CALLS:
            io = decoder.host.inputs(np.array([position]), np.array([T]), T)
            shapes = tiny.filled(model.shard, T)
            x = random.normal(size=shapes["x"].shape).astype(np.float16)
            inputs = native_inputs({name: io.get(name, x) for name in shapes})
            calls.append({name: torch.from_numpy(x) for name, x in inputs.items()})
        programs.append((miltorch.read(model.path), calls))
    return programs


def results_of(program: Program, calls: list[dict], fuse: bool) -> list | None:
    """Outputs and states after each of the calls; None if it is refused."""
    results = []
    try:
        runner = miltorch.Executable(miltorch.fuse(program) if fuse else program)
        cells = miltorch.make_state(program)
        for number, cell in enumerate(cells.values()):
            drawn = np.random.default_rng(number).normal(size=cell.value.shape)
            cell.value = torch.from_numpy(drawn.astype(np.float16)).to(cell.value.dtype)
        for inputs in calls:
            outputs = runner.run({n: x.clone() for n, x in inputs.items()}, cells)
            values = *outputs.values(), *(cell.value for cell in cells.values())
            # a changed program may return a string
            results += [value.double() for value in values if torch.is_tensor(value)]
    except InputError:
        return None
    return results


def difference(results: list, expected: list) -> float:
    """The largest relative RMS between the results of two runs; infinity for other shapes or
    other values that are not finite."""
    worst = 0.0
    for pair in zip(results, expected, strict=True):
        actual, reference = finite = [x.nan_to_num(0.0, 0.0, 0.0) for x in pair]
        if not np.array_equal(*map(torch.sub, pair, finite), equal_nan=True):
            return np.inf
        worst = max(worst, relative_rms(reference.numpy(), actual.numpy()))
    return worst


def outcome(program: Program, calls: list[dict]) -> str:
    """One of the outcomes above."""
    plain, fused = (results_of(program, calls, fuse) for fuse in (False, True))
    if plain is None or fused is None:
        return "refused" if plain is fused else "differ"
    error = difference(fused, plain)
    if error <= TOLERANCE:
        return "equal"
    random, nudged = np.random.default_rng(0), []
    for inputs in calls:
        signs = torch.from_numpy(random.choice([-1.0, 1.0], inputs["x"].shape)).float()
        nudged.append(inputs | {"x": inputs["x"] * (1 + 2**-11 * signs)})
    again = results_of(program, nudged, False)
    sensitivity = 0.0 if again is None else difference(again, plain)
    # half a unit of its inputs changes the plain program as much, or to other infinities
    return "unstable" if max(TOLERANCE, error / 4) <= sensitivity else "differ"


def run(programs: list[tuple], count: int, seed: int = 0) -> tuple[Counter, list]:
    """The number of edits with each outcome, and the edits on which the paths differ."""

    def attempt(random):
        program, calls = programs[random.integers(len(programs))]
        changed, edit = edited(program, random)
        return outcome(changed, calls), edit

    rows = attempts(count, seed, attempt)
    differing = [edit for result, edit in rows if result == "differ"]
    return Counter(result for result, _ in rows), differing


def main(count: int, seed: int = 0) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        programs = programs_of(tiny.Exports(Path(folder)), FAMILIES)
        counts, differing = run(programs, count, seed)
    print(*differing, f"{count} changed programs: {dict(counts)}", sep="\n")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
