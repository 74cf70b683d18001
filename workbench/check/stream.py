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
        layer, and nothing else is rounded.
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
    return pd.concat(parts, ignore_index=True)


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


def panels(sizes: pd.DataFrame, received: pd.DataFrame) -> pd.DataFrame:
    """The rows of `stream_sizes` and `attention_received` for a figure of lines: layer,
    position, the value `shown` and its `quantity`, and whether the `token` is the first
    one."""
    quantities = {
        "largest |value|": sizes.assign(shown=sizes["largest"]),
        "attention received": received.assign(shown=received["attention"]),
        "update moved by rounding": sizes.assign(shown=sizes["update_moved"]),
    }
    parts = [
        rows[["layer", "position", "shown"]].assign(quantity=quantity)
        for quantity, rows in quantities.items()
    ]
    data = pd.concat(parts, ignore_index=True)
    first = data["position"] == 0
    data["token"] = np.where(first, "first token", "other tokens")
    return data[data["shown"] > 0]  # a log scale has no place for zeros


def largest_token(
    sizes: pd.DataFrame, received: pd.DataFrame, tokens: Sequence[str]
) -> pd.DataFrame:
    """One row per layer for the token whose stream is the largest multiple of the
    median token's: the columns of `stream_sizes`; `others_moved`, the largest
    `update_moved` of any other token; the `attention` that the token receives, null in
    layers without attention, and `even`, the share that equal weights would give it."""
    position = int(sizes.loc[sizes["times"].idxmax(), "position"])
    is_token = sizes["position"] == position
    others = sizes[~is_token].groupby("layer")["update_moved"].max()
    shares = received[received["position"] == position].set_index("layer")["attention"]
    table = sizes[is_token].drop(columns="rms").reset_index(drop=True)
    table.insert(2, "token", tokens[position])
    table["others_moved"] = table["layer"].map(others)
    table["attention"] = table["layer"].map(shares)
    later = range(position + 1, len(tokens))
    table["even"] = np.mean([1 / (i + 1) for i in later]) if later else np.nan
    return table


def describe_stream(table: pd.DataFrame) -> list[str]:
    """Sentences about the token of `largest_token`: how large its stream is, which
    layers write its largest value and remove it, how far fp16's steps move its updates,
    and whether it is an attention sink."""
    peak = table.loc[table["times"].idxmax()]
    worst = table.loc[table["update_moved"].idxmax()]
    others_max = table["others_moved"].max()
    size = (
        f"The residual stream of token {peak['position']}, “{peak['token']}”, is up to "
        f"{peak['times']:.3g} times as large as the median token's (RMS, behind layer "
        f"{peak['layer']})"
    )
    if peak["times"] < LARGE:
        largest_share = np.fmax(worst["update_moved"], others_max)
        return [
            f"{size}: no token stands out, and rounding the stream to fp16 moves no "
            f"update by more than {largest_share:.2g} of its size."
        ]
    largest = table.loc[table["value"].abs().idxmax()]
    update_by_layer = table.set_index("layer")["added"]
    parts = update_by_layer / largest["value"]
    sentences = [
        f"{size}. Its channel {largest['channel']} reaches {largest['value']:,.0f}: "
        f"{_layers(update_by_layer[parts > CHANGE], 'write it', 'writes it')}; "
        f"{_layers(update_by_layer[parts < -CHANGE], 'take it away', 'takes it away')}."
    ]
    cause = ""
    if worst["update_moved"] > others_max:
        cause = (
            ": an error of that size at this token is not due to the weights' format"
        )
    sentences.append(
        f"Beside such a value fp16's numbers are {largest['step']:g} apart. Rounding the "
        f"stream, and no weight, moves an update of this token by up to "
        f"{worst['update_moved']:.2g} of its size (layer {worst['layer']}), and an "
        f"update of any other token by at most {others_max:.2g}{cause}."
    )
    share, even = table["attention"].mean(), peak["even"]
    if np.isfinite(share):
        name = "an attention sink" if share >= SINK * even else "no attention sink"
        sentences.append(
            f"Later tokens give it {share:.0%} of their attention, the mean of heads and "
            f"layers, where an even share is {even:.0%}: it is {name}."
        )
    return sentences


def _layers(added: pd.Series, verb: str, verb_of_one: str) -> str:
    """The layers in `added`, each with the value that it adds, as the subject of a
    verb."""
    layers = [f"{layer} ({value:+,.0f})" for layer, value in added.items()]
    if not layers:
        return f"no layer alone {verb_of_one}"
    if len(layers) == 1:
        return f"layer {layers[0]} {verb_of_one}"
    return f"layers {', '.join(layers[:-1])} and {layers[-1]} {verb}"
