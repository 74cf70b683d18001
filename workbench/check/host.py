"""Gate `host`: compares the rotary tables and masks that the host makes with Hugging
Face's own functions, at every position up to max_seq_len.

Gate `program` uses every input of the host, but not at every position. No shard
runs."""

import inspect
from collections.abc import Iterator

import numpy as np
import torch

from workbench.bundle.names import ATTN_MASK, MASKED, ROPE_COS, ROPE_SIN
from workbench.check import gates
from workbench.check.hf import empty_model, has_attention
from workbench.decode import Decoder
from workbench.models.checkpoint import Checkpoint

# rounding of cos and sin in fp32 makes 6e-8; a table of bf16 frequencies 0.1
LIMIT = 2e-5

Error = tuple[float, str]  # how far something is from its reference, and what it is


def host_gate(decoder: Decoder, checkpoint: Checkpoint) -> gates.Gate:
    """cos, sin and masks of a bundle.

    Errors: of cos and sin absolute, of inverse frequencies relative, of masks relative
    to the mask constant.
    """
    base = empty_model(checkpoint.config).model
    if base.rotary_emb is None:
        base.rotary_emb = NoRotation(decoder.manifest.dims.D)
    with torch.inference_mode():
        kinds = _layer_kinds(decoder, base)
        errors = [*_frequency_errors(decoder, kinds), *_call_errors(decoder, kinds)]
    reason = "rope and masks against Hugging Face's at every position; worst: "
    return gates.all_at_most("host", errors, LIMIT, reason)


class LayerKind:
    """What Hugging Face's model applies to some layers: rotary tables `cos`, `sin` [S,
    D_rotary / 2] of `inv_freq`, and `visible(queries, keys)` of positions.

    `index` is the first of these layers, `layer` its entry in the manifest,
    `layer_type` the name of its rotary table (None: there is but one), `window` how
    many tokens it attends to (None: all); layers that are not `turned` have no rotary
    embeddings."""

    def __init__(
        self, base, S: int, index: int, layer, layer_type, window, turned: bool
    ):
        from transformers import masking_utils

        self.index = index
        self.layer = layer
        self._mask = masking_utils.causal_mask_function
        if window:
            self._mask = masking_utils.sliding_window_causal_mask_function(window)
        attribute = "inv_freq"
        which = []
        if layer_type:
            attribute = f"{layer_type}_inv_freq"
            which = [layer_type]
        self.inv_freq = getattr(base.rotary_emb, attribute).numpy() * turned
        cos, sin = base.rotary_emb(torch.zeros(1), torch.arange(S)[None], *which)
        half = cos.shape[-1] // 2
        self.cos = cos[0, :, :half].numpy()
        self.sin = sin[0, :, :half].numpy()
        if not turned:
            self.cos = np.ones_like(self.cos)
            self.sin = np.zeros_like(self.sin)

    def visible(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        q = torch.from_numpy(queries)[:, None]
        k = torch.from_numpy(keys)[None]
        return self._mask(0, 0, q, k).numpy()

    def hidden(self, queries: np.ndarray, rows: int) -> np.ndarray:
        """Mask [T, rows], in parts of the mask constant, of the positions `queries`
        once these are written to a cache: row r then holds the last position written
        that is r modulo `rows`. A row that Hugging Face's mask shows and the cache has
        lost is nan."""
        last = queries[-1]
        if self.visible(queries, np.arange(last + 1 - rows)).any():
            return np.full((len(queries), rows), np.nan)
        stored = last - (last - np.arange(rows)) % rows  # negative: no token yet
        return ~(self.visible(queries, stored) & (stored >= 0))


class NoRotation(torch.nn.Module):
    """The rotary module that a model without rope lacks: it turns nothing."""

    def __init__(self, width: int):
        super().__init__()
        self.inv_freq = torch.zeros(width // 2)

    def forward(self, x, positions):
        ones = torch.ones(*positions.shape, 2 * len(self.inv_freq))
        return ones, ones - ones


def _layer_kinds(decoder: Decoder, base) -> list[LayerKind]:
    """The kinds of layers with attention, those of another rope table in the manifest
    apart."""
    by_type = "layer_type" in inspect.signature(base.rotary_emb.forward).parameters
    # in families that have but one
    everywhere = getattr(base.config, "sliding_window", None)
    kinds = {}
    S = decoder.options.max_seq_len
    layer_type = None
    for index, layer in enumerate(decoder.manifest.layers):
        if has_attention(base.layers[index]):
            attention = base.layers[index].self_attn
            if by_type:
                layer_type = base.config.layer_types[index]
            window = getattr(attention, "sliding_window", everywhere)
            kind = layer_type, window, bool(getattr(attention, "use_rope", True))
            if (layer.rope, *kind) not in kinds:
                kinds[layer.rope, *kind] = LayerKind(base, S, index, layer, *kind)
    return list(kinds.values())


def _frequency_errors(decoder: Decoder, kinds: list[LayerKind]) -> Iterator[Error]:
    """Inverse frequencies of the manifest, relative: the slowest turn too little to
    show in cos."""
    ropes = {rope.name: np.float32(rope.inv_freq) for rope in decoder.manifest.rope}
    for kind in kinds:
        scale = np.where(kind.inv_freq, np.abs(kind.inv_freq), 1.0)
        error = _largest(ropes[kind.layer.rope], kind.inv_freq, scale)
        yield (error, f"inv_freq of layer {kind.index}")


def _call_errors(decoder: Decoder, kinds: list[LayerKind]) -> Iterator[Error]:
    """Errors of the tables of every position, t_max of them a call, in every
    sequence."""
    S, T = decoder.options.max_seq_len, decoder.options.t_max
    every = np.ones(decoder.options.batch, int)
    for start in [*range(0, S - T + 1, T), S - T]:
        positions = np.arange(start, start + T)
        inputs = decoder.host.inputs(start * every, T * every, T)
        for kind in kinds:
            expected = {ROPE_COS: kind.cos[positions], ROPE_SIN: kind.sin[positions]}
            for name in (ROPE_COS, ROPE_SIN, ATTN_MASK):
                whole = name + kind.layer.suffix
                if whole not in decoder.host.names:
                    continue
                actual = inputs[whole][:, 0]
                if name == ATTN_MASK:
                    actual = actual / MASKED
                    expected[name] = kind.hidden(positions, actual.shape[-1])
                yield _largest(actual, expected[name]), f"{whole} at position {start}"


def _largest(actual: np.ndarray, reference: np.ndarray, scale=1.0) -> float:
    """The largest |actual − reference| / scale over the last axes that both have; inf
    where these differ or a value is no number."""
    if np.shape(actual)[-np.ndim(reference) :] != np.shape(reference):
        return np.inf
    errors = np.abs(np.float64(actual) - reference) / scale
    return float(np.nan_to_num(errors, nan=np.inf).max(initial=0.0))
