"""How a fault is planted in files: a copy of a bundle whose weights, programs, descriptions and
manifest can be edited.

`Copy.seal` writes the edits and updates every size and SHA-256 of bundle.json, so that the copy
opens like any bundle and only a gate can detect the edit.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from miltorch.coremltools_import import coremltools, protobuf_module
from miltorch.program import DTYPE_BITS, NUMPY, _Reader, spec_path
from workbench.files import sha256

ArrayChange = Callable[[np.ndarray], np.ndarray]


class StoredArray:
    """One array of a package, which can be read and overwritten.

    Attributes:
        value: the protobuf Value that holds the elements or gives their place in the weight file.
        dtype: name of the elements' type in MIL, such as "FLOAT16" or "UINT6".
        shape: of the array; `write` cannot change it.
    """

    def __init__(self, value, package: Path):
        tensor = value.type.tensorType
        self.value, self.package = value, package
        self.dtype = protobuf_module("MIL_pb2").DataType.Name(tensor.dataType)
        self.shape = tuple(d.constant.size for d in tensor.dimensions)

    def read(self) -> np.ndarray:
        """The elements; sub-byte integers have a byte each."""
        return np.array(_Reader(self.package).value(self.value))

    def write(self, array: np.ndarray) -> None:
        """Stores `array`, which has the same shape."""
        assert array.shape == self.shape, (array.shape, self.shape)
        values = np.ascontiguousarray(array).astype(NUMPY[self.dtype]).ravel()
        raw = values.view(np.uint8)
        if bits := DTYPE_BITS.get(self.dtype):
            all_bits = np.unpackbits(raw[:, None], axis=1, bitorder="little")
            raw = np.packbits(all_bits[:, :bits], bitorder="little")
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
    """A weight as its preset stores it.

    Attributes:
        arrays: by MIL's names: "val" for fp16; "data" and "scale" for integers; "indices" and "lut"
            for tables.
        role: the name of the array with an element for each weight: "val", "data" or "indices".
        codes: that array.
    """

    def __init__(self, arrays: dict[str, StoredArray]):
        self.arrays = arrays
        self.role = next(role for role in ("val", "data", "indices") if role in arrays)
        self.codes = arrays[self.role]

    def read(self) -> np.ndarray:
        """The weight, decompressed, float32."""
        codes = self.codes.read()
        if self.role == "indices":
            rows = codes.reshape(len(codes), -1).astype(int)
            return np.take_along_axis(self._tables(), rows, 1).reshape(codes.shape)
        return codes.astype(np.float32) * self._scales(codes.shape)

    def write(self, values: np.ndarray) -> None:
        """Stores the values nearest to `values` that the scale or the table can express."""
        codes = values
        if self.role == "indices":
            rows = values.reshape(len(values), -1, 1)
            codes = np.abs(rows - self._tables()[:, None]).argmin(-1)
            codes = codes.reshape(values.shape)
        elif self.role == "data":
            top = 127 if self.codes.dtype == "INT8" else 7
            codes = np.rint(values / self._scales(values.shape)).clip(-top, top)
        before = self.codes.read()
        self.codes.write(codes)
        is_lost = np.array_equal(before, self.codes.read())
        assert not is_lost, "this change is lost when it is stored"

    def scale(self, factor: float) -> None:
        """Multiplies the weight by way of its scale or table where it has one."""
        role = {"val": "val", "data": "scale", "indices": "lut"}[self.role]
        array = self.arrays[role]
        array.write(array.read().astype(np.float32) * factor)

    def scale_row(self, row: int, factor: float) -> None:
        """Multiplies one output channel, by its own scale where it has one."""
        scale = self.arrays.get("scale")
        by_scale = scale is not None and scale.shape[0] > 1
        stored = scale if by_scale else self
        values = stored.read().astype(np.float32)
        values[row] *= factor
        stored.write(values)

    def scale_row_by_draws(self, row: int, factor: float) -> None:
        """Multiplies one row of a weight with tables: each weight becomes one of the two entries
        around its multiple, drawn so that their mean is the multiple."""
        codes = self.codes.read()
        table = self._tables()[row]
        target = table[codes[row].ravel().astype(int)] * factor
        upper = np.searchsorted(table, target).clip(1, len(table) - 1)
        lower = upper - 1
        gap = np.maximum(table[upper] - table[lower], 1e-9)
        share = ((target - table[lower]) / gap).clip(0, 1)
        draws = np.random.default_rng(0).random(len(target))
        codes[row] = np.where(draws < share, upper, lower).reshape(codes[row].shape)
        self.codes.write(codes)

    def shift(self, steps: int) -> None:
        """Adds `steps` to every code, as a wrong zero point does; an fp16 weight moves by twice as
        many of fp16's steps."""
        codes = self.codes.read()
        if self.role == "val":
            shifted = codes.view(np.int16) + np.int16(2 * steps)
            self.codes.write(shifted.view(np.float16))
        else:
            ends = {"INT8": (-127, 127), "INT4": (-7, 7)}
            low, high = ends.get(self.codes.dtype, (0, codes.max()))
            self.codes.write((codes.astype(int) + steps).clip(low, high))

    def copy(self, other: "StoredWeight") -> None:
        """Takes the bytes of another weight of the same shape."""
        for role, array in self.arrays.items():
            array.write(other.arrays[role].read())

    def swap(self, other: "StoredWeight") -> None:
        """Exchanges the bytes with another weight of the same shape."""
        values = {role: array.read() for role, array in self.arrays.items()}
        self.copy(other)
        for role, array in other.arrays.items():
            array.write(values[role])

    def edit_tables(self, change: Callable[[np.ndarray], np.ndarray]) -> None:
        """Changes the lookup tables [groups, entries]; the indices stay."""
        lut = self.arrays["lut"]
        tables = lut.read()
        changed = change(tables.reshape(len(tables), -1).copy())
        assert not np.array_equal(changed, tables.reshape(changed.shape))
        lut.write(changed.reshape(tables.shape))

    def _tables(self) -> np.ndarray:
        """The lookup table of every row, [R, entries] float32."""
        tables = self.arrays["lut"].read().astype(np.float32)
        tables = tables.reshape(len(tables), -1)
        return tables.repeat(self.codes.shape[0] // len(tables), 0)

    def _scales(self, shape: tuple[int, ...]) -> np.ndarray | float:
        if self.role == "val":
            return 1.0
        scale = self.arrays["scale"].read().astype(np.float32)
        for axis, (size, count) in enumerate(zip(shape, scale.shape, strict=True)):
            scale = scale.repeat(size // count, axis)
        return scale


def find_source(op, parameter: str) -> str:
    """The name of the value that an operation reads."""
    return op.inputs[parameter].arguments[0].name


def list_arguments(op) -> list:
    """The arguments of an operation that are names of values."""
    return [
        argument
        for parameter in op.inputs.values()
        for argument in parameter.arguments
        if argument.WhichOneof("binding") == "name"
    ]


def rename_arguments(operations, names: dict[str, str]) -> None:
    """Makes operations read other values: `names` has the new name of each old one."""
    for op in operations:
        for argument in list_arguments(op):
            argument.name = names.get(argument.name, argument.name)


def is_constant(op) -> bool:
    return op.type == "const" or "constexpr" in op.type


class Copy:
    """A copy of a bundle that can be edited. Nothing of the manifest and of the programs is written
    before `seal`.

    Attributes:
        root: the folder of the copy.
        manifest: bundle.json as a dictionary, to be edited. A `shard` in a method's arguments is
            an entry of its "shards".
        function: name of the function whose program is edited, where packages have several. It is
            that of the smallest T until a fault sets it.
    """

    def __init__(self, source: Path, root: Path):
        coremltools()
        self.root = Path(shutil.copytree(source, root))
        self.manifest = json.loads((self.root / "bundle.json").read_text())
        first, *more = self.manifest["options"]["tokens"].split(",")
        self.function = f"t{first}" if more else "main"
        self._specs = {}

    def shard(self, layer: int | None = None, kind: str = "layers") -> dict:
        """The shard that holds a decoder layer, or the first of another kind."""
        for shard in self.manifest["shards"]:
            if shard["kind"] != kind:
                continue
            if layer is None or layer in range(*shard["layers"]):
                return shard
        raise LookupError(f"no shard of kind {kind} with layer {layer}")

    def spec(self, shard: dict):
        """The Model protobuf of a shard; edits of it are written by `seal`."""
        path = spec_path(self.root / shard["path"])
        if path not in self._specs:
            model = protobuf_module("Model_pb2").Model
            self._specs[path] = model.FromString(path.read_bytes())
        return self._specs[path]

    def block(self, shard: dict):
        """The operations of a shard's program and what they return, as a protobuf."""
        function = self.spec(shard).mlProgram.functions[self.function]
        return function.block_specializations[function.opset]

    def weight(self, tensor: str) -> StoredWeight:
        """How a checkpoint tensor is stored; `tensor` is the end of its name. Where several shards
        have a slice of it, the first slice."""
        for shard in self.manifest["shards"]:
            for full_name, constant in shard["weights"].items():
                if f".{full_name}".endswith(f".{tensor}"):
                    return self.constant(shard, constant)
        raise LookupError(tensor)

    def constant(self, shard: dict, name: str) -> StoredWeight:
        """How a constant of a program is stored."""
        package = self.root / shard["path"]
        op = self.find_operation_returning(shard, name)
        if op.type == "const":
            return StoredWeight({"val": StoredArray(op.attributes["val"], package)})
        arrays = {}
        for role in op.inputs:
            argument = op.inputs[role].arguments[0]
            if argument.WhichOneof("binding") == "name":
                arrays[role] = self.constant(shard, argument.name).codes
            else:
                arrays[role] = StoredArray(argument.value, package)
        return StoredWeight(arrays)

    def operations(self, shard: dict, kind: str, module: str = "") -> list:
        """The operations of a shard's program of this kind, at least one. `module` is a suffix of
        the path of the torch module that they came from."""
        operations = []
        for op in self.block(shard).operations:
            name = op.outputs[0].name if op.outputs else ""
            if op.type == kind and shard["modules"].get(name, "").endswith(module):
                operations.append(op)
        assert operations, (kind, module)
        return operations

    def find_operation_returning(self, shard: dict, name: str):
        """The operation whose first result has this name."""
        operations = self.block(shard).operations
        return next(
            op for op in operations if op.outputs and op.outputs[0].name == name
        )

    def feed(self, operation, parameter: str, name: str) -> None:
        """Makes an operation read the value `name`; `find_source` gives the present one."""
        assert parameter in operation.inputs
        operation.inputs[parameter].arguments[0].name = name

    def move_first(self, shard: dict, is_chosen: Callable = is_constant) -> None:
        """Moves the chosen operations of a shard's program before all others."""
        operations = self.block(shard).operations
        reordered = sorted(operations, key=lambda op: not is_chosen(op))
        del operations[:]
        operations.extend(reordered)

    def insert(self, shard: dict, after, kind: str, **inputs: np.ndarray) -> None:
        """Puts an operation behind `after`. It takes the result of `after` as `x` and constants as
        its other `inputs`; all later operations read its result instead."""
        operations, old = self.block(shard).operations, after.outputs[0].name
        name = f"planted_{old}"
        index = next(i for i, op in enumerate(operations) if op == after)
        later = list(operations[index + 1 :])
        del operations[index + 1 :]
        constants = [
            self._add_constant(operations, f"{name}_{parameter}", value)
            for parameter, value in inputs.items()
        ]
        op = operations.add(type=kind)
        op.outputs.add().CopyFrom(after.outputs[0])
        op.outputs[0].name = name
        op.inputs["x"].arguments.add(name=old)
        for parameter, constant in zip(inputs, constants, strict=True):
            op.inputs[parameter].arguments.add(name=constant)
        rename_arguments(later, {old: name})
        operations.extend(later)

    def _add_constant(self, operations, name: str, array: np.ndarray) -> str:
        from coremltools.converters.mil.backend.mil.helper import create_tensor_value

        op, value = operations.add(type="const"), create_tensor_value(array)
        op.attributes["val"].CopyFrom(value)
        op.outputs.add(name=name).type.CopyFrom(value.type)
        return name

    def edit_embedding(
        self, change: Callable[[np.ndarray], np.ndarray], name: str = "weight"
    ) -> None:
        """Changes one of the host's tables: `weight` [V, C] or `per_layer` [V, L·P]."""
        from safetensors.numpy import load_file, save_file

        path = self.root / self.manifest["embedding"]["file"]["path"]
        tensors = load_file(path)
        table = tensors[name]
        tensors[name] = change(table.copy()).astype(table.dtype)
        save_file(tensors, path)

    def edit_file(self, path: str, change: Callable[[bytes], bytes]) -> None:
        """Changes the content of a file of the bundle."""
        (self.root / path).write_bytes(change((self.root / path).read_bytes()))

    def seal(self) -> Path:
        """Writes programs and manifest, with the size and SHA-256 of every file as it is now.
        Returns the folder."""
        for path, spec in self._specs.items():
            path.write_bytes(spec.SerializeToString(deterministic=True))
        manifest = self.manifest
        for shard in manifest["shards"]:
            for entry in shard["files"]:
                self._update(entry)
            shard["bytes"] = sum(entry["bytes"] for entry in shard["files"])
        for entry in (manifest["embedding"]["file"], *manifest["tokens"]["files"]):
            self._update(entry)
        (self.root / "bundle.json").write_text(json.dumps(manifest, indent=1))
        return self.root

    def _update(self, entry: dict) -> None:
        path = self.root / entry["path"]
        entry |= {"bytes": path.stat().st_size, "sha256": sha256(path)}


Plant = Callable[[Copy], None]
LayerPlant = Callable[[Copy, int], None]
"""The `plant` of a `Fault` in files, and that of a fault in the shard of one layer."""
