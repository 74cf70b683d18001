"""Writes the smallest package that shows a wrong operation, ready for a bug report: axes
are shortened as long as the fault still shows."""

import platform
import shutil
from pathlib import Path

import numpy as np

import miltorch
from miltorch.coremltools_import import coremltools
from miltorch.program import refs
from workbench.explain.running import Arrays
from workbench.explain.search import Finding, Proof, Search
from workbench.runtime import is_device

# parameters of operations whose values are sizes of axes
SIZES = "shape", "begin", "end", "size", "reps", "split_sizes"


def reduce(search: Search, finding: Finding, proof: Proof, out: Path) -> dict:
    """Writes into `out` the package, its inputs, states and expected values (.npz), a
    script, and a text for a bug report.

    Args:
        search: that gave `finding` and `proof`.

    Returns:
        The kinds of its operations `ops`, the `shapes` of its arrays, `bytes`, and
        `times`, the error over what rounding explains.
    """
    flow = search.flow
    arrays = proof.arrays.copy()
    # constants become arrays too, so that their axes can be shortened
    for name in flow.operands(proof.indices):
        if name in flow.constants.ops and np.ndim(flow.constants[name]):
            arrays[name] = np.asarray(flow.constants[name])
    with_arrays = search.prove_wrong(proof.indices, arrays)
    # with constants as inputs the fault may vanish: the first proof stays then
    if with_arrays:
        proof = with_arrays
    proof = _shorten(search, proof)
    package = out / "reduced.mlpackage"
    shutil.copytree(proof.package, package, dirs_exist_ok=True)
    shutil.copyfile(Path(__file__).with_name("show.py"), out / "show.py")
    program = miltorch.read(package)
    # a package that does not run has no wrong values: all outputs are expected then
    names = list(proof.wrong or program.outputs)
    files = {
        "inputs": {name: proof.arrays[name] for name in program.inputs},
        "states": {name: proof.arrays[name] for name in program.states},
        "expected": {name: proof.expected[name] for name in names},
    }
    shapes = {}
    for file, values in files.items():
        values = {name: np.float32(value) for name, value in values.items()}
        np.savez(out / f"{file}.npz", **values)
        shapes |= {name: list(value.shape) for name, value in values.items()}
    kinds = [flow.ops[index].kind for index in proof.indices]
    report = _report(search, finding, proof, kinds, shapes)
    (out / "report.txt").write_text(report)
    size = sum(file.stat().st_size for file in package.rglob("*.*"))
    return {
        "ops": kinds,
        "shapes": shapes,
        "times": proof.rounding_ratio,
        "bytes": size,
    }


def _shorten(search: Search, proof: Proof) -> Proof:
    """The proof with every size of an axis replaced by the smallest one tried with
    which the fault still shows."""
    sizes = {n for array in proof.arrays.values() for n in array.shape if n > 1}
    for size in sorted(sizes, reverse=True):
        for shorter in sorted({1, 2, size // 4, size // 2} - {0, size}):
            arrays = _cut_axes(search, proof, size, shorter)
            smaller = search.prove_wrong(proof.indices, arrays)
            if smaller:
                proof = smaller
                break
    return proof


def _cut_axes(search: Search, proof: Proof, size: int, shorter: int) -> Arrays:
    """The arrays of a proof, with every axis of `size` elements cut to its first `shorter`."""
    lists_of_sizes = set()
    for index in proof.indices:
        inputs = search.flow.ops[index].inputs
        for parameter in SIZES:
            lists_of_sizes |= {ref.name for ref in refs(inputs.get(parameter))}
    arrays = {}
    for name, array in proof.arrays.items():
        if name in lists_of_sizes:
            # Two axes of one size are shortened together. Where operations and arrays then
            # no longer fit, `Search.prove_wrong` returns None.
            arrays[name] = np.where(array == size, shorter, array)
        else:
            places = tuple(slice(shorter if n == size else n) for n in array.shape)
            arrays[name] = np.ascontiguousarray(array[places])
    return arrays


def _report(
    search: Search, finding: Finding, proof: Proof, kinds: list[str], shapes: dict
) -> str:
    """The text for a bug report."""
    units, runtime = search.runner.units, search.runner.runtime
    tested = f"{runtime}, {units}" if is_device(runtime) else runtime
    error = f"error: {proof.rounding_ratio:.3g} times what fp16 rounding explains"
    lines = [
        f"{', '.join(kinds)}: wrong result on {tested}",
        "",
        f"machine: {platform.platform()}, {platform.machine()}",
        f"coremltools {coremltools().__version__}, Python {platform.python_version()}",
        f"found in: {finding.json()}",
        f"shapes: {shapes}",
        proof.failure or error,
        f"reproduce: python show.py {units}",
    ]
    return "\n".join(lines) + "\n"
