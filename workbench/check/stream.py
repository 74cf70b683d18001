"""How large the residual stream is at each token, and how much attention each token
receives.

Trained models often write a value far above all others into one channel of the first
token, and later layers attend to that token when they have nothing to look for: an
attention sink. fp16 has few numbers near so large a value, so that the small update
that a later layer adds there is rounded coarsely, whatever the format of the weights."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from workbench.check.compare import rms, safe_ratio
from workbench.check.golden import Golden
from workbench.check.hf import Reference, has_attention, round_stream
from workbench.models.checkpoint import Checkpoint

# Times the median token's RMS from which a token's stream is called large: it is 174 in
# SmolLM2-135M and 29 in Gemma 3 270M.
LARGE = 10.0
# Times an even share of the attention from which a large token is called a sink: 6.0 in
# SmolLM2-135M, 6.2 in Gemma 3 270M. In the small checkpoints of `data/` the tokens that
# are largest receive less than an even share.
SINK = 3.0
MULTIPLE = "RMS over the median"
LARGEST = "largest |value|"
STEP = "fp16 step"
VALUE = "channel's value"
ADDED = "layer adds"
MOVED = "update moved, relative RMS"
OTHERS_MOVED = "others moved, at most"
ATTENTION = "attention, share"
"""Columns of `largest_token`."""
LARGEST_TOKEN, OTHER_TOKENS = "token with the largest stream", "other tokens"
TOKENS = (LARGEST_TOKEN, OTHER_TOKENS)
"""Values of the column `token` of `panels`."""
CHANGE = 0.1  # of the largest value: a layer that changes it by more is named


def stream_sizes(golden: Golden, stream_scale: float = 1.0) -> pd.DataFrame:
    """The residual stream after each layer at each position: one row per layer and
    position.

    Args:
        stream_scale: a bundle stores the stream divided by this number.

    Returns:
        layer, position; `rms`, and `times`, its multiple of the median position's in
        that layer; `largest`, the largest magnitude, and `step`, the distance from it
        to the next fp16 number; `value`, the value of one `channel`, and `added`, the
        layer's update of it. The channel of a position is the one with the largest
        magnitude after any layer. `update_moved` is the relative RMS by which the
        layer's update changes if the stream is rounded to fp16 before and after the
        layer, and nothing else is rounded. `attrs` has the `stream_scale`.
    """
    rounded = round_stream(stream_scale)
    layers = golden.trace.layers
    hidden = np.stack([layer.hidden for layer in layers])
    channel = np.abs(hidden).max(0).argmax(-1)  # [n]
    positions = np.arange(len(channel))
    parts = []
    for layer, output in enumerate(hidden):
        x, update = layers[layer].x, layers[layer].update
        scalar = 1.0 if layers[layer].scalar is None else layers[layer].scalar
        size = rms(output)
        largest = np.abs(output).max(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            steps = np.spacing(np.float16(largest / stream_scale))
        # an update is output / scalar − x
        x_error = rounded(torch.from_numpy(x)).numpy() - x
        output_error = rounded(torch.from_numpy(output)).numpy() - output
        part = {
            "layer": layer,
            "position": positions,
            "rms": size,
            "times": safe_ratio(size, np.median(size)),
            "largest": largest,
            "step": np.float64(steps) * stream_scale,
            "channel": channel,
            "value": output[positions, channel],
            "added": update[positions, channel],
            "update_moved": safe_ratio(
                rms(x_error, output_error / scalar), rms(update)
            ),
        }
        parts.append(pd.DataFrame(part))
    sizes = pd.concat(parts, ignore_index=True)
    sizes.attrs = {"stream_scale": stream_scale}
    return sizes


def largest_stored(stream_scale: float) -> float:
    """The largest value of a stream that a bundle stores divided by this number: beyond
    it the stored value is infinite in fp16."""
    return float(np.finfo(np.float16).max) * stream_scale


def attention_received(checkpoint: Checkpoint, ids: Sequence[int]) -> pd.DataFrame:
    """The `attention` that each position receives, by layer and position: the weight
    that a later position gives it in Hugging Face's model, averaged over later positions
    and heads. The last position, and layers without attention, have no row."""
    reference = Reference(checkpoint)
    weights: dict[int, np.ndarray] = {}

    def record_layer(index: int):
        def record(module, arguments, outputs) -> None:
            # eager attention also returns its weights [B, H, n, n]
            if isinstance(outputs, tuple) and len(outputs) > 1:
                if torch.is_tensor(outputs[1]) and outputs[1].ndim == 4:
                    weights[index] = outputs[1][0].mean(0).numpy()

        return record

    for index, wrapper in enumerate(reference.base.layers):
        if has_attention(wrapper.layer):
            wrapper.layer.self_attn.register_forward_hook(record_layer(index))
    reference.run(ids, head=False)
    parts = []
    for layer, matrix in weights.items():
        positions = np.arange(len(matrix) - 1)
        received = [matrix[i + 1 :, i].mean() for i in positions]
        part = {"layer": layer, "position": positions, "attention": received}
        parts.append(pd.DataFrame(part))
    if not parts:
        dtypes = {"layer": int, "position": int, "attention": float}
        columns = {name: pd.Series(dtype=dtype) for name, dtype in dtypes.items()}
        return pd.DataFrame(columns)
    return pd.concat(parts, ignore_index=True)


def largest_position(sizes: pd.DataFrame) -> int:
    """The position whose stream is the largest multiple of the median token's behind any
    layer, from the rows of `stream_sizes`."""
    return int(sizes.loc[sizes["times"].idxmax(), "position"])


def panels(sizes: pd.DataFrame, received: pd.DataFrame) -> pd.DataFrame:
    """The rows of `stream_sizes` and `attention_received` for a figure of lines: layer,
    position, the value `shown` and its `quantity`, and the `token`: one of `TOKENS`,
    where that with the largest stream is the one of `largest_token`."""
    quantities = {
        LARGEST: sizes.assign(shown=sizes["largest"]),
        "attention received": received.assign(shown=received["attention"]),
        "change of the update by rounding": sizes.assign(shown=sizes["update_moved"]),
    }
    parts = [
        rows[["layer", "position", "shown"]].assign(quantity=quantity)
        for quantity, rows in quantities.items()
    ]
    data = pd.concat(parts, ignore_index=True)
    is_largest = data["position"] == largest_position(sizes)
    data["token"] = np.where(is_largest, *TOKENS)
    return data[data["shown"] > 0]  # a log scale has no place for zeros


def largest_token(
    sizes: pd.DataFrame, received: pd.DataFrame, tokens: Sequence[str]
) -> pd.DataFrame:
    """A row of each layer for one token, that of `largest_position`, which may be small
    behind other layers.

    Returns:
        layer, and what `describe_columns` says of the other columns. The attention is
        null in layers without attention. `attrs`, which a Parquet file keeps, has the
        `position`, the `token` and the `channel` of its largest value, and `even`, the
        share of attention that equal weights would give it (NaN for the last token), and
        the `stream_scale` of `stream_sizes`.
    """
    position = largest_position(sizes)
    is_token = sizes["position"] == position
    others = sizes[~is_token].groupby("layer")["update_moved"].max()
    shares = received[received["position"] == position].set_index("layer")["attention"]
    rows = sizes[is_token].reset_index(drop=True)
    columns = {
        "layer": rows["layer"],
        MULTIPLE: rows["times"],
        LARGEST: rows["largest"],
        STEP: rows["step"],
        VALUE: rows["value"],
        ADDED: rows["added"],
        MOVED: rows["update_moved"],
        OTHERS_MOVED: rows["layer"].map(others),
        ATTENTION: rows["layer"].map(shares),
    }
    table = pd.DataFrame(columns)
    later = range(position + 1, len(tokens))
    table.attrs = {
        "position": position,
        "token": tokens[position],
        "channel": int(rows["channel"].iloc[0]),
        "even": float(np.mean([1 / (i + 1) for i in later])) if later else np.nan,
        "stream_scale": sizes.attrs["stream_scale"],
    }
    return table


def describe_columns(table: pd.DataFrame) -> str:
    """What the table of `largest_token` shows, for its caption."""
    token = table.attrs
    share = "the share of their attention that later tokens give it"
    if np.isfinite(token["even"]):
        share += f" (an even share is {token['even']:.2g})"
    step = "the step from there to the next number of fp16"
    if (scale := _stream_scale(table)) != 1:
        step += f", for a stream that is stored divided by {scale:g}"
    return (
        f"One token by layer: {token['position']}, “{token['token']}”, whose stream is, "
        "behind one of the layers, a larger multiple of the median token's than that of "
        "any other token. The RMS of its stream over the median token's; its largest "
        f"magnitude, and {step}; its value in "
        f"channel {token['channel']}, where it is largest behind any layer, and what the "
        "layer added to it; the relative RMS by which rounding the stream to fp16, and "
        "nothing else, moves its update, and at most an update of another token; and "
        f"{share}."
    )


def describe_stream(table: pd.DataFrame) -> list[str]:
    """Sentences about the token of `largest_token`: how large its stream is, which
    layers write its largest value and remove it, how far fp16's steps move its updates,
    and whether it is an attention sink."""
    token = table.attrs
    peak = table.loc[table[MULTIPLE].idxmax()]
    worst = table.loc[table[MOVED].idxmax()]
    others_max = table[OTHERS_MOVED].max()
    size = (
        f"The residual stream of token {token['position']}, “{token['token']}”, is up to "
        f"{peak[MULTIPLE]:.3g} times as large as the median token's (RMS, behind layer "
        f"{peak['layer']:.0f})"
    )
    if peak[MULTIPLE] < LARGE:
        largest_share = np.fmax(worst[MOVED], others_max)
        return [
            f"{size}: no token stands out, and rounding the stream to fp16 moves no "
            f"update by more than {largest_share:.2g} of its size."
        ]
    largest = table.loc[table[VALUE].abs().idxmax()]
    update_by_layer = table.set_index("layer")[ADDED]
    parts = update_by_layer / largest[VALUE]
    sentences = [
        f"{size}. Its channel {token['channel']} reaches {largest[VALUE]:,.0f}: "
        f"{_layers(update_by_layer[parts > CHANGE], 'write it', 'writes it')}; "
        f"{_layers(update_by_layer[parts < -CHANGE], 'take it away', 'takes it away')}."
    ]
    cause = ""
    if worst[MOVED] > others_max:
        cause = ": an error of that size at this token need not be due to the weights' format"
    if (scale := _stream_scale(table)) == 1:
        step = f"Beside such a value fp16's numbers are {largest[STEP]:g} apart."
    else:
        step = (
            f"Such a value is stored divided by {scale:g}, so that fp16's numbers are "
            f"{largest[STEP]:g} apart there."
        )
    sentences.append(
        f"{step} Rounding the stream, and no weight, moves an update of this token by up to "
        f"{worst[MOVED]:.2g} of its size (layer {worst['layer']:.0f}), and an "
        f"update of any other token by at most {others_max:.2g}{cause}."
    )
    share, even = table[ATTENTION].mean(), token["even"]
    if np.isfinite(share):
        name = "an attention sink" if share >= SINK * even else "no attention sink"
        sentences.append(
            f"Later tokens give it {share:.0%} of their attention, the mean of heads and "
            f"layers, where an even share is {even:.0%}: it is {name}."
        )
    return sentences


def _stream_scale(table: pd.DataFrame) -> float:
    """The number by which the bundle divides the stream that it stores; 1 for the table of
    a report of before, which does not have it."""
    return table.attrs.get("stream_scale", 1.0)


def _layers(added: pd.Series, verb: str, verb_of_one: str) -> str:
    """The layers in `added`, each with the value that it adds, as the subject of a
    verb."""
    layers = [f"{layer} ({value:+,.0f})" for layer, value in added.items()]
    if not layers:
        return f"no layer alone {verb_of_one}"
    if len(layers) == 1:
        return f"layer {layers[0]} {verb_of_one}"
    return f"layers {', '.join(layers[:-1])} and {layers[-1]} {verb}"
