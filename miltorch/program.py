"""`.mlpackage` → `Program`: functions of typed operations whose constants are NumPy
arrays or weight-file views.

Reads the protobuf itself and evaluates nothing, so that a damaged or hostile package
ends in an `InputError` before any operation runs. How an operation is computed is in
`ops`."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import numpy as np

from miltorch.blob import DTYPE_BITS, NUMPY, BlobFile, unpack_bits
from miltorch.coremltools_import import protobuf_module
from miltorch.errors import InputError

MAX_SPEC_BYTES = 1 << 30
# suffix → what a file or folder without a manifest is
OTHER_MODELS = {".mlmodelc": "a compiled model", ".mlmodel": "a single .mlmodel file"}


@dataclass(frozen=True)
class Type:
    """Declared type of a value. `kind` is tensor, state, list or dict; a size that is known only
    at run time is None."""

    dtype: str
    shape: tuple[int | None, ...] = ()
    kind: str = "tensor"

    def allows(self, shape: Sequence[int]) -> bool:
        """Whether a shape, in which -1 is any size, has the declared rank, and the
        declared sizes where they are known."""
        agrees = len(shape) == len(self.shape) and all(
            n == -1 or size in (None, n) for n, size in zip(shape, self.shape)
        )
        return agrees or set(self.shape) == {None}  # no size is known: any rank passes


@dataclass(frozen=True)
class Ref:
    """The name of a value computed elsewhere in the program."""

    name: str


# The value of a MIL parameter: computed elsewhere, or a literal (a plain string is one)
Literal = np.ndarray | str | dict
Argument = Ref | Literal | list["Ref | Literal"]


@dataclass
class Op:
    """One operation. `inputs` maps each MIL parameter that is given to its argument: a
    `Ref`, a literal (an array, a string, a dict), or a list of these. Attributes are
    parameters, too."""

    kind: str
    name: str
    inputs: dict[str, Argument]
    outputs: list[tuple[str, Type]]
    blocks: list["Block"] = field(default_factory=list)

    @property
    def key(self) -> str | int:
        """Identifies the operation in its program: the name of its first result, since no
        two values have one name. An operation without a result, such as a write, has its
        `id`, which is valid as long as the operation exists."""
        if self.outputs:
            return self.outputs[0][0]
        return id(self)

    @property
    def is_constant(self) -> bool:
        """Whether its results are known before the program runs: a plain constant or a
        compressed weight."""
        return self.kind == "const" or self.kind.startswith("constexpr_")

    def reads(self) -> list[str]:
        """Names of the values and states that the operation itself reads, without those
        of its blocks."""
        return [ref.name for value in self.inputs.values() for ref in refs(value)]


@dataclass
class Block:
    """Operations in order, with the names and types of the block's inputs and the names of
    its outputs. Operations of nested blocks also read the values around them."""

    inputs: list[tuple[str, Type]]
    ops: list[Op]
    outputs: list[str]

    def walk(self) -> Iterator[Op]:
        """Every operation, nested blocks included, in order of execution."""
        for op in self.ops:
            yield op
            for block in op.blocks:
                yield from block.walk()


def refs(argument: Argument | None) -> list[Ref]:
    """The values that an argument names."""
    elements = argument if isinstance(argument, list) else [argument]
    return [element for element in elements if isinstance(element, Ref)]


@dataclass
class Program:
    """One function of a package, with the interface that its description states.

    Attributes:
        block: its operations; None where they were released, so that the file of the
            weights is mapped no longer.
        description: the protobuf message FunctionDescription: dtypes at the package's
            boundary.
        is_fused: whether `miltorch.fuse` returned it with operations in place of groups.
        unfused: for such a program, the operations that resemble the last one of a group and
            belong to none: name → reason.
        not_fused_because: why `miltorch.fuse` returned the program as it was; "" otherwise.
    """

    package: Path
    function: str
    inputs: dict[str, Type]
    states: dict[str, Type]
    outputs: list[str]
    block: Block | None
    description: object
    is_fused: bool = False
    unfused: dict[str, str] = field(default_factory=dict)
    not_fused_because: str = ""


@contextmanager
def operation_errors(program: Program, op: Op) -> Iterator[None]:
    """Context manager that turns every exception which an operation of `program` causes
    into an InputError that names the operation."""
    try:
        yield
    except InputError:
        raise
    # torch and NumPy raise many kinds where operands do not fit
    except Exception as problem:
        raise operation_error(program, op, problem) from problem


def operation_error(program: Program, op: Op, problem: Exception) -> InputError:
    """The error of an operation that cannot take its operands."""
    return InputError(
        f"{op.kind} {op.name!r}",
        f"{type(problem).__name__}: {problem}",
        "operands this operation accepts",
        f"check the inputs, then export {program.package.name} again",
    )


def _refuse(
    path: Path,
    actual: str,
    needed="a Core ML ML Program (.mlpackage)",
    next_step="export the model again",
):
    raise InputError(str(path), actual, needed, next_step)


def check_inside(package: Path, folder: Path, name: str) -> Path:
    """Returns the path of the file `name` of `folder`, a folder of `package`.

    Raises:
        InputError: no such file, an absolute path, one with `..` or with a symlink in it.
            The links of a Hub cache are allowed, see `_is_blob`.
    """
    relative = _check_relative(package, name)
    path = folder / relative
    if not os.path.isfile(path):  # also False for names that no file can have
        _refuse(
            path,
            "no such file",
            "every file that the package refers to",
            "copy the whole package",
        )
    place = package.resolve() / path.relative_to(package)
    if path.resolve() != place and not _is_blob(place):
        _refuse(path, "a symlink", "a regular file", "do not run this package")
    return path


def _check_relative(package: Path, name: str) -> PurePosixPath:
    """Returns a path in a package; refuses an absolute one and `..`."""
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        _refuse(
            package,
            f"the path {name!r}",
            "a path inside the package",
            "do not run this package",
        )
    return relative


def _is_blob(path: Path) -> bool:
    """Whether a file of a snapshot in the Hub's cache is a link into the `blobs` of the
    same model, as every file there is.

    `path` is absolute and passes through no link before its last part."""
    if path.parent.resolve() != path.parent:
        return False
    models = (
        above.parent
        for above in path.parents
        if above.name == "snapshots" and above.parent.name.startswith("models--")
    )
    return any(path.resolve().parent == model / "blobs" for model in models)


def _read_manifest(package: Path) -> tuple[dict, str]:
    """The paths of the items in a package's Manifest.json by their identifiers, and the
    identifier of the model."""
    manifest = package / "Manifest.json"
    if not package.exists():
        _refuse(package, "nothing there")
    if not manifest.is_file():
        _refuse(package, OTHER_MODELS.get(package.suffix, "no Manifest.json in it"))
    check_inside(package, package, manifest.name)
    if manifest.stat().st_size > 1 << 20:
        _refuse(manifest, "a manifest over 1 MiB")
    try:
        fields = json.loads(manifest.read_text())
        items = {key: str(i["path"]) for key, i in fields["itemInfoEntries"].items()}
        root = fields["rootModelIdentifier"]
        items[root]  # a KeyError, if the manifest has no such item
        return items, root
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        _refuse(manifest, f"no root model entry ({type(problem).__name__})")


def spec_path(package: Path) -> Path:
    """The model file that a package's Manifest.json names, refusing every path that
    leaves the package."""
    items, root = _read_manifest(package)
    return check_inside(package, package / "Data", items[root])


def files(package: Path) -> list[PurePosixPath]:
    """The files that a package consists of, relative to it: its Manifest.json, the
    items that this names, and what is in those that are folders.

    Raises:
        InputError: an item that is missing, a link to a folder, or a link that leaves the
            package and is none of a Hub cache.
    """
    items, _ = _read_manifest(package)
    relative = [PurePosixPath("Manifest.json")]
    for name in items.values():
        item = PurePosixPath("Data") / _check_relative(package, name)
        if not (package / item).is_dir():
            relative.append(item)
            continue
        for folder, below, names in os.walk(package / item):
            place = Path(folder).relative_to(package)
            if links := [n for n in below if (Path(folder) / n).is_symlink()]:
                _refuse(Path(folder) / links[0], "a link to a folder", "a folder")
            relative += [PurePosixPath(place / name) for name in names]
    for name in relative:
        check_inside(package, package, str(name))
    return sorted(dict.fromkeys(relative))


def read_spec(package: Path):
    """The Model protobuf of a package; refuses Git LFS pointers, other model types and
    undecodable bytes."""
    path = spec_path(package)
    if path.stat().st_size > MAX_SPEC_BYTES:
        _refuse(path, f"a model description of {path.stat().st_size} bytes")
    data = path.read_bytes()
    if data.startswith(b"version https://git-lfs"):
        _refuse(path, "a Git LFS pointer", "the model file itself", "run: git lfs pull")
    try:
        spec = protobuf_module("Model_pb2").Model.FromString(data)
    except Exception as problem:  # DecodeError differs between implementations
        _refuse(path, f"bytes that are no model ({type(problem).__name__})")
    kind = spec.WhichOneof("Type")
    if kind != "mlProgram":
        _refuse(path, f"a model of type {kind or 'none'}")
    return spec


def read(package: str | Path, function: str | None = None) -> Program:
    """Reads one function of `package` (default: the package's default function, else
    `main`)."""
    package = Path(package)
    spec = read_spec(package)
    functions = spec.mlProgram.functions
    name = function or spec.description.defaultFunctionName or "main"
    if name not in functions:
        _refuse(
            package,
            f"no function {name!r}",
            f"one of {sorted(functions)}",
            "name one of these functions",
        )
    described = {f.name: f for f in spec.description.functions}
    description = described.get(name, spec.description)
    try:
        return _Reader(package).program(name, functions[name], description)
    except InputError:
        raise
    except Exception as problem:  # whatever damaged bytes lead to
        _refuse(package, f"a damaged program ({type(problem).__name__}: {problem})")


class _Reader:
    """Turns protobuf messages into `Program` parts; weight files are opened once and
    looked up by name."""

    def __init__(self, package: Path):
        self.package = package
        self.files: dict[str, BlobFile] = {}
        self.types: dict[bytes, Type] = {}
        self.dtype_name = protobuf_module("MIL_pb2").DataType.Name

    def program(self, name, function, description) -> Program:
        """One function, with the description of its interface."""
        # a dict, because a protobuf map makes an empty block of a key that it lacks
        block = dict(function.block_specializations)[function.opset]
        declared = self.declared(function.inputs)
        inputs = {n: t for n, t in declared if t.kind != "state"}
        states = {n: t for n, t in declared if t.kind == "state"}
        body = self.block(block)
        outputs = list(block.outputs)
        missing = {feature.name for feature in description.input} - inputs.keys()
        missing |= {feature.name for feature in description.output} - {*outputs}
        if missing:
            actual = f"a description of {sorted(missing)}, not in its program"
            _refuse(self.package, actual)
        return Program(self.package, name, inputs, states, outputs, body, description)

    def declared(self, named) -> list[tuple[str, Type]]:
        """Names and types of a block's inputs or of an operation's results."""
        return [(value.name, self.type(value.type)) for value in named]

    def block(self, block) -> Block:
        """A block, nested ones included."""
        ops = [self.op(op) for op in block.operations]
        return Block(self.declared(block.inputs), ops, list(block.outputs))

    def op(self, op) -> Op:
        """An operation; its attributes are inputs like its arguments."""
        inputs = {k: self.value(v) for k, v in op.attributes.items()}
        outputs = self.declared(op.outputs)
        name = op.type
        if outputs:
            name = outputs[0][0]
        name = str(inputs.pop("name", name))
        inputs |= {k: self.argument(a) for k, a in op.inputs.items()}
        return Op(op.type, name, inputs, outputs, [self.block(b) for b in op.blocks])

    def argument(self, argument):
        """The value that an argument is bound to, or a list of several."""
        bound = [self.bound(binding) for binding in argument.arguments]
        if len(bound) == 1:
            return bound[0]
        return bound

    def bound(self, binding):
        """A value: the `Ref` of a computed one, or a literal."""
        if binding.WhichOneof("binding") == "name":
            return Ref(binding.name)
        return self.value(binding.value)

    def type(self, message) -> Type:
        """The declared type of a value."""
        # programs declare the same few types again and again
        key = message.SerializeToString()
        if key not in self.types:
            self.types[key] = self._type(message)
        return self.types[key]

    def _type(self, message) -> Type:
        kind = message.WhichOneof("type")
        if kind == "tensorType":
            tensor = message.tensorType
            shape = tuple(_size(dimension) for dimension in tensor.dimensions)
            return Type(self.dtype_name(tensor.dataType), shape)
        if kind == "stateType":
            return replace(self.type(message.stateType.wrappedType), kind="state")
        if kind == "listType":
            return replace(self.type(message.listType.type), kind="list")
        return Type("STRING", (), "dict")

    def value(self, message):
        """A literal: an array, a string, or a list or dict of them."""
        declared = self.type(message.type)
        if message.WhichOneof("value") == "blobFileValue":
            return self.file_value(message.blobFileValue, declared)
        immediate = message.immediateValue
        which = immediate.WhichOneof("value")
        if which == "list":
            return [self.value(v) for v in immediate.list.values]
        if which == "dictionary":
            return {
                self.value(e.key): self.value(e.value)
                for e in immediate.dictionary.values
            }
        return self.tensor_value(immediate.tensor, declared)

    def tensor_value(self, tensor, declared: Type):
        """An array, or a string or list of strings, that the protobuf itself holds."""
        which = tensor.WhichOneof("value") or "floats"
        values = getattr(tensor, which).values
        if declared.dtype == "STRING":
            strings = [str(value) for value in values]
            if declared.shape:
                return strings
            return strings[0]
        dtype, bits = NUMPY[declared.dtype], DTYPE_BITS.get(declared.dtype)
        if which != "bytes":
            array = np.array(values, dtype)
        elif bits is None:
            array = np.frombuffer(values, np.uint8).view(dtype)
        else:
            packed = np.frombuffer(values, np.uint8)
            count = int(np.prod(declared.shape, dtype=object))
            array = unpack_bits(packed, bits, count, signed=dtype is np.int8)
        return array.reshape(declared.shape).copy()

    def file_value(self, blob, declared: Type) -> np.ndarray:
        """An array in a weight file, as a view of the mapped file."""
        name = blob.fileName.removeprefix("@model_path/")
        if name not in self.files:
            folder = spec_path(self.package).parent
            self.files[name] = BlobFile(check_inside(self.package, folder, name))
        array = self.files[name].array(blob.offset, declared.shape)
        dtype = np.dtype(NUMPY[declared.dtype])
        if array.dtype.itemsize != dtype.itemsize:
            actual = f"a blob of {array.dtype} at {blob.offset}"
            _refuse(self.package, actual, declared.dtype)
        return array.view(dtype)


def _size(dimension) -> int | None:
    """The size of a dimension; None for one that is known at run time alone."""
    if dimension.WhichOneof("dimension") == "constant":
        return dimension.constant.size
    return None
