"""A shard's module as a program in Apple's operations, traced by torch.export."""

import torch
from torch import nn

from workbench.bundle import Options
from workbench.exporter.shards import LayerStack, Spec
from workbench_coreai.aimodel import fixed_t, import_apple
from workbench_coreai.weights import is_part

DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


def trace(
    module: nn.Module, spec: Spec, options: Options
) -> torch.export.ExportedProgram:
    """The module traced by torch.export, in Apple's operations.

    The axis T is fixed where every call has the same number of tokens, two or more. It
    is free otherwise, also where every call has one token: at a fixed T = 1 Apple's
    conversion exchanges a product with a reshape and returns other values
    (tests/test_coreai.py has the smallest module)."""
    dtype = DTYPES[options.program_dtype]
    T = max(2, options.t_max)  # torch.export takes an axis of size 1 for a fixed one
    examples = [
        torch.zeros([T if size == "T" else size for size in shape], dtype=dtype)
        for shape in spec.inputs.values()
    ]
    is_free = fixed_t(options) is None
    with torch.no_grad():
        program = torch.export.export(
            module,
            tuple(examples),
            dynamic_shapes=free_axes(module, spec, T) if is_free else None,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    prevent_constant_folding(program)
    return program.run_decompositions(import_apple("coreai_torch").get_decomp_table())


def free_axes(module: nn.Module, spec: Spec, t_max: int) -> tuple:
    """The axes T of the module's inputs, from 1 to `t_max`, as torch.export's
    `dynamic_shapes`: {axis: T} for each argument."""
    free = torch.export.Dim("T", min=1, max=t_max)
    axes = tuple(
        {axis: free for axis, size in enumerate(shape) if size == "T"}
        for shape in spec.inputs.values()
    )
    # the stack's one parameter is *tensors, which torch.export counts as one argument
    return (axes,) if isinstance(module, LayerStack) else axes


def prevent_constant_folding(program: torch.export.ExportedProgram) -> None:
    """Rewrites the products that Apple's passes would fold into a stored weight, so that
    it keeps the checkpoint's bits. The passes fold only operands of equal rank, so the
    product is computed with one axis more. With stored weights w and s:

    - conv(x, w) · s → squeeze(unsqueeze(conv(x, w)) · unsqueeze(s))
    - (conv(x, w) + b) · s → squeeze(unsqueeze(conv(x, w) + b) · unsqueeze(s))
    - (x · w) · 2.0, a norm → squeeze(unsqueeze(x · w) · 2.0)
    """
    aten = torch.ops.aten
    inputs = program.graph_signature.input_specs
    stored = {entry.arg.name for entry in inputs if is_part(entry.target)}
    for node in program.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        if not (is_scaled_convolution(node, stored) or is_scaled_norm(node, stored)):
            continue
        x, scale = node.args
        with program.graph.inserting_before(node):
            if isinstance(scale, torch.fx.Node):
                scale = call_like(node, aten.unsqueeze.default, scale, 0)
            x = call_like(node, aten.unsqueeze.default, x, 0)
            product = call_like(node, aten.mul.Tensor, x, scale)
            node.replace_all_uses_with(call_like(node, aten.squeeze.dim, product, 0))
        program.graph.erase_node(node)
    program.graph_module.recompile()


def is_scaled_convolution(product: torch.fx.Node, stored: set[str]) -> bool:
    """Whether a product is conv(…) · s or (conv(…) + b) · s with a stored s.

    Args:
        stored: the names of the nodes that are stored weights.
    """
    aten = torch.ops.aten
    x, scale = product.args
    if not isinstance(scale, torch.fx.Node) or scale.name not in stored:
        return False
    unbiased = x.args[0] if x.target == aten.add.Tensor else x
    return unbiased.target == aten.conv2d.default


def is_scaled_norm(product: torch.fx.Node, stored: set[str]) -> bool:
    """Whether a product is (x · w) · number with a stored w."""
    x, scale = product.args
    if isinstance(scale, torch.fx.Node) or x.target != torch.ops.aten.mul.Tensor:
        return False
    weight = x.args[1]
    return isinstance(weight, torch.fx.Node) and weight.name in stored


def call_like(node: torch.fx.Node, target, *arguments) -> torch.fx.Node:
    """A new call, with the metadata of `node` (source line and module) and its value
    for these arguments."""
    call = node.graph.call_function(target, arguments)
    values = torch.fx.map_arg(arguments, lambda argument: argument.meta["val"])
    call.meta = node.meta | {"val": target(*values)}
    return call
