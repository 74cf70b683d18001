"""Shards as programs of Apple's Core AI: the bundle is like any other, with `.aimodel`
folders as packages.

torch.export traces one shard of each shape; the others put their own weights into that
trace. The stored weights have the same bits as those of the Core ML shards. The axis T
is always free, from 1 to two or more, unless it is fixed above 1: at a fixed T = 1
Apple's conversion exchanges a product with a reshape and returns other values
(tests/test_coreai.py has the smallest module)."""

import json
import os
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from torch import nn

from miltorch.quiet import quiet
from workbench.bundle import FileEntry, Options, file_entries
from workbench.bundle.presets import Preset
from workbench.exporter.shards import LayerStack, Spec
from workbench.exporter.weights import WeightSource, blank, packed
from workbench.models.family import Plan
from workbench_coreai.aimodel import PROGRAM, apple, size_of_t

DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
STORED = "_stored"  # what follows a parameter's name where its stored parts are
RESOURCE = re.compile(r"dense_resource<(resource_\d+)>")
BLOB = re.compile(r'resource_\d+: "0x([0-9A-Fa-f]+)"')
ONE_AT_A_TIME = Lock()  # shards share one trace, into which each puts its weights
DATE = "20270101T000000Z"  # of every asset, so that equal assets have equal bytes


class CoreAITemplate:
    """The program of one shape of shard: torch.export traces the first shard that is
    written, and the others put their own weights into that trace."""

    suffix = ".aimodel"

    def __init__(
        self, spec: Spec, plan: Plan, options: Options, weights: list[WeightSource]
    ):
        # registers the operations of weights
        apple("coreai_torch._compression.custom_layers")
        self.name = spec.name
        self.spec = spec
        self.plan = plan
        self.options = options
        self.weights = weights
        self.program: torch.export.ExportedProgram | None = None
        self.modules: dict[str, str] = {}  # no values of operations are shown

    def write(
        self, package: Path, weights: list[WeightSource], load: Callable
    ) -> tuple[list[FileEntry], dict[str, str]]:
        """Writes the program with `weights`; see `workbench.exporter.template`."""
        dtype = DTYPES[self.options.program_dtype]
        stored = {w.path: shaped(w, load(w), dtype) for w in weights}
        with ONE_AT_A_TIME, quiet():
            if self.program is None:
                self.program = trace(self.module(stored), self.spec, self.options)
            save(self.program, self.spec, stored, package)
        raw = (package / PROGRAM).read_bytes()
        located = {w.path: locate(raw, stored[w.path], w.preset) for w in weights}
        places = {path: text for path, text in located.items() if text}
        return file_entries(package.parent, package), places

    def module(self, stored: dict[str, dict]) -> nn.Module:
        """The shard's module in the program's dtype, its weights the stored ones."""
        dtype = DTYPES[self.options.program_dtype]
        module = blank(self.spec, self.plan, self.options)
        module.requires_grad_(False).eval().to(dtype)
        for weight in self.weights:
            values = StoredWeight(stored[weight.path], weight.preset, dtype)
            attach(module, weight.path, values)
        return module


class StoredWeight(nn.Module):
    """A weight as it is stored: `val`, integers `data` times `scale`, or `indices` into
    `lut`.

    The values are those of fp16 arithmetic, whatever the program's dtype.
    """

    def __init__(
        self, parts: dict[str, torch.Tensor], preset: Preset, dtype: torch.dtype
    ):
        super().__init__()
        self.kind = getattr(torch, f"int{preset.bits}", torch.int8)
        self.dtype = dtype
        for role, part in parts.items():
            self.register_buffer(role, part)

    def forward(self) -> torch.Tensor:
        coreai = torch.ops.coreai
        if hasattr(self, "val"):
            value = self.val
        elif hasattr(self, "lut"):
            value = coreai.lut_to_dense(self.indices, self.lut, 0)
        else:
            value = coreai.constexpr_blockwise_shift_scale(
                self.data, self.scale, None, None, self.kind, None
            )
        return value if value.dtype == self.dtype else value.to(self.dtype)


def shaped(
    weight: WeightSource, arrays: dict[str, np.ndarray], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Stored arrays, copied, in the shapes that Core AI's operations take: a scale has
    the weight's rank, a table two axes more. A whole weight has the program's dtype,
    which its converter would give it anyway."""
    parts = {}
    ones = [1] * len(weight.shape)
    entries = 1 << weight.preset.bits  # of a table
    blocks = weight.shape[1] // weight.preset.block if weight.preset.block else 1
    for role, array in arrays.items():
        shape = {
            "scale": (array.size // blocks, blocks, *ones[2:]),
            # a table for each group of rows, or one for the whole tensor
            "lut": (array.size // entries, *ones[1:], entries, 1),
        }.get(role, weight.shape)
        parts[role] = torch.from_numpy(array.reshape(shape).copy())
        if role == "val":
            parts[role] = parts[role].to(dtype)
    return parts


def attach(module: nn.Module, path: str, stored: StoredWeight) -> None:
    """Replaces the parameter at `path` by a stored weight."""
    parent, _, name = path.rpartition(".")
    owner = module.get_submodule(parent)
    del owner._parameters[name]
    owner.register_module(name + STORED, stored)
    kind = type(owner)
    weight = property(lambda self: self.get_submodule(name + STORED)())
    owner.__class__ = type(kind.__name__, (kind,), {name: weight})


def trace(
    module: nn.Module, spec: Spec, options: Options
) -> torch.export.ExportedProgram:
    """The module traced by torch.export, in Apple's operations."""
    dtype = DTYPES[options.program_dtype]
    T, free = max(2, options.t_max), None
    if size_of_t(options) < 0:
        free = torch.export.Dim("T", min=1, max=T)
    examples, axes = [], []
    for shape in spec.inputs.values():
        examples.append(torch.zeros([T if n == "T" else n for n in shape], dtype=dtype))
        axes.append({i: free for i, n in enumerate(shape) if n == "T"})
    if isinstance(module, LayerStack):
        axes = [tuple(axes)]  # the stack takes *tensors
    with torch.no_grad():
        program = torch.export.export(
            module,
            tuple(examples),
            dynamic_shapes=tuple(axes) if free else None,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    keep_scales(program)
    return program.run_decompositions(apple("coreai_torch").get_decomp_table())


def keep_scales(program: torch.export.ExportedProgram) -> None:
    """Multiplies by a constant in a rank of its own what a stored weight has multiplied
    before: in one rank Apple's passes fold both into one weight, which is then no
    longer the checkpoint's.

    Meant are a stored scale behind a convolution and its bias, and a number behind a
    norm's weight."""
    aten = torch.ops.aten
    inputs = program.graph_signature.input_specs
    stored = {one.arg.name for one in inputs if STORED in (one.target or "")}
    for node in program.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        x, scale = node.args
        by_weight = isinstance(scale, torch.fx.Node)
        if by_weight:
            source = x.args[0] if x.target == aten.add.Tensor else x
            folds = source.target == aten.conv2d.default and scale.name in stored
        else:
            is_product = x.target == aten.mul.Tensor
            folds = is_product and getattr(x.args[1], "name", "") in stored
        if not folds:
            continue
        with program.graph.inserting_before(node):
            if by_weight:
                scale = _like(node, aten.unsqueeze.default, scale, 0)
            x = _like(node, aten.unsqueeze.default, x, 0)
            product = _like(node, aten.mul.Tensor, x, scale)
            node.replace_all_uses_with(_like(node, aten.squeeze.dim, product, 0))
        program.graph.erase_node(node)
    program.graph_module.recompile()


def _like(node: torch.fx.Node, target, *arguments) -> torch.fx.Node:
    """A call in the place of `node`: its line and module, its own value."""
    call = node.graph.call_function(target, arguments)
    values = torch.fx.map_arg(arguments, lambda argument: argument.meta["val"])
    call.meta = node.meta | {"val": target(*values)}
    return call


def save(
    program: torch.export.ExportedProgram,
    spec: Spec,
    stored: dict[str, dict],
    path: Path,
) -> None:
    """Writes a traced program with these weights. The same trace and weights give the
    same bytes, in any process."""
    for name, parts in stored.items():
        for role, part in parts.items():
            program.state_dict[f"{name}{STORED}.{role}"] = part
    torch_converter = apple("coreai_torch").TorchConverter
    with open(os.devnull, "w") as null, redirect_stdout(null):
        converter = torch_converter(mode=torch_converter.Mode.RELEASE)
        converter.add_exported_program(
            program,
            input_names=list(spec.inputs),
            output_names=list(spec.outputs),
            state_names=[state.tensor for state in spec.states.values()],
        )
        asset = converter.to_coreai()
        name_constants(asset._module._mlir_module)
        path.parent.mkdir(parents=True, exist_ok=True)
        asset.save_asset(path)
    metadata = json.loads((path / "metadata.json").read_text()) | {"creationDate": DATE}
    (path / "metadata.json").write_text(json.dumps(metadata, indent=1, sort_keys=True))


def name_constants(module) -> None:
    """Names the large constants of a program in their order, because Apple's names differ in
    every process."""
    ir = apple("coreai._compiler.ir")
    names = {}

    def visit(op):
        if "value" in op.attributes:
            value = op.attributes["value"]
            if resource := RESOURCE.match(str(value)[:200]):
                name = resource[1]
                if name not in names:
                    names[name] = renamed(op, value, f"weight_{len(names)}")
                op.attributes["value"] = names[name]
        return ir.WalkResult.ADVANCE

    def renamed(op, value, name: str):
        alone = ir.Module.create()
        op.clone(ir.InsertionPoint(alone.body))
        # its alignment in four bytes, then its bytes
        (blob,) = BLOB.findall(str(alone))
        raw = np.frombuffer(bytes.fromhex(blob), np.uint8)
        alignment = int(raw[:4].view(np.uint32)[0])
        create = ir.DenseResourceElementsAttr.get_from_buffer
        return create(raw[4:].copy(), name, value.type, alignment)

    with module.context, ir.Location.unknown():
        module.operation.walk(visit)


def locate(raw: bytes, parts: dict[str, torch.Tensor], preset: Preset) -> str:
    """Where the parts of a weight stand in a program, as the manifest names it; "" for
    a constant that is written as one repeated value."""
    texts = []
    for role, part in parts.items():
        array = part.numpy()
        dtype = f"fp{8 * array.itemsize}"
        if role in ("data", "indices"):
            dtype = f"{'u' * (role == 'indices')}int{preset.bits}"
            array = packed(array.reshape(-1), preset.bits)
        offset = raw.find(array.tobytes())
        if offset < 0:
            return ""
        sizes = ",".join(map(str, part.shape))
        texts.append(f"{role}:{dtype}[{sizes}]@{offset}")
    return " ".join(texts)
