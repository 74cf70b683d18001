"""The description of another exporter's packages in a manifest: what their inputs and
outputs are (`Role`), which calls run them (`Function`, `Foreign.calls`), where their caches
are (`PlaneName`), and how the rows of a cache are ordered (`RowOrder`). Of the workbench it
imports only the errors, `fields` and `rings`."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple, NoReturn

import numpy as np
from pydantic import Field

from workbench.bundle.fields import Count, ManifestModel, NonNegative, RelativePath
from workbench.bundle.rings import ring_positions
from workbench.errors import InputError

# role of an input → its axis with one entry for each token of a call
TOKEN_AXIS = {
    "ids": -1,  # token ids
    "x": -2,  # [1, C, T, 1] or [1, T, C]: embeddings, or the output of the part before
    "positions": -1,  # the position of every token
    "write": -1,  # [S, T], one-hot: the row that each token is written to
    # [T, S], added to attention scores: −1e4, or −inf, at rows that a token must not see
    "mask": -2,
    "mask_inf": -2,
    "rope_cos": -2,  # [T, D] or [T, D / 2], the bundle's rope table
    "rope_sin": -2,
    # the same of models that have a table for each of two kinds of layers
    "rope_cos_local": -2,
    "rope_sin_local": -2,
    "rope_cos_global": -2,
    "rope_sin_global": -2,
    "per_layer": -2,  # [1, L·P, T, 1] or [1, T, L·P]: second embeddings of all layers
}
Role = Literal[
    *TOKEN_AXIS, "start", "ring_start", "carried", "zeros", "logits", "top", "top_value"
]
"""What an input or output of a package is. Beside the inputs of `TOKEN_AXIS`:

- `start`: the position of the first token;
- `ring_start`: its row in the smallest cache, where position p is in row p modulo the
  rows;
- `zeros`: an input of no known role, which gets zeros;
- `carried`: an output that a later package reads under the same name, with or without
  `_out`;
- `logits`: an output, of the vocabulary or of a slice of it;
- `top`, `top_value`: outputs, of each slice the token with the largest logit, and that
  logit.

An output may also be `x`, the input of the next package."""

RowOrder = Literal["shift", "right"]
"""How a package orders the rows of a cache, where it is not a ring. A cache of 4 rows
holds these positions (·: none) once 2, 4 and 6 tokens are written:

    tokens    ring       shift      right
    2         0 1 · ·    0 1 · ·    · · 0 1
    4         0 1 2 3    0 1 2 3    0 1 2 3
    6         4 5 2 3    2 3 4 5    2 3 4 5

- a ring, the order of a bundle: position p is in row p modulo the number of rows;
- `shift`: rows fill from 0 on; once all are full, every call moves them up and writes at
  the end;
- `right`: every call moves the rows up, from the first token on, and writes at the end."""


class Function(ManifestModel):
    """One way to call the packages that have states.

    Args:
        name: the function of the packages (None: they have only one).
        t_min, t_max: the numbers of tokens that a call takes.
        first: the lowest start position of a call.
        until: the highest end position (None: any).
        logits: whether a call outputs logits, or only fills the cache.
    """

    name: str | None = None
    t_min: Count = 1
    t_max: Count = 1
    first: NonNegative = 0
    until: NonNegative | None = None
    logits: bool = True

    @property
    def label(self) -> str:
        """The function in words; some packages have one function without a name."""
        return f"function {self.name}" if self.name else "the packages' only function"

    def tokens_of_call(self, left: int, start: int, limit: int | None = None) -> int:
        """How many of the remaining `left` tokens one call from position `start` on can
        take, at most `limit`; 0 if it can take none."""
        # a function without logits leaves the last token for one that has them
        most = min(self.t_max, left if self.logits else left - 1)
        if limit is not None:
            most = min(most, limit)
        if self.until is not None:
            most = min(most, self.until - start)
        return most if start >= self.first and most >= self.t_min else 0


class Part(ManifestModel):
    """One package in the folder of its shard.

    Args:
        state: the number of its state, which several parts may share; None: it has
            none.
        functions: the names of the functions of a package without a state; empty, and left
            out of the file, where it has only one.
    """

    package: RelativePath
    state: NonNegative | None = None
    functions: tuple[str, ...] = Field((), exclude_if=lambda names: not names)


class PlaneName(NamedTuple):
    """The name of one cache in the packages, a plane [H_kv, rows, D] of a state's tensor
    [.., H_kv, rows, D]. Its text is `StateEntry.tensor` of the cache.

        >>> PlaneName.parse("0/kv_cache/3")
        PlaneName(state=0, tensor='kv_cache', index=3)

    Attributes:
        state: the number of the state, see `Part.state`.
        tensor: the tensor's name in the state.
        index: of the plane in the tensor, in the order of its values.
    """

    state: int | None
    tensor: str
    index: int

    def __str__(self) -> str:
        return f"{self.state}/{self.tensor}/{self.index}"

    @classmethod
    def parse(cls, text: str) -> "PlaneName":
        """The name whose text is `text`; the tensor's name may contain slashes."""
        state, _, rest = text.partition("/")
        tensor, _, index = rest.rpartition("/")
        return cls(int(state), tensor, int(index))


class Foreign(ManifestModel):
    """Packages of another exporter that together are one shard, in the order in which
    they run, and the ways to call them.

    `StateEntry.tensor` of the shard's caches is the text of a `PlaneName`. A plane may be
    wider than the heads of its layer, which are in its first channels.

    Args:
        roles: the role of every input and output of the packages by its name, slices of
            the vocabulary in their order.
        moves: number of rows → the order of the rows in caches that have so many, and in
            their masks and write addresses. Caches of a number that is missing are rings.
    """

    parts: Annotated[tuple[Part, ...], Field(min_length=1)]
    roles: dict[str, Role]
    functions: Annotated[tuple[Function, ...], Field(min_length=1)]
    moves: dict[Count, RowOrder] = {}

    def function_of(self, part: Part, function: Function) -> str | None:
        """The name of the function of a part's package that a call of `function` runs: that
        of `function`. None, the default function, for a package without a state that has no
        function of this name."""
        if part.state is None and function.name not in part.functions:
            return None
        return function.name

    def functions_of(self, part: Part) -> list[str | None]:
        """The names of the functions of a part's package that calls run."""
        names = [self.function_of(part, function) for function in self.functions]
        return list(dict.fromkeys(names))

    def calls(
        self,
        start: int,
        T: int,
        allow_without_logits: bool = True,
        ring_rows: int | None = None,
    ) -> Iterator[tuple[Function, np.ndarray]]:
        """The calls for `T` tokens from position `start` on.

        Args:
            allow_without_logits: whether functions that output no logits are used.
            ring_rows: the rows of caches that are written from `ring_start` on. No call
                goes on past the last of them: its rows follow one another.

        Yields:
            The function of a call, and the indices of its tokens among the T.
        """
        functions = self.functions
        if not allow_without_logits:
            functions = [function for function in functions if function.logits]
        done = 0
        while done < T:
            left = T - done
            position = start + done
            rows_to_the_end = None
            if ring_rows is not None:
                rows_to_the_end = ring_rows - position % ring_rows
            # the function that takes the most tokens; of several, the first
            counts = [
                function.tokens_of_call(left, position, rows_to_the_end)
                for function in functions
            ]
            count = max(counts)
            function = functions[counts.index(count)]
            if not count:
                needed = "t_min, t_max, first, until of a function that takes them"
                actual = f"{left} tokens at position {position}"
                raise_contradiction("call", actual, needed)
            yield function, done + np.arange(count)
            done += count

    def row_shift(self, rows: int, end: int) -> int:
        """How far the package's rows are from a ring's after `end` tokens: the package's
        row r holds what a ring has in row (r + shift) mod `rows`.

        In the table of `RowOrder`, with 4 rows and 6 tokens, it is 2 for `shift` and
        `right`: their row 0 holds position 2, which a ring has in row 2. With 2 tokens it
        is 0 for `shift` and −2 for `right`, whose row 2 holds position 0."""
        match self.moves.get(rows):
            case "shift":
                return max(0, end - rows)
            case "right":
                return end - rows
            case _:
                return 0

    def positions(self, rows: int, end: int) -> np.ndarray:
        """Which position each row [rows] of the package holds after `end` tokens. An
        empty row gives `end`, which no token of the call may attend to."""
        ring_rows = (np.arange(rows) + self.row_shift(rows, end)) % rows
        stored = ring_positions(end - 1, rows)[ring_rows]
        return np.where(stored < 0, end, stored)


def plane_shapes(state: int | None, tensors: dict) -> dict[str, list[int]]:
    """The text of the `PlaneName` → shape [1, H_kv, rows, D] of every cache in a state of
    a package.

    Args:
        state: the number of the state.
        tensors: its tensors [.., H_kv, rows, D] by name.
    """
    return {
        str(PlaneName(state, name, index)): [1, *tensor.shape[-3:]]
        for name, tensor in tensors.items()
        for index in range(math.prod(tensor.shape[:-3]))
    }


def raise_contradiction(place: str, actual: object, needed: object) -> NoReturn:
    """Raises an InputError for a description in a manifest that the packages contradict.

    Args:
        place: what of the description is wrong, such as `roles`.
        actual, needed: as of `InputError`.
    """
    raise InputError(
        f"foreign: {place}",
        str(actual),
        str(needed),
        "correct it in bundle.json, or adopt all packages with their own checkpoint",
    )
