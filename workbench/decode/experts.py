"""Routed experts: the host picks one expert per token and runs each picked expert once
per call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from workbench.bundle import Bundle, Shard
from workbench.bundle.names import (
    ACC,
    BASE,
    EXPERT_IN,
    EXPERT_WEIGHT,
    HIDDEN,
    ROUTER_PROBS,
    ROUTER_SCORES,
)
from workbench.decode.hooks import ShardHook, model_hook
from workbench.runtime import Model
from workbench.runtime.base import OnCall

NO_EXPERT = -1  # the choice of a column without a token


class RoutedExperts:
    """The expert shards of a bundle, each loaded when it is first picked.

    Args:
        bundle: an opened bundle.
        load: loads one shard.
        to_layout: puts [B, C, T] into the bundle's layout.

    Attributes:
        takes_all_columns: whether expert shards take every column of a call, because
            they take fixed numbers of columns alone.
        shards: by (layer, expert).
        models: those that are loaded, likewise.
        native_ms: Core ML's times of the predictions of the last run.
    """

    def __init__(
        self,
        bundle: Bundle,
        load: Callable[[Shard], Model],
        to_layout: Callable[[np.ndarray], np.ndarray],
    ):
        self.load = load
        self.to_layout = to_layout
        self.takes_all_columns = bool(bundle.manifest.options.fixed_sizes)
        self.shards = {
            (shard.layers[0], shard.expert): shard for shard in bundle.shards("expert")
        }
        self.models: dict[tuple[int, int], Model] = {}
        self.native_ms: list[float | None] = []

    def run(
        self,
        layer: int,
        routed: dict[str, np.ndarray],
        counts: np.ndarray,
        hook: ShardHook | None = None,
        on_call: OnCall | None = None,
    ) -> np.ndarray:
        """Finishes a layer from the outputs of its router shard.

        The expert with the best score runs, weighted by its probability; the class
        after the last expert runs none. Columns are grouped by expert; a model of fixed
        T takes all columns, those of other experts with weight zero.

        Args:
            routed: the router shard's outputs by name; see `bundle.names` for shapes.
            counts: [B] valid columns.
            hook: see `ShardHook`.
            on_call: called before every call of an expert's package.

        Returns:
            The hidden states in the bundle's layout.
        """
        # [B, channels, T]: without the axis of 1, which is the last or the one before
        flat = {
            name: value.reshape(*value.shape[:2], -1) for name, value in routed.items()
        }
        hidden = flat[BASE].copy()
        self.native_ms = []
        scores = flat[ROUTER_SCORES]
        skip_class = scores.shape[1] - 1
        choice = scores.argmax(1)  # [B, T]
        # [B, 1, T]
        weights = np.take_along_axis(flat[ROUTER_PROBS], choice[:, None], 1)
        # dummies pick no expert, so that none is loaded for garbage
        choice[np.arange(hidden.shape[2]) >= counts[:, None]] = NO_EXPERT
        for expert in np.unique(choice):
            if expert in (NO_EXPERT, skip_class):
                continue
            is_chosen = choice == expert  # [B, T]
            columns = is_chosen.any(0)
            if self.takes_all_columns:
                columns = np.ones_like(columns)
            all_columns = {
                EXPERT_IN: flat[EXPERT_IN],
                EXPERT_WEIGHT: weights * is_chosen[:, None],
                ACC: hidden,
            }
            inputs = {
                name: self.to_layout(value[:, :, columns])
                for name, value in all_columns.items()
            }
            model = self.model(layer, expert)
            outputs = self._predict(model, inputs, hook, on_call)
            self.native_ms.append(model.last_native_ms)
            hidden[:, :, columns] = outputs[HIDDEN].reshape(*hidden.shape[:2], -1)
        return self.to_layout(hidden)

    def _predict(
        self,
        model: Model,
        inputs: dict[str, np.ndarray],
        hook: ShardHook | None,
        on_call: OnCall | None,
    ) -> dict[str, np.ndarray]:
        expert_hook = model_hook(hook, model.shard)
        if on_call:
            return model.predict_observed(inputs, None, expert_hook, on_call)
        return model.predict(inputs, None, expert_hook)

    @contextmanager
    def taking_all_columns(self) -> Iterator[None]:
        """Context manager in which expert shards take every column, as with
        `takes_all_columns`."""
        before = self.takes_all_columns
        self.takes_all_columns = True
        try:
            yield
        finally:
            self.takes_all_columns = before

    def model(self, layer: int, expert: int) -> Model:
        """The model of an expert, loaded when it is first needed."""
        if (layer, expert) not in self.models:
            self.models[layer, expert] = self.load(self.shards[layer, expert])
        return self.models[layer, expert]
