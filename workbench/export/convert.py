"""Converts one shard of each shape with coremltools. Its weights are placeholders, so
that the program depends on shapes and options alone: random, because coremltools drops
a product with ones and merges equal constants."""

import errno
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from miltorch.quiet import coremltools, frozen, no_progress, quiet
from workbench.bundle import Options
from workbench.bundle.names import POS
from workbench.bundle.presets import FP16, Preset
from workbench.export.shards import Spec
from workbench.export.template import Template, pin, save_package
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
        OSError: no room for coremltools' temporary files.
    """
    module = blank(spec, plan, options).requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(0)
    for i, weight in enumerate(weights):
        values = torch.rand(weight.shape, generator=generator)
        # a range of its own: functions share equal lookup tables, too
        module.get_parameter(weight.path).data = values + 0.5 + i / 64
    modules: dict[str, str] = {}
    programs: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as folder, frozen():
        for name, T in (options.functions or {"main": None}).items():
            with lean():
                model = to_program(module, spec, options, weights, T, table="uniform")
            model._mil_program.validate()
            programs[name] = Path(folder, f"{name}.mlpackage")
            save_package(model, programs[name])
            modules |= modules_of(model)
        return Template(spec.name, joined(programs), weights, modules)


def to_program(
    module: nn.Module,
    spec: Spec,
    options: Options,
    weights: list[WeightSource],
    T: int | None = None,
    table: str = "kmeans",
):
    """Traces `module` and converts it to an ML Program for macOS 15, fp16, T in 1 …
    t_max.

    Args:
        weights: the parameters; those that no preset compresses stay fp16.
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
    for state in spec.states.values():
        kind = ct.TensorType(shape=state.shape, dtype=np.float16)
        states.append(ct.StateType(kind, name=state.tensor))
    pipeline = ct.PassPipeline.DEFAULT
    pipeline.remove_passes(FOLDING)
    if options.preset != FP16:
        excluded = [f"{w.path}_to_fp16" for w in weights if not w.compressed]
        _compress(pipeline, options.preset, excluded, table)
    with quiet(), no_progress(), torch.no_grad():
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
            # its writer of weight files gives no other reason
            reason = f"coremltools could not write to {tempfile.gettempdir()}"
            raise OSError(errno.ENOSPC, reason) from problem


def _inputs(spec: Spec, options: Options, T: int | None) -> tuple[list, list]:
    """Example tensors of the inputs for tracing, and their types for coremltools."""
    ct = coremltools()
    size = length = T or options.t_max
    if options.t_max > 1 and not options.shapes:
        # one symbol for every T: coremltools would take unrelated ranges without
        # complaint
        size, length = ct.RangeDim(1, options.t_max, default=1), 2
    examples, inputs = [], []
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
    the first one the default; coremltools stores weights that functions share once. One
    program stays as it is."""
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
    with quiet(), no_progress():
        Builder.name_count.clear()
        utils.save_multifunction(descriptor, str(package))
    pin(package)
    return package


@contextmanager
def lean():
    """Context manager around a conversion, which then takes half of the time and a
    fraction of the memory. coremltools 9.0 validates a program after each of its
    hundred passes; here its caller does so at the end. Its search for constants beyond
    fp16 takes 40 bytes for every element; here it leaves out large ones, which are
    weights."""
    from coremltools.converters.mil.mil import Program
    from coremltools.converters.mil.mil.passes.defs import quantization

    cast = quantization.FP16ComputePrecision
    is_beyond = cast.fp16_overflow

    def is_small_beyond(op) -> bool:
        sizes = [np.size(getattr(x, "val", None)) for x in op.inputs.values()]
        return max(sizes, default=0) <= LARGE and is_beyond(op)

    search = patch.object(cast, "fp16_overflow", staticmethod(is_small_beyond))
    with search, patch.object(Program, "validate", lambda *_, **__: None):
        yield


def _compress(pipeline, preset: Preset, excluded: list[str], table: str) -> None:
    """Appends to `pipeline` the compression of every convolution's constants but those
    in `excluded`.

    Integer presets are linear and symmetric; lookup tables are palettes, one per
    tensor. The pass comes last, because coremltools' functions for it convert a second
    time, with the passes that fold."""
    from coremltools.optimize import coreml as cto

    how = {"weight_threshold": 0}
    if preset.is_integer:
        if preset.block:
            how["block_size"] = preset.block
        how |= {"dtype": f"int{preset.bits}", "granularity": preset.granularity}
        op = cto.OpLinearQuantizerConfig(mode="linear_symmetric", **how)
        pass_name = "compression::linear_quantize_weights"
    else:
        op = cto.OpPalettizerConfig(mode=table, nbits=preset.bits, **how)
        pass_name = "compression::palettize_weights"
    kept = dict.fromkeys(excluded)
    config = cto.OptimizationConfig(op_type_configs={"conv": op}, op_name_configs=kept)
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
