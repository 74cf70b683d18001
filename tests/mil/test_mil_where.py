"""`torch.where` with sizes that vary: coremltools declares the result too small, Core ML
broadcasts."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import miltorch
from miltorch import shim
from miltorch.quiet import coremltools, frozen


def distance(q, end):
    return end - q + torch.arange(q)[:, None] - torch.arange(end)


class Windowed(nn.Module):
    """Two scalars as branches; the result is used as it is, and with one axis more."""

    def forward(self, ids, mask):
        away = distance(ids.shape[-1], mask.shape[-1])
        own = torch.where((away >= 0) & (away < 3), 0.0, -1e4)
        return mask + own, torch.softmax(mask + own[None] * 2.0, -1)


class Cells(nn.Module):
    """Branches [1, 1], and a branch that broadcasts."""

    def forward(self, ids, mask):
        away = distance(ids.shape[-1], mask.shape[-1])
        ones = torch.ones(1, 1)
        return mask * torch.where(away >= 0, ones, 2 * ones), torch.where(
            away > 1, mask, -ones
        )


@pytest.fixture(scope="module", params=[Windowed, Cells])
def exported(request, tmp_path_factory):
    """(the torch module, its program), with both sizes free."""
    ct = coremltools()
    q, end = ct.RangeDim(1, 8, default=2), ct.RangeDim(1, 16, default=5)
    module = request.param().eval()
    example = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 5)
    with warnings.catch_warnings(), shim.mended_converter(), frozen():
        warnings.simplefilter("ignore")
        model = ct.convert(
            torch.jit.trace(module, example, check_trace=False),
            inputs=[
                ct.TensorType("ids", (1, q), dtype=np.int32),
                ct.TensorType("mask", (1, 1, q, end), dtype=np.float16),
            ],
            outputs=[ct.TensorType("y"), ct.TensorType("z")],
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        )
    path = tmp_path_factory.mktemp("where") / "where.mlpackage"
    model.save(str(path))
    return module, miltorch.read(path)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 5), (1, 7), (4, 9), (8, 16)])
def test_a_select_broadcasts_like_torch(exported, sizes):
    module, program = exported
    q, end = sizes
    inputs = (
        torch.zeros(1, q, dtype=torch.int32),
        torch.randn(1, 1, q, end).half().float(),
    )
    outputs = miltorch.Executable(program, "exact").run(
        dict(zip(("ids", "mask"), inputs)), {}
    )
    for name, expected in zip("yz", module(*inputs)):
        assert outputs[name].shape == expected.shape
        torch.testing.assert_close(outputs[name], expected, rtol=1e-5, atol=1e-5)
