"""Packages of another exporter as one shard: a model with the interface of the workbench's
own shards.

A call of the shard (`BundleCall`) becomes one or more calls of the packages
(`ForeignCall`), because their functions take other numbers of tokens. A call of the
packages runs each of them once, in the order of the parts. `foreign_call.py` translates
its arrays; `foreign_state.py` shows the packages' states as those of a bundle."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

import miltorch
from miltorch.constants import Constants
from workbench.bundle import Bundle, Shard
from workbench.bundle.foreign import (
    TOKEN_AXIS,
    Function,
    Part,
    plane_shapes,
    raise_contradiction,
)
from workbench.bundle.names import LOGITS, POS, X
from workbench.runtime.base import LOADING_STAGES, Hook, Model, OnCall, PackageModel
from workbench.runtime.foreign_call import ForeignCall
from workbench.runtime.foreign_state import ForeignState


@dataclass(frozen=True)
class LoadedPart:
    """One package of the shard: its description, and its models by the names of its
    functions (None: its default function)."""

    description: Part
    models: dict[str | None, PackageModel]


@dataclass(frozen=True)
class BundleCall:
    """A call of the shard, as a bundle's shards are called: the arguments of
    `Model.predict_observed`."""

    inputs: dict[str, np.ndarray]
    state: ForeignState
    hook: Hook | None
    on_call: OnCall | None

    @property
    def start(self) -> int:
        """The position of the first token."""
        return int(self.inputs[POS][0])

    @property
    def T(self) -> int:
        """Tokens of the call."""
        return self.inputs[X].shape[2]

    def inputs_of(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """The inputs of some tokens of the call, given by their indices."""
        return {
            name: np.take(self.inputs[name], tokens, axis=TOKEN_AXIS[name])
            for name in self.inputs.keys() & TOKEN_AXIS.keys()
        }


class ForeignModel(Model):
    """The packages of one shard, run part after part.

    Args:
        parts: in the order in which they run.
        skips_missing_logits: whether logits stay nan in columns for which a function
            gives none, such as a prefill that only fills the cache. Otherwise other
            functions compute them first. The last column always has its logits.

    Attributes:
        ring_rows: the rows of the smallest cache, where an input has the role
            `ring_start`, which is a row of this cache; None: no input has it.

    Raises:
        InputError: a description that the packages contradict.
    """

    def __init__(
        self,
        bundle: Bundle,
        shard: Shard,
        parts: Sequence[LoadedPart],
        skips_missing_logits: bool = False,
    ):
        self.shard = shard
        self.foreign = shard.foreign
        self.skips_missing_logits = skips_missing_logits
        self.V = bundle.manifest.dims.V
        self.parts = parts
        self.ring_rows: int | None = None
        if "ring_start" in shard.foreign.roles.values():
            self.ring_rows = min(entry.shape[-2] for entry in shard.states.values())
        self._check_names()
        self._check_slices()
        self.is_device = self.package_models[0].is_device

    @property
    def package_models(self) -> list[PackageModel]:
        return [model for part in self.parts for model in part.models.values()]

    @property
    def loading_ms(self) -> dict[str, float | None]:
        """The sums over the functions of all packages. They grow: Core ML loads a function
        when it is first called. A stage that a function did not have adds nothing, such as
        the compilation of a package that another function compiled."""
        sums = {}
        for stage in LOADING_STAGES:
            times = [model.loading_ms[stage] for model in self.package_models]
            measured = [ms for ms in times if ms is not None]
            sums[stage] = sum(measured) if measured else None
        return sums

    def _check_names(self) -> None:
        """Refuses a description that lacks an input, output or cache of the packages, or
        has one that no package has."""
        caches = self.shard.states.values()
        described = {f"{cache.tensor} {cache.shape}" for cache in caches}
        described |= self.foreign.roles.keys()
        packaged = set()
        for part in self.parts:
            for model in part.models.values():
                packaged |= {*model.program.inputs, *model.program.outputs}
                packaged |= self._packaged_caches(part.description.state, model)
        if different := packaged ^ described:
            actual = f"{sorted(different)} on one side only"
            raise_contradiction("names", actual, "those of the packages")

    def _packaged_caches(self, state: int | None, model: PackageModel) -> set[str]:
        """The names and shapes of a package's caches, as the description has them."""
        caches = self.shard.states.values()
        head_widths = {cache.tensor: cache.shape[-1] for cache in caches}
        names_and_shapes = set()
        for name, shape in plane_shapes(state, model.program.states).items():
            # the heads of a layer may be narrower than their plane
            width = min(shape[-1], head_widths.get(name, shape[-1]))
            names_and_shapes.add(f"{name} {[*shape[:-1], width]}")
        return names_and_shapes

    def _check_slices(self) -> None:
        """Refuses several slices of `top` tokens if their logits are not output too."""
        outputs = Counter()
        for part in self.parts:
            models = part.models.values()
            names = {name for model in models for name in model.program.outputs}
            outputs.update(self.foreign.roles[name] for name in names)
        if outputs["top"] > max(1, outputs["top_value"]):
            slices, values = outputs["top"], outputs["top_value"]
            actual = f"{slices} slices of top, {values} of top_value"
            raise_contradiction("roles", actual, "top_value of each slice")

    def make_state(self) -> ForeignState:
        models = {}
        for part in self.parts:
            number = part.description.state
            if number is not None:
                models.setdefault(number, next(iter(part.models.values())))
        return ForeignState(self.shard, models)

    def predict(
        self,
        inputs: dict[str, np.ndarray],
        state: ForeignState,
        hook: Hook | None = None,
    ) -> dict[str, np.ndarray]:
        """Runs a call of T tokens, in as many calls of the packages as their functions
        need: logits [1, V, T, 1], −inf for ids that an argmax inside did not pick."""
        return self._predict(BundleCall(inputs, state, hook, on_call=None))

    def predict_observed(
        self,
        inputs: dict[str, np.ndarray],
        state: ForeignState,
        hook: Hook | None,
        on_call: OnCall,
    ) -> dict[str, np.ndarray]:
        return self._predict(BundleCall(inputs, state, hook, on_call))

    def _predict(self, bundle_call: BundleCall) -> dict[str, np.ndarray]:
        """Calls the packages as an app would. Functions that only fill the cache give no
        logits: unless these are skipped, the packages first run from the same states
        through functions that give all of them."""
        self.last_native_ms = 0.0
        logits = np.full((1, self.V, bundle_call.T, 1), np.nan, np.float32)
        calls = list(self._package_calls(bundle_call, allow_without_logits=True))
        lacks_logits = not all(function.logits for function, _ in calls)
        if lacks_logits and not self.skips_missing_logits:
            with_logits = self._package_calls(bundle_call, allow_without_logits=False)
            with bundle_call.state.restored():
                self._run_calls(with_logits, bundle_call, logits)
        self._run_calls(calls, bundle_call, logits)
        return {LOGITS: logits}

    def _package_calls(
        self, bundle_call: BundleCall, allow_without_logits: bool
    ) -> Iterator[tuple[Function, np.ndarray]]:
        """The calls of the packages for a call of the shard: the function of each, and
        the indices of its tokens; see `Foreign.calls`."""
        return self.foreign.calls(
            bundle_call.start, bundle_call.T, allow_without_logits, self.ring_rows
        )

    def _run_calls(
        self,
        package_calls: Iterable[tuple[Function, np.ndarray]],
        bundle_call: BundleCall,
        logits: np.ndarray,
    ) -> None:
        """Runs calls of the packages, as `_package_calls` gives them.

        Args:
            logits: [1, V, T, 1]; the columns of functions that give logits are
                overwritten.
        """
        for function, tokens in package_calls:
            positions = bundle_call.start + tokens
            foreign_call = ForeignCall(
                self.foreign,
                positions,
                bundle_call.inputs_of(tokens),
                self.ring_rows,
                # a hook may search the operations for an inf: the masks must have none
                has_finite_masks=bundle_call.hook is not None,
            )
            bundle_call.state.arrange_rows(positions[0])
            with bundle_call.state.changing_order(positions[-1] + 1):
                self._call_parts(function, foreign_call, bundle_call)
            if function.logits:
                logits[0, :, tokens, 0] = foreign_call.logits(self.V).T

    def _call_parts(
        self, function: Function, foreign_call: ForeignCall, bundle_call: BundleCall
    ) -> None:
        """Calls every part once."""
        for part in self._parts_of(function):
            name = self.foreign.function_of(part.description, function)
            model = part.models[name]
            inputs = foreign_call.package_inputs(model.program)
            state = bundle_call.state.states.get(part.description.state)
            if bundle_call.on_call:
                bundle_call.on_call(model, inputs, state)
            foreign_call.add_results(model.predict(inputs, state, bundle_call.hook))
            self.last_native_ms = total_ms([self.last_native_ms, model.last_native_ms])

    def _parts_of(self, function: Function) -> Sequence[LoadedPart]:
        """The parts that a call of a function runs. Parts without a state at the end, such
        as a head, only compute logits: a call that gives none leaves them out."""
        parts = list(self.parts)
        while not function.logits and parts[-1].description.state is None:
            del parts[-1]
        return parts


def constants(bundle: Bundle, shard: Shard) -> Callable[[Sequence[str]], torch.Tensor]:
    """A function that reads a matrix of the checkpoint, decompressed, from the places of
    its pieces in the packages of a shard: `1/w` is the constant `w` in part 1."""

    @cache
    def constants_of(part: str) -> Constants:
        package = shard.foreign.parts[int(part)].package
        return Constants(miltorch.read(bundle.package(shard) / package))

    def matrix(pieces: Sequence[str]) -> torch.Tensor:
        """Joins the constants `part/name`, which hold the rows of the matrix in order."""
        places = [piece.split("/", 1) for piece in pieces]
        return torch.cat([constants_of(part)[name].squeeze() for part, name in places])

    return matrix


def total_ms(times: Sequence[float | None]) -> float | None:
    """The sum of times; None if one of them is unknown."""
    return None if None in times else sum(times)
