"""Translates one call of another exporter's packages: from the inputs of a bundle to those
of each package, and from the outputs of the packages to logits. The role of an input or
output says what it is, see `bundle.foreign.Role`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

import miltorch
from workbench.bundle.foreign import TOKEN_AXIS, Foreign, raise_contradiction
from workbench.bundle.names import MASKED, PER_LAYER, X


@dataclass
class ForeignCall:
    """One call of the packages for tokens at consecutive positions. The packages run one
    after another: `package_inputs` gives the arrays that each is fed, `add_results` takes
    what it returns.

    Args:
        foreign: the description of the packages.
        positions: [T] of the tokens.
        values: the bundle's inputs for these tokens, by name. An output `x` of a package
            replaces the `x` before it.
        ring_rows: see `ForeignModel`.
        has_finite_masks: whether masks have −1e4 where the packages would be fed −inf.

    Attributes:
        carried: the results so far of the role `carried`, by the names of the inputs of
            later packages.
        outputs: the other results so far by role, as [rows, T]: one array for every
            package or slice of the vocabulary.
    """

    foreign: Foreign
    positions: np.ndarray
    values: dict[str, np.ndarray]
    ring_rows: int | None
    has_finite_masks: bool
    carried: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: dict[str, list[np.ndarray]] = field(default_factory=dict)

    @property
    def T(self) -> int:
        """Tokens of the call."""
        return len(self.positions)

    def package_inputs(self, program: miltorch.Program) -> dict[str, np.ndarray]:
        """The arrays of a package's inputs, in their shapes and dtypes."""
        inputs = {}
        for name, type_ in program.inputs.items():
            value = _with_rank(self._value(name, type_.shape), len(type_.shape))
            is_integer = type_.dtype.startswith("INT")
            inputs[name] = value.astype(np.int32 if is_integer else np.float32)
        return inputs

    def _value(self, name: str, shape: Sequence[int | None]) -> np.ndarray:
        """The array for an input of this shape, perhaps with fewer or more axes of 1."""
        role = self.foreign.roles[name]
        match role:
            case "positions":
                return self.positions
            case "start":
                return self.positions[:1]
            case "ring_start":
                return self.positions[:1] % self.ring_rows
            case "carried" if name in self.carried:
                return self.carried[name]
            case "write":
                return self._write_mask(rows=shape[-2])
            case "mask":
                return self._attention_mask(shape[-1], MASKED)
            case "mask_inf":
                blocked = MASKED if self.has_finite_masks else -np.inf
                return self._attention_mask(shape[-1], blocked)
            case "zeros":
                return np.zeros([size or self.T for size in shape])
        if role in self.values:
            return _fit_to_input(role, shape, self.values[role], self.T)
        # a role of outputs alone, or `carried` before a package has output it
        roles = [*self.values, *TOKEN_AXIS, "start"]
        raise_contradiction(name, f"role {role!r}", f"one of {roles}")

    def _write_mask(self, rows: int | None) -> np.ndarray:
        """The write mask [rows, T], a bool: the row that holds the position of each
        token."""
        return self._row_positions(rows)[:, None] == self.positions

    def _attention_mask(self, rows: int | None, blocked: float) -> np.ndarray:
        """The attention mask [T, rows]: 0 for rows that a token attends to, `blocked` for
        those of later tokens and for empty ones."""
        is_later = self._row_positions(rows) > self.positions[:, None]
        return np.where(is_later, blocked, 0.0)

    def _row_positions(self, rows: int | None) -> np.ndarray:
        """The position [rows] in each row of a cache after the call. An empty row has the
        position after the last token, which no token of the call is at or attends to.
        Without `rows` the cache has one for every position so far."""
        end = self.positions[-1] + 1
        return self.foreign.positions(rows or end, end)

    def add_results(self, results: dict[str, np.ndarray]) -> None:
        """Adds the outputs of a package by their names."""
        for name, role in self.foreign.roles.items():
            if name not in results:
                continue
            if role == "carried":
                self.carried[name.removesuffix("_out")] = results[name]
                continue
            array = _as_rows_by_tokens(role, results[name], self.T)
            self.outputs.setdefault(role, []).append(array)
            if role == X:
                self.values[X] = array[None, :, :, None]

    def logits(self, V: int) -> np.ndarray:
        """Logits [V, T] from the outputs of all packages. If the packages contain the
        argmax, only the tokens that it picked have one; the others are −inf."""
        if "top" not in self.outputs:
            return np.concatenate(self.outputs["logits"])
        # [slices, T]: in each slice of the vocabulary, counted from its first token
        top = np.concatenate(self.outputs["top"]).astype(int)
        slices = np.array_split(np.arange(V), len(top))
        first_ids = np.array([ids[0] for ids in slices])
        top_ids = top + first_ids[:, None]
        # one slice needs no logit: its token is the only one
        top_logits = np.zeros(top.shape)
        if "top_value" in self.outputs:
            top_logits = np.concatenate(self.outputs["top_value"])
        logits = np.full((V, top.shape[1]), -np.inf, np.float32)
        np.put_along_axis(logits, top_ids, top_logits, axis=0)
        return logits


def _fit_to_input(
    role: str, shape: Sequence[int | None], value: np.ndarray, T: int
) -> np.ndarray:
    """A value of the bundle's interface as a package takes it, for a call of T tokens.

    Args:
        shape: of the package's input.
    """
    # a head may take more columns than the call has: the last one is repeated
    size = max(T, shape[TOKEN_AXIS[role]] or T)
    columns = np.minimum(np.arange(size), T - 1)
    value = np.take(value, columns, axis=TOKEN_AXIS[role])
    if role in (X, PER_LAYER) and len(shape) < 4:
        return value[..., 0].swapaxes(1, 2)
    if role.startswith("rope"):
        # the input may have the width of the head: the table's half of it twice
        return np.tile(value, shape[-1] // value.shape[-1])
    return value


def _with_rank(value: np.ndarray, rank: int) -> np.ndarray:
    """A value with axes of 1 added in front or dropped there until it has `rank` axes."""
    padded = (1,) * rank + value.shape
    return value.reshape(padded[-rank:])


def _as_rows_by_tokens(role: str, value: np.ndarray, T: int) -> np.ndarray:
    """A package's output as [rows, T]."""
    if role in ("top", "top_value") and value.size == T:
        return value.reshape(1, T)
    # only in rank 4 do channels come before tokens
    if value.ndim == 4:
        rows = value[0, :, :, 0]
    else:
        rows = value.reshape(-1, value.shape[-1]).T
    return rows[:, :T]
