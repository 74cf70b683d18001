"""The residual stream of each token: a planted attention sink is found and named, with the layers
that write and remove it and what fp16's steps do beside it; a checkpoint without one says so."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from tiny import prompt

from workbench.check import stream
from workbench.check.golden import make_golden
from workbench.check.hf import whole_model
from workbench.check.trace import LayerTrace, Trace
from workbench.models.checkpoint import Checkpoint

N, C, LAYERS = 48, 64, 5
SINK = 22500.0


def recorded(sink_position: int | None, seed: int = 0):
    """Values of five layers that add small updates; the second one writes `SINK` into channel 7 of
    one token, the third takes 9 of it away, the fourth the rest."""
    rng = np.random.default_rng(seed)
    layers, x = [], 0.02 * rng.standard_normal((N, C)).astype(np.float32)
    for layer in range(LAYERS):
        added = 0.02 * rng.standard_normal((N, C)).astype(np.float32)
        if sink_position is not None and layer in (1, 3):
            added[sink_position, 7] += SINK if layer == 1 else -SINK
        if sink_position is not None and layer == 2:
            added[sink_position, 7] -= 9  # about half a step of fp16
        layers.append(LayerTrace(x, x + added))
        x = x + added
    tokens = [f"t{i}" for i in range(N)]
    return SimpleNamespace(trace=Trace(layers), tokens=tokens)


def attended(position: int | None) -> pd.DataFrame:
    """Even attention, but for a token that receives half of it."""
    layers, positions = map(np.ravel, np.indices((LAYERS, N - 1)))
    share = np.where(positions == position, 0.5, 0.02)
    return pd.DataFrame({"layer": layers, "position": positions, "attention": share})


@pytest.mark.parametrize("position", [0, 4])
def test_a_sink_is_found_at_its_token_with_the_layers_that_write_and_remove_it(
    position,
):
    golden = recorded(position)
    sizes, received = stream.stream_sizes(golden), attended(position)
    table = stream.largest_token(sizes, received, golden.tokens)
    assert (table.attrs["position"], table.attrs["channel"]) == (position, 7)
    assert table.loc[1, stream.STEP] == table.loc[2, stream.STEP] == 16
    assert table.loc[[1, 3], stream.ADDED].round(-2).tolist() == [SINK, -SINK]
    # of the layer between, whose update is small, a large part is lost in fp16
    assert table.loc[2, stream.MOVED] > 0.1 > 0.02 > table[stream.OTHERS_MOVED].max()
    text = " ".join(stream.describe_stream(table))
    assert f"token {position}, “t{position}”" in text
    assert "layer 1 (+22,5" in text and "layer 3 (-22,5" in text
    assert "16 apart" in text and "it is an attention sink" in text
    alike = stream.largest_token(sizes, attended(None), golden.tokens)
    assert "it is no attention sink" in " ".join(stream.describe_stream(alike))


@pytest.mark.parametrize("position", [0, 4])
def test_the_table_its_caption_and_the_figure_are_on_one_token(position, tmp_path):
    """The token is the largest behind one layer, and small behind another, where a maximum
    over tokens would be at least 1."""
    golden = recorded(position)
    for layer in golden.trace.layers[:1] + golden.trace.layers[4:]:
        layer.hidden[position] *= 0.1
    sizes, received = stream.stream_sizes(golden), attended(position)
    table = stream.largest_token(sizes, received, golden.tokens)
    assert table[stream.MULTIPLE].min() < 1 < 100 < table[stream.MULTIPLE].max()
    caption = stream.describe_columns(table)
    assert caption.startswith(f"One token by layer: {position}, “t{position}”, whose")
    assert "channel 7" in caption and "even share is 0.0" in caption
    panels = stream.panels(sizes, received)
    of_token = panels[panels["token"] == stream.LARGEST_TOKEN]
    assert set(of_token["position"]) == {position}
    assert set(panels["token"]) == {*stream.TOKENS}
    # a report keeps what the caption says
    table.to_parquet(tmp_path / "table.parquet")
    stored = pd.read_parquet(tmp_path / "table.parquet")
    assert stream.describe_stream(stored) == stream.describe_stream(table)


def test_a_stream_without_a_sink_says_that_no_token_stands_out():
    golden = recorded(None)
    sizes, received = stream.stream_sizes(golden), attended(0)
    table = stream.largest_token(sizes, received, golden.tokens)
    (text,) = stream.describe_stream(table)
    assert "no token stands out" in text and "sink" not in text


def test_a_bundle_that_holds_the_stream_scaled_has_the_steps_of_the_scaled_values():
    plain, scaled = (stream.stream_sizes(recorded(0), scale) for scale in (1.0, 8.0))
    behind = plain["layer"].eq(1) & plain["position"].eq(0)
    assert (plain[behind]["step"] == 16).all() and (scaled[behind]["step"] == 16).all()
    overflowing = recorded(0)
    for layer in overflowing.trace.layers:
        layer.x, layer.hidden = 4 * layer.x, 4 * layer.hidden
    plain, scaled = (
        stream.stream_sizes(overflowing, scale)["update_moved"] for scale in (1.0, 8.0)
    )
    assert not np.isfinite(plain).all() and np.isfinite(scaled).all()
    assert [stream.largest_stored(scale) for scale in (1.0, 8.0)] == [65504, 524032]


def test_a_value_beyond_fp16_is_said_to_be_stored_divided(tmp_path):
    """fp16 has no number above 65,504: the step there is that of the stored value."""
    golden = recorded(0)
    for layer in golden.trace.layers:
        layer.x, layer.hidden = 4 * layer.x, 4 * layer.hidden
    sizes, received = stream.stream_sizes(golden, 8.0), attended(0)
    stream.largest_token(sizes, received, golden.tokens).to_parquet(tmp_path / "table")
    table = pd.read_parquet(tmp_path / "table")
    text = " ".join(stream.describe_stream(table))
    assert "reaches 90,0" in text
    assert "stored divided by 8, so that fp16's numbers are 64 apart there" in text
    assert "stored divided by 8" in stream.describe_columns(table)
    assert "need not be due to the weights' format" in text
    unscaled = stream.largest_token(
        stream.stream_sizes(recorded(0)), received, golden.tokens
    )
    assert "divided" not in " ".join(stream.describe_stream(unscaled))
    assert "divided" not in stream.describe_columns(unscaled)


def test_attention_is_that_of_the_whole_model(exports):
    """Held against transformers' own attention weights."""
    path = exports.checkpoint("llama")
    ids = prompt(97, 9)
    received = stream.attention_received(Checkpoint(path), ids)
    model = whole_model(Checkpoint(path))
    attentions = model(torch_ids(ids), output_attentions=True).attentions
    for row in received.itertuples():
        weights = attentions[row.layer][0, :, row.position + 1 :, row.position]
        assert row.attention == pytest.approx(weights.mean().item(), abs=1e-6)
    assert len(received) == len(attentions) * (len(ids) - 1)


def torch_ids(ids):
    import torch

    return torch.tensor([list(ids)])


def test_layers_without_attention_have_no_row(exports):
    checkpoint = Checkpoint(exports.checkpoint("lfm2"))
    ids = prompt(97, 6)
    received = stream.attention_received(checkpoint, ids)
    golden = make_golden(checkpoint, ids)
    assert set(received["layer"]) < set(range(golden.layer_count))
    table = stream.largest_token(stream.stream_sizes(golden), received, list("abcdef"))
    assert (
        table[stream.ATTENTION].isna().sum()
        == golden.layer_count - received["layer"].nunique()
    )
