"""Shards as programs of Apple's Core AI: the bundle is like any other, with `.aimodel`
folders as packages. The workbench calls this file through `target.Target.template`."""

from collections.abc import Callable
from pathlib import Path
from threading import Lock

import torch
from torch import nn

from miltorch.coremltools_import import quiet
from workbench.bundle import FileEntry, Options, file_entries
from workbench.exporter.shards import Spec
from workbench.exporter.weights import WeightSource, empty_module
from workbench.models.family import Plan
from workbench_coreai.aimodel import PROGRAM, import_apple
from workbench_coreai.asset import locate, save
from workbench_coreai.trace import DTYPES, trace
from workbench_coreai.weights import StoredWeight, replace_parameter, shape_parts

# the shards of one shape share a trace, into which each puts its weights
TRACE_LOCK = Lock()


class CoreAITemplate:
    """The program of one shape of shard: torch.export traces the first shard that is
    written, and the others put their own weights into that trace.

    See `workbench.exporter.template.Template` for the attributes that the exporter
    reads."""

    suffix = ".aimodel"

    def __init__(
        self, spec: Spec, plan: Plan, options: Options, weights: list[WeightSource]
    ):
        # imported because it registers torch.ops.coreai, the operations of weights
        import_apple("coreai_torch._compression.custom_layers")
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
        stored = {w.path: shape_parts(w, load(w), dtype) for w in weights}
        with TRACE_LOCK, quiet():
            if self.program is None:
                module = self.make_module(stored)
                self.program = trace(module, self.spec, self.options)
            save(self.program, self.spec, stored, package)
        program_bytes = (package / PROGRAM).read_bytes()
        places = {}
        for weight in weights:
            place = locate(program_bytes, stored[weight.path], weight.preset)
            if place is not None:
                places[weight.path] = place
        return file_entries(package.parent, package), places

    def make_module(self, stored: dict[str, dict[str, torch.Tensor]]) -> nn.Module:
        """The shard's module in the program's dtype, its weights the stored ones.

        Args:
            stored: path of the parameter → role → part.
        """
        dtype = DTYPES[self.options.program_dtype]
        module = empty_module(self.spec, self.plan, self.options)
        module.requires_grad_(False).eval().to(dtype)
        for weight in self.weights:
            values = StoredWeight(stored[weight.path], weight.preset, dtype)
            replace_parameter(module, weight.path, values)
        return module
