"""A trace names the operation and module where values leave fp16, in time, and its headroom is that
of the true values."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import prompt

import miltorch
from miltorch.program import Op
from miltorch.steps import Constants
from workbench import Decoder
from workbench.check import gates
from workbench.explain import trace
from workbench.runtime import Model, Settings, load_package

IDS = prompt(97, 7)


@pytest.mark.parametrize("how", [{}, {"kv_write": "slice", "tokens": "1,4"}])
def test_every_shard_is_seen_and_every_layer_value_has_a_module(exports, how):
    bundle = exports.bundle("llama", **how)
    frame = trace.trace_bundle(bundle, IDS)["exact"].frame()
    assert set(frame["shard"]) == {s.name for s in bundle.manifest.shards}
    assert (
        frame.loc[frame["kind"] == "conv", "module"].str.contains("proj|lm_head").all()
    )


def plant(decoder, layer, kind, change):
    step = next(
        s for s in decoder.layers[layer].executable.body.steps if s.op.kind == kind
    )
    original = step.function
    step.function = lambda **arguments: change(original(**arguments))
    return step.op.name


@pytest.mark.parametrize("precision", ["declared", "narrow"])
def test_the_first_inf_is_named_with_its_module(llama_bundle, precision):
    decoder = Decoder(llama_bundle, "portable", precision)
    name = plant(decoder, 2, "silu", lambda y: y * 1e6)
    found = trace.trace_decoder(decoder, IDS).first
    where = {"shard": "layers_02_02", "module": "layers.2.mlp"}
    assert found["inf"] == where | {"op": name, "kind": "silu"}
    assert found["nan"] is not None


def test_a_nan_is_not_taken_for_an_inf(llama_bundle):
    decoder = Decoder(llama_bundle, "portable", "exact")
    plant(decoder, 1, "softmax", lambda y: y.masked_fill(y > 0.5, float("nan")))
    found = trace.trace_decoder(decoder, IDS).first
    assert found["nan"]["kind"] == "softmax" and found["inf"] is None


def result(*values):
    """The row of an operation that gave these values, call after call."""
    op = Op("add", "op", {}, [("v", None)])
    found = trace.Ranges()
    for x in values:
        found.add(SimpleNamespace(name="s", modules={}), op, [torch.as_tensor(x)])
    return found.frame().iloc[0]


def test_counts_of_a_range_are_exact():
    inf = float("inf")
    row = result([1.0, -3.0, 0.0, 1e-6], [inf, -inf, float("nan"), 2.0])
    assert (row["max_abs"], row["inf"], row["nan"]) == (3.0, 2, 1)
    assert row["headroom_bits"] == -inf
    assert 2.0 ** result([1.0, -3.0])["headroom_bits"] * 3 == pytest.approx(65504)


def test_a_package_is_traced_alone_with_the_same_random_inputs(llama_bundle):
    package = llama_bundle.root / "layers_00_00.mlpackage"
    traced = [trace.trace_package(package)["exact"].frame() for _ in range(2)]
    assert traced[0].equals(traced[1])


@pytest.mark.parametrize(
    "scale, verdict, kind", [(1.0, "GREEN", None), (6e4, "RED", "mul")]
)
def test_an_inf_that_a_mask_brings_in_is_no_fault_and_one_beside_it_is(
    llama_bundle, scale, verdict, kind
):
    package = llama_bundle.root / "layers_00_00.mlpackage"
    given = trace.random_inputs(miltorch.read(package))
    given["rope_cos"] *= scale
    given["attn_mask"][..., 1:] = -np.inf
    traced = trace.trace_package(package, given)
    assert gates.verdict(trace.finite_gates(traced)) == verdict
    found = trace.summary(traced)
    assert (found["first_inf"] or {}).get("kind") == kind
    assert found["first_nan"] is None or kind


class Pair(Model):
    """Two packages of layers as a shard of another exporter's."""

    def __init__(self, *layers):
        self.shard = layers[0].shard
        packages = [layer.package for layer in layers]
        settings = Settings("portable")
        self.models = [{None: load_package(each, settings)} for each in packages]

    def make_state(self):
        return [own.make_state() for own in trace.packages(self)]

    def predict(self, inputs, state, hook):
        for own, cells in zip(trace.packages(self), state):
            inputs = inputs | own.predict(inputs, cells, hook)
            inputs["x"] = inputs["hidden"]
        return inputs


@pytest.mark.parametrize("foreign", [False, True])
def test_an_inf_of_a_constant_is_no_fault_in_any_shard(
    llama_bundle, monkeypatch, foreign
):
    """Each package of another exporter's shard has rows of its own."""
    made = Constants._made

    def infinite(constants, op):
        values = made(constants, op)
        if "layernorm_eps0" in op.key:
            return {name: x * np.inf for name, x in values.items()}
        return values

    monkeypatch.setattr(Constants, "_made", infinite)
    decoder = Decoder(llama_bundle, "portable")
    first, second, *others = decoder.layers
    if foreign:
        decoder.layers = [Pair(first, second), *others]
    found = trace.trace_decoder(decoder, IDS)
    assert not any(found.first.values())
    frame = found.frame()
    assert frame["inf"].any()
    assert set(frame["shard"]) == {s.name for s in llama_bundle.manifest.shards}


def test_experts_that_load_late_are_traced_too(exports):
    bundle = exports.bundle("zaya", moe="routed")
    frame = trace.trace_bundle(bundle, [1, 2, 3, 4, 5, 6])["exact"].frame()
    assert frame["shard"].str.startswith("expert").any()
