"""A Gemma 4 checkpoint as four small packages with the interface of public ones: two chunks with
stacked caches of two sizes, padded to the larger head, and two stateless chunks that read whole
caches of the second one."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from exporter_model import integers, plain, saved
from torch import nn
from transformers import AutoModelForCausalLM

from workbench.exporter.template import join_functions

SLIDING, FULL = "sliding_attention", "full_attention"
# by the layers of E2B that own these rows
SHARED = {SLIDING: ("kv13_k", "kv13_v"), FULL: ("kv14_k", "kv14_v")}


class Chunked(nn.Module):
    """A checkpoint whose layers are sliding and full in turn, for one sequence of up to S tokens.
    The last two layers share the rows of the two before.

    Args:
        turns_all_pairs: whether full layers turn every pair of channels, by a table of the
            package's own, in place of the host's, in which three quarters stand still.
        verified: tokens of a call of the function `verify`, which every package then has beside
            `decode` for one token. It reads a ring before its new rows are written to it, under a
            mask of its own.
    """

    def __init__(
        self,
        path: Path,
        S: int = 32,
        turns_all_pairs: bool = False,
        verified: int | None = None,
    ):
        super().__init__()
        whole = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        self.config, self.body, self.head = whole.config, whole.model, whole.lm_head
        config = self.config
        self.S, self.W = S, config.sliding_window
        self.L, self.P = config.num_hidden_layers, config.hidden_size_per_layer_input
        self.turns_all_pairs = turns_all_pairs
        self.verified = verified
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

    def ring_mask(self, start: torch.Tensor, T: int) -> torch.Tensor:
        """The mask [1, 1, T, W + T] of a ring before a call from position `start` on, and of the
        rows of the call."""
        rows = torch.arange(self.W)
        stored = start - 1 - torch.remainder(start - 1 - rows, self.W)
        new = start + torch.arange(T)
        positions = torch.cat([stored, new])
        distance = new[:, None] - positions
        inside = (distance >= 0) & (distance < self.W) & (positions >= 0)
        return torch.where(inside, 0.0, -1e4)[None, None]

    def run(self, layers, caches, x, masks, combined, ropes, starts, shared):
        """x [1, T, C] through some layers; those that own rows write them to `caches`, which
        `shared` then has whole."""
        kinds = self.config.layer_types
        T = x.shape[1]
        if T > 1:
            # the interface stays as it is
            mask = self.ring_mask(starts[FULL], T) + 0.0 * masks[SLIDING][..., :1]
            masks = masks | {SLIDING: mask}
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
                before = cache[plane : plane + 1][..., :D] + 0.0
                cache[plane : plane + 1, :, start : start + T] = padded
                if T > 1 and kind == SLIDING:
                    seen.append(torch.cat([before, rows], 2))
                else:
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
    combined = per_layer.reshape(1, -1, m.L, m.P)
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
        return x, combined.reshape(1, -1, m.L * m.P)
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
        per_layer.reshape(1, -1, m.L, m.P),
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
    """Cosines and sines [1, T, D] of each kind of layer from inputs [1, 1, T, D]."""
    cos_s, sin_s, cos_f, sin_f = (table[0] for table in tables)
    return {SLIDING: [cos_s, sin_s], FULL: [cos_f, sin_f]}


def save_functions(path: Path, m: Chunked, save: Callable[[Path, int], None]) -> None:
    """A package for one token a call, or one with both functions; `save` converts the one for T
    tokens to a path."""
    if not m.verified:
        return save(path, 1)
    functions = {}
    for name, T in {"decode": 1, "verify": m.verified}.items():
        functions[name] = path.with_name(f".{name}-{path.name}")
        save(functions[name], T)
    join_functions(functions).rename(path)


def save_program(
    convert: Callable[[Path, int], None], copied: Path | None, path: Path, T: int
) -> None:
    """A program for T tokens: for one token a copy of a package, if there is one."""
    if copied and T == 1:
        shutil.copytree(copied, path)
    else:
        convert(path, T)


def inputs_of(m: Chunked, per_layer: str, T: int) -> list:
    """The inputs that all packages have; `per_layer` is the name of the second embeddings."""
    narrow, wide = min(m.head_dims), max(m.head_dims)
    return [
        plain("hidden_states", 1, T, m.config.hidden_size),
        plain("causal_mask_full", 1, 1, T, m.S),
        plain("causal_mask_sliding", 1, 1, T, m.W),
        plain(per_layer, 1, T, m.L * m.P),
        plain("cos_s", 1, 1, T, narrow),
        plain("sin_s", 1, 1, T, narrow),
        plain("cos_f", 1, 1, T, wide),
        plain("sin_f", 1, 1, T, wide),
    ]


def save_chunk(m: Chunked, layers: range, is_first: bool, path: Path, T: int) -> None:
    """Converts the first or the second chunk for T tokens."""
    inputs = inputs_of(m, "per_layer_raw" if is_first else "per_layer_combined", T)
    inputs += [integers("current_pos", 1), integers("ring_pos", 1)]
    outputs = [*SHARED[SLIDING], *SHARED[FULL]]
    if is_first:
        outputs = ["per_layer_combined_out"]
    caches = {"kv_cache_sliding": m.cache(SLIDING, layers)}
    caches["kv_cache_full"] = m.cache(FULL, layers)
    function = partial(chunk, m, layers, is_first)
    saved(path, m, function, inputs, ["hidden_states_out", *outputs], caches)


def save_stateless_chunk(m: Chunked, layers: range, path: Path, T: int) -> None:
    """Converts the third or the fourth chunk for T tokens."""
    inputs = inputs_of(m, "per_layer_combined", T)
    rows = {SLIDING: m.W if T == 1 else m.W + T, FULL: m.S}
    widths = {SLIDING: min(m.head_dims), FULL: max(m.head_dims)}
    H = m.config.num_key_value_heads
    for kind, names in SHARED.items():
        inputs += [plain(name, 1, H, rows[kind], widths[kind]) for name in names]
    if m.turns_all_pairs or T > 1:
        inputs.append(integers("current_pos", 1))
    is_last = layers[-1] == m.L - 1
    outputs = ["token_id", "token_logit"] if is_last else ["hidden_states_out"]
    saved(path, m, partial(stateless_chunk, m, layers), inputs, outputs)


def chunked(folder: Path, m: Chunked, sound: Path | None = None) -> None:
    """Four packages.

    Args:
        sound: the packages of the same checkpoint without a fault, for one token a call. Their
            programs are copied, and not converted again: all of them beside functions of
            several tokens, and all but the first where full layers turn all pairs.
    """
    owners = m.L - m.config.num_kv_shared_layers
    middle = owners + (m.L - owners) // 2
    saving = [
        partial(save_chunk, m, range(owners // 2), True),
        partial(save_chunk, m, range(owners // 2, owners), False),
        partial(save_stateless_chunk, m, range(owners, middle)),
        partial(save_stateless_chunk, m, range(middle, m.L)),
    ]
    for number, convert in enumerate(saving, 1):
        path = folder / f"chunk_{number}.mlpackage"
        is_faulty = m.turns_all_pairs and number == 1
        copied = sound / path.name if sound and not is_faulty else None
        save_functions(path, m, partial(save_program, convert, copied))
