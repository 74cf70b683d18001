"""A lean conversion gives the program that coremltools gives by itself."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from miltorch.quiet import coremltools, quiet
from workbench.export.convert import lean, no_progress

ct = coremltools()


class Masked(nn.Module):
    """x + (mask − 1) · far, which fp16 must not compute where `far` is beyond it."""

    def __init__(self, far):
        super().__init__()
        self.far = far

    def forward(self, x, mask):
        return x + (mask - 1.0) * self.far


@pytest.mark.parametrize(
    "far, dtype",
    [
        (1e9, "fp32"),
        (1e4, "fp16"),
        (torch.full((4, 1, 1), 1e9), "fp32"),
        (torch.full((4, 1, 1), 1e4), "fp16"),
    ],
    ids=["a far number", "a near number", "far numbers", "near numbers"],
)
def test_what_fp16_cannot_hold_is_computed_in_fp32(far, dtype):
    shapes = {"x": (1, 4, 2, 1), "mask": (1, 1, 2, 1)}
    examples = tuple(map(torch.zeros, shapes.values()))
    programs = []
    for context in (nullcontext(), lean()):
        with context, quiet(), no_progress(), torch.no_grad():
            model = ct.convert(
                torch.jit.trace(Masked(far), examples),
                inputs=[ct.TensorType(name, shape) for name, shape in shapes.items()],
                minimum_deployment_target=ct.target.macOS15,
                skip_model_load=True,
            )
        operations = model._mil_program.functions["main"].operations
        programs.append([(op.op_type, op.outputs[0].dtype) for op in operations])
    assert programs[0] == programs[1]
    (product,) = [kind for name, kind in programs[1] if name == "mul"]
    assert product.__name__ == dtype
