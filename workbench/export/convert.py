"""Converts a traced module with coremltools to a Core ML model with state, flexible T
and compressed weights."""

import errno
import tempfile
from contextlib import contextmanager
from functools import cache, partialmethod
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from miltorch.quiet import coremltools, frozen, quiet
from workbench.bundle import Options
from workbench.bundle.names import MAX_FP16, POS
from workbench.bundle.presets import FP16, Preset
from workbench.errors import InputError
from workbench.export.package import WEIGHTS, pin
from workbench.export.shards import Spec

# These passes fold neighbouring scales into convolution weights and round the product
# again: the stored weights would no longer be the checkpoint's (1.3e-3 against 1.9e-6
# on one layer).
FOLDING = [
    "common::fuse_conv_scale",
    "common::fuse_conv_bias",
    "common::fuse_conv_batchnorm",
    "common::fuse_elementwise_to_batchnorm",
]


def convert(
    module: nn.Module,
    spec: Spec,
    options: Options,
    compressed: set[str],
    T: int | None = None,
):
    """Traces `module` and converts it to an ML Program for macOS 15, fp16, T in 1 …
    t_max.

    Args:
        compressed: paths of the parameters that `options.compress` is for; all others
            stay fp16.
        T: the tokens of a call, for a program of this one T (default: as the options
            say).

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
        _compress(pipeline, options.preset, [f"{path}_to_fp16" for path in excluded])
    with quiet(), no_progress(), torch.no_grad():
        # coremltools numbers the names it makes up through the life of the process
        Builder.name_count.clear()
        traced = torch.jit.trace(module.eval(), examples, check_trace=False)
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
    if options.t_max > 1 and options.t != "fixed":
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


def save_functions(programs: dict[str, Path], package: Path) -> None:
    """Writes a package with one function for each of `programs` (name → package with
    `main`), the first one the default; coremltools stores weights that functions share
    once.

    Raises:
        InputError: a program without a weight file, which coremltools does not take.
    """
    from coremltools.converters.mil.mil import Builder
    from coremltools.models import utils

    descriptor = utils.MultiFunctionDescriptor()
    for name, program in programs.items():
        if not (program / WEIGHTS).is_file():
            raise InputError(
                f"functions of {package.stem}",
                "weights so small that they stand in the program",
                "a weight file, which functions can share",
                "export without --functions",
            )
        descriptor.add_function(str(program), "main", name)
    descriptor.default_function_name = next(iter(programs))
    with quiet(), no_progress():
        Builder.name_count.clear()
        utils.save_multifunction(descriptor, str(package))
    pin(package)


@contextmanager
def lean():
    """Lowers three costs of coremltools. Its search for weights beyond fp16 takes 40
    bytes for every weight and a third of the time; this one takes neither where no
    weight is beyond. Its garbage collection after a conversion takes half of a small
    one's time; here it looks only at the objects of the conversion. Half of what is
    left goes with `seldom_validated`, `quickly_solved`, `compressed_alone` and
    `described_once`."""
    from coremltools.converters.mil.mil.passes.defs.quantization import (
        FP16ComputePrecision,
    )

    original = FP16ComputePrecision.fp16_overflow

    def overflow(op) -> bool:
        for operand in op.inputs.values():
            variables = operand if isinstance(operand, list | tuple) else [operand]
            if any(_beyond_fp16(variable.val) for variable in variables):
                return original(op)
        return False

    check = staticmethod(overflow)
    search = patch.object(FP16ComputePrecision, "fp16_overflow", check)
    rarely, once = seldom_validated(), described_once()
    with frozen(), search, rarely, once, quickly_solved(), compressed_alone():
        yield


def _beyond_fp16(value) -> bool:
    """Whether a value is a number or an array of fp32 beyond what fp16 can hold."""
    if not isinstance(value, np.ndarray | np.float32) or value.dtype != np.float32:
        return False
    # NaN is beyond it, too
    return bool(value.size) and not (
        value.max() <= MAX_FP16 and value.min() >= -MAX_FP16
    )


def seldom_validated():
    """Context manager inside which coremltools validates a program once after each of
    its three pipelines in place of once after each of their hundred passes, and formats
    no log messages."""
    from coremltools.converters.mil.mil import Function, Program
    from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

    original = PassPipelineManager.apply_pipeline

    def apply(program, passes) -> None:
        with (
            patch.object(Program, "validate", lambda *_, **__: None),
            patch.object(Program, "__str__", object.__repr__),
            patch.object(Function, "__str__", object.__repr__),
        ):
            original(program, passes)
        program.validate()

    return patch.object(PassPipelineManager, "apply_pipeline", staticmethod(apply))


def quickly_solved():
    """Context manager that solves an equation that is linear in its one unknown size
    directly. coremltools solves one with sympy for every reshape after every pass."""
    import sympy

    original = sympy.solve

    def solve(equations, sizes, **how) -> list[dict]:
        (equation,), (size,) = equations, sizes
        factor = equation.coeff(size)
        rest = equation - factor * size
        if not factor.is_number or factor == 0 or size in rest.free_symbols:
            return original(equations, sizes, **how)
        return [{size: -rest / factor}]

    return patch.object(sympy, "solve", solve)


def compressed_alone():
    """Context manager inside which coremltools follows compressed constants only
    through programs that have some. It computes after every pass the constants that
    each value depends on."""
    from coremltools.converters.mil.mil import Block, Function

    original = Block._propagate_nonreplaceable_vars

    def follow(block) -> None:
        if isinstance(block, Function):
            operations = block.operations
            kinds = {op.op_type[:10] for op in operations}
            if "constexpr_" not in kinds and not any(op.blocks for op in operations):
                return
        original(block)

    return patch.object(Block, "_propagate_nonreplaceable_vars", follow)


def described_once():
    """Context manager inside which coremltools describes each type once. It does so to
    find out whether a value is a tensor, some ten thousand times in a conversion."""
    from coremltools.converters.mil.mil.types import type_mapping

    describe = cache(type_mapping.get_type_info)
    return patch.object(type_mapping, "get_type_info", describe)


def no_progress():
    """coremltools draws its bars with tqdm and has no switch for them."""
    import tqdm

    silent = partialmethod(tqdm.tqdm.__init__, disable=True)
    return patch.object(tqdm.tqdm, "__init__", silent)


def _compress(pipeline, preset: Preset, excluded: list[str]) -> None:
    """Appends to `pipeline` the compression of every convolution's constants but those
    in `excluded`.

    Integer presets are linear and symmetric; lookup tables are k-means palettes, one
    per tensor. The pass comes last, because coremltools' functions for it convert a
    second time, with the passes that fold."""
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
        op = cto.OpPalettizerConfig(
            mode="kmeans", nbits=preset.bits, weight_threshold=0
        )
        pass_name = "compression::palettize_weights"
    config = cto.OptimizationConfig(
        op_type_configs={"conv": op}, op_name_configs=dict.fromkeys(excluded)
    )
    pipeline.append_pass(pass_name)
    pipeline.set_options(pass_name, {"config": config})


def modules(model) -> dict[str, str]:
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


def constants(model) -> dict[str, str]:
    """Parameter path with underscores for dots → name of the program constant that
    holds it, after compression."""
    names = {}
    for op in model._mil_program.functions["main"].operations:
        if op.op_type.startswith("const"):  # const, or constexpr_…
            # fp16 cast and compression append to the parameter's name
            name = op.outputs[0].name
            names[name.split("_to_fp16")[0]] = name
    return names
