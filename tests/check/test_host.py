"""The host gate: GREEN on clean bundles of every family, RED on other rotary tables and masks;
test_faults has more faults."""

import numpy as np
import pytest
from faults import host

from workbench import Decoder
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


def ring_mask_off_by_one(m, o, c, T):
    m["attn_mask_local"] = np.roll(m["attn_mask_local"], 1, axis=3)


def local_rope_for_both(m, o, c, T):
    m["rope_cos_global"] = m["rope_cos_local"]


@pytest.mark.parametrize("change", [ring_mask_off_by_one, local_rope_for_both])
def test_a_ring_or_a_table_of_the_other_kind_is_red(exports, change):
    decoder, source = opened(exports, "gemma3_text")
    host(decoder, change)
    red(decoder, source, "_local" if "ring" in change.__name__ else "_global")


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
