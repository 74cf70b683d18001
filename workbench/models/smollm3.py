"""SmolLM 3: Llama without rope in some layers, every fourth of them unless the
configuration says otherwise.

Such layers have a rope table of their own whose frequencies are all zero: cos is 1, sin
is 0."""

from workbench.bundle import Layer, Rope
from workbench.models import llama
from workbench.models.family import Plan, refuse, rope

head = llama.head
layer = llama.layer


def plan(config) -> Plan:
    if set(config.layer_types) != {"full_attention"}:
        refuse(
            config,
            f"layer types {sorted(set(config.layer_types))}",
            "full_attention alone",
        )
    turned = [bool(flag) for flag in config.no_rope_layers[: config.num_hidden_layers]]
    table = rope(config)
    ropes = {
        True: table,
        False: Rope(name="nope", inv_freq=[0.0] * len(table.inv_freq)),
    }
    layers = [Layer(rope=ropes[flag].name) for flag in turned]
    return llama.plan_alike(
        config, [ropes[flag] for flag in sorted(set(turned))], layers
    )
