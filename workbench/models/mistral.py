"""Mistral: Llama with one window for all layers, or none."""

from workbench.bundle import Layer
from workbench.models import llama
from workbench.models.family import Plan, refuse

head = llama.head
layer = llama.layer


def layers(config) -> list[Layer]:
    if getattr(config, "layer_types", None):
        refuse(config, "layer_types", "the same attention in all layers")
    return [Layer(window=config.sliding_window)] * config.num_hidden_layers


def plan(config) -> Plan:
    return llama.plan_alike(config, layers=layers(config))
