"""Runs adopted packages through the interface that all gates use: `begin`, `advance`,
`kv`."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch

from workbench.adopt import fit, schema
from workbench.adopt.arrays import (
    DIMS,
    arrange,
    mask,
    named,
    row_positions,
    write_columns,
)
from workbench.adopt.folder import Adopted, largest_tile
from workbench.adopt.schema import Function, Input
from workbench.check import golden
from workbench.decode import checks
from workbench.errors import InputError
from workbench.models.family import head_dim
from workbench.runtime import named as named_runtime
from workbench.runtime import resolve
from workbench.runtime.package import load_package

EMBEDDING = "embedding"  # name of the embedding table among the packages' weights


@dataclass
class Result:
    """The outputs of a call of T tokens: `logits` [T, V], or the `top` token [T] and
    its logit `value` [T] if the package contains the argmax, or None."""

    logits: np.ndarray | None = None
    top: np.ndarray | None = None
    value: np.ndarray | None = None


class Adapter:
    """Runs adopted packages.

    Args:
        adopted: the opened folder; its checkpoint is needed if the host looks up
            embeddings or computes rope tables.
        runtime, precision, compute_units: as in `Decoder`.
    """

    def __init__(
        self,
        adopted: Adopted,
        runtime: str = "auto",
        precision: str = "declared",
        compute_units: str = "CPU_AND_NE",
    ):
        self.adopted, self.foreign = adopted, adopted.foreign
        self.checkpoint, self.stateful = adopted.checkpoint, adopted.stateful
        self.runtime, self.precision = resolve(runtime), precision
        self.portable = named_runtime(self.runtime)[0] == "portable"
        self.how = dict(
            runtime=self.runtime, precision=precision, compute_units=compute_units
        )
        self.models: dict[tuple[int, str | None], object] = {}
        self.context = self.foreign.context
        for index, part in enumerate(self.foreign.parts):
            for function in part.functions:
                self.model(index, function)
        self.layers = sorted({i for state in self.foreign.states for i in state.layers})

    def model(self, part: int, function: Function):
        """The loaded function of a part."""
        key = part, function.name
        if key not in self.models:
            package = self.adopted.package(self.foreign.parts[part])
            self.models[key] = load_package(package, function.name, **self.how)
        return self.models[key]

    def functions(self, T: int, start: int) -> list[Function] | None:
        """The function of every part with a state for T tokens at `start`; None if a
        part has none."""
        chosen = []
        for index in self.stateful:
            for f in self.foreign.parts[index].functions:
                stop = min(f.until or self.context, self.context)
                if f.t_min <= T <= f.t_max and f.first <= start <= stop - T:
                    chosen.append(f)
                    break
            else:
                return None
        return chosen

    @cached_property
    def tiles(self) -> list[int]:
        """The T of the gates' calls: 1 to 4, and the smallest and largest of every
        function, at most `LARGEST_TILE` if T varies."""
        ends, starts = {1, 2, 3, 4}, {0}
        for part in self.foreign.parts:
            starts.update(f.first for f in part.functions)
        for index in self.stateful:
            for f in self.foreign.parts[index].functions:
                ends |= {f.t_min, largest_tile(f)}
        return sorted(
            {T for T, start in product(ends, starts) if self.functions(T, start)}
        )

    def plan(self, count: int, T: int, start: int = 0, logits: str = "") -> list[int]:
        """Sizes of consecutive calls for `count` tokens from `start` on: T if a
        function takes it, else the largest smaller size. `logits` is the `last` or
        `every` call that must give logits.

        Raises:
            InputError: no function takes the remaining tokens.
        """
        sizes, stop = [], start + count
        while start < stop:
            for size in range(min(T, stop - start), 0, -1):
                chosen = self.functions(size, start)
                silent = logits == "every" or (logits and start + size == stop)
                if chosen and (chosen[-1].logits or not silent):
                    break
            else:
                most = min(T, stop - start)
                raise InputError(
                    schema.FILE,
                    f"no function for {most} or fewer tokens at position {start}",
                    f"calls up to position {stop}, of a context of {self.context}",
                    "shorten the prompt, or correct t_min, t_max, first and until",
                )
            sizes.append(size)
            start += size
        return sizes

    def begin(self) -> dict:
        """A fresh state: one for all parts that share it, and one for each other
        part."""
        state = {}
        for index in self.stateful:
            functions = self.foreign.parts[index].functions
            models = [self.model(index, function) for function in functions]
            most = max(models, key=lambda model: len(model.program.states))
            state.setdefault(self.owner(index), most.make_state())
        return state

    def owner(self, part: int) -> int | None:
        """The key of a part's state in `begin`: the part, or None for the shared
        state."""
        own = any(state.part == part for state in self.foreign.states)
        return part if own else None

    def advance(self, state: dict, ids: Sequence[int], start: int) -> Result:
        """Runs `ids` [T] at positions `start` and on, in one call of every part.

        Raises:
            InputError: no function takes so many tokens there.
        """
        by_kind, function = self.run_body(state, ids, start)
        if function.logits:
            return self.result(self.run_heads(by_kind, ids, start))
        return Result()

    def run_body(
        self, state: dict, ids, start: int
    ) -> tuple[dict[str, list], Function]:
        """Runs the parts up to the last one with a state; returns their outputs [T, …]
        by kind, and that part's function."""
        ids, T = np.asarray(ids, np.int64), len(ids)
        if self.adopted.vocabulary:
            checks.token_ids(ids, self.adopted.vocabulary)
        chosen = self.functions(T, start)
        if chosen is None:
            raise InputError(
                "call",
                f"{T} tokens at position {start}",
                "a number that a function takes there",
                f"see functions in {schema.FILE}",
            )
        functions, self.ms = dict(zip(self.stateful, chosen, strict=True)), []
        by_kind = {"hidden": [self.embed(ids) if self.host_embeds else None]}
        for index in range(self.stateful[-1] + 1):
            hidden = by_kind["hidden"][0]
            if index not in functions:
                outputs = self._in_columns(index, ids, hidden, start)
            else:
                begin, cpu = time.perf_counter(), time.thread_time()
                raw = state[self.owner(index)]
                outputs = self._call(index, functions[index], raw, ids, hidden, start)
                ms = 1e3 * (time.perf_counter() - begin)
                self.ms.append((ms, 1e3 * (time.thread_time() - cpu)))
            by_kind = _joined(by_kind, outputs)
        return by_kind, chosen[-1]

    def run_heads(
        self, by_kind: dict[str, list], ids: Sequence[int], start: int
    ) -> dict:
        """Runs the parts after the last one with a state."""
        ids = np.asarray(ids, np.int64)
        for index in range(self.stateful[-1] + 1, len(self.foreign.parts)):
            hidden = by_kind["hidden"][0]
            by_kind = _joined(by_kind, self._in_columns(index, ids, hidden, start))
        return by_kind

    @staticmethod
    def result(pieces: dict[str, list[np.ndarray]]) -> Result:
        """The slices of logits joined, or of the slices' top tokens the one with the
        largest logit."""
        if "logits" in pieces:
            return Result(logits=np.concatenate(pieces["logits"], axis=1))
        if "top" not in pieces:
            return Result()
        tops = np.concatenate(pieces["top"], axis=1).astype(np.int64)
        if "top_value" not in pieces:
            return Result(top=tops[:, 0])
        values = np.concatenate(pieces["top_value"], axis=1)
        best = np.arange(len(values)), values.argmax(1)
        return Result(top=tops[best], value=values[best])

    def _in_columns(
        self, index: int, ids, hidden, start: int
    ) -> dict[str, list[np.ndarray]]:
        """Runs a part without a state over all tokens, in as many calls as its
        functions need; a call with more columns than tokens remain is padded with
        copies of the last token."""
        functions = self.foreign.parts[index].functions
        smallest = min(functions, key=lambda f: f.t_min)
        calls, done = defaultdict(list), 0  # kind → its outputs of every call
        while done < len(ids):
            left = len(ids) - done
            fitting = [f for f in functions if f.t_min <= left]
            f = max(fitting, key=lambda f: f.t_max, default=smallest)
            size = max(f.t_min, min(f.t_max, left))
            columns = np.minimum(done + np.arange(size), len(ids) - 1)
            inner = None if hidden is None else hidden[columns]
            by_kind = self._call(index, f, None, ids[columns], inner, start + done)
            for kind, values in by_kind.items():
                calls[kind].append([value[:left] for value in values])
            done += size
        joined = {}
        for kind, outputs in calls.items():
            joined[kind] = list(map(np.concatenate, zip(*outputs, strict=True)))
        return joined

    def _call(
        self, index: int, function: Function, raw, ids, hidden, start: int
    ) -> dict:
        """The outputs of one call of a part by kind, each with the axis of tokens
        first."""
        part = self.foreign.parts[index]
        model = self.model(index, function)
        feeds = {}
        for name, kind in model.program.inputs.items():
            entry = part.inputs[name]
            sizes = fit.sizes(model.program, name)
            value = self.feed(entry, sizes, ids, hidden, start)
            integers = kind.dtype.startswith("INT")
            feeds[name] = value.astype(np.int32 if integers else np.float32)
        outputs, by_kind = model.predict(feeds, raw), {}
        for name, entry in part.outputs.items():
            silent = entry.kind != "hidden" and not function.logits
            if name not in outputs or entry.kind == "ignored" or silent:
                continue
            value = outputs[name]
            if entry.kind == "hidden":
                value = named(value, entry.axes, "TC")
            elif entry.kind == "logits":
                value = named(value, entry.axes, "TV")
            else:
                value = value.reshape(len(ids), -1)
                if entry.offsets:
                    value = value + np.array(entry.offsets)
            by_kind.setdefault(entry.kind, []).append(value)
        return by_kind

    def feed(
        self, entry: Input, sizes: list[Sequence[int]], ids, hidden, start: int
    ) -> np.ndarray:
        """The array of one input, in the package's axes, which have `sizes`."""
        T, kind = len(ids), entry.kind
        if kind == "constant":
            return np.full([size[0] for size in sizes], entry.value)
        if kind in ("cos", "sin"):
            value = self.rope(entry, start, T)[kind]
        elif kind in ("mask", "write"):
            axes = dict(zip(entry.axes, sizes, strict=True))
            columns = start + T if "E" in axes else axes["S"][0]
            make = {"mask": mask, "write": write_columns}[kind]
            value = make(entry, start, T, columns)
        else:
            value = {
                "ids": ids,
                "hidden": hidden,
                "positions": start + np.arange(T),
                "start": np.array(start),
                "end": np.array(start + T),
            }[kind]
        return arrange(value, DIMS[kind], entry.axes)

    def kv(self, state: dict, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of a layer, [H_kv, rows, D] each, in the order of the cache's
        rows."""
        rows = {}
        for entry in self.foreign.states:
            if layer in entry.layers:
                value = named(state[entry.part].read(entry.name), entry.axes, "LHSD")
                i = entry.layers.index(layer)
                if entry.order == "pairs":
                    planes = value[len(entry.holds) * i :]
                else:
                    planes = value[i :: len(entry.layers)]
                rows |= dict(zip(entry.holds, planes))
        return rows["k"].astype(np.float32), rows["v"].astype(np.float32)

    def positions(self, layer: int, count: int, end: int) -> np.ndarray:
        """The position in each of the `count` cache rows of a layer after `end` tokens,
        −1 in an empty row."""
        entry = next(s for s in self.foreign.states if layer in s.layers)
        return row_positions(entry.rows, count, end)

    def read(self, state: dict) -> dict[tuple, np.ndarray]:
        """A copy of every state tensor, by part and name."""
        values = {}
        for entry in self.foreign.states:
            value = state[entry.part].read(entry.name)
            values[entry.part, entry.name] = np.array(value)
        return values

    def write(self, state: dict, values: dict[tuple, np.ndarray]) -> None:
        """Writes values of `read` into a state."""
        for (part, name), value in values.items():
            state[part].write(name, value)

    @cached_property
    def reference(self):
        """Hugging Face's model without weights: its rope and the scale of its
        embeddings."""
        if self.checkpoint is None:
            needed = "the configuration that rope tables and embeddings come from"
            step = f"give --checkpoint, or write it in {schema.FILE}"
            raise InputError("checkpoint", "none", needed, step)
        return golden.empty_model(self.checkpoint.config).model

    @property
    def host_embeds(self) -> bool:
        """Whether the first part reads embeddings instead of token ids."""
        inputs = self.foreign.parts[0].inputs.values()
        return any(entry.kind == "hidden" for entry in inputs)

    @cached_property
    def table(self) -> np.ndarray:
        """The embedding table [V, C] of the host, without the scale of embeddings."""
        entry = self.foreign.embedding
        C = self.reference.config.hidden_size
        if entry.file is None:
            name = f"{self.checkpoint.prefix}embed_tokens.weight"
            return self.checkpoint.tensor(name).half().float().numpy()
        path = self.adopted.path(entry.file)
        if not path.is_file() or path.stat().st_size % (2 * C):
            raise InputError(
                f"embedding {path}",
                "no file of whole rows",
                f"float16 numbers [V, {C}]",
                f"correct embedding.file in {schema.FILE}",
            )
        return np.fromfile(path, np.float16).reshape(-1, C).astype(np.float32)

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """The embeddings [T, C] that the host looks up."""
        scale = self.foreign.embedding.scale
        if scale is None:
            scale = float(getattr(self.reference.embed_tokens, "embed_scale", 1.0))
        return self.table[ids] * np.float32(scale)

    def rope(self, entry: Input, start: int, T: int) -> dict[str, np.ndarray]:
        """`cos` and `sin` [T, D], or [T, D / 2], at positions `start` and on."""
        positions = torch.arange(start, start + T)[None]
        if entry.theta:
            D = head_dim(self.reference.config)
            angles = positions[:, :, None] * entry.theta ** (-torch.arange(0, D, 2) / D)
            angles = torch.cat([angles, angles], -1)
            cos, sin = angles.cos(), angles.sin()
        else:
            types = [entry.layer_type] if entry.layer_type else []
            cos, sin = self.reference.rotary_emb(torch.zeros(1), positions, *types)
        width = cos.shape[-1]
        if entry.width == "half":
            width //= 2
        return {"cos": cos[0, :, :width].numpy(), "sin": sin[0, :, :width].numpy()}


def _joined(before: dict[str, list], outputs: dict[str, list]) -> dict[str, list]:
    """Outputs by kind of parts that run one after the other; the hidden states are the
    newest."""
    joined = before | outputs
    for kind in before.keys() & outputs.keys():
        if kind != "hidden":
            joined[kind] = before[kind] + outputs[kind]
    return joined
