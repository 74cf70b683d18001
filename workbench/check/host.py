"""Gate `host`: compares the host's part of a bundle with Hugging Face's own rotary and
mask functions, embedding and head.

Every input that a shard takes beside `x` is compared for all positions up to
max_seq_len and every T, with dummy columns, with other offsets per sequence of a batch,
and on ring buffers. No shard of layers runs."""

import inspect
from collections.abc import Iterator

import numpy as np
import torch

from workbench.bundle.names import (
    ATTN_MASK,
    IDS,
    KV_WRITE_MASK,
    MASKED,
    ORDER,
    POS,
    ROPE_COS,
    ROPE_SIN,
    ROUTER_STATE,
    TAIL_KEEP,
    TAIL_SELECT,
    X,
)
from workbench.check import gates, metrics
from workbench.check.fidelity import default_ts
from workbench.check.hf import (
    HEAD_ROWS,
    empty_model,
    final_norm,
    has_attention,
    head_weight,
    logit_divisor,
)
from workbench.check.interface import sizes
from workbench.decode import Decoder
from workbench.models.checkpoint import Checkpoint

# rounding of cos and sin in fp32 makes 6e-8; a table of bf16 frequencies 0.1
LIMIT = 2e-5
MASK_ENTRIES = 1 << 28  # beyond that many, uncommon T skip positions evenly
PROBES = 16  # hidden states per row of the head
UNLIKE = 0.5  # compression leaves 0.15 of a logit

Error = tuple[float, str]  # how far something is from its reference, and what it is


def host_gate(decoder: Decoder, checkpoint: Checkpoint) -> gates.Gate:
    """cos, sin, masks, write addresses, tail selection, embedding rows and head order
    of a bundle.

    Errors: of cos and sin absolute, of inverse frequencies relative, of masks relative
    to the mask constant, of embedding rows relative to the row's RMS. A head row that
    is not the checkpoint's counts with its logits' relative error, all others with 0.
    """
    base = empty_model(checkpoint.config).model
    for name, _ in list(base.named_parameters()):
        if not name.startswith(("layers.", "embed_tokens.")):
            path, _, leaf = name.rpartition(".")
            value = checkpoint.tensor(checkpoint.prefix + name).half().float()
            setattr(base.get_submodule(path), leaf, torch.nn.Parameter(value, False))
    if base.rotary_emb is None:
        base.rotary_emb = NoRotation(decoder.manifest.dims.D)
    with torch.inference_mode():
        kinds = _layer_kinds(decoder, base)
        errors = [
            *_frequency_errors(decoder, kinds),
            *_call_errors(decoder, kinds),
            *_embedding_errors(decoder, checkpoint, base),
            *_head_errors(decoder, checkpoint, base),
        ]
    reason = "rope, masks, write addresses, embedding and head against Hugging Face's; worst: "
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
    """The worst error of every input over all calls."""
    worst: dict[str, Error] = {}
    shapes = {}
    for model in decoder.layers:
        shapes |= model.shard.inputs
    shapes.pop(X, None)
    shapes.pop(IDS, None)
    for offsets, counts, T in _calls(decoder):
        inputs = decoder.host.inputs(offsets, counts, T)
        for name, shape in shapes.items():
            error = _input_error(name, shape, inputs, kinds, offsets, counts, T)
            if name not in worst or not error <= worst[name][0]:
                at = f"offsets {offsets.tolist()}, {counts.tolist()} of T = {T}"
                worst[name] = (error, f"{name} at {at}")
    yield from worst.values()


def _calls(decoder: Decoder) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """(offsets [B], counts [B], T): every position at every T, then calls with dummy
    columns.

    The sequences of a batch are at other positions and have other counts, unless the
    bundle writes by a slice, which takes neither those nor dummy columns."""
    options = decoder.options
    S = options.max_seq_len
    t_max = options.t_max
    B = options.batch
    by_slice = options.kv_write == "slice"
    common = default_ts(options)
    seqs = np.arange(B)
    apart = seqs * (S // B + 1)
    if by_slice:
        apart[:] = 0
    for T in options.shapes or range(1, t_max + 1):
        step = T
        if T not in common:
            step *= max(1, S * S * t_max // MASK_ENTRIES)
        for start in [*range(0, S - T + 1, step), S - T]:
            offsets = (start + apart) % S
            yield offsets, np.minimum(T, S - offsets), T
        if by_slice:
            continue
        for start in sorted({0, 1, S // 2, S - T, S - 1}):
            offsets = (start + apart) % S
            for count in sorted({0, 1, T // 2, T - 1, T}):
                yield offsets, np.minimum((count + seqs) % (T + 1), S - offsets), T


def _input_error(name, shape, inputs, kinds, offsets, counts, T) -> float:
    """How far input `name` of one call is from its reference; what dummy columns may
    hold is free, except that they write nothing and have finite values."""
    array = np.asarray(inputs.get(name))
    if list(array.shape) != sizes(shape, T) or not np.isfinite(array).all():
        return np.inf
    if name == POS:
        return float(np.abs(array - offsets[0]).max())
    if name == ROUTER_STATE:
        return float(np.abs(array).max())
    if name in (TAIL_SELECT, TAIL_KEEP):
        sequences = zip(array, counts, strict=True)
        return max(_tail_error(name, *sequence) for sequence in sequences)
    if name == ORDER:
        order = np.arange(1, T + 1)
        order = np.where(order <= counts[:, None], order, 0)
        return _largest(array[:, 0, :, 0], order)
    sequences = list(zip(array[:, 0], offsets, counts, strict=True))
    if name.startswith(KV_WRITE_MASK):
        return max(_write_error(*sequence) for sequence in sequences)
    errors = [
        _kind_error(kind, own, *sequence)
        for kind in kinds
        for own in (ROPE_COS, ROPE_SIN, ATTN_MASK)
        if name == own + kind.layer.suffix
        for sequence in sequences
    ]
    return max(errors, default=np.inf)


def _tail_error(name: str, one_hot: np.ndarray, count: int) -> float:
    """Rows of a tail input of one sequence against the places, in the old rows and the
    valid columns behind them, of the last ones."""
    rows, width = one_hot.shape
    first = rows if name == TAIL_SELECT else 0
    last = np.arange(count, count + rows)
    return _largest(one_hot, last[:, None] == np.arange(first, first + width))


def _kind_error(
    kind: LayerKind, name: str, rows: np.ndarray, offset: int, count: int
) -> float:
    """One sequence's rows [T, width] of rope_cos, rope_sin or attn_mask, the valid
    ones."""
    if name == ATTN_MASK:
        return _mask_error(kind, rows[:count], offset)
    table = {ROPE_COS: kind.cos, ROPE_SIN: kind.sin}[name]
    return _largest(rows[:count], table[offset : offset + count])


def _mask_error(kind: LayerKind, rows: np.ndarray, offset: int) -> float:
    """Masks [count, rows of the cache] of the positions from `offset` on, once these
    are written.

    Row r of a cache of n rows then holds the last position written that is r modulo n.
    A position that Hugging Face's mask shows and no row holds any more counts as a
    whole error."""
    count, n = rows.shape
    end = offset + count
    queries = np.arange(offset, end)
    lost = np.arange(end - n)
    if kind.visible(queries, lost).any():
        return 1.0
    stored = end - 1 - (end - 1 - np.arange(n)) % n  # negative where no token is yet
    return _largest(rows / MASKED, ~(kind.visible(queries, stored) & (stored >= 0)))


def _write_error(mask: np.ndarray, offset: int, count: int) -> float:
    """A write mask [rows, T] of one sequence: each valid column at its own row, dummies
    nowhere."""
    expected = np.zeros_like(mask)
    valid = np.arange(count)
    expected[(offset + valid) % len(mask), valid] = 1
    return _largest(mask, expected)


def _embedding_errors(
    decoder: Decoder, checkpoint: Checkpoint, base
) -> Iterator[Error]:
    """What enters the first layer for every token of the vocabulary, from fp16-rounded
    weights."""
    layers = base.layers
    entering = []
    # nothing between the embedding and the final norm
    base.layers = torch.nn.ModuleList()
    taken = final_norm(base).register_forward_pre_hook(
        lambda _, args: entering.append(args[0])
    )
    base.embed_tokens.padding_idx = None
    scale = decoder.manifest.stream_scale
    name = f"{checkpoint.prefix}embed_tokens.weight"
    for ids, rows in _checkpoint_rows(decoder, checkpoint, name):
        base.embed_tokens.weight = torch.nn.Parameter(rows, False)
        base(input_ids=torch.arange(len(ids))[:, None], use_cache=False)
        reference = entering.pop()[:, 0].numpy()
        errors = metrics.max_abs(reference, decoder.bundle.embed(ids[None])[0] * scale)
        errors = errors / np.maximum(metrics.rms(reference), 1e-30)
        error, token = gates.worst(zip(errors, ids, strict=True))
        yield error, f"embedding of token {token}"
    taken.remove()
    base.layers = layers


def _head_errors(decoder: Decoder, checkpoint: Checkpoint, base) -> Iterator[Error]:
    """Rows of the head that are not the checkpoint's: logits of random hidden states.

    A row is another one when its logits are wrong by half of themselves and by more
    than three times what compression makes of most rows; the precision of stored
    weights is not checked here."""
    if not decoder.manifest.shows_hidden:
        return  # what the head reads is not what Hugging Face's reads
    probes = np.random.default_rng(0).standard_normal((PROBES, decoder.manifest.dims.C))
    probes = probes.astype(np.float32)
    divisor = logit_divisor(checkpoint.config)
    normed = final_norm(base)(torch.from_numpy(probes)) / divisor
    hidden = probes.T / decoder.manifest.stream_scale  # [C, PROBES]
    logits = decoder.logits(np.tile(hidden, (decoder.options.batch, 1, 1)))
    for ids, rows in _checkpoint_rows(decoder, checkpoint, head_weight(checkpoint)):
        reference = (normed @ rows.T).numpy()
        size = np.sqrt((reference**2).mean(0))
        for actual in logits[:, :, ids]:
            error = np.sqrt(((np.float64(actual) - reference) ** 2).mean(0))
            noise = min(np.median(error), 0.3 * np.median(size))
            unlike = np.where(error > 3 * noise, error / np.maximum(size, 1e-30), 0)
            worst = int(np.nan_to_num(unlike, nan=np.inf).argmax())
            value = unlike[worst] * (unlike[worst] > UNLIKE)
            yield value, f"row {ids[worst]} of the head"


def _checkpoint_rows(
    decoder: Decoder, checkpoint: Checkpoint, name: str
) -> Iterator[tuple]:
    """(token ids, the rows of a tensor of the vocabulary as fp16 holds them), slice by
    slice."""
    V = decoder.manifest.dims.V
    for start in range(0, V, HEAD_ROWS):
        stop = min(start + HEAD_ROWS, V)
        rows = checkpoint.tensor(name, slice(start, stop))
        yield np.arange(start, stop), rows.half().float()


def _largest(actual: np.ndarray, reference: np.ndarray, scale=1.0) -> float:
    """The largest |actual − reference| / scale; inf where the shapes differ or a value is none."""
    if np.shape(actual) != np.shape(reference):
        return np.inf
    errors = np.abs(np.float64(actual) - reference) / scale
    return float(np.nan_to_num(errors, nan=np.inf).max(initial=0.0))
