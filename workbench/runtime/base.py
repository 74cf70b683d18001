"""The whole interface between a shard and whatever runs it, and the checks every runtime shares.

NumPy arrays at the boundary, float32 in and out; states under their logical names (`layers.3.k_state`).
"""

from typing import Protocol

import numpy as np

from workbench.bundle import Shard
from workbench.errors import InputError


class RawState(Protocol):
    """A runtime's own state object: whole tensors under Core ML's names."""

    def read(self, tensor: str) -> np.ndarray: ...
    def write(self, tensor: str, value: np.ndarray) -> None: ...


class Model(Protocol):
    """One loaded shard."""

    shard: Shard
    loading_ms: dict[
        str, float | None
    ]  # compile, load, first_predict; None where it did not happen or is not known

    def make_state(self) -> "State":
        """Fresh state, zeros; it belongs to this model alone."""
        ...

    def predict(
        self, inputs: dict[str, np.ndarray], state: "State | None" = None
    ) -> dict[str, np.ndarray]:
        """Runs once; advances `state`."""
        ...


class State:
    """Logical states of one shard for one batch of sequences, over a runtime's raw state.

    `read(name)` copies a state out; `write(name, value)` replaces it (shape and dtype as `read` gives them).
    """

    def __init__(self, shard: Shard, raw: RawState):
        self.shard, self.raw = shard, raw

    def _entry(self, name: str):
        if name not in self.shard.states:
            raise InputError(
                f"state {name!r}",
                f"no such state in shard {self.shard.name}",
                f"one of {', '.join(self.shard.states)}",
                "name one of these",
            )
        return self.shard.states[name]

    def read(self, name: str) -> np.ndarray:
        entry = self._entry(name)
        return np.array(self.raw.read(entry.tensor)[entry.index]).reshape(entry.shape)

    def write(self, name: str, value: np.ndarray) -> None:
        entry = self._entry(name)
        if tuple(value.shape) != tuple(entry.shape):
            raise InputError(
                f"state {name!r}",
                f"shape {list(value.shape)}",
                f"{entry.shape}",
                "reshape the array",
            )
        if entry.part is not None:
            whole = np.array(self.raw.read(entry.tensor))
            whole[entry.index] = value.reshape(whole[entry.index].shape)
            value = whole
        self.raw.write(entry.tensor, value)


def check_inputs(shard: Shard, inputs: dict[str, np.ndarray], t_max: int) -> None:
    """Refuses missing or unknown inputs, wrong shapes, and axes T that disagree or pass t_max.

    Core ML checks each input alone: it lets different T through to undefined results.
    """
    if inputs.keys() != shard.inputs.keys():
        raise InputError(
            f"inputs of shard {shard.name}",
            ", ".join(sorted(inputs)),
            ", ".join(sorted(shard.inputs)),
            "give exactly these",
        )
    T = None
    for name, shape in shard.inputs.items():
        subject, actual = f"input {name!r} of shard {shard.name}", inputs[name].shape
        if len(actual) != len(shape) or any(n not in ("T", m) for n, m in zip(shape, actual)):
            raise InputError(subject, f"shape {list(actual)}", f"{shape}", "reshape it")
        for m in (m for n, m in zip(shape, actual) if n == "T"):
            T = T or m
            if m != T or m > t_max or not m:
                raise InputError(
                    subject, f"T = {m}", f"one T for all inputs, 1 to {t_max}", "split the call"
                )
