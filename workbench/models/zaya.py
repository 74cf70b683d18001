"""ZAYA1: compressed convolutional attention, one expert per token, learned scales on
both sides of every residual sum.

A router reads the state of the router in the layer before. The experts of a layer are
either stacked and all run for every token, weighted by one-hot probabilities (dense), or
the host runs the chosen one (routed). The class after the last expert is the skip class,
which adds nothing."""

import torch
from torch import nn

from workbench.bundle import Options
from workbench.bundle.names import (
    BASE,
    CONV_STATE,
    EXPERT_IN,
    ROUTER_PROBS,
    ROUTER_SCORES,
    ROUTER_STATE,
    ROUTER_STATE_OUT,
    TAIL_SELECT,
    V_DELAYED_STATE,
)
from workbench.models import llama
from workbench.models.family import Plan, dims, plan_alternating_layers, refuse
from workbench.models.layers import (
    NORMAL,
    ActivationShape,
    CachedAttention,
    Conv,
    by_peak,
    cut,
    vector,
)
from workbench.models.recurrence import append_to_tail

TAPS = 2  # kernel size of each of the two convolutions
TAIL = 2 * TAPS - 2  # earlier inputs that both together read


class Projection(nn.Module):
    """x → q [B, H, T, D], k and v [B, H_kv, T, D], before norm and rope.

    Queries and keys are mixed over time by two short convolutions and pulled towards
    their means; half of the value channels are the previous token's."""

    def __init__(self, C: int, core: CachedAttention):
        super().__init__()
        self.queries, self.keys = core.queries, core.keys
        queries, keys = core.queries, core.keys
        self.widths = queries.width, keys.width
        width = sum(self.widths)
        conv = {"bias": True, "kernel": (1, TAPS)}
        self.q_proj = Conv(C, queries.width)
        self.k_proj = Conv(C, keys.width)
        self.v_proj_current = Conv(C, keys.width // 2)
        self.v_proj_delayed = Conv(C, keys.width // 2)
        self.conv_qk_depthwise = Conv(width, width, groups=width, **conv)
        groups = queries.count + keys.count
        self.conv_qk_grouped = Conv(width, width, groups=groups, **conv)

    def forward(self, x, cache: dict, select):
        queries, keys = self.queries, self.keys
        B = queries.B
        q = self.q_proj(x)
        k = self.k_proj(x)
        mixed = append_to_tail(B, torch.cat([q, k], 1), cache[CONV_STATE], select)
        mixed = self.conv_qk_grouped(self.conv_qk_depthwise(mixed))
        mean_q, mean_k = self.means(queries.split(q), keys.split(k))
        q, k = cut(mixed, *self.widths)
        q = queries.split(q) + mean_q
        k = keys.split(k) + mean_k
        # this state is one row shorter than the convolutions'
        delayed = cache[V_DELAYED_STATE]
        delayed = append_to_tail(B, self.v_proj_delayed(x), delayed, select[:, 1:])
        current = self.v_proj_current(x).reshape(B, keys.width // 2, 1, -1)
        v = torch.cat([current, delayed[..., :-1]], 1)
        return q, k, keys.split(v)

    def means(self, q, k):
        """Mean of each query with its group's key, and the mean of those over the
        group; [B, H, T, D], [B, H_kv, T, D]."""
        B, D = self.queries.B, self.queries.D
        H, H_kv = self.queries.count, self.keys.count
        groups = B * H_kv
        # rank 4: batch and groups share the first axis
        queries = q.reshape(groups, H // H_kv, -1, D)
        mean_q = (queries + k.reshape(groups, 1, -1, D)) * 0.5
        mean_k = mean_q.mean(1, keepdim=True)
        return mean_q.reshape(B, H, -1, D), mean_k.reshape(B, H_kv, -1, D)


class QKNorm(nn.Module):
    """q to unit length, k to length √D times its head's temperature, per head.

    The score scale D^-½ and q's own √D cancel, so neither is applied.
    """

    def __init__(self, H_kv: int):
        super().__init__()
        self.temp = vector(H_kv)

    def forward(self, q, k):
        # 0 stays 0
        (q, _), (k, _) = by_peak(q, 3), by_peak(k, 3)
        q = q / (q * q).sum(3, keepdim=True).sqrt().clamp(*NORMAL)
        k = k / (k * k).mean(3, keepdim=True).sqrt().clamp(*NORMAL)
        return q, k * self.temp


class CompressedConvAttention(nn.Module):
    """Compressed convolutional attention (CCA, arXiv 2510.04476): x → [B, C, T, 1].

    Beyond K and V it keeps `conv_state` [B, 2, (H + H_kv)·D], the last two inputs of
    the convolutions, oldest first, and `v_delayed_state` [B, 1, H_kv·D / 2]. Both start
    as zeros."""

    def __init__(self, C: int, core: CachedAttention):
        super().__init__()
        self.core = core
        self.qkv_proj = Projection(C, core)
        self.qk_norm = QKNorm(core.keys.count)
        self.o_proj = Conv(core.queries.width, C)

    def forward(self, x, cache: dict, io: dict):
        core = self.core
        q, k, v = self.qkv_proj(x, cache, io[TAIL_SELECT])
        q, k = self.qk_norm(q, k)
        mixed = core.attend(core.rotate(q, io), core.rotate(k, io), v, cache, io)
        return self.o_proj(core.queries.merge(mixed))


class RouterMLP(nn.Module):
    """Router state [B, R, T, 1] → logits [B, E + 1, T, 1]."""

    def __init__(self, plan: Plan):
        super().__init__()
        R = plan.router_width
        self.norm = plan.norm(R)
        self.fc1 = Conv(R, R, True)
        self.fc2 = Conv(R, R, True)
        self.out_proj = Conv(R, plan.experts + 1)

    def forward(self, x):
        x = nn.functional.gelu(self.fc1(self.norm(x)))
        return self.out_proj(nn.functional.gelu(self.fc2(x)))


class Router(nn.Module):
    """x, the previous layer's router state → its own state [B, R, T, 1], probabilities
    and scores [B, E + 1, T, 1].

    Scores are probabilities plus balancing biases: their maximum chooses, the
    probability weighs. The first layer has no state before it; a scale of zeros gives
    it the shape of the others."""

    def __init__(self, plan: Plan, first: bool):
        super().__init__()
        R = plan.router_width
        self.down_proj = Conv(plan.dims.C, R, True)
        self.router_mlp = RouterMLP(plan)
        # without a gradient it stays zero, and no checkpoint holds it
        self.router_states_scale = vector(R).requires_grad_(not first)
        self.balancing_biases = vector(plan.experts + 1)

    def forward(self, x, before):
        state = self.down_proj(x) + before * self.router_states_scale
        probabilities = torch.softmax(self.router_mlp(state), 1)
        return state, probabilities, probabilities + self.balancing_biases


class Experts(nn.Module):
    """Gated experts stacked as one wide convolution up and one grouped convolution
    down."""

    def __init__(self, count: int, C: int, inner: int, shape: ActivationShape):
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
        shape = self.shape
        B, E = shape.B, self.count
        # one convolution for all experts: gates and ups of an expert lie side by side
        both = nn.functional.conv2d(x, self.gate_up_proj)
        both = both.reshape(B, E, 2 * self.inner, -1)
        # [B, E, inner, T]
        inner = nn.functional.silu(both[:, :, : self.inner]) * both[:, :, self.inner :]
        inner = shape.plane(inner, E * self.inner)
        down = nn.functional.conv2d(inner, self.down_proj, groups=E)
        weighted = down.reshape(B, E, self.C, -1) * weights.reshape(B, E, 1, -1)
        return shape.plane(weighted.sum(1), self.C)


class Mixture(nn.Module):
    """The router and the experts; `experts` is None where the host runs them (routed)."""

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


class ResidualScaling(nn.Module):
    """(hidden + bias) · scale + (residual + bias) · scale, each with its own vectors.

    Bias and scale stay factors: their product would be rounded to fp16 once more.
    """

    def __init__(self, C: int):
        super().__init__()
        self.hidden_states_scale = vector(C)
        self.hidden_states_bias = vector(C)
        self.residual_scale = vector(C)
        self.residual_bias = vector(C)

    def forward(self, hidden, residual):
        hidden = (hidden + self.hidden_states_bias) * self.hidden_states_scale
        return hidden + (residual + self.residual_bias) * self.residual_scale


class ZayaDecoderLayer(nn.Module):
    """One decoder layer: x → hidden; reads the router state of the layer before and
    leaves its own in `io`.

    With routed experts the module ends at the router: `io` gets the values with which
    the host and the expert shards finish the layer."""

    def __init__(self, plan: Plan, index: int, options: Options):
        super().__init__()
        C = plan.dims.C
        core = plan.attention(index, options)
        self.input_layernorm = plan.norm(C)
        self.post_attention_layernorm = plan.norm(C)
        self.self_attn = CompressedConvAttention(C, core)
        experts = None
        if options.moe == "dense":
            inner = plan.config.moe_intermediate_size
            shape = ActivationShape(options.batch, options.layout)
            experts = Experts(plan.experts, C, inner, shape)
        self.mlp = Mixture(Router(plan, first=index == 0), experts)
        self.post_attention_residual_scale = ResidualScaling(C)
        self.post_mlp_residual_scale = ResidualScaling(C)

    def forward(self, x, cache: dict, io: dict):
        added = self.self_attn(self.input_layernorm(x), cache, io)
        x = self.post_attention_residual_scale(added, x)
        normed = self.post_attention_layernorm(x)
        # an earlier layer of this shard has left its state; the first one reads the input
        before = io.get(ROUTER_STATE_OUT, io[ROUTER_STATE])
        state, probabilities, scores = self.mlp.gate(normed, before)
        io[ROUTER_STATE_OUT] = state
        if self.mlp.experts:
            added = self.mlp.dense(normed, probabilities, scores)
            return self.post_mlp_residual_scale(added, x)
        io |= {EXPERT_IN: normed, ROUTER_PROBS: probabilities, ROUTER_SCORES: scores}
        # x - x: zeros that no converter folds into bias · scale
        io[BASE] = self.post_mlp_residual_scale(x - x, x)
        return io[BASE]


class Expert(nn.Module):
    """One expert of one layer: hidden = acc + expert_weight · expert(expert_in) ·
    scale."""

    def __init__(self, plan: Plan, options: Options):
        super().__init__()
        C = plan.dims.C
        inner = plan.config.moe_intermediate_size
        experts = Experts(1, C, inner, ActivationShape(options.batch, options.layout))
        self.mlp = nn.ModuleDict({"experts": experts})
        scale = nn.ParameterDict({"hidden_states_scale": vector(C)})
        self.post_mlp_residual_scale = scale

    def forward(self, x, weight, acc):
        added = self.mlp["experts"](x, weight)
        return acc + added * self.post_mlp_residual_scale["hidden_states_scale"]


def plan(config) -> Plan:
    if config.attention_bias or config.lm_head_bias:
        refuse(config, "attention_bias or lm_head_bias", "neither, as in ZAYA1")
    if config.cca_time0 != TAPS or config.cca_time1 != TAPS:
        actual = f"cca_time0, cca_time1 = {config.cca_time0}, {config.cca_time1}"
        refuse(config, actual, f"{TAPS} and {TAPS}")
    d = dims(config)
    tables, layers = plan_alternating_layers(config, "hybrid", "hybrid_sliding")
    side = {
        CONV_STATE: (TAIL, (d.H + d.H_kv) * d.D),
        V_DELAYED_STATE: (1, d.H_kv * d.D // 2),
    }
    return llama.plan(
        config,
        partial_rotary=True,
        embedding={
            "bias": "input_hidden_states_bias",
            "scale": "input_hidden_states_scale",
        },
        side_states=[side] * d.L,
        router_width=config.router_hidden_size,
        experts=config.num_experts,
        rope=tables,
        layers=layers,
    )


layer = ZayaDecoderLayer
expert = Expert
head = llama.head
