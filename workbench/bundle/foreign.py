"""The description of another exporter's packages in a manifest, and the arrays that
follow from it: axes by their letters, which row of a cache holds which position. A
leaf.

Letters of axes: T tokens of the call; S cache rows, or the columns of a mask, as many
as the package declares; E columns of a mask where there is one for every token in the
cache once the call is done; C channels of the residual stream; D width of a head or of
a rope table; H key/value heads; L planes of a packed state; V vocabulary. T may be
written 1 where calls have one token."""

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

Axis = Annotated[int, Field(ge=1)] | Literal["T", "S", "E", "C", "D", "H", "L", "V"]
Axes = tuple[Axis, ...]
Position = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Rows = Literal["absolute", "ring", "shift", "right"]
DIMS = {
    "ids": "T",
    "hidden": "TC",
    "positions": "T",
    "start": "",
    "end": "",
    "mask": "TS",
    "write": "ST",
    "cos": "TD",
    "sin": "TD",
    "logits": "TV",
}
"""The letters that an array of each kind has, in the host's order."""


class Described(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Tensor(Described):
    """An input or an output: its kind decides the letters of its axes."""

    kind: str
    axes: Axes = ()

    @model_validator(mode="after")
    def _has_its_letters(self):
        needed = set(DIMS.get(self.kind, ""))
        letters = [axis for axis in self.axes if isinstance(axis, str)]
        letters = ["S" if self.kind == "mask" and a == "E" else a for a in letters]
        whole = needed - {"T"} <= set(letters) <= needed
        if self.kind in DIMS and not (whole and len(letters) == len(set(letters))):
            raise ValueError(
                f"axes {list(self.axes)} of {self.kind} need each letter of "
                f"{', '.join(DIMS[self.kind]) or 'none'} once (T only where calls have "
                "several tokens)"
            )
        return self


class Input(Tensor):
    """One input of a package and the values that the host writes into it.

    Args:
        kind: `ids`: token ids. `hidden`: what the part before hands on; in the first
            part the bundle's embeddings. `positions`: the position of every token.
            `start`: that of the first one. `end`: tokens in the cache once the call is
            done. `mask`: added to attention scores. `write`: one-hot columns, the row
            that each token is written to. `cos`, `sin`: the bundle's rope table.
            `constant`: `value` everywhere.
        blocked: of a mask, what keeps a token from looking.
        window: of a mask, positions this many or more before the token are blocked too.
        rows: of a mask or a write, which row holds which position; see `row_positions`.
        rope: the suffix of the rope table, as in `Layer.rope`.
    """

    kind: Literal[
        "ids",
        "hidden",
        "positions",
        "start",
        "end",
        "mask",
        "write",
        "cos",
        "sin",
        "constant",
    ]
    blocked: float = -1e4
    window: Count | None = None
    rows: Rows = "absolute"
    rope: Literal["", "local", "global", "nope"] = ""
    value: float = 0.0


class Output(Tensor):
    """One output of a package.

    Args:
        kind: `hidden` goes into the next part. `logits` are of the whole vocabulary or
            of a slice of it; slices are joined in the order of parts and outputs.
            `top` is the token with the largest logit, `top_value` that logit.
        offsets: of `top`, the first token of each vocabulary slice, where ids count
            from there.
    """

    kind: Literal["hidden", "logits", "top", "top_value", "ignored"]
    offsets: tuple[Position, ...] = ()


class Function(Described):
    """One way to call a package: a function by its name (None: the default one), the
    numbers of tokens and the positions that it takes (a call ends at or before
    `until`). Where `logits` is false it only fills the cache."""

    name: str | None = None
    t_min: Count = 1
    t_max: Count = 1
    first: Position = 0
    until: Position | None = None
    logits: bool = True

    @model_validator(mode="after")
    def _ordered(self):
        if self.t_min > self.t_max:
            raise ValueError(f"t_min = {self.t_min} is above t_max = {self.t_max}")
        return self

    def takes(self, T: int, start: int) -> bool:
        """Whether a call may have T tokens from position `start` on."""
        end = start + T if self.until is None else self.until
        return self.t_min <= T <= self.t_max and self.first <= start <= end - T


class Part(Described):
    """One package in the folder of its shard; every input and output by its name in the
    package. Inputs that a function lacks are left out when it is called."""

    package: str
    functions: tuple[Function, ...] = (Function(),)
    inputs: dict[str, Input]
    outputs: dict[str, Output]


class PackedState(Described):
    """One state tensor of the packages.

    Args:
        part: the part that has it; None: all parts that declare the name share it.
        layers: the decoder layers whose rows it holds, in its order.
        holds: keys, values or both.
        order: of `kv`: `halves` has all keys before all values, `pairs` each layer's
            keys before its values.
        rows: which row holds which position; see `row_positions`.
    """

    name: str
    part: Position | None = None
    layers: Annotated[tuple[Position, ...], Field(min_length=1)]
    holds: Literal["kv", "k", "v"] = "kv"
    order: Literal["halves", "pairs"] = "halves"
    axes: Axes = ("L", "H", "S", "D")
    rows: Rows = "absolute"

    @property
    def planes(self) -> dict[str, int]:
        """Logical state → the plane that it is."""
        planes = {}
        for i, layer in enumerate(self.layers):
            for j, leaf in enumerate(self.holds):
                plane = i + j * len(self.layers)
                if self.order == "pairs":
                    plane = i * len(self.holds) + j
                planes[f"layers.{layer}.{leaf}_state"] = plane
        return planes


class Piece(Described):
    """Rows of a checkpoint's matrix that a constant holds: the rows from `source` on of
    the constant of a part's function, as [rows, columns], `transposed` first where it
    is stored so, are `count` rows of the matrix from `target` on."""

    part: Position
    function: str | None
    constant: str
    transposed: bool = False
    source: Position
    target: Position
    count: Count


class Foreign(Described):
    """Packages of another exporter that together are one shard, in the order they run
    in; what each state holds; the checkpoint's matrices that were found in them."""

    parts: Annotated[tuple[Part, ...], Field(min_length=1)]
    states: tuple[PackedState, ...] = ()
    weights: dict[str, tuple[Piece, ...]] = {}

    @property
    def gives_logits(self) -> bool:
        """Whether logits come out; otherwise the argmax is inside."""
        outputs = [entry.kind for part in self.parts for entry in part.outputs.values()]
        return "top" not in outputs


def arrange(value: np.ndarray, dims: str, axes: Sequence[Axis]) -> np.ndarray:
    """`value` with the axes `dims` in the axes that a package declares. `E` is equal to
    `S`, a dim of size 1 may have no letter, and sizes above 1 repeat the value."""
    letters = "".join(axis for axis in axes if isinstance(axis, str)).replace("E", "S")
    value = value.reshape([n for n, dim in zip(value.shape, dims) if dim in letters])
    dims = [dim for dim in dims if dim in letters]
    value = value.transpose([dims.index(letter) for letter in letters])
    shape = list(axes)
    for i, axis in enumerate(axes):
        if isinstance(axis, str):
            shape[i] = value.shape[i]
        else:
            value = np.expand_dims(value, i)
    return np.broadcast_to(value, shape)


def named(value: np.ndarray, axes: Sequence[Axis], dims: str) -> np.ndarray:
    """A view of a package's array with the axes `dims`; a missing one has size 1."""
    kept = [n for n, axis in zip(value.shape, axes) if isinstance(axis, str)]
    letters = [axis for axis in axes if isinstance(axis, str)]
    value = value.reshape(kept)
    for letter in dims:
        if letter not in letters:
            letters, value = [letter, *letters], value[None]
    return value.transpose([letters.index(letter) for letter in dims])


def row_positions(rule: Rows, count: int, end: int) -> np.ndarray:
    """The position in each of `count` rows [count] after `end` tokens, −1 in an empty
    one.

    Args:
        rule: `absolute`: row r holds position r. `ring`: position p is in row p modulo
            `count`. `shift`: rows fill from 0 on; once all are full, every call moves
            them up and writes at the end. `right`: every call moves them up and writes
            at the end, from the first token on.
    """
    rows = np.arange(count)
    if rule == "ring":
        return np.maximum(end - 1 - (end - 1 - rows) % count, -1)
    shifted = {"absolute": 0, "shift": max(0, end - count), "right": end - count}[rule]
    positions = rows + shifted
    return np.where((positions >= 0) & (positions < end), positions, -1)


def logical_rows(rule: Rows, count: int, end: int) -> np.ndarray:
    """The row of the bundle's state that each row of a package is, [count]: position p
    in row p modulo `count`, empty rows in the rows that are left, in order."""
    positions = row_positions(rule, count, end)
    rows = positions % count
    empty = positions < 0
    rows[empty] = np.setdiff1d(np.arange(count), rows[~empty])
    return rows


def visible(entry: Input, start: int, T: int, columns: int) -> np.ndarray:
    """The additive mask [T, columns] of a call of T tokens from position `start` on."""
    positions = row_positions(entry.rows, columns, start + T)
    distance = start + np.arange(T)[:, None] - positions
    seen = (positions >= 0) & (distance >= 0) & (distance < (entry.window or np.inf))
    return np.where(seen, 0.0, entry.blocked)


def written(entry: Input, start: int, T: int, rows: int) -> np.ndarray:
    """One-hot columns [rows, T]: the row that each token is written to."""
    return row_positions(entry.rows, rows, start + T)[:, None] == start + np.arange(T)
