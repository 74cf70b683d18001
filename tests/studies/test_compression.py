"""The prices of presets on one checkpoint."""

from workbench.check.golden import make_golden
from workbench.models.checkpoint import Checkpoint
from workbench.studies import compression


def test_a_preset_that_the_sizes_do_not_allow_says_why_and_the_others_are_priced(
    exports, tmp_path
):
    path = exports.checkpoint(
        "llama", hidden_size=72, num_attention_heads=3, num_key_value_heads=1
    )
    source = Checkpoint(path)
    golden = make_golden(source, [1, 2, 3, 4])
    prices = compression.preset_prices(
        source,
        golden,
        ["int4-block32", "int8-channel"],
        tmp_path,
        max_kl=1.0,
        max_seq_len=16,
    ).set_index("compress")
    assert "multiple of 32" in prices.loc["int4-block32", "verdict"]
    assert prices.loc["int8-channel", "verdict"] == "GREEN"
    assert "int8-channel" in compression.cheapest_conclusion(prices.reset_index(), 1.0)
