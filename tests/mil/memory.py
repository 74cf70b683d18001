"""A small stateful module with one weight matrix, and its export as a Core ML model."""

import numpy as np
import torch

from miltorch.coremltools_import import coremltools, quiet

WIDTH, ROWS = 64, 8


class Memory(torch.nn.Module):
    """A linear layer with a state `memory` [1, ROWS, WIDTH], zeros at first. For x [1, T, WIDTH]
    a call computes

        y = relu(linear(x))
        memory = memory / 2 + the mean of y over T, in every row
        result = y + the first row of memory

    Weight and bias are seeded normal draws, rounded to fp16."""

    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(WIDTH, WIDTH)
        random = np.random.default_rng(0)
        for parameter in self.mix.parameters():
            value = random.normal(0, 0.1, parameter.shape).astype(np.float16)
            parameter.data = torch.from_numpy(value.astype(np.float32))
        self.register_buffer("memory", torch.zeros(1, ROWS, WIDTH))

    def forward(self, x):
        y = torch.relu(self.mix(x))
        self.memory[:] = self.memory * 0.5 + y.mean(1, keepdim=True)
        return y + self.memory[:, :1]


def export():
    """Memory as a coremltools model: x [1, T, WIDTH] with T from 1 to 4, output y, state `memory`,
    all fp16."""
    ct = coremltools()
    memory = ct.TensorType(shape=(1, ROWS, WIDTH), dtype=np.float16)
    with quiet():
        return ct.convert(
            torch.jit.trace(Memory().eval(), torch.zeros(1, 2, WIDTH)),
            skip_model_load=True,
            minimum_deployment_target=ct.target.iOS18,
            inputs=[
                ct.TensorType("x", (1, ct.RangeDim(1, 4), WIDTH), dtype=np.float16)
            ],
            outputs=[ct.TensorType("y", dtype=np.float16)],
            states=[ct.StateType(memory, "memory")],
        )
