"""The smallest package that shows a wrong operation, ready for a bug report: operations
before and behind it are dropped, then axes are shortened as long as the fault stays."""

import platform
import shutil
import tempfile
from pathlib import Path

import numpy as np

import miltorch
from miltorch.program import Op, Program, Ref
from miltorch.quiet import coremltools, frozen, quiet
from miltorch.steps import Constants
from workbench.check.device import DEVICE_FACTOR
from workbench.explain.cut import SHOWN, values
from workbench.explain.operation import Call, Finding, Search, sharply

MAX_OPS = 10
SMALLER = 1, 2, 0.25, 0.5  # sizes of an axis that are tried: absolute, then relative
SIZES = "shape", "begin", "end", "size", "reps", "split_sizes"  # parameters


def reduce(search: Search, found: Finding, out: Path, units: str) -> dict | None:
    """Writes `out`: the package, inputs, states and expected values (.npz), a script
    and a text for a bug report.

    Returns:
        Its operations, bytes and packages tried; None if the fault shows in no package
        of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        reduction = _Reduction(search, found, Path(folder))
        if not reduction.drop():
            return None
        reduction.shorten()
        return reduction.write(out, units)


class _Reduction:
    def __init__(self, search: Search, found: Finding, folder: Path):
        self.search, self.found, self.folder, self.count = search, found, folder, 0
        region, self.wrong, self.shown = found.region
        self.region = list(region)

    def drop(self) -> bool:
        """The fewest operations that show it: those that were named, or a few before
        them too. Whether there are such."""
        search = self.search
        for steps in range(1, MAX_OPS):
            boundary = search._boundary(self.region)
            part = search.flow.part([self.wrong], [*search.call.inputs, *boundary])
            every = search.expected[0] | search.call.inputs
            for name in boundary:
                if name in self.shown:
                    shape = every[name].shape
                    every[name] = self.shown[name].reshape(shape)
            self.inputs = {name: every[name] for name in part.inputs}
            self.states = {n: search.call.states[n] for n in part.states}
            held = Constants(part)
            self.constants = {n: v.numpy() for n, v in held.read() if np.ndim(v)}
            self.program = part
            if self.tried(self.inputs, self.states, self.constants):
                return True
            self.region = sorted({*self.region, *search._region(self.wrong, steps)})
            if len(self.region) > MAX_OPS:
                return False
        return False

    def shorten(self) -> None:
        """Makes every axis as short as the fault allows, longest first."""
        arrays = [
            *self.inputs.values(),
            *self.states.values(),
            *self.constants.values(),
        ]
        sizes = sorted({n for a in arrays for n in a.shape if n > 1}, reverse=True)
        for size in sizes:
            for smaller in SMALLER:
                target = int(smaller if smaller >= 1 else size * smaller)
                if 0 < target < size and self.tried(*self.short(size, target)):
                    break

    def short(self, size: int, target: int) -> list[dict[str, np.ndarray]]:
        """Inputs, states and constants whose axes of one size have another one."""
        shorter = []
        for arrays in (self.inputs, self.states, self.constants):
            cut = {}
            for name, array in arrays.items():
                places = [slice(target if n == size else n) for n in array.shape]
                cut[name] = np.ascontiguousarray(array[tuple(places)])
            shorter.append(cut)
        for op in self.program.block.ops:
            for name in [r.name for p in SIZES if (r := op.inputs.get(p)) in _refs(op)]:
                held = shorter[-1].get(name, np.zeros(0))
                shorter[-1][name] = np.where(held == size, target, held)
        return shorter

    def tried(self, inputs: dict, states: dict, constants: dict) -> bool:
        """Whether these values fit each other and still show the fault, which they then
        replace the current ones for."""
        self.count += 1
        path = self.folder / f"{self.count}.mlpackage"
        call = Call(inputs, states)
        try:
            with quiet():
                build(path, self.program, self.wrong, inputs, states, constants)
            pair = [
                values(each, inputs, states)[self.wrong]
                for each in self.search._executables(miltorch.read(path))
            ]
        except Exception:  # coremltools raises many where operands do not fit
            return False
        outcome = self.search.run(path, None, [call])
        if outcome.failure:
            return False
        found = outcome.value[0]
        value = found.get(self.wrong, found.get(self.wrong + SHOWN))
        value = value.reshape(pair[0].shape)
        self.search.report(1)
        if not sharply(*pair, value) > DEVICE_FACTOR:
            return False
        self.inputs, self.states, self.constants = inputs, states, constants
        self.package, self.pair, self.value = path, pair, value
        return True

    def write(self, out: Path, units: str) -> dict:
        shutil.copytree(self.package, out / "reduced.mlpackage", dirs_exist_ok=True)
        shutil.copyfile(Path(__file__).with_name("show.py"), out / "show.py")
        np.savez(out / "inputs.npz", **self.inputs)
        np.savez(
            out / "states.npz", **{n: np.float32(v) for n, v in self.states.items()}
        )
        name = next(iter(miltorch.read(self.package).outputs))
        if self.wrong in self.states:
            name = self.wrong
        np.savez(out / "expected.npz", **{name: np.float32(self.pair[0])})
        ops = [op.kind for op in self.program.block.ops if not op.constant]
        times = sharply(*self.pair, self.value)
        shapes = {n: list(v.shape) for n, v in (self.inputs | self.states).items()}
        result = {"ops": ops, "shapes": shapes, "times": times, "packages": self.count}
        files = (out / "reduced.mlpackage").rglob("*.*")
        result["bytes"] = sum(file.stat().st_size for file in files)
        lines = [
            f"{', '.join(ops)}: wrong result on {units}",
            "",
            f"machine: {platform.platform()}, {platform.machine()}",
            f"coremltools {coremltools().__version__}, Python {platform.python_version()}",
            f"found in: {self.found.json()}",
            f"operands: {shapes}",
            f"result: {self.wrong} {list(self.value.shape)}, {times:.3g} times what fp16"
            " rounding explains",
            f"reproduce: python show.py {units}",
        ]
        (out / "report.txt").write_text("\n".join(lines) + "\n")
        return result


def _refs(op: Op) -> list:
    return [source for source in op.inputs.values() if isinstance(source, Ref)]


def build(
    path: Path,
    program: Program,
    wrong: str,
    inputs: dict,
    states: dict,
    constants: dict,
) -> None:
    """Writes a program with fixed shapes and other constants, decompressed, through
    coremltools' builder; its output is one value.

    Raises:
        Exception: operands that do not fit each other.
    """
    ct = coremltools()
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import Function, types
    from coremltools.converters.mil.mil import Program as Made

    dtypes = {"FLOAT16": types.fp16, "FLOAT32": types.fp32, "INT32": types.int32}

    def value(source):
        if isinstance(source, list):
            return [value(each) for each in source]
        if isinstance(source, Ref):
            return known[source.name]
        if isinstance(source, np.ndarray) and not source.ndim:
            return source[()]
        return source

    declared = program.inputs | program.states
    slots = {
        name: make(array.shape, dtypes[declared[name].dtype])
        for arrays, make in (
            (inputs, mb.placeholder),
            (states, mb.state_tensor_placeholder),
        )
        for name, array in arrays.items()
    }
    with Function(slots, opset_version=ct.target.iOS18) as function:
        known = {name: function.inputs[name] for name in slots}
        for op in program.block.ops:
            name = op.outputs[0][0] if op.outputs else op.name
            given = {key: value(source) for key, source in op.inputs.items()}
            if op.constant:
                held = constants.get(name, given.get("val"))
                known[name] = held if held is None or np.ndim(held) else value(held)
                continue
            kind = op.kind
            if kind == "write_state":
                kind = "coreml_update_state"
                given = {"state": given["input"], "value": given["data"]}
            made = getattr(mb, kind)(**given, name=name)
            made = made if isinstance(made, (list, tuple)) else [made]
            for (output, _), result in zip(op.outputs, made):
                known[output] = result
                result.name = output
        shown = result if wrong in states else known[wrong]
        if shown.dtype is types.bool:
            shown = mb.cast(x=shown, dtype="int32", name=wrong + SHOWN)
        function.set_outputs([shown])
    whole = Made()
    whole.add_function("main", function)
    with frozen():
        model = ct.convert(
            whole,
            minimum_deployment_target=ct.target.iOS18,
            pass_pipeline=ct.PassPipeline.EMPTY,
            skip_model_load=True,
        )
    model.save(str(path))
