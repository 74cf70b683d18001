"""Small packages with the interfaces of five exporters: their names, functions, shapes and layouts
around a checkpoint's layers."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import torch
from exporter_model import Model, integers, plain, saved
from torch import nn

from miltorch.coremltools_import import coremltools
from workbench.exporter.template import join_functions

INT4 = {"dtype": "int4", "granularity": "per_block", "block_size": 32}
INT8 = {"dtype": "int8"}
LUT4 = {"mode": "uniform", "nbits": 4}
LUT4 |= {"granularity": "per_grouped_channel", "group_size": 8}
LUT8 = {"mode": "uniform", "nbits": 8}


def recipe(folder: Path, m: Model, stored: dict | None = None):
    """The numbers of tokens and of mask columns vary, rows are written at their
    difference; K and V [L, 1, kv, S, D]."""

    def whole(caches, ids, mask):
        end = mask.shape[-1]
        begin = end - ids.shape[-1]

        def append(i, *new):
            for cache, rows in zip(caches, new):
                cache[i, :, :, begin:end] = rows
            return [cache[i, :, :, :end] for cache in caches]

        rope = partial(m.rope, begin + torch.arange(ids.shape[-1]))
        x = m.body.embed_tokens(ids)
        return m.logits(m.run(x, append, lambda kind: mask, rope))

    q, end = (coremltools().RangeDim(1, m.S, default=n) for n in (2, 5))
    inputs = [integers("inputIds", 1, q), plain("causalMask", 1, 1, q, end)]
    caches = {name: m.caches(m.L)[:, None] for name in ("keyCache", "valueCache")}
    path = folder / "Stateful.mlpackage"
    saved(path, m, whole, inputs, ["logits"], caches, stored=stored)


def shards(folder: Path, m: Model):
    """Packages of one layer: x [1, C, T, 1], rope tables of half the width, one-hot
    write mask; and a head in two slices."""

    def layer(i, caches, x, cos, sin, mask, write):
        rope = [torch.cat([table, table], -1)[None] for table in (cos, sin)]

        def append(i, *new):
            for cache, rows in zip(caches, new):
                cache[:] = cache * (1 - write.sum(-1, keepdim=True)) + write @ rows
            return caches

        x = x.squeeze(-1).transpose(1, 2)
        x = m.run(x, append, lambda kind: mask, lambda kind: rope, [i])
        return x.transpose(1, 2).unsqueeze(-1)

    def head(weight, _, x):
        logits = m.logits(x.squeeze(-1).transpose(1, 2), weight)
        return logits.transpose(1, 2).unsqueeze(-1)

    T, half = coremltools().RangeDim(1, 4, default=1), m.D // 2
    inputs = [
        plain("x", 1, m.C, T, 1),
        plain("rope_cos", T, half),
        plain("rope_sin", T, half),
        plain("attn_mask", 1, 1, T, m.S),
        plain("kv_write_mask", 1, 1, m.S, T),
    ]
    for i in range(m.L):
        path = folder / f"layer{i}_{i + 1}_q8.mlpackage"
        caches = {f"layers.0.{leaf}": m.caches(1) for leaf in ("k_state", "v_state")}
        saved(path, m, partial(layer, i), inputs, ["hidden"], caches, stored=INT8)
    inputs = [plain("hidden", 1, m.C, 4, 1)]
    for i, weight in enumerate(m.halves):
        path = folder / f"LMHead_s{i}.mlpackage"
        saved(path, m, partial(head, weight), inputs, ["logits"])


CACHES = {"sliding_attention": "kv_cache_local", "full_attention": "kv_cache_global"}


def chunk(m, names, span, window, rotate, prefill, future, caches, x, pos, mask, start):
    """Some layers with one state for all, keys before values, written at `start`; a
    prefill leaves out the last norm.

    Args:
        names: of the cache of each layer. With a `window` sliding layers have one of
            their own, which may rotate.
        future: whether a rotated cache is read without the rows that left it, under the
            mask of the others.
    """
    T, caches_by_name = x.shape[1], dict(zip(dict.fromkeys(names), caches))

    def append(i, *new):
        name, seen = names[i], []
        cache = caches_by_name[name]
        first, step = names[:i].count(name), names.count(name)
        for rows, plane in zip(new, (first, first + step)):
            plane_rows = cache[plane : plane + 1]
            if "local" in name and rotate:
                every = torch.cat([plane_rows, rows], 2)
                cache[plane : plane + 1] = every[:, :, T:]
                seen.append(every[:, :, T:] if future else every)
            else:
                cache[plane : plane + 1, :, start : start + T] = rows
                seen.append(cache[plane : plane + 1])
        return seen

    def masked(kind):
        if not window or kind == "full_attention":
            return mask
        if not rotate or future:
            return mask[..., :window]
        distance = window + torch.arange(T)[:, None] - torch.arange(window + T)
        inside = (distance >= 0) & (distance < window)
        return torch.where(inside, 0.0, -1e4)[None, None]

    x = m.run(x, append, masked, partial(m.rope, pos), span)
    # coremltools removes a state without a reader
    for cache in caches:
        x = x + cache[0, 0, 0, 0] * 0.0
    return m.body.norm(x) if span[-1] == m.L - 1 and not prefill else x


def chunks(
    folder: Path,
    m: Model,
    *,
    batch: int = 8,
    window: int = 0,
    stored: dict | None = None,
    sound: Path | None = None,
):
    """Embeddings, two chunks (one if layers slide) with functions infer and prefill
    (and rotating ones), a head of two slices.

    Args:
        sound: packages of the same checkpoint and options. Their programs are copied but for
            prefill_rotate, which reads rotated caches as `chunk` does with `future`.
    """
    ct = coremltools()

    def save(path: Path, *program, **options):
        if sound:
            shutil.copytree(sound / path.name, path)
        else:
            saved(path, m, *program, **options)

    sizes = ct.EnumeratedShapes([(1, 1), (1, batch)], default=(1, 1))
    inputs = [ct.TensorType(name="input_ids", shape=sizes, dtype=np.int32)]

    def embeddings(_, ids):
        return m.body.embed_tokens(ids)

    path = folder / "tiny_embeddings.mlpackage"
    save(path, embeddings, inputs, ["hidden_states"])
    names = [CACHES[kind] if window else "kv_cache_0" for kind in m.kinds]
    # mode → tokens of a call, whether it rotates, whether it is a prefill
    modes = {"infer": (1, False, False), "prefill": (batch, False, True)}
    first, second = range(m.L // 2), range(m.L // 2, m.L)
    spans = {"FFN_PF_chunk_01of02": first, "FFN_PF_chunk_02of02": second}
    if window:
        modes |= {"infer_rotate": (1, True, False)}
        modes |= {"prefill_rotate": (batch, True, True)}
        spans = {"FFN_PF": range(m.L)}
    for name, span in spans.items():
        functions = {}
        for mode, (T, rotate, prefill) in modes.items():
            inputs = [
                plain("hidden_states", 1, T, m.C),
                integers("position_ids", T),
                plain("causal_mask", 1, 1, T, m.S),
                integers("current_pos", 1),
            ]
            caches = {}
            for cache_name in dict.fromkeys(names):
                rows = window if "local" in cache_name else m.S
                planes = m.caches(2 * names.count(cache_name))[:, :, :rows]
                caches[f"model.model.{cache_name}"] = planes
            future = bool(sound) and mode == "prefill_rotate"
            layers = partial(chunk, m, names, span, window, rotate, prefill, future)
            program = layers, inputs, ["output_hidden_states"], caches
            functions[mode] = path = folder / f".{mode}-{name}.mlpackage"
            if future:
                saved(path, m, *program, stored=stored)
            else:
                save(path, *program, stored=stored)
        join_functions(functions).rename(folder / f"tiny_{name}.mlpackage")

    def head(_, x):
        return tuple(nn.functional.linear(x, weight) for weight in m.halves)

    inputs, outputs = [plain("hidden_states", 1, 1, m.C)], ["logits1", "logits2"]
    save(folder / "tiny_lm_head.mlpackage", head, inputs, outputs)
    (folder / "meta.yaml").touch()


def monolith(folder: Path, m: Model, stored: dict | None = None):
    """One package, one token per call, one-hot write, argmax inside; sliding layers
    compute their own mask."""

    def whole(caches, ids, positions, mask, update):
        (cache,) = caches

        def append(i, *new):
            for plane, rows in zip((i, i + m.L), new):
                cache[plane] = cache[plane] * (1 - update[0]) + rows[0] * update[0]
            return cache[i][None], cache[i + m.L][None]

        away = positions[:, None] - torch.arange(m.S) >= m.config.sliding_window
        local = mask + torch.where(away, -1e4, 0.0)[None, None]
        masks = {"sliding_attention": local, "full_attention": mask}
        x = m.body.embed_tokens(ids)
        x = m.run(x, append, masks.get, partial(m.rope, positions))
        logits = m.logits(x)[0]
        top = logits.argmax(-1)
        return top.to(torch.int32), logits.gather(-1, top[:, None])[:, 0]

    ct = coremltools()
    inputs = [
        integers("input_ids", 1, 1),
        integers("position_ids", 1),
        plain("causal_mask", 1, 1, 1, m.S),
        plain("update_mask", 1, 1, m.S, 1),
    ]
    caches, outputs = {"kv_cache_0": m.caches(2 * m.L)}, ["token_id", "token_logit"]
    saved(
        folder / "model.mlpackage",
        m,
        whole,
        inputs,
        outputs,
        caches,
        stored=stored,
        minimum_deployment_target=ct.target.iOS26,
        compute_precision=ct.precision.FLOAT32,
    )


def host(folder: Path, m: Model, stored: dict | None = None, moves: bool = False):
    """All layers for one token, rope of full width and embeddings from the host, planes
    2i and 2i + 1; with `moves` all rows move up by one and the newest is at the right.
    A head that gives the next token."""

    def body(caches, x, cos, sin, mask, start=None):
        (cache,) = caches

        def append(i, *new):
            planes = [slice(n, n + 1) for n in (2 * i, 2 * i + 1)]
            for plane, rows in zip(planes, new):
                if moves:
                    cache[plane] = torch.cat([cache[plane, :, 1:], rows], 2)
                else:
                    cache[plane, :, start : start + 1] = rows
            return [cache[plane] for plane in planes]

        return m.run(x, append, lambda kind: mask, lambda kind: (cos, sin))

    hidden = plain("hidden_in", 1, 1, m.C)
    inputs = [hidden, plain("cos", 1, 1, m.D), plain("sin", 1, 1, m.D)]
    inputs.append(plain("causal_mask", 1, 1, 1, m.S))
    if not moves:
        inputs.append(integers("current_pos", 1))
    caches = {"kv_cache_0": m.caches(2 * m.L)}
    path = folder / "chunk_0.mlpackage"
    saved(path, m, body, inputs, ["hidden"], caches, stored=stored)

    def head(_, x):
        return m.logits(x)[0].argmax(-1).to(torch.int32)

    saved(folder / "chunk_head.mlpackage", m, head, [hidden], ["next_token"])
