"""The host gate: GREEN on clean bundles of every family, RED on other rotary tables and masks."""

import json

import numpy as np
import pytest
from faults import host

from workbench import Bundle, Decoder
from workbench.check.host import LIMIT, host_gate
from workbench.models.checkpoint import Checkpoint

S = 96  # rope frozen past 32 and off by one past 64 show
OPTIONS = {
    "llama": dict(max_seq_len=S, batch=3, tokens="1-3"),
    "qwen2": dict(max_seq_len=S, kv_write="slice"),
    "qwen3": dict(max_seq_len=S, tokens="4", compress="lut4", layout="bc1t"),
    "gemma3_text": dict(
        max_seq_len=32, sliding="ring", batch=2, compress="int8-tensor"
    ),
    "zaya": dict(max_seq_len=24, compress="int4-block32"),
    "mistral": dict(max_seq_len=24, sliding="ring", batch=2),
    "smollm3": dict(max_seq_len=16, kv_write="slice", layers_per_shard=3),
    "phi3": dict(max_seq_len=16),
    "lfm2": dict(max_seq_len=16, batch=3, layers_per_shard=3),
    "qwen3_5_text": dict(max_seq_len=16, batch=3, layers_per_shard=3),
    "granitemoehybrid": dict(max_seq_len=16, batch=2, tokens="1-8"),
}


def opened(exports, family: str) -> tuple[Decoder, Checkpoint]:
    source = exports.checkpoint(family)
    return Decoder(exports.bundle(source, **OPTIONS[family]), "portable"), Checkpoint(
        source
    )


@pytest.mark.matrix(2, wide=9)
@pytest.mark.parametrize("family", OPTIONS)
def test_a_clean_host_is_green_by_far(exports, family):
    gate = host_gate(*opened(exports, family))
    print(family, f"{gate.value:.2e} of {LIMIT:g}", gate.reason)
    assert gate.verdict == "GREEN"
    assert gate.value < LIMIT / 50


# In memory: change(inputs, offsets, counts, T)


def late(offsets, T):
    return offsets[:, None] + np.arange(T)


def rope(decoder, positions, inv_freq=None):
    """cos and sin of other positions [B, T] or other frequencies."""
    inv_freq = decoder.manifest.rope[0].inv_freq if inv_freq is None else inv_freq
    angles = positions[:, None, :, None] * np.float32(inv_freq)
    return {"rope_cos": np.cos(angles), "rope_sin": np.sin(angles)}


def bf16(values):
    return (np.float32(values).view(np.uint32) & 0xFFFF0000).view(np.float32)


def without_the_slowest_quarter(inv_freq):
    return np.where(np.arange(len(inv_freq)) < 0.75 * len(inv_freq), inv_freq, 0)


POSITIONS = {
    "frozen past 32": lambda p: np.minimum(p, 32),
    "off by one past 64": lambda p: p + (p > 64),
    "of the next position": lambda p: p + 1,
}
FREQUENCIES = {
    "bf16": bf16,
    "fp16": np.float16,
    "slowest quarter 0": without_the_slowest_quarter,
}


@pytest.mark.matrix(2, wide=2)
@pytest.mark.parametrize("change", POSITIONS)
def test_rope_of_other_positions_is_red(exports, change):
    decoder, source = opened(exports, "llama")
    host(
        decoder,
        lambda m, o, c, T: m.update(rope(decoder, POSITIONS[change](late(o, T)))),
    )
    red(decoder, source, "rope_")


@pytest.mark.matrix(1, wide=2)
@pytest.mark.parametrize("change", FREQUENCIES)
def test_other_frequencies_in_memory_are_red(exports, change):
    decoder, source = opened(exports, "llama")
    inv_freq = FREQUENCIES[change](decoder.manifest.rope[0].inv_freq)
    host(decoder, lambda m, o, c, T: m.update(rope(decoder, late(o, T), inv_freq)))
    red(decoder, source, "rope_")


@pytest.mark.parametrize("change", FREQUENCIES)
def test_other_frequencies_in_the_manifest_are_red(exports, tmp_path, change):
    def plant(manifest, folder):
        table = manifest["rope"][0]
        table["inv_freq"] = [float(f) for f in FREQUENCIES[change](table["inv_freq"])]

    red(*edited(exports, tmp_path, "llama", plant), "")


def hide(m, blocked):
    m["attn_mask"] = np.where(blocked, np.float32(-1e4), m["attn_mask"])


def mask_of_40_rows(m, o, c, T):
    distance = late(o, T)[:, None, :, None] - np.arange(m["attn_mask"].shape[-1])
    hide(m, distance >= 40)


def last_row_blocked(m, o, c, T):
    m["attn_mask"][..., -1] = -1e4


def weak_mask(m, o, c, T):
    m["attn_mask"] /= 1e3


@pytest.mark.parametrize("change", [mask_of_40_rows, last_row_blocked, weak_mask])
def test_other_masks_are_red(exports, change):
    decoder, source = opened(exports, "llama")
    host(decoder, change)
    red(decoder, source, "mask")


def ring_mask_off_by_one(m, o, c, T):
    m["attn_mask_local"] = np.roll(m["attn_mask_local"], 1, axis=3)


def local_rope_for_both(m, o, c, T):
    m["rope_cos_global"] = m["rope_cos_local"]


@pytest.mark.parametrize("change", [ring_mask_off_by_one, local_rope_for_both])
def test_a_ring_or_a_table_of_the_other_kind_is_red(exports, change):
    decoder, source = opened(exports, "gemma3_text")
    host(decoder, change)
    red(decoder, source, "_local" if "ring" in change.__name__ else "_global")


# On disk


def edited(exports, folder, family, plant) -> tuple[Decoder, Checkpoint]:
    """A copy of the family's bundle after plant(manifest, folder), with hashes that fit again."""
    import shutil

    source = exports.checkpoint(family)
    root = folder / "bundle"
    shutil.copytree(exports.bundle(source, **OPTIONS[family]).root, root)
    manifest = json.loads((root / "bundle.json").read_text())
    plant(manifest, root)
    (root / "bundle.json").write_text(json.dumps(manifest))
    return Decoder(Bundle.open(root), "portable"), Checkpoint(source)


def test_a_window_that_is_not_the_model_s_is_red(exports, tmp_path):
    source = exports.checkpoint("gemma3_text")
    bundle = exports.bundle(source, max_seq_len=32)
    decoder = Decoder(bundle, "portable")
    assert host_gate(decoder, Checkpoint(source)).verdict == "GREEN"
    decoder.host.tables = [(s, r, w and w + 1) for s, r, w in decoder.host.tables]
    red(decoder, Checkpoint(source), "attn_mask")


def red(decoder, source, place):
    gate = host_gate(decoder, source)
    print(f"{gate.value:.2e} of {LIMIT:g}", gate.reason)
    assert gate.verdict == "RED"
    assert gate.value > 3 * LIMIT
    assert place in gate.reason
