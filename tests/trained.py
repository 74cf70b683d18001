"""The shipped, trained checkpoints as decoders whose caches every reuse test shares: batch 1, and 3
of them together."""

from tiny import DATA

from workbench import Decoder

NAMES = ("tiny-llama", "tiny-qwen2", "tiny-gemma3", "tiny-zaya", "tiny-lfm2")
S, T_MAX, BATCH = 128, 16, 3


def decoder(
    exports, name: str, batch: int = 1, precision: str = "exact", **changed
) -> Decoder:
    """Gemma's local layers (window 64) are rings of 79 slots here, so that they wrap."""
    ring = {"sliding": "ring"} if name == "tiny-gemma3" else {}
    options = (
        {"max_seq_len": S, "tokens": f"1-{T_MAX}", "batch": batch} | ring | changed
    )
    return exports.decoder(DATA / name, precision, **options)
