"""Small packages with the interfaces of five exporters: their names, functions, shapes and layouts
around a checkpoint's layers."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from exporter_model import Apply, Model, integers, joined, plain, saved
from torch import nn

from miltorch.quiet import coremltools

INT4 = {"dtype": "int4", "granularity": "per_block", "block_size": 32}
GROUPED = {"nbits": 4, "granularity": "per_grouped_channel", "group_size": 8}


class Recipe(nn.Module):
    """The numbers of tokens and of mask columns vary, rows are written at their
    difference; K and V [L, 1, kv, S, D]."""

    def __init__(self, m: Model):
        super().__init__()
        self.m = m
        self.register_buffer("keyCache", m.caches(m.L)[:, None])
        self.register_buffer("valueCache", m.caches(m.L)[:, None])

    def forward(self, ids, mask):
        end = mask.shape[-1]
        begin = end - ids.shape[-1]
        caches = self.keyCache, self.valueCache

        def append(i, *new):
            for cache, rows in zip(caches, new):
                cache[i, :, :, begin:end] = rows
            return [cache[i, :, :, :end] for cache in caches]

        rope = partial(self.m.rope, begin + torch.arange(ids.shape[-1]))
        x = self.m.body.embed_tokens(ids)
        return self.m.logits(self.m.run(x, append, lambda kind: mask, rope))


def recipe(folder: Path, checkpoint: Path, S: int = 64, stored: dict | None = None):
    ct = coremltools()
    q, end = (ct.RangeDim(1, S, default=1) for _ in range(2))
    inputs = [
        ("inputIds", (1, q), np.int32, (1, 2)),
        ("causalMask", (1, 1, q, end), np.float16, (1, 1, 2, 5)),
    ]
    module = Recipe(Model(checkpoint, S))
    saved(folder / "Stateful.mlpackage", module, inputs, ["logits"], stored=stored)


class Shard(nn.Module):
    """One layer: x [1, C, T, 1], rope tables of half the width, one-hot write mask."""

    def __init__(self, m: Model, index: int):
        super().__init__()
        self.m, self.index = m, index
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].register_buffer("k_state", m.caches(1))
        self.layers[0].register_buffer("v_state", m.caches(1))

    def forward(self, x, cos, sin, mask, write):
        states = self.layers[0].k_state, self.layers[0].v_state
        rope = [torch.cat([table, table], -1)[None] for table in (cos, sin)]

        def append(i, *new):
            for state, rows in zip(states, new):
                state[:] = state * (1 - write.sum(-1, keepdim=True)) + write @ rows
            return states

        x = x.squeeze(-1).transpose(1, 2)
        about = lambda kind: mask, lambda kind: rope, [self.index]
        return self.m.run(x, append, *about).transpose(1, 2).unsqueeze(-1)


def shards(folder: Path, checkpoint: Path, S: int = 32, t_max: int = 4):
    """Packages of one layer, and a head in two slices."""
    m, T = Model(checkpoint, S), coremltools().RangeDim(1, t_max, default=1)
    half = m.D // 2
    inputs = [
        ("x", (1, m.C, T, 1), np.float16, (1, m.C, 1, 1)),
        ("rope_cos", (T, half), np.float16, (1, half)),
        ("rope_sin", (T, half), np.float16, (1, half)),
        ("attn_mask", (1, 1, T, S), np.float16, (1, 1, 1, S)),
        ("kv_write_mask", (1, 1, S, T), np.float16, (1, 1, S, 1)),
    ]
    for i in range(m.L):
        path, how = folder / f"layer{i}_{i + 1}_q8.mlpackage", {"states": "layers.0."}
        how["stored"] = {"dtype": "int8"}
        saved(path, Shard(m, i), inputs, ["hidden"], **how)
    V = len(m.head.weight)
    for i, rows in enumerate((slice(0, V // 2), slice(V // 2, V))):

        def head(m, x, rows=rows):
            logits = m.logits(x.squeeze(-1).transpose(1, 2), rows)
            return logits.transpose(1, 2).unsqueeze(-1)

        path, inputs = folder / f"LMHead_s{i}.mlpackage", plain("hidden", 1, m.C, 4, 1)
        saved(path, Apply(m, head), [inputs], ["logits"])


CACHES = {"sliding_attention": "kv_cache_local", "full_attention": "kv_cache_global"}


class Chunk(nn.Module):
    """Some layers with one state for all, keys before values, written at current_pos; a
    prefill leaves out the last norm.

    With a `window` sliding layers have a cache of their own, which may rotate; with
    `future` a rotated cache is read without the rows that left it, under the mask of
    the others."""

    def __init__(self, m, span, window=0, rotate=False, prefill=False, future=False):
        super().__init__()
        self.m, self.span, self.window = m, span, window
        self.rotate, self.prefill, self.future = rotate, prefill, future
        # Core ML's names of the states are the paths of these modules
        self.model = nn.Module()
        self.model.model = nn.Module()
        self.names = [CACHES[kind] if window else "kv_cache_0" for kind in m.kinds]
        for name in dict.fromkeys(self.names):
            planes = m.caches(2 * self.names.count(name))
            if name == "kv_cache_local":
                planes = planes[:, :, :window]
            self.model.model.register_buffer(name, planes)

    def forward(self, x, positions, mask, start):
        T = x.shape[1]

        def append(i, *new):
            name, found = self.names[i], []
            state = getattr(self.model.model, name)
            first, step = self.names[:i].count(name), self.names.count(name)
            for rows, plane in zip(new, (first, first + step)):
                if name == "kv_cache_local" and self.rotate:
                    seen = torch.cat([state[plane : plane + 1], rows], 2)
                    state[plane : plane + 1] = seen[:, :, T:]
                    found.append(seen[:, :, T:] if self.future else seen)
                else:
                    state[plane : plane + 1, :, start : start + T] = rows
                    found.append(state[plane : plane + 1])
            return found

        def own(kind):
            if not self.window or kind == "full_attention":
                return mask
            if not self.rotate or self.future:
                return mask[..., : self.window]
            rows = self.window + torch.arange(T)[:, None]
            distance = rows - torch.arange(self.window + T)
            inside = (distance >= 0) & (distance < self.window)
            return torch.where(inside, 0.0, -1e4)[None, None]

        x = self.m.run(x, append, own, partial(self.m.rope, positions), self.span)
        # coremltools removes a state without a reader
        for state in self.model.model.buffers():
            x = x + state[0, 0, 0, 0] * 0.0
        last = self.span[-1] == self.m.L - 1 and not self.prefill
        return self.m.body.norm(x) if last else x


def chunks(
    folder: Path,
    checkpoint: Path,
    S: int = 32,
    *,
    batch: int = 8,
    window: int = 0,
    stored: dict | None = None,
    future: bool = False,
):
    """Embeddings, two chunks (one if layers slide) with functions infer and prefill
    (and rotating ones), a head of two slices; −inf masks, meta.yaml."""
    m = Model(checkpoint, S)
    ids = coremltools().EnumeratedShapes([(1, 1), (1, batch)], default=(1, 1))
    embed = Apply(m, lambda m, ids: m.body.embed_tokens(ids))
    inputs = [("input_ids", ids, np.int32, (1, 1))]
    saved(folder / "tiny_embeddings.mlpackage", embed, inputs, ["hidden_states"])
    spans = {"FFN_PF": range(m.L)}
    modes = {"infer": (1, False, False), "prefill": (batch, False, True)}
    if window:
        modes |= {"infer_rotate": (1, True, False)}
        modes |= {"prefill_rotate": (batch, True, True)}
    else:
        half = m.L // 2
        spans = {"FFN_PF_chunk_01of02": range(half)}
        spans |= {"FFN_PF_chunk_02of02": range(half, m.L)}
    for name, span in spans.items():
        functions = {}
        for mode, (T, rotate, prefill) in modes.items():
            inputs = [
                plain("hidden_states", 1, T, m.C),
                integers("position_ids", T),
                plain("causal_mask", 1, 1, T, S),
                integers("current_pos", 1),
            ]
            how = {"states": "model.model.", "stored": stored}
            fault = future and mode == "prefill_rotate"
            chunk = Chunk(m, span, window, rotate, prefill, fault)
            functions[mode] = folder / f".{mode}-{name}.mlpackage"
            saved(functions[mode], chunk, inputs, ["output_hidden_states"], **how)
        joined(folder / f"tiny_{name}.mlpackage", functions)
    slices = np.array_split(np.arange(len(m.head.weight)), 2)

    def head(m, x):
        weights = [m.head.weight[rows[0] : rows[-1] + 1] for rows in slices]
        return tuple(nn.functional.linear(x, weight) for weight in weights)

    inputs = [plain("hidden_states", 1, 1, m.C)]
    outputs = ["logits1", "logits2"]
    saved(folder / "tiny_lm_head.mlpackage", Apply(m, head), inputs, outputs)
    (folder / "meta.yaml").write_text("model_info:\n  name: anemll-tiny\n")


class Monolith(nn.Module):
    """One package, one token per call, one-hot write, argmax inside; sliding layers
    compute their own mask."""

    def __init__(self, m: Model):
        super().__init__()
        self.m = m
        self.register_buffer("kv_cache_0", m.caches(2 * m.L))

    def forward(self, ids, positions, mask, update):
        m = self.m

        def append(i, *new):
            for plane, rows in zip((i, i + m.L), new):
                before = self.kv_cache_0[plane]
                self.kv_cache_0[plane] = before * (1 - update[0]) + rows[0] * update[0]
            return self.kv_cache_0[i][None], self.kv_cache_0[i + m.L][None]

        away = positions[:, None] - torch.arange(m.S) >= m.config.sliding_window
        local = mask + torch.where(away, -1e4, 0.0)[None, None]
        masks = {"sliding_attention": local, "full_attention": mask}
        x = m.body.embed_tokens(ids)
        x = m.run(x, append, masks.get, partial(m.rope, positions))
        logits = m.logits(x)[0]
        top = logits.argmax(-1)
        return top.to(torch.int32), logits.gather(-1, top[:, None])[:, 0]


def monolith(folder: Path, checkpoint: Path, S: int = 32, stored: dict | None = None):
    ct = coremltools()
    inputs = [
        integers("input_ids", 1, 1),
        integers("position_ids", 1),
        plain("causal_mask", 1, 1, 1, S),
        plain("update_mask", 1, 1, S, 1),
    ]
    module, outputs = Monolith(Model(checkpoint, S)), ["token_id", "token_logit"]
    how = {"stored": stored, "minimum_deployment_target": ct.target.iOS26}
    how["compute_precision"] = ct.precision.FLOAT32
    saved(folder / "model.mlpackage", module, inputs, outputs, **how)


class Body(nn.Module):
    """All layers for one token, rope of full width from the host, planes 2i and 2i + 1;
    with `moves` all rows move up by one and the newest is at the right."""

    def __init__(self, m: Model, moves: bool):
        super().__init__()
        self.m, self.moves = m, moves
        self.register_buffer("kv_cache_0", m.caches(2 * m.L))

    def forward(self, x, cos, sin, mask, start=None):
        def append(i, *new):
            planes = [slice(n, n + 1) for n in (2 * i, 2 * i + 1)]
            for plane, rows in zip(planes, new):
                if self.moves:
                    moved = torch.cat([self.kv_cache_0[plane, :, 1:], rows], 2)
                    self.kv_cache_0[plane] = moved
                else:
                    self.kv_cache_0[plane, :, start : start + 1] = rows
            return [self.kv_cache_0[plane] for plane in planes]

        return self.m.run(x, append, lambda kind: mask, lambda kind: (cos, sin))


def host(
    folder: Path,
    checkpoint: Path,
    S: int = 32,
    stored: dict | None = None,
    moves: bool = False,
):
    """One chunk, a head that gives the next token; embeddings are the host's."""
    m = Model(checkpoint, S)
    hidden = plain("hidden_in", 1, 1, m.C)
    inputs = [hidden, plain("cos", 1, 1, m.D), plain("sin", 1, 1, m.D)]
    inputs.append(plain("causal_mask", 1, 1, 1, S))
    if not moves:
        inputs.append(integers("current_pos", 1))
    path = folder / "chunk_0.mlpackage"
    saved(path, Body(m, moves), inputs, ["hidden"], stored=stored)
    head = Apply(m, lambda m, x: m.logits(x)[0].argmax(-1).to(torch.int32))
    saved(folder / "chunk_head.mlpackage", head, [hidden], ["next_token"])
