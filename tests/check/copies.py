"""A copy of a bundle on disk that a test edits: its weight files, its programs, its descriptions,
its manifest.

`Copy.seal` writes what was edited and brings every size and SHA-256 of bundle.json up to date, so
that the copy opens like any bundle and nothing but a gate can notice the edit.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from miltorch.program import DTYPE_BITS, NUMPY, _Reader, spec_path
from miltorch.quiet import coremltools, messages
from workbench.files import sha256


class StoredArray:
    """One array of a package: the protobuf value that holds it, or says where in the weight file it
    lies. `miltorch` reads it, nothing of which writes it."""

    def __init__(self, value, package: Path):
        tensor = value.type.tensorType
        self.value, self.package = value, package
        self.dtype = messages("MIL_pb2").DataType.Name(tensor.dataType)
        self.shape = tuple(d.constant.size for d in tensor.dimensions)

    def read(self) -> np.ndarray:
        """Its elements, those of sub-byte integers one per byte."""
        return np.array(_Reader(self.package).value(self.value))

    def write(self, array: np.ndarray) -> None:
        """Puts `array`, of the same shape, in its place."""
        assert array.shape == self.shape, (array.shape, self.shape)
        values = np.ascontiguousarray(array).astype(NUMPY[self.dtype]).ravel()
        raw = values.view(np.uint8)
        if bits := DTYPE_BITS.get(self.dtype):
            every = np.unpackbits(raw[:, None], axis=1, bitorder="little")
            raw = np.packbits(every[:, :bits], bitorder="little")
        if self.value.WhichOneof("value") == "blobFileValue":
            payload = self._payload()
            payload[: len(raw)] = raw
            payload.flush()
            return
        tensor = self.value.immediateValue.tensor
        field = tensor.WhichOneof("value")
        if field == "bytes":
            tensor.bytes.values = raw.tobytes()
        else:
            getattr(tensor, field).values[:] = values.tolist()

    def _payload(self) -> np.memmap:
        blob = self.value.blobFileValue
        folder = spec_path(self.package).parent
        path = folder / blob.fileName.removeprefix("@model_path/")
        record = np.memmap(path, np.uint8, mode="r")[blob.offset : blob.offset + 64]
        size, start = record[8:24].view(np.uint64).tolist()
        return np.memmap(path, np.uint8, mode="r+", offset=start, shape=(size,))


class StoredWeight:
    """A weight as its preset stores it: `arrays` by role (val; data and scale; indices and lut),
    `codes` the one that has an entry per weight."""

    def __init__(self, arrays: dict[str, StoredArray]):
        self.arrays = arrays
        self.role = next(r for r in ("val", "data", "indices") if r in arrays)
        self.codes = arrays[self.role]

    def read(self) -> np.ndarray:
        """The weight, decompressed, float32."""
        codes = self.codes.read()
        if self.role == "indices":
            return self._table()[codes]
        return codes.astype(np.float32) * self._scales(codes.shape)

    def write(self, values: np.ndarray) -> None:
        """Stores what is nearest to `values` among what scale or table can express."""
        codes = values
        if self.role == "indices":
            codes = np.abs(values[..., None] - self._table()).argmin(-1)
        elif self.role == "data":
            top = 127 if self.codes.dtype == "INT8" else 7
            codes = np.rint(values / self._scales(values.shape)).clip(-top, top)
        before = self.codes.read()
        self.codes.write(codes)
        lost = np.array_equal(before, self.codes.read())
        assert not lost, "this change is lost when it is stored"

    def scale(self, factor: float) -> None:
        """Multiplies the weight by way of its scale or table where it has one."""
        array = self.arrays[
            {"val": "val", "data": "scale", "indices": "lut"}[self.role]
        ]
        array.write(array.read().astype(np.float32) * factor)

    def scale_row(self, row: int, factor: float) -> None:
        """Multiplies one output channel, by its own scale where it has one."""
        scale = self.arrays.get("scale")
        by_scale = scale is not None and scale.shape[0] > 1
        stored = scale if by_scale else self
        values = stored.read().astype(np.float32)
        values[row] *= factor
        stored.write(values)

    def shift(self, steps: int) -> None:
        """Moves every weight by `steps` of what its storage can tell apart, floats by twice as
        many, as a wrong zero point does."""
        codes = self.codes.read()
        if self.role == "val":
            moved = codes.view(np.int16) + np.int16(2 * steps)
            self.codes.write(moved.view(np.float16))
        else:
            ends = {"INT8": (-127, 127), "INT4": (-7, 7)}
            low, high = ends.get(self.codes.dtype, (0, codes.max()))
            self.codes.write((codes.astype(int) + steps).clip(low, high))

    def copy(self, other: "StoredWeight") -> None:
        """Takes the bytes of another weight of the same shape."""
        for role, array in self.arrays.items():
            array.write(other.arrays[role].read())

    def swap(self, other: "StoredWeight") -> None:
        values = {role: array.read() for role, array in self.arrays.items()}
        self.copy(other)
        for role, array in other.arrays.items():
            array.write(values[role])

    def _table(self) -> np.ndarray:
        return self.arrays["lut"].read().ravel().astype(np.float32)

    def _scales(self, shape: tuple[int, ...]) -> np.ndarray | float:
        if self.role == "val":
            return 1.0
        scale = self.arrays["scale"].read().astype(np.float32)
        for axis, (size, count) in enumerate(zip(shape, scale.shape, strict=True)):
            scale = scale.repeat(size // count, axis)
        return scale


def source(op, parameter: str) -> str:
    """The value that an operation reads."""
    return op.inputs[parameter].arguments[0].name


def arguments(op) -> list:
    """The values, by name, that an operation reads."""
    bound = [bound for argument in op.inputs.values() for bound in argument.arguments]
    return [each for each in bound if each.WhichOneof("binding") == "name"]


def renamed(operations, names: dict[str, str]) -> None:
    """Makes operations read other values in the place of these."""
    for op in operations:
        for bound in arguments(op):
            bound.name = names.get(bound.name, bound.name)


def is_constant(op) -> bool:
    return op.type == "const" or "constexpr" in op.type


class Copy:
    """A copy of the bundle at `source` in `root`. `manifest` is bundle.json as a dictionary, to be
    edited. `function`: whose program is edited where packages have several; the smallest T's unless
    it is set."""

    def __init__(self, source: Path, root: Path):
        coremltools()
        self.root = Path(shutil.copytree(source, root))
        self.manifest = json.loads((self.root / "bundle.json").read_text())
        first, *more = self.manifest["options"]["tokens"].split(",")
        self.function = f"t{first}" if more else "main"
        self._specs = {}

    def shard(self, layer: int | None = None, kind: str = "layers") -> dict:
        """The shard that holds a decoder layer, or the first of another kind."""
        return next(
            s
            for s in self.manifest["shards"]
            if s["kind"] == kind and (layer is None or layer in range(*s["layers"]))
        )

    def spec(self, shard: dict):
        """The Model protobuf of a shard; what is changed in it is written by `seal`."""
        path = spec_path(self.root / shard["path"])
        if path not in self._specs:
            model = messages("Model_pb2").Model
            self._specs[path] = model.FromString(path.read_bytes())
        return self._specs[path]

    def block(self, shard: dict):
        function = self.spec(shard).mlProgram.functions[self.function]
        return function.block_specializations[function.opset]

    def weight(self, tensor: str) -> StoredWeight:
        """The stored form of a checkpoint tensor, its name given from its end; of several slices
        the first."""
        shard, name = next(
            (shard, name)
            for shard in self.manifest["shards"]
            for full, name in shard["weights"].items()
            if f".{full}".endswith(f".{tensor}")
        )
        return self.constant(shard, name)

    def constant(self, shard: dict, name: str) -> StoredWeight:
        """The stored form of a program's constant."""
        package = self.root / shard["path"]
        op = self.making(shard, name)
        if op.type == "const":
            return StoredWeight({"val": StoredArray(op.attributes["val"], package)})
        arrays = {}
        for role in op.inputs:
            bound = op.inputs[role].arguments[0]
            if bound.WhichOneof("binding") == "name":
                arrays[role] = self.constant(shard, bound.name).codes
            else:
                arrays[role] = StoredArray(bound.value, package)
        return StoredWeight(arrays)

    def operations(self, shard: dict, kind: str, module: str = "") -> list:
        """Operations of a shard's program by kind and source module (a suffix of its path), at
        least one."""
        found = []
        for op in self.block(shard).operations:
            name = op.outputs[0].name if op.outputs else ""
            if op.type == kind and shard["modules"].get(name, "").endswith(module):
                found.append(op)
        assert found, (kind, module)
        return found

    def making(self, shard: dict, name: str):
        """The operation whose first result has this name."""
        operations = self.block(shard).operations
        return next(o for o in operations if o.outputs and o.outputs[0].name == name)

    def feed(self, operation, parameter: str, name: str) -> None:
        """Makes an operation read another value."""
        assert parameter in operation.inputs
        operation.inputs[parameter].arguments[0].name = name

    def first(self, shard: dict, chosen: Callable = is_constant) -> None:
        """Moves the chosen operations of a shard's program before all others."""
        operations = self.block(shard).operations
        made = sorted(operations, key=lambda op: not chosen(op))
        del operations[:]
        operations.extend(made)

    def insert(self, shard: dict, after, kind: str, **inputs: np.ndarray) -> None:
        """Puts an operation behind `after`, whose result it takes as `x`; all later readers take
        what it returns."""
        operations, old = self.block(shard).operations, after.outputs[0].name
        name = f"planted_{old}"
        index = next(i for i, op in enumerate(operations) if op == after)
        later = list(operations[index + 1 :])
        del operations[index + 1 :]
        made = [self._const(operations, f"{name}_{p}", v) for p, v in inputs.items()]
        op = operations.add(type=kind)
        op.outputs.add().CopyFrom(after.outputs[0])
        op.outputs[0].name = name
        op.inputs["x"].arguments.add(name=old)
        for parameter, constant in zip(inputs, made, strict=True):
            op.inputs[parameter].arguments.add(name=constant)
        renamed(later, {old: name})
        operations.extend(later)

    def _const(self, operations, name: str, value: np.ndarray) -> str:
        from coremltools.converters.mil.backend.mil.helper import create_tensor_value

        op, held = operations.add(type="const"), create_tensor_value(value)
        op.attributes["val"].CopyFrom(held)
        op.outputs.add(name=name).type.CopyFrom(held.type)
        return name

    def embedding(self, change: Callable[[np.ndarray], np.ndarray]) -> None:
        """Changes the host's embedding table [V, C]."""
        from safetensors.numpy import load_file, save_file

        path = self.root / self.manifest["embedding"]["file"]["path"]
        tensors = load_file(path)
        table = tensors["weight"]
        tensors["weight"] = change(table.copy()).astype(table.dtype)
        save_file(tensors, path)

    def file(self, path: str, change: Callable[[bytes], bytes]) -> None:
        (self.root / path).write_bytes(change((self.root / path).read_bytes()))

    def seal(self) -> Path:
        """Writes programs and manifest, every file's size and SHA-256 brought up to date; returns
        the folder."""
        for path, spec in self._specs.items():
            path.write_bytes(spec.SerializeToString(deterministic=True))
        manifest = self.manifest
        for shard in manifest["shards"]:
            for entry in shard["files"]:
                self._renew(entry)
            shard["bytes"] = sum(entry["bytes"] for entry in shard["files"])
        for entry in (manifest["embedding"]["file"], *manifest["tokens"]["files"]):
            self._renew(entry)
        (self.root / "bundle.json").write_text(json.dumps(manifest, indent=1))
        return self.root

    def _renew(self, entry: dict) -> None:
        path = self.root / entry["path"]
        entry |= {"bytes": path.stat().st_size, "sha256": sha256(path)}
