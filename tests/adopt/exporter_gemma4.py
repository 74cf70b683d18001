"""A Gemma 4 checkpoint as four small packages with the interface of public ones: two chunks with
stacked caches of two sizes, padded to the larger head, and two stateless chunks that read whole
caches of the second one."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from exporter_model import integers, plain, saved
from torch import nn
from transformers import AutoModelForCausalLM

SLIDING, FULL = "sliding_attention", "full_attention"
# by the layers of E2B that own these rows
SHARED = {SLIDING: ("kv13_k", "kv13_v"), FULL: ("kv14_k", "kv14_v")}


class Chunked(nn.Module):
    """A checkpoint whose layers are sliding and full in turn, for one sequence of up to S tokens,
    one a call. The last two layers share the rows of the two before.

    Args:
        turns_all_pairs: whether full layers turn every pair of channels, by a table of the
            package's own, in place of the host's, in which three quarters stand still.
    """

    def __init__(self, path: Path, S: int = 32, turns_all_pairs: bool = False):
        super().__init__()
        whole = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        self.config, self.body, self.head = whole.config, whole.model, whole.lm_head
        config = self.config
        self.S, self.W = S, config.sliding_window
        self.L, self.P = config.num_hidden_layers, config.hidden_size_per_layer_input
        self.turns_all_pairs = turns_all_pairs
        self.head_dims = [config.per_layer_config[i].head_dim for i in range(self.L)]
        width = max(self.head_dims)
        frequencies = 1e6 ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(S)[:, None] * torch.cat([frequencies, frequencies])
        self.register_buffer("cos_all", angles.cos())
        self.register_buffer("sin_all", angles.sin())

    def cache(self, kind: str, layers: range) -> torch.Tensor:
        """Keys, then values, of the layers of a kind."""
        count = sum(self.config.layer_types[i] == kind for i in layers)
        rows = self.W if kind == SLIDING else self.S
        heads = self.config.num_key_value_heads
        return torch.zeros(2 * count, heads, rows, max(self.head_dims))

    def run(self, layers, caches, x, masks, combined, ropes, starts, shared):
        """x [1, 1, C] through some layers; those that own rows write them to `caches`, which
        `shared` then has whole."""
        kinds = self.config.layer_types
        if self.turns_all_pairs:
            position = starts[FULL]
            tables = zip((self.cos_all, self.sin_all), ropes[FULL])
            # the interface stays as it is
            ropes = ropes | {FULL: [t[position][None] + 0.0 * r for t, r in tables]}

        def append(k, v, i):
            kind, D = kinds[i], self.head_dims[i]
            cache, start = caches[kind], starts[kind]
            alike = [j for j in layers if kinds[j] == kind]
            first = alike.index(i)
            seen = []
            for rows, plane in ((k, first), (v, first + len(alike))):
                padded = nn.functional.pad(rows, (0, cache.shape[-1] - D))
                cache[plane : plane + 1, :, start : start + 1] = padded
                seen.append(cache[plane : plane + 1][..., :D])
            return seen

        for i in layers:
            x = self.body.layers[i](
                x,
                per_layer_input=combined[:, :, i],
                shared_kv_states=shared,
                attention_mask=masks[kinds[i]],
                position_embeddings=ropes[kinds[i]],
                past_key_values=SimpleNamespace(update=append),
            )
        return x


def chunk(m: Chunked, layers: range, is_first: bool, caches, x, *inputs):
    """The first or the second chunk."""
    mask_full, mask_sliding, per_layer, *tables, position, ring = inputs
    combined = per_layer.reshape(1, 1, m.L, m.P)
    if is_first:
        combined = m.body.project_per_layer_inputs(x, combined)
    shared: dict = {}
    x = m.run(
        layers,
        dict(zip((SLIDING, FULL), caches)),
        x,
        {FULL: mask_full, SLIDING: mask_sliding},
        combined,
        ropes_of(tables),
        {SLIDING: ring, FULL: position},
        shared,
    )
    if is_first:
        return x, combined.reshape(1, 1, m.L * m.P)
    return x, *shared[SLIDING], *shared[FULL]


def stateless_chunk(m: Chunked, layers: range, _, x, *inputs):
    """The third or the fourth chunk; the last one ends in a token and its logit."""
    mask_full, mask_sliding, per_layer, *tables = inputs[:7]
    rows, positions = inputs[7:11], inputs[11:]
    x = m.run(
        layers,
        {},
        x,
        {FULL: mask_full, SLIDING: mask_sliding},
        per_layer.reshape(1, 1, m.L, m.P),
        ropes_of(tables),
        {FULL: positions[0]} if positions else {},
        {SLIDING: rows[:2], FULL: rows[2:]},
    )
    if layers[-1] < m.L - 1:
        return x
    logits = m.head(m.body.norm(x))[0]
    softcap = m.config.final_logit_softcapping
    logits = torch.tanh(logits / softcap) * softcap
    top = logits.argmax(-1)
    return top.to(torch.int32), logits.gather(-1, top[:, None])[:, 0]


def ropes_of(tables) -> dict[str, list[torch.Tensor]]:
    """Cosines and sines [1, 1, D] of each kind of layer from inputs [1, 1, 1, D]."""
    cos_s, sin_s, cos_f, sin_f = (table[0] for table in tables)
    return {SLIDING: [cos_s, sin_s], FULL: [cos_f, sin_f]}


def chunked(folder: Path, m: Chunked) -> None:
    """Four packages."""
    C, narrow, wide = m.config.hidden_size, min(m.head_dims), max(m.head_dims)
    H = m.config.num_key_value_heads
    first_inputs = [
        plain("hidden_states", 1, 1, C),
        plain("causal_mask_full", 1, 1, 1, m.S),
        plain("causal_mask_sliding", 1, 1, 1, m.W),
    ]
    tables = [
        plain("cos_s", 1, 1, 1, narrow),
        plain("sin_s", 1, 1, 1, narrow),
        plain("cos_f", 1, 1, 1, wide),
        plain("sin_f", 1, 1, 1, wide),
    ]
    position = integers("current_pos", 1)
    owners = m.L - m.config.num_kv_shared_layers
    spans = [range(owners // 2), range(owners // 2, owners)]
    hidden = "hidden_states_out"
    outputs = [
        [hidden, "per_layer_combined_out"],
        [hidden, *SHARED[SLIDING], *SHARED[FULL]],
    ]
    for number, span in enumerate(spans):
        name = "per_layer_combined" if number else "per_layer_raw"
        inputs = [*first_inputs, plain(name, 1, 1, m.L * m.P), *tables]
        inputs += [position, integers("ring_pos", 1)]
        caches = {"kv_cache_sliding": m.cache(SLIDING, span)}
        caches["kv_cache_full"] = m.cache(FULL, span)
        function = partial(chunk, m, span, number == 0)
        path = folder / f"chunk_{number + 1}.mlpackage"
        saved(path, m, function, inputs, outputs[number], caches)
    middle = owners + (m.L - owners) // 2
    inputs = [*first_inputs, plain("per_layer_combined", 1, 1, m.L * m.P), *tables]
    rows = {SLIDING: (m.W, narrow), FULL: (m.S, wide)}
    for kind, names in SHARED.items():
        inputs += [plain(name, 1, H, *rows[kind]) for name in names]
    if m.turns_all_pairs:
        inputs.append(position)
    for number, (span, names) in enumerate(
        [
            (range(owners, middle), [hidden]),
            (range(middle, m.L), ["token_id", "token_logit"]),
        ]
    ):
        function = partial(stateless_chunk, m, span)
        path = folder / f"chunk_{number + 3}.mlpackage"
        saved(path, m, function, inputs, names)
