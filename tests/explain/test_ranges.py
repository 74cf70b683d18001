"""`explain.ranges` names the operation and the module that produce the first inf and the first
NaN, counts both, and gives the headroom below the largest fp16 value."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import prompt

import miltorch
from miltorch.constants import Constants
from miltorch.program import Op, Ref
from workbench import Decoder
from workbench.check import gates
from workbench.explain import ranges
from workbench.explain.ranges import OperationPlace
from workbench.runtime import Model, Settings, load_package

IDS = prompt(97, 7)


@pytest.mark.parametrize("options", [{}, {"kv_write": "slice", "tokens": "1,4"}])
def test_every_shard_has_rows_and_every_projection_a_module(exports, options):
    bundle = exports.bundle("llama", **options)
    frame = ranges.measure_bundle(bundle, IDS)["exact"].frame()
    assert set(frame["shard"]) == {shard.name for shard in bundle.manifest.shards}
    modules = frame.loc[frame["kind"] == "conv", "module"]
    assert modules.str.contains("proj|lm_head").all()


def test_the_constant_of_a_mask_is_not_ranked(llama_bundle):
    """A mask's -10,000 would fill the first rows, and hide how near computed values come to
    fp16's limit. The frame still has the sums."""
    measured = ranges.measure_bundle(llama_bundle, IDS)
    summary = ranges.summarize(measured)
    frame = measured["exact"].frame()
    assert frame["max_abs"].max() > 9000 > summary["worst"][0]["max_abs"]
    assert frame["is_masked"].sum() == llama_bundle.manifest.dims.L
    assert summary["min_headroom_bits"] == summary["worst"][0]["headroom_bits"]


def test_a_sum_with_a_mask_that_overflows_is_ranked():
    measured = ranges.Ranges()
    shard = SimpleNamespace(name="s", modules={})
    operands = {"x": Ref("scores"), "y": Ref("attn_mask")}
    result = torch.tensor([float("inf"), 1.0])
    measured.add(shard, Op("add", "sum", operands, [("v", None)]), [result])
    summary = ranges.summarize({"exact": measured, "declared": measured})
    assert [row["op"] for row in summary["worst"]] == ["sum"]


def plant_fault(
    decoder: Decoder,
    layer: int,
    kind: str,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> str:
    """Applies `change` to the result of a layer's first operation of a kind; returns the
    operation's name."""
    steps = decoder.layer_shards[layer].executable.body.steps
    step = next(step for step in steps if step.op.kind == kind)
    original = step.function
    step.function = lambda **arguments: change(original(**arguments))
    return step.op.name


@pytest.mark.parametrize("precision", ["declared", "narrow"])
def test_the_first_inf_is_named_with_its_module(llama_bundle, precision):
    decoder = Decoder(llama_bundle, "portable", precision)
    name = plant_fault(decoder, 2, "silu", lambda y: y * 1e6)
    first = ranges.measure_decoder(decoder, IDS).first
    assert first["inf"] == OperationPlace("layers_02_02", name, "silu", "layers.2.mlp")
    assert first["nan"] is not None


def test_a_nan_is_not_taken_for_an_inf(llama_bundle):
    decoder = Decoder(llama_bundle, "portable", "exact")
    plant_fault(decoder, 1, "softmax", lambda y: y.masked_fill(y > 0.5, float("nan")))
    first = ranges.measure_decoder(decoder, IDS).first
    assert first["nan"].kind == "softmax" and first["inf"] is None


def range_of(*results: list[float]) -> pd.Series:
    """The row of an operation that has these results, one per call."""
    op = Op("add", "op", {}, [("v", None)])
    shard = SimpleNamespace(name="s", modules={})
    measured = ranges.Ranges()
    for result in results:
        measured.add(shard, op, [torch.as_tensor(result)])
    return measured.frame().iloc[0]


def test_a_range_counts_inf_and_nan_and_keeps_the_largest_finite_magnitude():
    inf = float("inf")
    row = range_of([1.0, -3.0, 0.0, 1e-6], [inf, -inf, float("nan"), 2.0])
    assert (row["max_abs"], row["inf"], row["nan"]) == (3.0, 2, 1)
    assert row["headroom_bits"] == -inf


def test_headroom_reaches_from_the_largest_magnitude_to_the_largest_fp16_value():
    row = range_of([1.0, -3.0])
    assert 3 * 2.0 ** row["headroom_bits"] == pytest.approx(65504)


def test_a_package_is_measured_with_the_same_random_inputs_every_time(llama_bundle):
    package = llama_bundle.root / "layers_00_00.mlpackage"
    frames = [ranges.measure_package(package)["exact"].frame() for _ in range(2)]
    assert frames[0].equals(frames[1])


@pytest.mark.parametrize(
    "rope_scale, verdict, kind_of_first_inf",
    [(1.0, "GREEN", None), (6e4, "RED", "mul")],
)
def test_an_inf_in_a_mask_is_no_fault_and_an_overflow_beside_it_is(
    llama_bundle, rope_scale, verdict, kind_of_first_inf
):
    package = llama_bundle.root / "layers_00_00.mlpackage"
    inputs = ranges.random_inputs(miltorch.read(package))
    inputs["rope_cos"] *= rope_scale
    inputs["attn_mask"][..., 1:] = -np.inf
    measured = ranges.measure_package(package, inputs)
    assert gates.verdict(ranges.finite_gates(measured)) == verdict
    summary = ranges.summarize(measured)
    if kind_of_first_inf is None:
        assert summary["first_inf"] is None
        assert summary["first_nan"] is None
    else:
        assert summary["first_inf"]["kind"] == kind_of_first_inf


class ShardOfTwoPackages(Model):
    """Two shards of layers, run one after the other as a single shard, like that of
    another exporter."""

    def __init__(self, first: Model, second: Model):
        self.shard = first.shard
        settings = Settings("portable")
        paths = first.path, second.path
        self.parts = [load_package(path, settings) for path in paths]

    @property
    def package_models(self):
        return self.parts

    def make_state(self):
        return [package.make_state() for package in self.package_models]

    def predict(self, inputs, state, hook):
        for package, cells in zip(self.package_models, state):
            inputs = inputs | package.predict(inputs, cells, hook)
            inputs["x"] = inputs["hidden"]
        return inputs


@pytest.mark.parametrize("foreign", [False, True])
def test_an_inf_of_a_constant_is_no_fault_in_any_shard(
    llama_bundle, monkeypatch, foreign
):
    """Two packages run as one shard where `foreign`, as in another exporter's bundle; each package
    has rows of its own."""
    evaluate = Constants._evaluate

    def evaluate_with_infinite_eps(constants, op):
        values = evaluate(constants, op)
        if "layernorm_eps0" in op.key:
            return {name: x * np.inf for name, x in values.items()}
        return values

    monkeypatch.setattr(Constants, "_evaluate", evaluate_with_infinite_eps)
    decoder = Decoder(llama_bundle, "portable")
    first, second, *others = decoder.layer_shards
    if foreign:
        decoder.layer_shards = [ShardOfTwoPackages(first, second), *others]
    measured = ranges.measure_decoder(decoder, IDS)
    assert not any(measured.first.values())
    frame = measured.frame()
    assert frame["inf"].any()
    shards = llama_bundle.manifest.shards
    assert set(frame["shard"]) == {shard.name for shard in shards}


def test_experts_that_load_late_are_measured_too(exports):
    bundle = exports.bundle("zaya", moe="routed")
    frame = ranges.measure_bundle(bundle, [1, 2, 3, 4, 5, 6])["exact"].frame()
    assert frame["shard"].str.startswith("expert").any()


def test_a_bar_counts_the_calls_of_every_precision(llama_bundle, monkeypatch):
    options, updates = {}, []

    def counted(**given):
        options.update(given)
        return nullcontext(SimpleNamespace(update=lambda: updates.append(1)))

    monkeypatch.setattr(ranges, "bar", counted)
    ranges.measure_bundle(llama_bundle, IDS)  # seven tokens, four of them in a call
    assert options == {"desc": "ranges", "total": 6, "unit": "call"}
    assert len(updates) == 6
