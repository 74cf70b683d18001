"""Clean bundles of random family, seed, dimensions, compression and options: no bug gate may be RED on any of them.

`python -m tests.prove clean` asks all of them. What goes in is a number, what comes out is what to make and export.
"""

import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1])]
from tiny import DIMS  # noqa: E402

from workbench.bundle.manifest import Options  # noqa: E402
from workbench.bundle.presets import PRESETS as ALL_PRESETS  # noqa: E402

FAMILIES, PRESETS = sorted(DIMS), sorted(ALL_PRESETS)


def draw(seed: int, preset: str | None = None) -> tuple[str, dict, dict]:
    """A family, changes to its tiny dimensions, and export options; families take turns, and presets unless one is given."""
    rng = np.random.default_rng(seed)
    changes = {
        "seed": seed,
        "hidden_size": int(rng.choice([64, 96, 128])),
        "num_hidden_layers": int(rng.choice([2, 3])),
    }
    family = FAMILIES[seed % len(FAMILIES)]
    if family == "gemma3_text":
        changes["layer_types"] = rng.choice(
            ["sliding_attention", "full_attention"], changes["num_hidden_layers"]
        ).tolist()
    if family in ("llama", "qwen2", "qwen3"):
        heads = (
            [(4, 2), (4, 1), (2, 2)] if family == "llama" else [(4, 2), (3, 1), (3, 3)]
        )  # Llama's must divide the width
        changes |= dict(
            zip(("num_attention_heads", "num_key_value_heads"), heads[rng.integers(3)], strict=True)
        )
    compress = preset or PRESETS[seed // len(FAMILIES) % len(PRESETS)]
    if changes.get("num_attention_heads") == 3 and (
        changes["hidden_size"] == 64 or compress == "int4-block32"
    ):
        changes["hidden_size"] = (
            96  # three heads of another width have an odd one, or give no whole blocks
        )
    options = {
        "compress": compress,
        "t_max": int(rng.choice([2, 4])),
        "layers_per_shard": int(rng.choice([1, 2])),
        "kv_write": str(rng.choice(["mask", "slice"])),
        "layout": str(rng.choice(["bct1", "bc1t"])),
        "states": str(rng.choice(["separate", "packed"])),
        "batch": int(rng.choice([1, 1, 3])),
    }
    if family == "gemma3_text" and options["kv_write"] == "mask":
        options["sliding"] = str(rng.choice(["mask", "ring"]))
    if family == "zaya" and rng.integers(2):
        options |= {"moe": "routed", "layers_per_shard": 1}
    return (
        family,
        changes,
        Options(max_seq_len=32, **options).model_dump(include={"max_seq_len", *options}),
    )
