"""Faults of a bundle's manifest, and of the tokenizer that it lists."""

import json

from faults.copies import Plant
from faults.fault import Fault


def declare(part: str, field: str, value) -> Plant:
    """Sets a field of a part of the manifest."""

    def plant(copy):
        copy.manifest[part][field] = value

    return plant


def declare_smaller_stream(copy):
    copy.manifest["residual_exponent"] = 1


def exchange_states(copy, layer):
    states = copy.shard(layer)["states"]
    k, v = states[f"layers.{layer}.k_state"], states[f"layers.{layer}.v_state"]
    k["tensor"], v["tensor"] = v["tensor"], k["tensor"]


def declare_first_source(copy, layer):
    copy.manifest["layers"][layer]["source"] = 0


def declare_family(copy):
    copy.manifest["family"] = "qwen2"


def declare_compression(others: dict[str, str], default: str) -> Plant:
    """Declares another preset than the bundle's: `others[preset]`, and `default` for presets that
    `others` lacks."""

    def plant(copy):
        options = copy.manifest["options"]
        options["compress"] = others.get(options["compress"], default)

    return plant


def declare_cache_length(S: int) -> Plant:
    """Declares another S, in the options and in the shapes of masks and states."""

    def plant(copy):
        options = copy.manifest["options"]
        old, options["max_seq_len"] = options["max_seq_len"], S
        for shard in copy.manifest["shards"]:
            masks = [
                shape for name, shape in shard["inputs"].items() if "_mask" in name
            ]
            states = [state["shape"] for state in shard["states"].values()]
            for shape in masks + states:
                shape[:] = [S if size == old else size for size in shape]

    return plant


def drop_taps(copy, layer):
    copy.shard(layer)["taps"].clear()


def tap_another_value(copy, layer):
    modules = copy.shard(layer)["modules"].items()
    name = next(name for name, module in modules if module.endswith("self_attn"))
    copy.shard(layer)["taps"] = {str(layer): name}


def store_two_states_in_one_tensor(copy, layer):
    copy.shard(layer)["states"][f"layers.{layer}.k_state"]["tensor"] = "v_state"


def exchange_two_tokens(copy):
    def change(text):
        fields = json.loads(text)
        vocabulary = fields["model"]["vocab"]
        a, b = list(vocabulary)[-2:]
        vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
        return json.dumps(fields).encode()

    copy.edit_file("tokenizer/tokenizer.json", change)


def replace_chat_template(copy):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"

    def change(text):
        return json.dumps(json.loads(text) | {"chat_template": template}).encode()

    copy.edit_file("tokenizer/tokenizer_config.json", change)


FAULTS = [
    Fault(
        "source of copied rows is another layer of its type",
        gate="interface",
        bundle="gemma4",
        layer=4,
        plant=declare_first_source,
    ),
    Fault(
        "embedding scale left out",
        gate="program",
        bundle="gemma",
        plant=declare("embedding", "scale", 1.0),
    ),
    Fault(
        "embedding times 1.05",
        gate="program",
        plant=declare("embedding", "scale", 1.05),
    ),
    Fault(
        "stream declared half as large", gate="program", plant=declare_smaller_stream
    ),
    Fault(
        "states exchanged in the manifest",
        gate="program",
        layer=1,
        plant=exchange_states,
    ),
    Fault(
        "t_max of 60 over a range of 4",
        gate="interface",
        plant=declare("options", "tokens", "1-60"),
    ),
    Fault(
        "t_max of 2 over a range of 4",
        gate="interface",
        plant=declare("options", "tokens", "1-2"),
    ),
    Fault(
        "one T declared over a range",
        gate="interface",
        plant=declare("options", "tokens", "4"),
    ),
    Fault(
        "experts declared routed",
        gate="interface",
        plant=declare("options", "moe", "routed"),
    ),
    Fault(
        "slice writes declared",
        gate="interface",
        plant=declare("options", "kv_write", "slice"),
    ),
    Fault(
        "two layers a shard declared",
        gate="interface",
        plant=declare("options", "layers_per_shard", 2),
    ),
    Fault("other heads declared", gate="interface", plant=declare("dims", "H", 8)),
    Fault(
        "end of sequence of another model",
        gate="interface",
        plant=declare("tokens", "eos", [0]),
    ),
    Fault(
        "one end of sequence too many",
        gate="interface",
        plant=declare("tokens", "eos", [2, 5]),
    ),
    Fault(
        "token suppressed that the checkpoint allows",
        gate="interface",
        plant=declare("tokens", "suppressed", [5]),
    ),
    Fault(
        "begin of sequence of another model",
        gate="interface",
        plant=declare("tokens", "bos", 3),
    ),
    Fault(
        "begin of sequence dropped",
        gate="interface",
        plant=declare("tokens", "bos", None),
    ),
    Fault("tokenizer left out", gate="interface", plant=declare("tokens", "files", [])),
    Fault("another family declared", gate="interface", plant=declare_family),
    Fault(
        "another compression declared",
        gate="interface",
        plant=declare_compression({"fp16": "int8-tensor"}, default="fp16"),
    ),
    Fault(
        "a finer compression declared",
        gate="interface",
        plant=declare_compression(
            {"int8-channel": "int8-tensor", "lut6-g16": "lut4-g16"},
            default="int8-channel",
        ),
    ),
    Fault(
        "a longer cache declared than the program has",
        gate="interface",
        plant=declare_cache_length(128),
    ),
    Fault(
        "a shorter cache declared than the program has",
        gate="interface",
        plant=declare_cache_length(32),
    ),
    Fault("taps left out", gate="interface", layer=1, plant=drop_taps),
    Fault("taps of another value", gate="interface", layer=1, plant=tap_another_value),
    Fault(
        "two states in one tensor",
        gate="interface",
        layer=1,
        plant=store_two_states_in_one_tensor,
    ),
    Fault(
        "tokenizer with two tokens exchanged",
        gate="interface",
        plant=exchange_two_tokens,
    ),
    Fault(
        "chat template of another model", gate="interface", plant=replace_chat_template
    ),
]
