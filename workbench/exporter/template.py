"""Writes all shards that have the same program and differ only in their weight bytes.

`convert_shard` has coremltools convert one of these shards. Its weights are placeholders,
so that the program depends only on shapes and options. They are random, because
coremltools drops a product with ones and merges equal constants. The result is a
`Template`, which knows where each parameter is in the weight file and in the program;
`Template.write` writes a shard by putting the shard's own weights in these places.

Two objects of coremltools are told apart here: an `mlmodel` is its MLModel, the result of
a conversion; a `proto` is the Model protobuf that the saved package has.

Equal programs and weights give equal bytes. coremltools writes the current date and random
identifiers, and orders map entries arbitrarily; here the date is fixed, identifiers are
computed from the paths that they name, and the model is serialized in canonical order.
Two shards are therefore equal if their manifest entries (path, size, SHA-256) are."""

import json
import re
import struct
import tempfile
import uuid
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from miltorch.coremltools_import import (
    coremltools,
    frozen_gc,
    lean_passes,
    no_progress,
    protobuf_module,
    quiet,
    seldom_validated,
)
from workbench.bundle import FileEntry, Options, file_entries
from workbench.bundle.names import POS
from workbench.bundle.presets import FP16, Preset
from workbench.exporter.shards import Spec
from workbench.exporter.weights import Arrays, WeightSource, empty_module, pack_bits
from workbench.models.family import Plan

if TYPE_CHECKING:
    from coremltools.models import MLModel

Proto = Any  # coremltools' Model protobuf, whose class is made when it is first needed
# These passes fold neighbouring scales into convolution weights and round the product
# again: the stored weights would no longer be the checkpoint's (1.3e-3 against 1.9e-6
# on one layer).
FOLDING_PASSES = [
    "common::fuse_conv_scale",
    "common::fuse_conv_bias",
    "common::fuse_conv_batchnorm",
    "common::fuse_elementwise_to_batchnorm",
]

# coremltools logs these as warnings at every conversion of a shard: its outputs are a tuple,
# and its caches are read and written. Its other messages reach the user.
HARMLESS_MESSAGES = re.compile(
    r"Tuple detected at graph output|Torch var \w+_state is added again"
)

DATE_KEY = "com.github.apple.coremltools.conversion_date"
DATE = "1970-01-01"
MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
MANIFEST = "Manifest.json"
RECORD = struct.Struct("<IIQQ")  # sentinel, dtype, bytes of payload, their offset


@dataclass(frozen=True)
class FileArray:
    """One array of a parameter, bytes [start, stop) of the weight file.

    Args:
        role: what the array is to the operation that reads it, such as `scale`; see
            `weights.encode_weight`.
    """

    role: str
    start: int
    stop: int


@dataclass(frozen=True)
class InlineArray:
    """One array of a parameter that is small enough to be in the program.

    Args:
        role: see `FileArray`.
        op: the number of the operation that has it, in the list of `operations`.
    """

    role: str
    op: int


@dataclass(frozen=True)
class Template:
    """The program of a shard, into which the weights of every shard of its shape can be
    written.

    Args:
        name: of the shard that was converted.
        proto: the Model protobuf.
        manifest: the text of the package's own manifest.
        modules: program value → module path, layers counted from the shard's first.
        constants: parameter's path → name of the constant that holds it.
        arrays: parameter's path → its stored arrays.
        fixed_bytes: (offset, bytes) of the rest of the weight file: headers, records,
            padding, constants that are no parameters.
    """

    suffix: ClassVar[str] = ".mlpackage"

    name: str
    proto: Proto
    manifest: str
    modules: dict[str, str]
    constants: dict[str, str]
    arrays: dict[str, list[FileArray | InlineArray]]
    fixed_bytes: list[tuple[int, bytes]]

    def write(
        self,
        package: Path,
        weights: list[WeightSource],
        load: Callable[[WeightSource], Arrays],
    ) -> tuple[list[FileEntry], dict[str, str]]:
        """Writes this program with `weights` to the new folder `package`.

        Args:
            load: gives the arrays that store a weight.

        Returns:
            The files, and the constant of each parameter by its path.

        Raises:
            InputError: a weight of another shape, or one that fp16 or the compression
                cannot hold.
        """
        proto = deepcopy(self.proto)
        ops = operations(proto)
        file = package / WEIGHTS
        file.parent.mkdir(parents=True)
        with file.open("wb") as weight_file:
            for start, fixed in self.fixed_bytes:
                weight_file.seek(start)
                weight_file.write(fixed)
            for weight in weights:
                values = load(weight)
                for array in self.arrays[weight.path]:
                    payload = pack_bits(values[array.role], weight.preset.bits)
                    if isinstance(array, FileArray):
                        size = array.stop - array.start
                        weight_file.seek(array.start)
                        weight_file.write(payload)
                    else:
                        value = constant_values(ops[array.op])[array.role]
                        inline = value.immediateValue.tensor.bytes
                        size = len(inline.values)
                        inline.values = payload.tobytes()
                    assert len(payload) == size, (weight, array)
        if not file.stat().st_size:
            file.unlink()
            file.parent.rmdir()
        (package / MODEL).write_bytes(serialize(proto))
        (package / MANIFEST).write_text(self.manifest)
        return file_entries(package.parent, package), self.constants


def convert_shard(
    spec: Spec, plan: Plan, options: Options, weights: list[WeightSource]
) -> Template:
    """Converts a shard with placeholder weights.

    Raises:
        OSError: no space for coremltools' temporary files.
    """
    module = _placeholder_module(spec, plan, options, weights)
    programs: dict[str, Path] = {}  # function → its package
    modules: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        frozen_gc(),
        _without_overflow_search(),
    ):
        for name, T in (options.tiling.functions or {"main": None}).items():
            mlmodel = convert_module(module, spec, options, weights, T)
            programs[name] = Path(folder, f"{name}.mlpackage")
            mlmodel.save(str(programs[name]))
            modules |= find_modules(mlmodel)
        package = join_functions(programs)
        proto = read_package(package)
        manifest = read_pinned_manifest(package)
        file = package / WEIGHTS
        # without a file, all constants are small and in the program
        blob = file.read_bytes() if file.is_file() else b""
    arrays_by_name = find_arrays(proto, blob)
    constants = _find_constants(weights, arrays_by_name)
    arrays_by_path = {path: arrays_by_name[name] for path, name in constants.items()}
    return Template(
        name=spec.name,
        proto=proto,
        manifest=manifest,
        modules=modules,
        constants=constants,
        arrays=arrays_by_path,
        fixed_bytes=_bytes_between(arrays_by_path, blob),
    )


def _placeholder_module(
    spec: Spec, plan: Plan, options: Options, weights: list[WeightSource]
) -> nn.Module:
    """The module of a shard with random weights."""
    module = empty_module(spec, plan, options).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(0)
    for i, weight in enumerate(weights):
        # coremltools stores equal lookup tables of two parameters once. A separate range
        # for each parameter keeps their tables apart.
        low = 0.5 + i / 64
        parameter = module.get_parameter(weight.path)
        parameter.uniform_(low, low + 1, generator=generator)
    return module


def _find_constants(
    weights: list[WeightSource], names: Iterable[str]
) -> dict[str, str]:
    """Path of a parameter → name of the constant that holds it, one of `names`.

    coremltools names a constant after the path, with underscores in place of dots; the
    cast to fp16 and the compression append to that, such as `_to_fp16_palettized`."""
    by_stem = {name.split("_to_fp16")[0]: name for name in names}
    return {w.path: by_stem[w.path.replace(".", "_")] for w in weights}


def _bytes_between(
    arrays: dict[str, list[FileArray | InlineArray]], blob: bytes
) -> list[tuple[int, bytes]]:
    """The bytes of a weight file before, between and after the arrays of its parameters, as
    pairs (offset, bytes)."""
    spans = sorted(
        (array.start, array.stop)
        for arrays_of_parameter in arrays.values()
        for array in arrays_of_parameter
        if isinstance(array, FileArray)
    )
    pieces = []
    end = 0
    for start, stop in spans:
        assert start >= end, "parameters that share bytes"
        pieces.append((end, blob[end:start]))
        end = stop
    return [*pieces, (end, blob[end:])]


def _without_overflow_search():
    """Context manager in which coremltools converts without searching for constants beyond
    fp16. There are none, and the search of version 9.0 takes 40 bytes of memory for every
    element of every weight."""
    from coremltools.converters.mil.mil.passes.defs import quantization

    cast = quantization.FP16ComputePrecision
    return patch.object(cast, "fp16_overflow", staticmethod(lambda op: False))


def convert_module(
    module: nn.Module,
    spec: Spec,
    options: Options,
    weights: list[WeightSource],
    T: int | None = None,
) -> "MLModel":
    """Traces `module` and converts it to an ML Program for macOS 15, fp16, T in 1 …
    t_max.

    Args:
        weights: the parameters; those that no preset compresses stay fp16.
        T: the tokens of a call, for a program of this one T (default: those of the
            options).

    Returns:
        The model, not loaded, with its pymil program attached.

    Raises:
        OSError: no space for its temporary files.
    """
    ct = coremltools()
    from coremltools.converters.mil.mil import Builder

    examples, inputs = _trace_inputs(spec, options, T)
    states = []
    for state in spec.states.values():
        tensor_type = ct.TensorType(shape=state.shape, dtype=np.float16)
        states.append(ct.StateType(tensor_type, name=state.tensor))
    pipeline = ct.PassPipeline.DEFAULT
    pipeline.remove_passes(FOLDING_PASSES)
    _append_compression(pipeline, weights)
    silence = quiet(HARMLESS_MESSAGES)
    with silence, no_progress(), seldom_validated(), lean_passes(), torch.no_grad():
        # coremltools numbers the names it makes up through the life of the process
        Builder.name_count.clear()
        traced = torch.jit.trace(module, examples, check_trace=False)
        try:
            return ct.convert(
                traced,
                inputs=inputs,
                outputs=[ct.TensorType(n, dtype=np.float16) for n in spec.outputs],
                states=states,
                minimum_deployment_target=ct.target.macOS15,
                compute_units=ct.ComputeUnit.CPU_AND_NE,
                pass_pipeline=pipeline,
                skip_model_load=True,
            )
        except RuntimeError as problem:
            if "FileWriter" not in str(problem):
                raise
            # the writer of weight files gives no other reason
            reason = f"coremltools could not write to {tempfile.gettempdir()}"
            raise OSError(reason) from problem


def _trace_inputs(spec: Spec, options: Options, T: int | None) -> tuple[list, list]:
    """Example tensors of the inputs for tracing, and their types for coremltools."""
    ct = coremltools()
    size = length = T or options.t_max
    if options.t_max > 1 and not options.fixed_sizes:
        # One symbol for every T: coremltools would accept unrelated ranges silently.
        size, length = ct.RangeDim(1, options.t_max, default=1), 2
    examples, inputs = [], []
    for name, shape in spec.inputs.items():
        traced_dtype, stored_dtype = torch.float32, np.float16
        if name == POS:
            traced_dtype, stored_dtype = torch.int32, np.int32
        example = [length if n == "T" else n for n in shape]
        examples.append(torch.zeros(example, dtype=traced_dtype))
        sizes = [size if n == "T" else n for n in shape]
        inputs.append(ct.TensorType(name, sizes, dtype=stored_dtype))
    return examples, inputs


def _append_compression(pipeline, weights: list[WeightSource]) -> None:
    """Appends to `pipeline` the compression of convolutions' constants.

    Integer presets are linear and symmetric; lookup tables are palettes of evenly
    spaced values, which need no search, one per tensor or group of its rows. The passes
    come last, because coremltools' functions for them convert a second time, with the
    passes that fold."""
    presets = {weight.preset for weight in weights} - {FP16}
    if not presets:
        return
    from coremltools.optimize import coreml as cto

    for name, in_pass in (
        ("compression::linear_quantize_weights", lambda preset: preset.is_integer),
        ("compression::palettize_weights", lambda preset: preset.is_table),
    ):
        configs = {p: _op_config(p) for p in presets if in_pass(p)}
        if not configs:
            continue
        by_name = {f"{w.path}_to_fp16": configs.get(w.preset) for w in weights}
        config = cto.OptimizationConfig(op_name_configs=by_name)
        pipeline.append_pass(name)
        pipeline.set_options(name, {"config": config})


def _op_config(preset: Preset):
    """coremltools' description of a preset that compresses."""
    from coremltools.optimize import coreml as cto

    if preset.is_integer:
        return cto.OpLinearQuantizerConfig(
            mode="linear_symmetric",
            dtype=f"int{preset.bits}",
            granularity=preset.granularity,
            block_size=preset.block,
            weight_threshold=0,
        )
    granularity = "per_grouped_channel" if preset.group else "per_tensor"
    return cto.OpPalettizerConfig(
        "uniform",
        preset.bits,
        granularity=granularity,
        group_size=preset.group,
        weight_threshold=0,
    )


def join_functions(programs: dict[str, Path]) -> Path:
    """Writes a package with one function for each of `programs` (name → package with
    `main`), the first one the default, beside the first package; returns its path.
    coremltools stores weights that functions share once. A single package is returned as
    it is."""
    from coremltools.converters.mil.mil import Builder
    from coremltools.models import utils

    first, *others = programs.values()
    if not others:
        return first
    descriptor = utils.MultiFunctionDescriptor()
    for name, program in programs.items():
        descriptor.add_function(str(program), "main", name)
    descriptor.default_function_name = next(iter(programs))
    package = first.with_name("joined.mlpackage")
    silence = quiet(HARMLESS_MESSAGES)
    with silence, no_progress(), seldom_validated(), lean_passes():
        Builder.name_count.clear()
        utils.save_multifunction(descriptor, str(package))
    return package


def find_modules(mlmodel: "MLModel") -> dict[str, str]:
    """Program value → path of the torch module that it came from, layers counted from
    the shard's first."""
    from coremltools.converters.mil.mil.scope import ScopeSource

    paths = {}
    for op in mlmodel._mil_program.functions["main"].operations:
        scope = op.scopes.get(ScopeSource.TORCHSCRIPT_MODULE_NAME)
        if op.op_type != "const" and scope:
            # a scope ends with the name of the operation itself
            path = ".".join(scope[:-1])
            # the list `LayerStack.blocks` is no scope: a path begins with a layer's number
            if path[:1].isdigit():
                path = f"layers.{path}"
            paths |= {out.name: path for out in op.outputs}
    return paths


def constant_values(op) -> dict:
    """Role → Value message of an operation that holds constants."""
    if op.type == "const":
        return {"val": op.attributes["val"]}
    inputs = op.inputs if op.type.startswith("constexpr_") else {}
    return {role: bound.arguments[0].value for role, bound in inputs.items()}


def operations(proto: Proto) -> list:
    """The operations of a program, of all its functions in the order of their names."""
    functions = [function for _, function in sorted(proto.mlProgram.functions.items())]
    return [op for f in functions for op in f.block_specializations[f.opset].operations]


def find_arrays(proto: Proto, blob: bytes) -> dict[str, list[FileArray | InlineArray]]:
    """The arrays of each constant operation in the weight file `blob` or in the program,
    by the name of the operation's result.

    The functions of a program have an operation of this name each. In the weight file
    they read the same bytes, which are listed once, since writing them once serves all
    functions. An inline array belongs to one function, and all of them are listed.
    """
    arrays: dict[str, list[FileArray | InlineArray]] = {}
    for index, op in enumerate(operations(proto)):
        for role, value in sorted(constant_values(op).items()):
            array = InlineArray(role, index)
            if value.HasField("blobFileValue"):
                record = value.blobFileValue.offset
                _, _, size, start = RECORD.unpack_from(blob, record)
                array = FileArray(role, start, start + size)
            listed = arrays.setdefault(op.outputs[0].name, [])
            if array not in listed:
                listed.append(array)
    return arrays


def read_pinned_manifest(package: Path) -> str:
    """The text of a package's own manifest with identifiers that are computed from the
    paths that they name, in the form in which coremltools rewrites it when it opens a
    package."""
    text = (package / MANIFEST).read_text()
    for identifier, item in json.loads(text)["itemInfoEntries"].items():
        pinned = str(uuid.uuid5(uuid.NAMESPACE_URL, item["path"])).upper()
        text = text.replace(identifier, pinned)
    return json.dumps(json.loads(text), indent=4, sort_keys=True) + "\n"


def read_package(package: Path) -> Proto:
    """Reads the Model protobuf of a package that this export wrote."""
    return protobuf_module("Model_pb2").Model.FromString((package / MODEL).read_bytes())


def serialize(proto: Proto) -> bytes:
    """A Model protobuf as canonical bytes, with a fixed date."""
    if DATE_KEY in proto.description.metadata.userDefined:
        proto.description.metadata.userDefined[DATE_KEY] = DATE
    return proto.SerializeToString(deterministic=True)
