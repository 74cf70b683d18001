"""Gemma 4 (text, dense): Gemma 3 with plain norm weights, a number that multiplies the
output of each layer, heads of another size in full attention, and two mechanisms of
its smaller models. The last layers attend to the K and V rows of the last layer of
their type that has some; here they keep a copy of its cache. And each layer adds a
function of a second embedding (per-layer embeddings)."""

from torch import nn

from workbench.bundle import Layer, Options
from workbench.bundle.names import PER_LAYER, X0
from workbench.models import llama
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import (
    LAYER_INPUT,
    ROPE_TYPES,
    Plan,
    dims,
    plan_alternating_layers,
    refuse,
)
from workbench.models.gemma3 import ADDING, NORMS, embedding_bound, gelu, with_peak
from workbench.models.layers import CachedAttention, Conv, RMSNorm, cut, scaled, vector

FULL, SLIDING = "full_attention", "sliding_attention"


class Attention(nn.Module):
    """Attention with normed queries, keys and values, which are not scaled further.

    Args:
        core: the attention itself, which has no weights.
        norm: builds an RMSNorm from a width and an axis.
        has_v_proj: whether V has a projection; otherwise V is K before norm and rope.
        copies: whether K and V rows come from an earlier layer.
        shared_rows: the two entries of `io` that hold these rows: read by a layer that
            copies, written by its source. None: the rows are this layer's, and no other
            layer reads them.
    """

    def __init__(
        self,
        C: int,
        core: CachedAttention,
        *,
        norm,
        has_v_proj: bool,
        copies: bool,
        shared_rows: tuple[str, str] | None,
    ):
        super().__init__()
        self.core = core
        self.copies = copies
        self.has_v_proj = has_v_proj
        self.shared_rows = shared_rows
        queries, keys = core.queries, core.keys
        self.q_proj = Conv(C, queries.width)
        self.q_norm = norm(queries.D, dim=3)
        if not copies:
            self.k_proj = Conv(C, keys.width)
            if has_v_proj:
                self.v_proj = Conv(C, keys.width)
            self.k_norm = norm(keys.D, dim=3)
            self.v_norm = norm(keys.D, dim=3, has_weight=False)
        self.o_proj = Conv(queries.width, C)

    def rows(self, x, io: dict):
        """K and V rows [B, H_kv, T, D] of this call; adds them to `io` where another layer
        copies them."""
        core = self.core
        if self.copies:
            k, v = (io[name] for name in self.shared_rows)
            return k, v
        k = core.keys.split(self.k_proj(x))
        v = core.keys.split(self.v_proj(x)) if self.has_v_proj else k
        k = core.rotate(self.k_norm(k), io)
        v = self.v_norm(v)
        if self.shared_rows:
            io |= dict(zip(self.shared_rows, (k, v)))
        return k, v

    def forward(self, x, cache: dict, io: dict):
        core = self.core
        q = core.rotate(self.q_norm(core.queries.split(self.q_proj(x))), io)
        k, v = self.rows(x, io)
        return self.o_proj(core.queries.merge(core.attend(q, k, v, cache, io)))


class DecoderLayer(llama.DecoderLayer):
    """A layer of Gemma 3's form. Where there are second embeddings, behind the MLP it
    adds W_out(gelu(W_in x) · p), normed; p is the layer's input `LAYER_INPUT`. A number
    multiplies the whole stream at the end."""

    def __init__(
        self,
        plan: Plan,
        index: int,
        options: Options,
        settings: llama.LayerSettings,
        mixer: llama.Mixer,
    ):
        super().__init__(plan, index, options, settings, mixer)
        C, P = plan.dims.C, plan.dims.P
        self.layer_scalar = vector(1)
        self.has_layer_input = bool(P)
        if P:
            self.act = gelu()
            # brings the shard's stream back to the model's size
            self.stream_scale = 2.0**plan.residual_exponent
            self.per_layer_input_gate = Conv(C, P)
            self.per_layer_projection = Conv(P, C)
            self.post_per_layer_input_norm = plan.norm(C, gain=1 / self.stream_scale)

    def forward(self, x, cache: dict, io: dict):
        x = super().forward(x, cache, io)
        if self.has_layer_input:
            gate = self.act(scaled(self.per_layer_input_gate(x), self.stream_scale))
            added = self.per_layer_projection(gate * io[LAYER_INPUT])
            x = x + self.post_per_layer_input_norm(added)
        return x * self.layer_scalar


class Projection(Conv):
    """Some rows of a matrix [L·P, C] of the checkpoint as a linear layer."""

    def __init__(self, C: int, rows: slice):
        super().__init__(C, rows.stop - rows.start)
        self.rows = rows


class LayerInputs(nn.Module):
    """What each layer of a shard adds to its stream: (norm(W x0 / √C) + √P · table[id])
    / √2, cut into the P channels of each layer. The host reads the table and
    multiplies by √P."""

    def __init__(self, plan: Plan, first: int, last: int):
        super().__init__()
        C, P = plan.dims.C, plan.dims.P
        self.widths = [P] * (last - first)
        self.per_layer_model_projection = Projection(C, slice(first * P, last * P))
        # The norm absorbs 1 / √C: that of W x0 has an epsilon C times as large.
        eps = plan.config.rms_norm_eps * C
        exponent = plan.residual_exponent
        self.per_layer_projection_norm = RMSNorm(P, eps, exponent=exponent)

    def forward(self, io: dict) -> list:
        projected = cut(self.per_layer_model_projection(io[X0]), *self.widths)
        embedded = cut(io[PER_LAYER], *self.widths)
        return [
            scaled(self.per_layer_projection_norm(context) + token, 0.5**0.5)
            for context, token in zip(projected, embedded)
        ]


def plan(config) -> Plan:
    P = getattr(config, "hidden_size_per_layer_input", None) or 0
    refuse_unsupported(config, P)
    rope_types = *ROPE_TYPES, "proportional"
    tables, layers = plan_alternating_layers(config, FULL, SLIDING, rope_types)
    sources = read_sources(config)
    # The model's sizes are those of its sliding layers, of which there are most.
    types = config.layer_types
    typical = types.index(SLIDING if SLIDING in types else FULL)
    H_kv, D = key_heads(config, typical)
    return llama.plan(
        config,
        act="gelu_pytorch_tanh",
        partial_rotary=True,
        sizes=dims(config, H_kv=H_kv, D=D, P=P),
        embedding_scale=config.hidden_size**0.5,
        embedding={PER_LAYER: "embed_tokens_per_layer.weight"} if P else {},
        rope=tables,
        layers=[
            with_differences(layer, key_heads(config, i), (H_kv, D), sources.get(i))
            for i, layer in enumerate(layers)
        ],
    )


def refuse_unsupported(config, P: int) -> None:
    """Refuses configurations that the layers of this file cannot compute. P is the width
    of the second embedding."""
    if getattr(config, "enable_moe_block", False):
        refuse(config, "enable_moe_block = true", "a dense model, without experts")
    if config.use_bidirectional_attention == "all":
        refuse(config, "use_bidirectional_attention = all", "causal attention")
    if P and config.vocab_size_per_layer_input != config.vocab_size:
        actual = f"vocab_size_per_layer_input = {config.vocab_size_per_layer_input}"
        refuse(config, actual, f"{config.vocab_size}, as vocab_size")
    if config.attention_bias:
        refuse(config, "attention_bias = true", "attention without biases")


def key_heads(config, index: int) -> tuple[int, int]:
    """H_kv and D of layer `index`: both differ between the types of layers."""
    layer = config.per_layer_config[index]
    return layer.num_key_value_heads, layer.head_dim


def with_differences(
    layer: Layer, sizes: tuple[int, int], typical: tuple[int, int], source: int | None
) -> Layer:
    """A layer of the plan with H_kv and D where they differ from the model's (`typical`),
    and the layer whose K and V rows it copies, if it copies any."""
    differences = {}
    for name, size, typical_size in zip(("H_kv", "D"), sizes, typical):
        if size != typical_size:
            differences[name] = size
    if source is not None:
        differences["source"] = source
    return layer.model_copy(update=differences)


def read_sources(config) -> dict[int, int]:
    """Layer without K and V rows → the layer whose rows it attends to."""
    try:
        modes = config.kv_sharing_modes
    except ValueError:
        actual = f"num_kv_shared_layers = {config.num_kv_shared_layers}"
        needed = "a layer with K and V of its own for every type that shares them"
        refuse(config, actual, needed)
    types = config.layer_types
    owners = {types[i]: i for i, mode in enumerate(modes) if mode == "store"}
    return {i: owners[types[i]] for i, mode in enumerate(modes) if mode == "reuse"}


def with_weights(plan: Plan, source: Checkpoint) -> Plan:
    """The plan with the smallest residual exponent that keeps the stream inside fp16
    for every input, as Gemma 3's; each layer's number multiplies the bound, too."""
    bound = embedding_bound(plan, source)
    names = [*ADDING]
    if plan.dims.P:
        names.append("post_per_layer_input_norm")
    peak = float(bound.max())
    for i in range(plan.dims.L):
        layer = f"{source.prefix}layers.{i}."
        for name in names:
            bound = bound + source.tensor(f"{layer}{name}.weight").abs()
        peak = max(peak, float(bound.max()))
        bound = bound * source.tensor(f"{layer}layer_scalar").abs()
        peak = max(peak, float(bound.max()))
    return with_peak(plan, peak)


def layer(plan: Plan, index: int, options: Options) -> nn.Module:
    config, description = plan.config, plan.layers[index]
    copies = description.source is not None
    is_source = index in {other.source for other in plan.layers}
    equal_kv = config.attention_k_eq_v and config.layer_types[index] == FULL
    attention = Attention(
        plan.dims.C,
        plan.attention(index, options),
        norm=plan.norm,
        has_v_proj=not equal_kv,
        copies=copies,
        shared_rows=description.shared_rows if copies or is_source else None,
    )
    is_wide = getattr(config, "use_double_wide_mlp", False) and copies
    settings = llama.LayerSettings(
        norms=NORMS, act=gelu(), inner=config.intermediate_size * (2 if is_wide else 1)
    )
    mixer = llama.Mixer("self_attn", attention)
    return DecoderLayer(plan, index, options, settings, mixer)


def shared(plan: Plan, first: int, last: int) -> nn.Module | None:
    return LayerInputs(plan, first, last) if plan.dims.P else None


def head(plan: Plan, rows: int) -> nn.Module:
    return llama.head(plan, rows, softcap=plan.config.final_logit_softcapping)
