"""The description of another exporter's packages in a manifest, and the arrays that
follow from it. A leaf.

`INPUTS`, `OUTPUTS` and `STATES` have one row for each convention: what is recognised in the
names of packages, what a manifest may say, and what the host computes.

Axes are one string with a letter for each: T tokens of the call; S cache rows, or the
columns of a mask (where their number varies, one for every token in the cache once the
call is done); C channels of the residual stream; D width of a head or of a rope
table; H key/value heads; L planes of a packed state; V vocabulary. An axis of size 1 is
written 1: `11TS` is a mask [1, 1, T, S]."""

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from workbench.errors import InputError

Axes = Annotated[str, Field(pattern="^[1TSCDHLV]*$")]
Position = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class Role(NamedTuple):
    """What an input, an output or a state of a package holds.

    Args:
        axes: the letters of its array, in the host's order.
        names: a pattern of the names that exporters give it, in lower case.
        value: the array of an input, called as value(entry, at, away): the positions
            `at` [T] of the call's tokens, and how far before each of them the position
            in each row is, `away` [T, S], below 0 where the row is empty. None: it is
            the bundle's input `entry.source`.
    """

    axes: str
    names: str
    value: Callable | None = None


def seen(entry: "Tensor", at: np.ndarray, away: np.ndarray) -> np.ndarray:
    """An additive mask [T, S]."""
    inside = (away >= 0) & (away < (entry.window or np.inf))
    return np.where(inside, 0.0, entry.blocked)


INPUTS = {
    # one-hot, the row that each token is written to
    "write": Role("ST", "write|update", lambda entry, at, away: away.T == 0),
    # added to attention scores
    "mask": Role("TS", "mask", seen),
    # the bundle's rope table
    "rope_cos": Role("11TD", "cos"),
    "rope_sin": Role("11TD", "sin"),
    # the position of the first token; of every token
    "start": Role(
        "1", "current_?pos|start|^pos$|offset", lambda entry, at, away: at[:1]
    ),
    "positions": Role("T", "position", lambda entry, at, away: at),
    # token ids
    "ids": Role("1T", "ids?$|tokens?$"),
    # what the part before hands on; in the first part the bundle's embeddings
    "x": Role("1CT1", "hidden|embed|^x$"),
    "zeros": Role("", ""),
}
OUTPUTS = {
    # the largest logit; the token that has it
    "top_value": Role("1VT1", "val|token_logit|max_logit"),
    "top": Role("1VT1", "idx|token|argmax"),
    # of the whole vocabulary or of a slice; slices are joined in the order of outputs
    "logits": Role("1VT1", "logit"),
    # what the next part reads
    "x": Role("1CT1", ""),
}
STATES = {"cache": Role("LHSD", "")}
"""The first row whose pattern is in a name decides."""


class Described(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Tensor(Described):
    """One input, output or state of a package.

    Args:
        blocked: of a mask, what keeps a token from looking.
        window: of a mask, positions this many or more before the token are blocked too.
        rope: the suffix of the rope table, as in `Layer.rope`.
        offsets: of `top`, the first token of each vocabulary slice, where ids count
            from there.
    """

    role: Literal[*INPUTS, *OUTPUTS, *STATES]
    axes: Axes = ""
    blocked: float = -1e4
    window: Count | None = None
    rope: Literal["", "local", "global", "nope"] = ""
    offsets: tuple[Position, ...] = (0,)

    @property
    def source(self) -> str:
        """The bundle's input with its values, if there is one."""
        return f"{self.role}_{self.rope}" if self.rope else self.role


class Function(Described):
    """One way to call the packages: their function of this name, in those without it
    their first; the numbers of tokens and the positions that it takes (a call ends at
    or before `until`). Where `logits` is false it only fills the cache."""

    name: str | None = None
    t_min: Count = 1
    t_max: Count = 1
    first: Position = 0
    until: Position | None = None
    logits: bool = True

    def size(self, left: int, start: int) -> int:
        """The most of `left` tokens that one call from position `start` on takes; 0: it
        takes none. The last token needs logits."""
        room = left if self.until is None else self.until - start
        most = min(self.t_max, left - (not self.logits), room)
        return most if start >= self.first and most >= self.t_min else 0


class Part(Described):
    """One package in the folder of its shard, the names of its functions (None: the
    only one) and the number of its state, which parts may share (None: it has none)."""

    package: str
    functions: tuple[str | None, ...] = (None,)
    state: Position | None = None


class Piece(Described):
    """Rows of a checkpoint's matrix that a constant holds: `count` rows from `source`
    on of the constant of a part's function, as [rows, columns], `transposed` first
    where it is stored so. A matrix is the rows of its pieces, one after another."""

    part: Position
    function: str | None
    constant: str
    transposed: bool = False
    source: Position
    count: Count


class Foreign(Described):
    """Packages of another exporter that together are one shard, in the order they run
    in, and the ways to call them. `StateEntry.tensor` of its caches is a plane of a
    packed state: `0/kv_cache/3` is plane 3 of `kv_cache` in state number 0.

    Args:
        tensors: every input, output and state of the packages by its name, slices of
            logits in their order.
        moves: how rows move in caches, masks and write addresses of so many rows.
            `shift`: rows fill from 0 on; once all are full, every call moves them up
            and writes at the end. `right`: it does from the first token on. Otherwise
            position p is in row p modulo their number.
    """

    parts: Annotated[tuple[Part, ...], Field(min_length=1)]
    tensors: dict[str, Tensor]
    functions: Annotated[tuple[Function, ...], Field(min_length=1)]
    moves: dict[Count, Literal["shift", "right"]] = {}

    @property
    def gives_logits(self) -> bool:
        """Whether logits come out; otherwise the argmax is inside."""
        return all(tensor.role != "top" for tensor in self.tensors.values())

    def moved(self, rows: int, end: int) -> int:
        """What the row of a bundle's cache of `rows` rows is above the package's,
        modulo `rows`, after `end` tokens."""
        up = {"shift": max(0, end - rows), "right": end - rows}
        return up.get(self.moves.get(rows), 0)

    def positions(self, rows: int, end: int) -> np.ndarray:
        """The position in each row [rows] after `end` tokens, `end` in an empty one."""
        places = np.arange(rows) + self.moved(rows, end)
        held = places + (end - 1 - places) // rows * rows
        return np.where(held < 0, end, held)


def arrange(name: str, value: np.ndarray, axes: str, target: str) -> np.ndarray:
    """A view of the array `name` with the axes `axes` as one with the axes `target`; a
    letter that one of them lacks is an axis of size 1.

    Raises:
        InputError: axes that are not the array's.
    """
    kept = [letter for letter in axes if letter in target and letter != "1"]
    try:
        sizes = dict(zip(axes, value.shape, strict=True))
        view = value.reshape([sizes[letter] for letter in kept])
        view = view.transpose([kept.index(a) for a in target if a in kept])
    except ValueError:
        found = f"axes {axes!r} as {target!r}, of sizes {list(value.shape)}"
        refuse(name, found, "a letter or 1 for each axis, once")
    return np.expand_dims(view, [i for i, a in enumerate(target) if a not in kept])


def refuse(where: str, found: object, needed: object) -> None:
    raise InputError(
        f"foreign: {where}",
        str(found),
        str(needed),
        "correct it in bundle.json, or adopt all packages with their own checkpoint",
    )
