"""Small packages with the interfaces of five exporters: their names, functions, shapes
and layouts around torch code of this project. Faults are planted by name."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import torch
from exporter_model import (
    Apply,
    Model,
    convert,
    palettized,
    plain,
    quantized,
    states_of,
)
from torch import nn

from miltorch.quiet import coremltools, quiet
from workbench.export.convert import lean, no_progress

GROUPED = {"nbits": 4, "granularity": "per_grouped_channel", "group_size": 8}
FAULTS = {
    "future": "prefill_rotate sees the future",
    "norm_order": "q and k are normed after rope, not before it",
    "theta": "rope scaling is replaced by theta times factor",
    "one_mask": "sliding layers see as far back as full ones",
}


class Recipe(nn.Module):
    """One package; q and end vary, rows are written at end − q; K and V [L, 1, kv, S,
    D]."""

    def __init__(self, model):
        super().__init__()
        self.m = model
        shape = (model.L, 1, model.kv, model.S, model.D)
        self.register_buffer("keyCache", torch.zeros(shape))
        self.register_buffer("valueCache", torch.zeros(shape))

    def forward(self, ids, mask):
        q = ids.shape[-1]
        end = mask.shape[-1]
        begin = end - q

        def cache(i, k, v):
            self.keyCache[i, :, :, begin:end] = k[None]
            self.valueCache[i, :, :, begin:end] = v[None]
            return self.keyCache[i, 0, :, :end], self.valueCache[i, 0, :, :end]

        x = self.m.embed(ids)
        positions = begin + torch.arange(q)
        for i in range(self.m.L):
            rope = self.m.rope(self.m.kinds[i], positions)
            x = self.m.layer(i, x, *rope, mask[0], cache)
        return nn.functional.linear(self.m.norm(x), self.m.head)


def recipe(
    folder: Path, checkpoint: Path, S: int = 64, fault: str = "", int4: bool = False
):
    ct = coremltools()
    m = Model(checkpoint, S, fault)
    q, end = (ct.RangeDim(1, S, default=1) for _ in range(2))
    inputs = [
        ("inputIds", (1, q), np.int32, (1, 2)),
        ("causalMask", (1, 1, q, end), np.float16, (1, 1, 2, 5)),
    ]
    module = Recipe(m)
    package = convert(module, inputs, ["logits"], states_of(module))
    if int4:
        package = quantized(
            package, dtype="int4", granularity="per_block", block_size=32
        )
    folder.mkdir(parents=True)
    package.save(str(folder / "Stateful.mlpackage"))


class Shard(nn.Module):
    """Layers [first, stop): x [1, C, T, 1], rope tables of half the width, one-hot
    write mask."""

    def __init__(self, model, first, stop):
        super().__init__()
        self.m = model
        self.span = range(first, stop)
        self.layers = nn.ModuleList()
        for _ in self.span:
            shape = (1, model.kv, model.S, model.D)
            layer = nn.Module()
            layer.register_buffer("k_state", torch.zeros(shape))
            layer.register_buffer("v_state", torch.zeros(shape))
            self.layers.append(layer)

    def forward(self, x, cos, sin, mask, write):
        x = x.squeeze(-1).transpose(1, 2)
        cos, sin = (torch.cat([t, t], -1) for t in (cos, sin))

        def cache(i, k, v):
            layer = self.layers[i - self.span.start]
            rows = []
            for name, new in (("k_state", k), ("v_state", v)):
                state = getattr(layer, name)
                state[:] = state * (1 - write.sum(-1, keepdim=True)) + write @ new[None]
                rows.append(state[0])
            return rows

        for i in self.span:
            x = self.m.layer(i, x, cos, sin, mask[0], cache)
        return x.transpose(1, 2).unsqueeze(-1)


def _head_slice(rows, m, x):
    x = m.norm(x.squeeze(-1).transpose(1, 2))
    return nn.functional.linear(x, m.head[rows]).transpose(1, 2).unsqueeze(-1)


def shards(
    folder: Path, checkpoint: Path, S: int = 32, fault: str = "", t_max: int = 4
):
    ct = coremltools()
    m = Model(checkpoint, S, fault)
    folder.mkdir(parents=True)
    T = ct.RangeDim(1, t_max, default=1)
    half = m.D // 2
    for i in range(m.L):
        inputs = [
            ("x", (1, m.C, T, 1), np.float16, (1, m.C, 1, 1)),
            ("rope_cos", (T, half), np.float16, (1, half)),
            ("rope_sin", (T, half), np.float16, (1, half)),
            ("attn_mask", (1, 1, T, S), np.float16, (1, 1, 1, S)),
            ("kv_write_mask", (1, 1, S, T), np.float16, (1, 1, S, 1)),
        ]
        states = [(f"layers.0.{n}_state", (1, m.kv, S, m.D)) for n in "kv"]
        package = convert(Shard(m, i, i + 1), inputs, ["hidden"], states)
        package = quantized(package, dtype="int8")
        package.save(str(folder / f"layer{i}_{i + 1}_q8.mlpackage"))
    V = m.head.shape[0]
    for i, rows in enumerate((slice(0, V // 2), slice(V // 2, V))):
        inputs = [plain("hidden", (1, m.C, t_max, 1))]
        head = convert(Apply(m, partial(_head_slice, rows)), inputs, ["logits"])
        head.save(str(folder / f"LMHead_s{i}.mlpackage"))


CACHES = {"sliding_attention": "kv_cache_local", "full_attention": "kv_cache_global"}


class Chunk(nn.Module):
    """Layers of the chunked style with one state for all of them, written at
    current_pos.

    Sliding layers may have a cache of their own that rotates (`rotate`); a prefill
    skips the last layer's MLP. Core ML's names of the states are the paths of these
    modules."""

    def __init__(self, model, span, window=0, rotate=False, prefill=False):
        super().__init__()
        self.m = model
        self.span = span
        self.window = window
        self.rotate = rotate
        self.prefill = prefill
        self.model = nn.Module()
        self.model.model = nn.Module()
        names = ["kv_cache_0"] * model.L
        if window:
            names = [CACHES[kind] for kind in model.kinds]
        self.caches = {}
        for name in dict.fromkeys(names):
            rows = window if name == "kv_cache_local" else model.S
            count = names.count(name)
            shape = (2 * count, model.kv, rows, model.D)
            self.model.model.register_buffer(name, torch.zeros(shape))
            layers = (i for i, own in enumerate(names) if own == name)
            for plane, i in enumerate(layers):
                self.caches[i] = name, plane, count

    def forward(self, x, positions, mask, start):
        T = x.shape[1]

        def cache(i, k, v):
            name, plane, count = self.caches[i]
            state = getattr(self.model.model, name)
            rows = []
            for new, index in ((k, plane), (v, plane + count)):
                before = state[index : index + 1]
                if name == "kv_cache_local" and self.rotate:
                    seen = torch.cat([before, new[None]], 2)
                    state[index : index + 1] = seen[:, :, T:]
                    if self.m.fault == "future":
                        seen = seen[:, :, T:]
                else:
                    state[index : index + 1, :, start : start + T] = new[None]
                    seen = state[index : index + 1]
                rows.append(seen[0])
            return rows

        for i in self.span:
            local = self.caches[i][0] == "kv_cache_local"
            own = mask[0]
            if local and self.rotate and self.m.fault != "future":
                rows = self.window + torch.arange(T)[:, None]
                distance = rows - torch.arange(self.window + T)
                inside = (distance >= 0) & (distance < self.window)
                own = torch.where(inside, 0.0, -1e4)[None]
            elif local:
                own = own[:, :, : self.window]
            kind = self.m.kinds[i]
            mlp = not (self.prefill and i == self.m.L - 1)
            x = self.m.layer(i, x, *self.m.rope(kind, positions), own, cache, mlp)
        # coremltools removes a state without a reader
        for state in self.model.model.buffers():
            x = x + state[0, 0, 0, 0] * 0.0
        if self.prefill or self.span[-1] < self.m.L - 1:
            return x
        return self.m.norm(x)


def chunks(
    folder: Path,
    checkpoint: Path,
    S: int = 32,
    fault: str = "",
    *,
    batch: int = 8,
    window: int = 0,
    heads: int = 2,
    lut: bool = False,
    sound: Path | None = None,
):
    """Embeddings, two chunks (one if layers slide) with functions infer and prefill
    (and rotating ones), a head of several slices; −inf masks, meta.yaml. Packages
    without the fault `future` are copied from the folder `sound`."""
    m = Model(checkpoint, S, fault)
    if sound:
        shutil.copytree(sound, folder)
    else:
        folder.mkdir(parents=True)
        _ends(folder, m, batch, heads)
    half = m.L // 2
    spans = {
        "FFN_PF_chunk_01of02": range(half),
        "FFN_PF_chunk_02of02": range(half, m.L),
    }
    modes = {"infer": (1, False, False), "prefill": (batch, True, False)}
    if window:
        spans = {"FFN_PF": range(m.L)}
        modes["infer_rotate"] = 1, False, True
        modes["prefill_rotate"] = batch, True, True
    for name, span in spans.items():
        functions = coremltools().utils.MultiFunctionDescriptor()
        for mode, (T, prefill, rotate) in modes.items():
            path = folder / f".{mode}-{name}.mlpackage"
            if not sound or mode == "prefill_rotate":
                shutil.rmtree(path, ignore_errors=True)
                chunk = Chunk(m, span, window, rotate, prefill)
                _function(chunk, T, lut).save(str(path))
            functions.add_function(str(path), "main", mode)
        functions.default_function_name = "infer"
        target = folder / f"tiny_{name}.mlpackage"
        shutil.rmtree(target, ignore_errors=True)
        with quiet(), no_progress(), lean():
            coremltools().utils.save_multifunction(functions, str(target))
    (folder / "meta.yaml").write_text(
        f"model_info:\n  name: anemll-tiny\n  parameters:\n    context_length: {S}\n"
        f"    batch_size: {batch}\n    num_chunks: {len(spans)}\n    split_lm_head: {heads}\n"
    )


def _function(chunk: Chunk, T: int, lut: bool):
    """One function of a chunk, for T tokens; with `lut` in palettes of groups."""
    m = chunk.m
    inputs = [
        plain("hidden_states", (1, T, m.C)),
        plain("position_ids", (T,), np.int32),
        plain("causal_mask", (1, 1, T, m.S)),
        plain("current_pos", (1,), np.int32),
    ]
    states = states_of(chunk.model.model, "model.model")
    package = convert(chunk, inputs, ["output_hidden_states"], states)
    if lut:
        package = palettized(package, **GROUPED)
    return package


def _ends(folder: Path, m: Model, batch: int, heads: int) -> None:
    """Embeddings of one token or a batch, and the head."""
    ids = coremltools().EnumeratedShapes([(1, 1), (1, batch)], default=(1, 1))
    embed = convert(
        Apply(m, lambda m, ids: m.embed(ids)),
        [("input_ids", ids, np.int32, (1, 1))],
        ["hidden_states"],
    )
    embed.save(str(folder / "tiny_embeddings.mlpackage"))
    slices = np.array_split(np.arange(m.head.shape[0]), heads)

    def head(m, x):
        return tuple(nn.functional.linear(x, m.head[s[0] : s[-1] + 1]) for s in slices)

    outputs = [f"logits{i + 1}" for i in range(heads)]
    package = convert(Apply(m, head), [plain("hidden_states", (1, 1, m.C))], outputs)
    package.save(str(folder / "tiny_lm_head.mlpackage"))


class Monolith(nn.Module):
    """One package, one token per call, one-hot write, argmax inside; sliding layers
    compute their own mask."""

    def __init__(self, model, window):
        super().__init__()
        self.m = model
        self.window = window
        shape = (2 * model.L, model.kv, model.S, model.D)
        self.register_buffer("kv_cache_0", torch.zeros(shape))

    def forward(self, ids, positions, mask, update):
        def cache(i, k, v):
            for index, new in ((i, k), (i + self.m.L, v)):
                before = self.kv_cache_0[index]
                self.kv_cache_0[index] = before * (1 - update[0]) + new * update[0]
            return self.kv_cache_0[i], self.kv_cache_0[i + self.m.L]

        x = self.m.embed(ids)
        away = positions[:, None] - torch.arange(self.m.S) >= self.window
        for i, kind in enumerate(self.m.kinds):
            own = mask[0]
            if kind == "sliding_attention" and self.m.fault != "one_mask":
                own = own + torch.where(away, -1e4, 0.0)[None]
            x = self.m.layer(i, x, *self.m.rope(kind, positions), own, cache)
        logits = nn.functional.linear(self.m.norm(x), self.m.head)[0]
        top = logits.argmax(-1)
        return top.to(torch.int32), logits.gather(-1, top[:, None])[:, 0]


def monolith(
    folder: Path, checkpoint: Path, S: int = 32, fault: str = "", int4: bool = False
):
    ct = coremltools()
    m = Model(checkpoint, S, fault)
    module = Monolith(m, getattr(m.config, "sliding_window", None) or S)
    package = convert(
        module,
        [
            plain("input_ids", (1, 1), np.int32),
            plain("position_ids", (1,), np.int32),
            plain("causal_mask", (1, 1, 1, S)),
            plain("update_mask", (1, 1, S, 1)),
        ],
        ["token_id", "token_logit"],
        states_of(module),
        target=ct.target.iOS26,
        compute_precision=ct.precision.FLOAT32,
    )
    if int4:
        package = palettized(package, **GROUPED)
    folder.mkdir(parents=True)
    package.save(str(folder / "model.mlpackage"))


class Body(nn.Module):
    """Chunk of the host style: rope of full width from the host, planes 2i and 2i +
    1; with `moves` all rows move up by one and the newest is at the right."""

    def __init__(self, model, moves=False):
        super().__init__()
        self.m = model
        self.moves = moves
        shape = (2 * model.L, model.kv, model.S, model.D)
        self.register_buffer("kv_cache_0", torch.zeros(shape))

    def forward(self, x, cos, sin, mask, start=None):
        def cache(i, k, v):
            planes = [2 * i, 2 * i + 1]
            for plane, new in zip(planes, (k, v), strict=True):
                if self.moves:
                    before = self.kv_cache_0[plane : plane + 1, :, 1:]
                    moved = torch.cat([before, new[None]], 2)
                    self.kv_cache_0[plane : plane + 1] = moved
                    continue
                self.kv_cache_0[plane : plane + 1, :, start : start + 1] = new[None]
            return [self.kv_cache_0[plane : plane + 1][0] for plane in planes]

        for i in range(self.m.L):
            x = self.m.layer(i, x, cos[0], sin[0], mask[0], cache)
        return x


def host(
    folder: Path,
    checkpoint: Path,
    S: int = 32,
    fault: str = "",
    lut: bool = False,
    moves: bool = False,
):
    """Chunks of one layer, a head that gives the next token, a file of embeddings."""
    m = Model(checkpoint, S, fault)
    folder.mkdir(parents=True)
    (folder / "embed_weight.bin").write_bytes(
        m.w_embed_tokens_weight.half().numpy().tobytes()
    )
    module = Body(m, moves)
    inputs = [
        plain("hidden_in", (1, 1, m.C)),
        plain("cos", (1, 1, m.D)),
        plain("sin", (1, 1, m.D)),
        plain("causal_mask", (1, 1, 1, S)),
    ]
    if not moves:
        inputs.append(plain("current_pos", (1,), np.int32))
    package = convert(module, inputs, ["hidden"], states_of(module))
    if lut:
        package = palettized(package, nbits=8)
    package.save(str(folder / "chunk_0.mlpackage"))

    def head(m, x):
        return nn.functional.linear(m.norm(x), m.head)[0].argmax(-1).to(torch.int32)

    package = convert(Apply(m, head), [plain("hidden_in", (1, 1, m.C))], ["next_token"])
    package.save(str(folder / "chunk_head.mlpackage"))
