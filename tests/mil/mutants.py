"""Mutation test of the portable runtime: `python -m tests.mil.mutants N [SEED]` edits the programs
of exported packages N times and runs each edited program both plain and fused.

An edit leaves out, alters, replaces or exchanges one operation, operand, result, type or output.
The edited program then runs on the inputs that the sound one takes: one token twice, then three
tokens twice.

Outcomes
    refused    both the plain and the fused program end in an InputError
    equal      all outputs and states agree within TOLERANCE, with the same values that are not
               finite
    unstable   they do not agree, but the plain program's own results move by at least a quarter of
               that difference when x moves by half a unit in the last place
    differ     they do not agree and the program is not unstable, or one of the two alone is refused
Any other exception ends the run, as do too much time or memory.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import miltorch
from miltorch.ops import FUSED, OPERATIONS
from miltorch.ops.state import StateCell
from miltorch.program import NUMPY, Op, Program, Ref, Type
from workbench.check.compare import relative_rms
from workbench.errors import InputError
from workbench.runtime.base import native_inputs

# `python -m tests.mil.mutants` lacks the folders that pytest puts on the path
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import tiny  # noqa: E402
from fuzz import run_attempts  # noqa: E402

Tensors = dict[str, torch.Tensor]

# (family, options of its export)
BUNDLES = [
    ("llama", {}),
    ("llama", {"kv_write": "slice", "layout": "bc1t"}),
    ("qwen2", {"compress": "int8-tensor"}),
    ("qwen3", {"compress": "int4-block32"}),
    ("gemma3_text", {"sliding": "ring"}),
    ("zaya", {}),
]
CALLS = ((3, 1), (4, 1), (5, 3), (8, 3))  # (position of the first token, tokens)
TOLERANCE = 1e-2  # relative RMS, of fp16 results
HALF_ULP = 2**-11  # half a unit in the last place of fp16, relative to 1
# what an edit puts into constants
FLOATS = [0.0, -1.0, 2.0, 1e-3, 1e4, np.nan, np.inf]
INTEGERS = [-1, 0, 1, 2, 3, 1 << 20]
# kinds of operations that a package may have
PACKAGE_KINDS = [kind for kind in OPERATIONS if kind not in FUSED]


@dataclass(frozen=True)
class Subject:
    """A sound program, and the inputs of each of its calls: float32 tensors by name."""

    program: Program
    calls: list[Tensors]


@dataclass(frozen=True)
class Place:
    """A place in a program that holds a value: a list or a dictionary, and an index or a key."""

    container: list | dict
    key: int | str

    def get(self):
        return self.container[self.key]

    def set(self, value) -> None:
        self.container[self.key] = value

    def delete(self) -> None:
        del self.container[self.key]


# --- edits --------------------------------------------------------------------------------


def alter(value, names: list[str], choose: Callable[[Iterable], object]):
    """Another value of the same form: of an operation, of a result (name, type), of a type, of a
    constant, of an output's name, or of the reference to an operand.

    Args:
        names: of the values that a program may refer to.
        choose: draws one of several items.
    """
    match value:
        case Op():
            return replace(value, kind=choose(PACKAGE_KINDS))
        case (str(name), Type() as declared):
            renamed = (choose(names), declared)
            retyped = (name, alter(declared, names, choose))
            return choose([renamed, retyped])
        case Type(dtype, shape):
            new_shape = []
            for n in shape:
                sizes = [n, n, None, 0, 1, 2 * (n or 1), 1 << 40]
                new_shape.append(choose(sizes))
            new_dtype = choose([dtype, choose(NUMPY)])
            return replace(value, dtype=new_dtype, shape=tuple(new_shape))
        case np.ndarray() if value.size:
            array = np.array(value)
            first = choose(range(array.size))
            number = choose(FLOATS if array.dtype.kind == "f" else INTEGERS)
            # a run of up to 16 elements
            array.flat[first : first + 16] = np.array(number).astype(array.dtype)
            return array
        case str():
            return choose(names)
    return choose([Ref(choose(names)), [value, value]])


def edit_program(program: Program, random: np.random.Generator) -> tuple[Program, str]:
    """A copy of a program with one edit, and the edit in words."""
    ops = [
        replace(op, inputs=dict(op.inputs), outputs=list(op.outputs))
        for op in program.block.ops
    ]
    inputs, states = dict(program.inputs), dict(program.states)
    outputs = list(program.outputs)
    # coremltools orders constants by hashes that differ between processes
    names = sorted(name for op in ops for name, _ in op.outputs)
    names += [*sorted(program.inputs), "nothing"]

    def choose(items: Iterable):
        items = list(items)
        return items[random.integers(len(items))]

    # constants are the majority, so one in four is enough
    edits_constant = choose([True, False, False, False])
    indices = [i for i, op in enumerate(ops) if (op.kind == "const") == edits_constant]
    indices.sort(key=lambda index: ops[index].name)
    candidates = [ops[index] for index in indices]
    places_of = {
        "operation": [Place(ops, index) for index in indices],
        "operand": [
            Place(op.inputs, parameter)
            for op in candidates
            for parameter in sorted(op.inputs)
        ],
        "result": [
            Place(op.outputs, number)
            for op in candidates
            for number in range(len(op.outputs))
        ],
        "type": [
            Place(types, name) for types in (inputs, states) for name in sorted(types)
        ],
        "output": [Place(outputs, number) for number in range(len(outputs))],
    }
    kind = choose(places_of)
    place, other_place = choose(places_of[kind]), choose(places_of[kind])
    value = place.get()
    change = choose(["left out", "altered", "exchanged", "replaced"])
    match change:
        case "left out":
            place.delete()
        case "altered":
            place.set(alter(value, names, choose))
        case "replaced":
            place.set(other_place.get())
        case "exchanged":
            place.set(other_place.get())
            other_place.set(value)
    block = replace(program.block, ops=ops, outputs=outputs)
    edited = replace(
        program, block=block, inputs=inputs, states=states, outputs=outputs
    )
    return edited, f"{kind} {value!r:.80} {change}"


# --- runs ---------------------------------------------------------------------------------


def export_subjects(
    exports: tiny.Exports, bundles: Sequence[tuple[str, dict]] = BUNDLES
) -> list[Subject]:
    """The program of the first layers of each bundle, with calls at the positions of `CALLS`."""
    random, subjects = np.random.default_rng(0), []
    for family, options in bundles:
        decoder = exports.decoder(exports.checkpoint(family), **options)
        model, calls = decoder.layer_shards[0], []
        for position, T in CALLS:
            computed = decoder.host.inputs(np.array([position]), np.array([T]), T)
            placeholders = tiny.make_inputs(model.shard, T)
            x = random.normal(size=placeholders["x"].shape).astype(np.float16)
            # every input of the shard that the host does not compute is x
            arrays = {name: computed.get(name, x) for name in placeholders}
            native = native_inputs(arrays)
            tensors = {name: torch.from_numpy(array) for name, array in native.items()}
            calls.append(tensors)
        subjects.append(Subject(miltorch.read(model.path), calls))
    return subjects


def make_random_state(program: Program) -> dict[str, StateCell]:
    """States of seeded normal draws, rounded to fp16."""
    cells = miltorch.make_state(program)
    for number, cell in enumerate(cells.values()):
        values = np.random.default_rng(number).normal(size=cell.value.shape)
        rounded = torch.from_numpy(values.astype(np.float16))
        cell.value = rounded.to(cell.value.dtype)
    return cells


def compute_results(
    program: Program, calls: list[Tensors], fuse: bool
) -> list[torch.Tensor] | None:
    """The outputs and states after each of the calls, in float64; None if the program is
    refused."""
    results = []
    try:
        executable = miltorch.Executable(miltorch.fuse(program) if fuse else program)
        cells = make_random_state(program)
        for inputs in calls:
            copies = {name: tensor.clone() for name, tensor in inputs.items()}
            outputs = executable.run(copies, cells)
            values = [*outputs.values(), *(cell.value for cell in cells.values())]
            # an edited program may return a string
            results += [value.double() for value in values if torch.is_tensor(value)]
    except InputError:
        return None
    return results


def finite_part(x: torch.Tensor) -> torch.Tensor:
    """x with zeros in the place of NaN and infinities."""
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def largest_difference(
    results: list[torch.Tensor], expected: list[torch.Tensor]
) -> float:
    """The largest relative RMS between the results of two runs; infinity where shapes, or values
    that are not finite, differ."""
    worst = 0.0
    for actual, reference in zip(results, expected, strict=True):
        finite_actual, finite_reference = finite_part(actual), finite_part(reference)
        # NaN or an infinity where the value is one, and 0 elsewhere
        rest_of_actual = actual - finite_actual
        rest_of_reference = reference - finite_reference
        if not np.array_equal(rest_of_actual, rest_of_reference, equal_nan=True):
            return np.inf
        error = relative_rms(finite_reference.numpy(), finite_actual.numpy())
        worst = max(worst, error)
    return worst


def nudge(calls: list[Tensors]) -> list[Tensors]:
    """The calls with every element of x half a unit in the last place larger or smaller."""
    random, nudged = np.random.default_rng(0), []
    for inputs in calls:
        x = inputs["x"]
        signs = torch.from_numpy(random.choice([-1.0, 1.0], x.shape)).float()
        nudged.append(inputs | {"x": x * (1 + HALF_ULP * signs)})
    return nudged


def classify(program: Program, calls: list[Tensors]) -> str:
    """The outcome of a program, one of those at the top of this file."""
    plain = compute_results(program, calls, fuse=False)
    fused = compute_results(program, calls, fuse=True)
    if plain is None and fused is None:
        return "refused"
    if plain is None or fused is None:
        return "differ"
    error = largest_difference(fused, plain)
    if error <= TOLERANCE:
        return "equal"
    nudged = compute_results(program, nudge(calls), fuse=False)
    if nudged is None:
        return "differ"
    # infinite where other values become infinite or NaN, like the error
    sensitivity = largest_difference(nudged, plain)
    return "unstable" if sensitivity >= max(TOLERANCE, error / 4) else "differ"


def run_edits(
    subjects: list[Subject], count: int, seed: int = 0
) -> tuple[Counter, list[str]]:
    """The number of edits with each outcome, and the edits with the outcome `differ`, in
    words."""

    def attempt(random: np.random.Generator) -> tuple[str, str]:
        subject = subjects[random.integers(len(subjects))]
        edited, edit = edit_program(subject.program, random)
        return classify(edited, subject.calls), edit

    attempts = run_attempts(count, seed, attempt)
    differing = [edit for outcome, edit in attempts if outcome == "differ"]
    return Counter(outcome for outcome, _ in attempts), differing


def main(count: int, seed: int = 0) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        subjects = export_subjects(tiny.Exports(Path(folder)))
        counts, differing = run_edits(subjects, count, seed)
    print(*differing, f"{count} edited programs: {dict(counts)}", sep="\n")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
