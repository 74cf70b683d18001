"""Converts one shard of each shape with coremltools. Its weights are placeholders, so
that the program depends on shapes and options alone: random, because coremltools drops
a product with ones and merges equal constants."""

import errno
import shutil
import tempfile
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from miltorch.quiet import coremltools, frozen, quiet
from workbench.bundle import Options
from workbench.bundle.names import POS
from workbench.bundle.presets import FP16, Preset
from workbench.errors import InputError
from workbench.export.package import WEIGHTS, pin, save_package
from workbench.export.shards import Spec
from workbench.export.template import Template
from workbench.export.weights import WeightSource, blank
from workbench.models.family import Plan

# These passes fold neighbouring scales into convolution weights and round the product
# again: the stored weights would no longer be the checkpoint's (1.3e-3 against 1.9e-6
# on one layer).
FOLDING = [
    "common::fuse_conv_scale",
    "common::fuse_conv_bias",
    "common::fuse_conv_batchnorm",
    "common::fuse_elementwise_to_batchnorm",
]

LARGE = 1 << 16  # elements of a constant that only a parameter has


def to_template(
    spec: Spec, plan: Plan, options: Options, weights: list[WeightSource]
) -> Template:
    """The program of a shard as a template, into which the weights of every shard of
    its shape can be written.

    Raises:
        InputError: functions of a program without a weight file.
        OSError: no room for coremltools' temporary files.
    """
    module = blank(spec, plan, options).requires_grad_(False).eval()
    fill(module, weights)
    compressed = {weight.path for weight in weights if weight.compressed}
    constants: dict[str, str] = {}
    modules: dict[str, str] = {}
    programs: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as folder, frozen(), lean():
        for name, T in (options.functions or {"main": None}).items():
            model = to_program(module, spec, options, compressed, T, table="uniform")
            programs[name] = Path(folder, f"{name}.mlpackage")
            save_package(model, programs[name])
            constants |= constants_of(model)
            modules |= modules_of(model)
        package = programs["main"] if "main" in programs else joined(programs)
        named = {w.path: constants[w.path.replace(".", "_")] for w in weights}
        return Template(spec.name, package, named, modules)


def fill(module: nn.Module, weights: list[WeightSource]) -> None:
    """Gives every parameter random placeholder values between 0.5 and 1.5."""
    generator = torch.Generator().manual_seed(0)
    for weight in weights:
        values = torch.rand(weight.shape, generator=generator)
        module.get_parameter(weight.path).data = values + 0.5


def to_program(
    module: nn.Module,
    spec: Spec,
    options: Options,
    compressed: set[str],
    T: int | None = None,
    table: str = "kmeans",
):
    """Traces `module` and converts it to an ML Program for macOS 15, fp16, T in 1 …
    t_max.

    Args:
        compressed: paths of the parameters that `options.compress` is for; all others
            stay fp16.
        T: the tokens of a call, for a program of this one T (default: as the options
            say).
        table: how the values of lookup tables are chosen; `uniform` needs no search.

    Returns:
        coremltools' MLModel, not loaded, with its pymil program attached.

    Raises:
        OSError: no room for its temporary files.
    """
    ct = coremltools()
    from coremltools.converters.mil.mil import Builder

    examples, inputs = _inputs(spec, options, T)
    states = []
    for name, shape in spec.buffers.items():
        kind = ct.TensorType(shape=shape, dtype=np.float16)
        states.append(ct.StateType(kind, name=name))
    pipeline = ct.PassPipeline.DEFAULT
    pipeline.remove_passes(FOLDING)
    if options.preset != FP16:
        excluded = {path for path, _ in module.named_parameters()} - compressed
        _compress(
            pipeline, options.preset, [f"{path}_to_fp16" for path in excluded], table
        )
    with quiet(), no_progress(), torch.no_grad():
        # coremltools numbers the names it makes up through the life of the process
        Builder.name_count.clear()
        traced = torch.jit.trace(module, examples, check_trace=False)
        try:
            return ct.convert(
                traced,
                inputs=inputs,
                outputs=[
                    ct.TensorType(name, dtype=np.float16) for name in spec.outputs
                ],
                states=states,
                minimum_deployment_target=ct.target.macOS15,
                compute_units=ct.ComputeUnit.CPU_AND_NE,
                pass_pipeline=pipeline,
                skip_model_load=True,
            )
        except RuntimeError as problem:
            if "FileWriter" not in str(problem):
                raise
            # its writer of weight files gives no other reason
            place = tempfile.gettempdir()
            reason = f"coremltools could not write to {place}"
            raise OSError(errno.ENOSPC, reason) from problem


def _inputs(spec: Spec, options: Options, T: int | None) -> tuple[list, list]:
    """Example tensors of the inputs for tracing, and their types for coremltools."""
    ct = coremltools()
    size = length = T or options.t_max
    if options.t_max > 1 and not options.shapes:
        # one symbol for every T: coremltools would take unrelated ranges without
        # complaint
        size = ct.RangeDim(1, options.t_max, default=1)
        length = 2
    examples = []
    inputs = []
    for name, shape in spec.inputs.items():
        traced, stored = torch.float32, np.float16
        if name == POS:
            traced, stored = torch.int32, np.int32
        example = [length if n == "T" else n for n in shape]
        examples.append(torch.zeros(example, dtype=traced))
        sizes = [size if n == "T" else n for n in shape]
        inputs.append(ct.TensorType(name, sizes, dtype=stored))
    return examples, inputs


def joined(programs: dict[str, Path]) -> Path:
    """A package with one function for each of `programs` (name → package with `main`),
    the first one the default; coremltools stores weights that functions share once.

    Raises:
        InputError: a program without a weight file, which coremltools does not take.
    """
    from coremltools.converters.mil.mil import Builder
    from coremltools.models import utils

    descriptor = utils.MultiFunctionDescriptor()
    for name, program in programs.items():
        if not (program / WEIGHTS).is_file():
            raise InputError(
                "functions of a shard",
                "weights so small that they stand in the program",
                "a weight file, which functions can share",
                "export with --tokens 1-4",
            )
        descriptor.add_function(str(program), "main", name)
    descriptor.default_function_name = next(iter(programs))
    package = next(iter(programs.values())).with_name("joined.mlpackage")
    with quiet(), no_progress():
        Builder.name_count.clear()
        utils.save_multifunction(descriptor, str(package))
    pin(package)
    for program in programs.values():
        shutil.rmtree(program)
    return package


@contextmanager
def lean():
    """Context manager around a conversion. coremltools 9.0 validates a program after
    each of its hundred passes, which is half of a conversion's time; here it does so
    after the last of each pipeline. Its search for constants beyond fp16 takes 40 bytes
    for every element; here it leaves out large ones, which are weights."""
    from coremltools.converters.mil.mil import Program
    from coremltools.converters.mil.mil.passes.defs import quantization
    from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

    original = PassPipelineManager.apply_pipeline

    def apply(program, passes) -> None:
        with patch.object(Program, "validate", lambda *_, **__: None):
            original(program, passes)
        program.validate()

    pipeline = patch.object(PassPipelineManager, "apply_pipeline", staticmethod(apply))
    cast = quantization.FP16ComputePrecision
    is_beyond = cast.fp16_overflow

    def is_small_beyond(op) -> bool:
        sizes = [np.size(getattr(x, "val", None)) for x in op.inputs.values()]
        return max(sizes, default=0) <= LARGE and is_beyond(op)

    search = patch.object(cast, "fp16_overflow", staticmethod(is_small_beyond))
    with pipeline, search:
        yield


def no_progress():
    """coremltools draws its bars with tqdm and has no switch for them."""
    import tqdm

    silent = partialmethod(tqdm.tqdm.__init__, disable=True)
    return patch.object(tqdm.tqdm, "__init__", silent)


def _compress(pipeline, preset: Preset, excluded: list[str], table: str) -> None:
    """Appends to `pipeline` the compression of every convolution's constants but those
    in `excluded`.

    Integer presets are linear and symmetric; lookup tables are palettes, one per
    tensor. The pass comes last, because coremltools' functions for it convert a second
    time, with the passes that fold."""
    from coremltools.optimize import coreml as cto

    if preset.is_integer:
        how = {"dtype": f"int{preset.bits}", "granularity": preset.granularity}
        if preset.block:
            how["block_size"] = preset.block
        op = cto.OpLinearQuantizerConfig(
            mode="linear_symmetric", weight_threshold=0, **how
        )
        pass_name = "compression::linear_quantize_weights"
    else:
        op = cto.OpPalettizerConfig(mode=table, nbits=preset.bits, weight_threshold=0)
        pass_name = "compression::palettize_weights"
    config = cto.OptimizationConfig(
        op_type_configs={"conv": op}, op_name_configs=dict.fromkeys(excluded)
    )
    pipeline.append_pass(pass_name)
    pipeline.set_options(pass_name, {"config": config})


def modules_of(model) -> dict[str, str]:
    """Program value → path of the torch module it came from; layers counted from the
    shard's first."""
    from coremltools.converters.mil.mil.scope import ScopeSource

    paths = {}
    for op in model._mil_program.functions["main"].operations:
        scope = op.scopes.get(ScopeSource.TORCHSCRIPT_MODULE_NAME)
        if op.op_type != "const" and scope:
            path = ".".join(scope[:-1])
            if path[:1].isdigit():
                path = f"layers.{path}"
            paths |= {out.name: path for out in op.outputs}
    return paths


def constants_of(model) -> dict[str, str]:
    """Parameter path with underscores for dots → name of the program constant that
    holds it, after compression."""
    names = {}
    for op in model._mil_program.functions["main"].operations:
        if op.op_type.startswith("const"):  # const, or constexpr_…
            # fp16 cast and compression append to the parameter's name
            name = op.outputs[0].name
            names[name.split("_to_fp16")[0]] = name
    return names
