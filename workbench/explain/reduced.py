"""The smallest package that shows a wrong operation, ready for a bug report: axes are
shortened as long as the fault stays."""

import platform
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np

import miltorch
from miltorch.program import refs
from miltorch.quiet import coremltools
from workbench.check.hf import Values
from workbench.explain.search import Finding, Proof, Search
from workbench.runtime import is_device

SIZES = "shape", "begin", "end", "size", "reps", "split_sizes"  # parameters


def reduce(search: Search, found: Finding, out: Path) -> dict:
    """Writes `out`: the package, inputs, states and expected values (.npz), a script
    and a text for a bug report.

    Returns:
        Its operations, shapes and bytes, and the error over what rounding explains.
    """
    flow = search.flow
    proof = search.proof
    arrays = proof.arrays.copy()
    for name in flow.operands(proof.ops):
        if name in flow.constants.ops and np.ndim(flow.constants[name]):
            arrays[name] = np.asarray(flow.constants[name])
    proof = search.test(proof.ops, arrays) or proof
    sizes = {n for array in proof.arrays.values() for n in array.shape if n > 1}
    for size in sorted(sizes, reverse=True):
        for target in sorted({1, 2, size // 4, size // 2} - {0, size}):
            if smaller := search.test(proof.ops, _short(search, proof, size, target)):
                proof = smaller
                break
    package = out / "reduced.mlpackage"
    shutil.copytree(proof.package, package, dirs_exist_ok=True)
    shutil.copyfile(Path(__file__).with_name("show.py"), out / "show.py")
    program = miltorch.read(package)
    files = {
        "inputs": {name: proof.arrays[name] for name in program.inputs},
        "states": {name: proof.arrays[name] for name in program.states},
        "expected": {n: proof.expected[n] for n in proof.wrong or program.outputs},
    }
    shapes = {}
    for file, values in files.items():
        values = {name: np.float32(value) for name, value in values.items()}
        np.savez(out / f"{file}.npz", **values)
        shapes |= {name: list(value.shape) for name, value in values.items()}
    units = search.run.units
    runtime = search.run.runtime
    on = f"{runtime}, {units}" if is_device(runtime) else runtime
    kinds = [flow.ops[index].kind for index in proof.ops]
    lines = [
        f"{', '.join(kinds)}: wrong result on {on}",
        "",
        f"machine: {platform.platform()}, {platform.machine()}",
        f"coremltools {coremltools().__version__}, Python {platform.python_version()}",
        f"found in: {asdict(found)}",
        f"shapes: {shapes}",
        proof.failure or f"error: {proof.times:.3g} times what fp16 rounding explains",
        f"reproduce: python show.py {units}",
    ]
    (out / "report.txt").write_text("\n".join(lines) + "\n")
    size = sum(file.stat().st_size for file in package.rglob("*.*"))
    return {"ops": kinds, "shapes": shapes, "times": proof.times, "bytes": size}


def _short(search: Search, proof: Proof, size: int, target: int) -> Values:
    """The arrays whose axes of one size have another one."""
    lists = set()  # arrays of sizes
    for index in proof.ops:
        inputs = search.flow.ops[index].inputs
        lists |= {ref.name for name in SIZES for ref in refs(inputs.get(name))}
    shorter = {}
    for name, array in proof.arrays.items():
        if name in lists:
            shorter[name] = np.where(array == size, target, array)
        else:
            places = tuple(slice(target if n == size else n) for n in array.shape)
            shorter[name] = np.ascontiguousarray(array[places])
    return shorter
