"""Gate `host`: compares the rotary tables and masks that the host makes with Hugging
Face's own functions, at every position up to max_seq_len. No shard runs.

Gate `program` uses every input of the host too, but not at every position."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from workbench.bundle.manifest import Layer, Manifest
from workbench.bundle.names import ATTN_MASK, MASKED, ROPE_COS, ROPE_SIN
from workbench.check import gates
from workbench.check.hf import has_attention
from workbench.decode import Decoder
from workbench.models.checkpoint import Checkpoint
from workbench.models.layerwise import empty_model

# rounding of cos and sin in fp32 makes 6e-8; a table of bf16 frequencies 0.1
LIMIT = 2e-5


@dataclass
class LayerKind:
    """The rotary tables and the mask that Hugging Face's model applies to some layers.

    Attributes:
        index: of the first of these layers.
        layer: its entry in the manifest.
        inv_freq: [D_rotary / 2], radians per token.
        cos, sin: [S, D_rotary / 2].
        visible: (batch, head, queries, keys) → whether these positions see each other.
    """

    index: int
    layer: Layer
    inv_freq: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    visible: Callable

    def mask(self, queries: np.ndarray, rows: int) -> np.ndarray:
        """Mask [T, rows] of the positions `queries` [T], as multiples of the mask
        constant, after these positions are written to a cache: row r then holds the
        last written position that is r modulo `rows`. All are nan if Hugging Face's
        mask shows a position that the cache has overwritten."""

        def is_visible(keys: np.ndarray) -> np.ndarray:
            positions = map(torch.from_numpy, (queries[:, None], keys[None]))
            return self.visible(0, 0, *positions).numpy()

        last = queries[-1]
        if is_visible(np.arange(last + 1 - rows)).any():
            return np.full((len(queries), rows), np.nan)
        stored = last - (last - np.arange(rows)) % rows  # negative: no token yet
        return ~(is_visible(stored) & (stored >= 0))


def host_gate(decoder: Decoder, checkpoint: Checkpoint) -> gates.Gate:
    """The worst error of a table or mask. Errors of cos and sin are absolute, errors of
    inverse frequencies relative, and errors of masks relative to the mask constant."""
    kinds = layer_kinds(decoder.manifest, empty_model(checkpoint.config).model)
    errors = [*_frequency_errors(decoder.manifest, kinds)]
    errors += _input_errors(decoder, kinds)
    value, place = max(errors)
    reason = "rope and masks against Hugging Face's at every position; worst: "
    return gates.at_most("host", value, LIMIT, reason + place)


def _frequency_errors(
    manifest: Manifest, kinds: list[LayerKind]
) -> Iterator[tuple[float, str]]:
    """The largest relative error of the inverse frequencies of each kind of layers, and
    the place in words."""
    ropes = {rope.name: np.float32(rope.inv_freq) for rope in manifest.rope}
    for kind in kinds:
        # the lowest frequencies turn too little to change cos in max_seq_len tokens
        scale = np.where(kind.inv_freq, np.abs(kind.inv_freq), 1.0)
        error = largest_error(ropes[kind.layer.rope], kind.inv_freq, scale)
        yield error, f"inv_freq of layer {kind.index}"


def _input_errors(
    decoder: Decoder, kinds: list[LayerKind]
) -> Iterator[tuple[float, str]]:
    """The largest error of each rotary table and mask that the host makes for calls of
    t_max tokens, which together have every position; and the place in words."""
    options = decoder.options
    S, T = options.max_seq_len, options.t_max
    ones = np.ones(options.batch, int)
    for start in [*range(0, S - T + 1, T), S - T]:
        positions = np.arange(start, start + T)
        inputs = decoder.host.inputs(start * ones, T * ones, T)
        for kind in kinds:
            mask = kind.mask(positions, options.cache_rows(kind.layer.window)) * MASKED
            # name → Hugging Face's values, and what errors are relative to
            expected_inputs = {
                ROPE_COS: (kind.cos[positions], 1.0),
                ROPE_SIN: (kind.sin[positions], 1.0),
                ATTN_MASK: (mask, -MASKED),
            }
            for input_name, (expected, scale) in expected_inputs.items():
                name = input_name + kind.layer.suffix
                if name in decoder.host.names:
                    error = largest_error(inputs[name][:, 0], expected, scale)
                    yield error, f"{name} at position {start}"


@torch.inference_mode()
def layer_kinds(manifest: Manifest, base) -> list[LayerKind]:
    """The kinds of layers with attention in Hugging Face's model `base`. Layers with
    different rope tables in the manifest are of different kinds."""
    from transformers import masking_utils

    rotary = base.rotary_emb
    S = manifest.options.max_seq_len
    # families with several tables select one by the type of the layer
    has_layer_types = (
        rotary and "layer_type" in inspect.signature(rotary.forward).parameters
    )
    kinds = {}
    for index, layer in enumerate(manifest.layers):
        if not has_attention(base.layers[index]):
            continue
        attention = base.layers[index].self_attn
        types = [base.config.layer_types[index]] if has_layer_types else []
        config_window = getattr(base.config, "sliding_window", None)
        window = getattr(attention, "sliding_window", config_window)
        uses_rope = rotary is not None and bool(getattr(attention, "use_rope", True))
        key = (layer.rope, *types, window, uses_rope)
        if key in kinds:
            continue
        if uses_rope:
            inv_freq = getattr(rotary, "_".join([*types, "inv_freq"])).numpy()
            tables = rotary(torch.zeros(1), torch.arange(S)[None], *types)
            pairs = tables[0].shape[-1] // 2  # both halves are equal
            cos, sin = (table[0, :, :pairs].numpy() for table in tables)
        else:
            (rope,) = (rope for rope in manifest.rope if rope.name == layer.rope)
            inv_freq = np.zeros(len(rope.inv_freq), np.float32)
            cos = np.ones((S, len(inv_freq)))
            sin = np.zeros((S, len(inv_freq)))
        visible = masking_utils.causal_mask_function
        if window:
            visible = masking_utils.sliding_window_causal_mask_function(window)
        kinds[key] = LayerKind(index, layer, inv_freq, cos, sin, visible)
    return list(kinds.values())


def largest_error(actual: np.ndarray, reference: np.ndarray, scale=1.0) -> float:
    """The largest |actual − reference| / scale over the last axes that both have; inf
    if these axes differ or a value is not a number."""
    if np.shape(actual)[-np.ndim(reference) :] != np.shape(reference):
        return np.inf
    errors = np.abs(np.float64(actual) - reference) / scale
    return float(np.nan_to_num(errors, nan=np.inf).max(initial=0.0))
