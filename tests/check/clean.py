"""Clean bundles of random family, seed, dimensions, compression and options: no bug gate may be RED
on any of them.

`python -m tests.prove clean` runs every gate on all of them. `draw` makes a `Recipe`, which is what
to make and export, from a number.
"""

import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from recipe import Recipe  # noqa: E402
from tiny import DIMS  # noqa: E402

from workbench.bundle.presets import PRESETS as ALL_PRESETS  # noqa: E402

FAMILIES, PRESETS = sorted(DIMS), sorted(ALL_PRESETS)
COUNT = 6 * len(FAMILIES)  # draws of a whole proof
# Numbers of query and key/value heads to choose from; the query heads of EVEN divide every width.
EVEN, ANY = [(4, 2), (4, 1), (2, 2)], [(4, 2), (3, 1), (3, 3)]
HEADS = dict.fromkeys(("llama", "olmo2", "olmo3"), EVEN) | dict.fromkeys(
    ("qwen2", "qwen3", "mistral", "ministral3", "smollm3", "hunyuan_v1_dense"), ANY
)
WINDOWED = "gemma3_text", "gemma4_text", "gemma4_unified_text", "mistral", "olmo3"
# Families whose layers depend on each other, and numbers of key/value heads to choose from.
FIXED_LAYERS = {"gemma4_text": [1, 2], "gemma4_unified_text": [2, 4]}
# Families with layers that do not attend, and numbers of these layers' sizes to choose from.
HYBRID = {
    "lfm2": {"conv_L_cache": [2, 3, 4]},
    "qwen3_5_text": {
        "linear_num_value_heads": [2, 4, 6],
        "linear_conv_kernel_dim": [2, 4, 5],
    },
    "granitemoehybrid": {
        "mamba_n_groups": [1, 2],
        "mamba_d_conv": [2, 4],
        "mamba_n_heads": [2, 4],
    },
}


def family_of(seed: int) -> str:
    """The family of a draw: families take turns."""
    return FAMILIES[seed % len(FAMILIES)]


def draw(seed: int, preset: str | None = None) -> Recipe:
    """A family with random dimensions and export options; families take turns, and presets unless
    one is given."""
    rng = np.random.default_rng(seed)
    family = family_of(seed)
    compress = preset or PRESETS[seed // len(FAMILIES) % len(PRESETS)]
    # the order of the draws is part of what a seed stands for
    changes = {"seed": seed} | draw_dimensions(rng, family, compress)
    options = draw_options(rng, family, changes, compress)
    return Recipe(family, changes, options)


def draw_dimensions(rng: np.random.Generator, family: str, compress: str) -> dict:
    """Changes to a family's tiny dimensions with which it can be stored in a preset."""
    changes = {
        "hidden_size": int(rng.choice([64, 96, 128])),
        "num_hidden_layers": int(rng.choice([2, 3])),
    }
    if key_heads := FIXED_LAYERS.get(family):
        del changes["num_hidden_layers"]
        changes["num_key_value_heads"] = int(rng.choice(key_heads))
    elif kinds := sorted(set(DIMS[family].get("layer_types", []))):
        kinds = rng.choice(kinds[::-1], changes["num_hidden_layers"])
        changes["layer_types"] = kinds.tolist()
    if family in HYBRID:
        for name, sizes in HYBRID[family].items():
            changes[name] = int(rng.choice(sizes))
        changes["layer_types"][-1] = "full_attention"  # one at least is needed
    if heads := HEADS.get(family):
        queries, keys = heads[rng.integers(3)]
        changes |= {"num_attention_heads": queries, "num_key_value_heads": keys}
    if changes.get("num_attention_heads") == 3:
        # 64 channels would give three heads an odd width, 21, and 128 channels one of 42, which
        # blocks do not fill
        if changes["hidden_size"] == 64 or ALL_PRESETS[compress].block:
            changes["hidden_size"] = 96
    if family == "phi3":  # whose factors of longrope fit heads of 32 channels
        queries = changes["hidden_size"] // 32
        keys = int(rng.choice([1, queries]))
        changes |= {"num_attention_heads": queries, "num_key_value_heads": keys}
    return changes


def draw_options(
    rng: np.random.Generator, family: str, changes: dict, compress: str
) -> dict:
    """Options with which a family of these dimensions can be exported."""
    options = {
        "max_seq_len": 32,
        "compress": compress,
        "tokens": f"1-{rng.choice([2, 4])}",
        "layers_per_shard": int(rng.choice([1, 2])),
        "kv_write": str(rng.choice(["mask", "slice"])),
        "layout": str(rng.choice(["bct1", "bc1t"])),
        "batch": int(rng.choice([1, 1, 3])),
    }
    has_windows = family in WINDOWED and "sliding_attention" in changes.get(
        "layer_types", ["sliding_attention"]
    )
    if has_windows and options["kv_write"] == "mask":
        options["sliding"] = str(rng.choice(["mask", "ring"]))
    if family == "zaya" and rng.integers(2):
        options |= {"moe": "routed", "layers_per_shard": 1}
    return options
