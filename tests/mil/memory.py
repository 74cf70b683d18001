"""A small stateful module with one weight matrix, to be exported and run as a package."""

import numpy as np
import torch

from miltorch.quiet import coremltools, quiet

WIDTH, ROWS = 64, 8


class Memory(torch.nn.Module):
    """y = relu(linear(x)) + memory[:, :1], where memory [1, ROWS, WIDTH] halves and takes in the
    mean of y's rows."""

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
    with quiet():
        return ct.convert(
            torch.jit.trace(Memory().eval(), torch.zeros(1, 2, WIDTH)),
            skip_model_load=True,
            minimum_deployment_target=ct.target.iOS18,
            inputs=[
                ct.TensorType("x", (1, ct.RangeDim(1, 4), WIDTH), dtype=np.float16)
            ],
            outputs=[ct.TensorType("y", dtype=np.float16)],
            states=[
                ct.StateType(
                    ct.TensorType(shape=(1, ROWS, WIDTH), dtype=np.float16), "memory"
                )
            ],
        )
