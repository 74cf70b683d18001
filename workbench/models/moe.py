"""A mixture of experts with one expert per token: a router with a state from the layer
before, and stacked experts.

Experts run all together, weighted by one-hot probabilities (dense), or one by one as
the host picks them (routed). The class after the last expert is the skip class: it adds
nothing."""

import torch
from torch import nn

from workbench.models.layers import AttentionGeometry, Conv, RMSNorm


class RouterMLP(nn.Module):
    """Router state [B, R, T, 1] → logits [B, E + 1, T, 1]."""

    def __init__(self, R: int, classes: int, eps: float):
        super().__init__()
        self.norm = RMSNorm(R, eps)
        self.fc1 = Conv(R, R, True)
        self.fc2 = Conv(R, R, True)
        self.out_proj = Conv(R, classes)

    def forward(self, x):
        x = nn.functional.gelu(self.fc1(self.norm(x)))
        return self.out_proj(nn.functional.gelu(self.fc2(x)))


class Router(nn.Module):
    """x, the previous layer's router state → its own state [B, R, T, 1], probabilities
    and scores [B, E + 1, T, 1].

    Scores are probabilities plus balancing biases: their maximum chooses, the
    probability weighs. The first layer has no state before it; a scale of zeros gives
    it the shape of the others."""

    def __init__(self, C: int, R: int, experts: int, eps: float, first: bool):
        super().__init__()
        self.down_proj = Conv(C, R, True)
        self.router_mlp = RouterMLP(R, experts + 1, eps)
        # without gradient: stays zero, and no checkpoint holds it
        self.router_states_scale = nn.Parameter(
            torch.zeros(1, R, 1, 1), requires_grad=not first
        )
        self.balancing_biases = nn.Parameter(torch.zeros(1, experts + 1, 1, 1))

    def forward(self, x, before):
        state = self.down_proj(x) + before * self.router_states_scale
        probabilities = torch.softmax(self.router_mlp(state), 1)
        return state, probabilities, probabilities + self.balancing_biases


class Experts(nn.Module):
    """Gated experts stacked as one wide convolution up and one grouped convolution
    down."""

    def __init__(self, count: int, C: int, inner: int, shape: AttentionGeometry):
        super().__init__()
        self.count = count
        self.C = C
        self.inner = inner
        self.shape = shape
        self.gate_up_proj = nn.Parameter(torch.zeros(count * 2 * inner, C, 1, 1))
        self.down_proj = nn.Parameter(torch.zeros(count * C, inner, 1, 1))

    def forward(self, x, weights):
        """Σ over experts of weights [B, E, T, 1] · down(silu(gate(x)) · up(x)), [B, C,
        T, 1]."""
        s = self.shape
        E = self.count
        both = nn.functional.conv2d(x, self.gate_up_proj).reshape(
            s.B, E, 2 * self.inner, -1
        )
        # [B, E, inner, T]
        inner = nn.functional.silu(both[:, :, : self.inner]) * both[:, :, self.inner :]
        down = nn.functional.conv2d(
            s.plane(inner, E * self.inner), self.down_proj, groups=E
        )
        weighted = down.reshape(s.B, E, self.C, -1) * weights.reshape(s.B, E, 1, -1)
        return s.plane(weighted.sum(1), self.C)


class Mixture(nn.Module):
    """The router and, unless the host runs them, the experts."""

    def __init__(self, gate: Router, experts: Experts | None):
        super().__init__()
        self.gate = gate
        self.experts = experts
        classes = torch.arange(gate.balancing_biases.shape[1], dtype=torch.int32)
        self.register_buffer("classes", classes.reshape(1, -1, 1, 1), persistent=False)

    def dense(self, x, probabilities, scores):
        """Runs every expert on every token; all but the chosen one have weight zero."""
        chosen = scores.argmax(1, keepdim=True).int() == self.classes
        weights = probabilities * chosen.to(probabilities.dtype)
        return self.experts(x, weights[:, : self.experts.count])
