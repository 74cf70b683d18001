"""Llama (2, 3, 3.1, 3.2): pre-norm, grouped queries, default, linear or llama3 rope,
SwiGLU."""

from torch import nn

from workbench.bundle import Layer, Options
from workbench.models.cache import Cache
from workbench.models.family import Plan, dims, flag, refuse, rope
from workbench.models.layers import Attention, GatedMLP, Head, scaled

# norms in front of attention and MLP, and behind them
READING = "input_layernorm", "post_attention_layernorm"
ADDING = "post_attention_layernorm", "post_feedforward_layernorm"


class DecoderLayer(nn.Module):
    """One decoder layer: x → hidden, both [B, C, T, 1] or [B, C, 1, T].

    Args:
        behind: norms follow attention and MLP instead of preceding them.
        fused: projections of the same input are one.
        mixer: name and module of what stands in place of attention, if anything does.
        gain: multiplies what attention and MLP add, unless norms follow them.
        attention: further keywords of `Attention`.
    """

    def __init__(
        self,
        plan: Plan,
        index: int,
        options: Options,
        *,
        behind=False,
        fused=False,
        mixer: tuple[str, nn.Module] | None = None,
        gain: float = 1.0,
        **attention,
    ):
        super().__init__()
        config = plan.config
        C = plan.dims.C
        self.behind = behind
        self.gain = gain
        for name in ADDING if behind else READING:
            self.add_module(name, plan.norm(C))
        if mixer is None:
            shape = plan.shape(index, options)
            rotary = plan.rotary(index)
            own = {"scale": plan.dims.D**-0.5, "rotary": rotary, "fused": fused}
            self.self_attn = Attention(C, shape, **own | attention)
        bias = flag(config, "mlp_bias")
        self.mlp = GatedMLP(
            C, config.intermediate_size, nn.functional.silu, bias, fused
        )
        self.mixer, module = mixer or ("self_attn", self.self_attn)
        self.add_module(self.mixer, module)

    def forward(self, x, cache: Cache, io: dict):
        mixer = self.get_submodule(self.mixer)
        if self.behind:
            x = x + self.post_attention_layernorm(mixer(x, cache, io))
            return x + self.post_feedforward_layernorm(self.mlp(x))
        if self.gain != 1:
            x = x + scaled(mixer(self.input_layernorm(x), cache, io), self.gain)
            return x + scaled(self.mlp(self.post_attention_layernorm(x)), self.gain)
        x = x + mixer(self.input_layernorm(x), cache, io)
        return x + self.mlp(self.post_attention_layernorm(x))


def plan(config) -> Plan:
    # bundles of it are older than that option
    return plan_alike(config, close_eps=False)


def plan_alike(config, *, partial_rotary: bool = False, **own) -> Plan:
    """The plan of a family like Llama; `own` are its fields of `Plan` where they differ
    from one rope table and no window."""
    d = dims(config)
    fields = {"layers": [Layer()] * d.L, "close_eps": True} | own
    if "rope" not in own:
        fields["rope"] = [rope(config)]
    full = all(2 * len(table.inv_freq) == d.D for table in fields["rope"])
    if not (partial_rotary or full):
        refuse(config, "a partial rotary factor", "full rotary dimensions")
    if config.hidden_act != "silu":
        refuse(config, f"activation {config.hidden_act!r}", "silu")
    return Plan(config, d, tied=config.tie_word_embeddings, **fields)


def layer(plan: Plan, index: int, options: Options, **chosen) -> nn.Module:
    """`chosen`: further keywords of `DecoderLayer`."""
    bias = flag(plan.config, "attention_bias")
    return DecoderLayer(
        plan, index, options, **{"qkv_bias": bias, "o_bias": bias} | chosen
    )


def head(plan: Plan, rows: int) -> nn.Module:
    return Head(plan.norm(plan.dims.C), plan.dims.C, rows)
