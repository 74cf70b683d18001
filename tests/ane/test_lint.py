"""Every rule fires on a program made to break it, names what breaks it, and is silent on a program
that breaks none."""

import numpy as np
import pytest
from mil.one_op import program

from miltorch import Type
from miltorch.program import Op, Ref
from workbench.ane import placement, rules

WEIGHT = np.ones((64, 64, 1, 1), np.float16)


def half(*shape) -> Type:
    return Type("FLOAT16", shape)


X = half(1, 64, 1, 32)


def op(kind: str, out: Type | None = X, name: str | None = None, **inputs) -> Op:
    """An operation; strings among its inputs are names of values."""
    bound = {k: Ref(v) if isinstance(v, str) else v for k, v in inputs.items()}
    return Op(kind, name or kind, bound, [(f"{name or kind}_out", out)] if out else [])


CONV = op("conv", x="x", weight=WEIGHT)


def graph(
    *ops: Op,
    inputs=None,
    states=None,
    outputs=("conv_out",),
    weights=5_000_000,
    **about,
) -> rules.LintGraph:
    made = program([CONV, *ops], {"x": X} | (inputs or {}), list(outputs), states)
    return rules.LintGraph(made, weights, **about)


def state(*shape, dtype="FLOAT16") -> dict[str, Type]:
    return {"k_state": Type(dtype, shape, "state")}


def written(source: str) -> Op:
    return op("write_state", None, data=source, input="k_state")


INT8 = {
    "data": np.arange(-64, 64, dtype=np.int8).reshape(2, 64),
    "scale": np.ones((2, 1), np.float16),
}
INT4 = {"data": np.full((64, 64), 7, np.int8), "scale": np.ones((64, 2), np.float16)}
W = half(64, 64)
KV = half(1, 2, 64, 32)


def compressed(weight: dict, **about) -> rules.LintGraph:
    """A program with a product by a weight of 8 or 4 bits."""
    kind = "constexpr_blockwise_shift_scale"
    return graph(op(kind, W, **weight), op("matmul", x="x", y=f"{kind}_out"), **about)


def palette(*shape) -> rules.LintGraph:
    """A program with a weight in a palette of this shape."""
    lut, indices = np.zeros(shape, np.float16), np.zeros((64, 64), np.uint8)
    return graph(op("constexpr_lut_to_dense", W, lut=lut, indices=indices))


# rule → (a program that breaks it, what must be named)
BROKEN = {
    "T1": (graph(op("add", Type("FLOAT32", (1, 64, 1, 32)), x="x", y="x")), "add"),
    "T3": (
        graph(op("cast", Type("INT32", (1, 64, 1, 32)), x="x", dtype="int32")),
        "cast",
    ),
    "T4": (
        graph(
            op("reshape", half(1, 2, 2, 2, 8, 32), x="x", shape=np.ones(6, np.int32))
        ),
        "reshape",
    ),
    "S1": (graph(inputs={"narrow": half(1, 64, 1, 4)}), "narrow"),
    "S2": (
        graph(
            op("linear", half(1, 4, 64), x="rows", weight=W, bias=None),
            inputs={"rows": half(1, 4, 64)},
        ),
        "linear",
    ),
    "S4": (
        graph(
            op("add", half(1, 70000, 1, 32), x="big", y="big"),
            inputs={"big": half(1, 70000, 1, 32)},
        ),
        "add",
    ),
    "S10": (
        graph(op("transpose", half(1, 64, 32, 1), x="x", perm=np.array([0, 1, 3, 2]))),
        "transpose",
    ),
    "S12": (
        graph(
            op("add", half(1, 8, 1024, 128), x="k", y="k"),
            inputs={"k": half(1, 8, 1024, 128)},
        ),
        "add",
    ),
    "D1": (graph(inputs={"t": half(1, 64, 1, None)}), "t"),
    "D3": (graph(inputs={"t": half(1, 64, 1, None)}), "t"),
    "D5": (graph(op("while_loop", x="x")), "while_loop"),
    "D7": (graph(inputs={"x": half(1, 64, 1, None)}, states=state(1, 2, 64, 32)), "x"),
    "D8": (
        graph(
            inputs={"t": half(1, 64, None, 1), "pos": Type("INT32", (1,))},
            states=state(1, 2, 64, 32),
        ),
        "pos",
    ),
    "K2": (graph(states=state(1, 2, 64, 48)), "k_state"),
    "K3": (
        graph(
            states={
                n: Type("FLOAT16", (1, 2, 64, 32), "state") for n in ("a", "b", "c")
            }
        ),
        "a",
    ),
    "K4": (
        graph(
            inputs={"x": half(1, 64, 4, 32)}, states=state(1, 2, 64, 32), functions=2
        ),
        "k_state",
    ),
    "K9": (graph(op("scatter_nd", data="x", indices="x", updates="x")), "scatter_nd"),
    "K10": (
        graph(
            op(
                "constexpr_lut_to_dense",
                W,
                lut=np.zeros((1, 1, 16, 1), np.float16),
                indices=np.zeros((64, 64), np.uint8),
            ),
            states=state(1, 2, 64, 32),
        ),
        "constexpr_lut_to_dense",
    ),
    "K12": (graph(states=state(1, 2, 2048, 32)), "k_state"),
    "K13": (graph(states=state(1, 2, 64, 32)), "k_state"),
    "K14": (
        graph(
            op("read_state", KV, input="k_state"),
            op("mul", KV, x="read_state_out", y="x"),
            op("matmul", KV, x="x", y="x"),
            op("add", KV, x="mul_out", y="matmul_out"),
            written("add_out"),
            states=state(1, 2, 64, 32),
        ),
        "write_state",
    ),
    "K15": (graph(states=state(1, 2, 64, 32)), "k_state"),
    "O1": (graph(op("cumsum", x="x")), "cumsum"),
    "O2": (graph(op("gather_nd", x="x", indices="x")), "gather_nd"),
    "O3": (graph(op("cos", x="x"), generation=2), "cos"),
    "O4": (graph(op("linear", x="x", weight=W, bias=None)), "linear"),
    "O8": (
        graph(op("scaled_dot_product_attention", query="x", key="x", value="x")),
        "scaled_dot_product_attention",
    ),
    "O15": (graph(op("softmax", x="x", axis=np.array(-1))), "softmax"),
    "G1": (graph(weights=100_000), "conv"),
    "G2": (graph(weights=3_000_000_000), "conv"),
    "G3": (
        graph(programs=697),
        "conv",
    ),  # ZAYA1's routers, experts and slices of the head
    "G4": (graph(weights=1_100_000_000), "conv"),
    "Q3": (compressed(INT4), "matmul"),
    "Q4": (compressed(INT8), "matmul"),
    "Q5": (palette(1, 1, 16, 1), "constexpr_lut_to_dense"),
    "Q6": (compressed(INT8, generation=1), "constexpr_blockwise_shift_scale"),
    "N7": (graph(op("softplus", x="x")), "softplus"),
}


LOOKED_FOR = [id for id, row in rules.RULES.items() if row.of != "-"]


def found(g: rules.LintGraph) -> dict[str, tuple[str, ...]]:
    return {f.rule.id: f.names for f in rules.lint(g)}


@pytest.mark.matrix(24, wide=99)
@pytest.mark.parametrize("id", LOOKED_FOR)
def test_every_rule_fires_on_a_program_that_breaks_it(id):
    broken, name = BROKEN[id]
    assert name in found(broken)[id]


def test_a_program_that_breaks_none_is_clean():
    """State itself is disputed (K13), and any decoder of a conversation pauses (K15)."""
    assert found(graph()) == {}
    assert found(
        graph(
            op("mul", name="scaled", x="x", y=np.array(0.5, np.float16)),
            op("mul", x="scaled_out", y="scaled_out"),
            op("add", x="mul_out", y=np.array(0.5, np.float16)),
            op("rsqrt", x="add_out", epsilon=np.array(1e-12)),
            op(
                "slice_update",
                KV,
                x="k_state",
                update="x",
                begin=np.zeros(4),
                end=np.zeros(4),
            ),
            written("slice_update_out"),
            states=state(1, 2, 64, 32),
        )
    ).keys() == {"K13", "K15"}


def test_every_rule_says_where_it_is_from_and_what_to_do():
    for r in rules.RULES.values():
        assert r.effect in ("cpu", "stays", "fails", "wrong", "slow"), r
        assert r.confidence in "HML" and r.advice, r
        sources = [word.partition("#")[0] for word in r.source.split()]
        assert all(source in rules.RULE_SOURCES for source in sources), r


@pytest.mark.parametrize(
    ("id", "eligible", "ane"),
    [("O1", 1, 1), ("G1", 1, 0), ("K2", 1, 0), ("N7", 2, 2), ("D3", 1, 1)],
)
def test_eligible_and_expected_are_told_apart(id, eligible, ane):
    placed = placement.place_operations("shard", BROKEN[id][0])
    assert placed.source == "predicted" and (placed.eligible, placed.ane) == (
        eligible,
        ane,
    )
    assert placed.ane + placed.cpu == placed.ops and id in {
        r["id"] for r in placed.rules
    }


def test_a_disputed_rule_is_shown_and_moves_nothing():
    for id in LOOKED_FOR:
        if rules.RULES[id].disputed:
            others = [
                x
                for x in placement.place_operations("s", BROKEN[id][0]).rules
                if not x["disputed"] and x["effect"] in ("cpu", "stays", "fails")
            ]
            assert (
                others == [] and placement.place_operations("s", BROKEN[id][0]).cpu == 0
            ), id


# --- real exports
# ------------------------------------------------------------------------------------------------


def attention_shard(folder):
    """Experiment 30's shard: four 1×1 convolutions of ZAYA1's dimensions, int8 per tensor, RangeDim
    T, two states."""
    import coremltools as ct
    import torch
    from coremltools.optimize.coreml import (
        OpLinearQuantizerConfig,
        OptimizationConfig,
        linear_quantize_weights,
    )

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (
                torch.nn.Conv2d(*c, 1, bias=False)
                for c in ((2048, 1024), (2048, 256), (2048, 256), (1024, 2048))
            )
            self.register_buffer("k_state", torch.zeros(1, 2, 2048, 128))
            self.register_buffer("v_state", torch.zeros(1, 2, 2048, 128))

        def forward(self, x, attn_mask, kv_write_mask):
            T = x.shape[2]
            q = self.q(x).reshape(1, 2, 4, 128, T)[:, :, 0].transpose(2, 3)
            k, v = (
                c(x).reshape(1, 2, 128, T).transpose(2, 3) for c in (self.k, self.v)
            )
            keep = 1 - kv_write_mask.sum(-1, keepdim=True)
            self.k_state[:] = self.k_state * keep + kv_write_mask @ k
            self.v_state[:] = self.v_state * keep + kv_write_mask @ v
            mixed = (
                torch.softmax(q @ self.k_state.transpose(2, 3) + attn_mask, -1)
                @ self.v_state
            )
            return x + self.o(
                mixed.transpose(2, 3).reshape(1, 256, T, 1).repeat(1, 4, 1, 1)
            )

    T = ct.RangeDim(1, 4, default=1)
    shapes = {
        "x": (1, 2048, T, 1),
        "attn_mask": (1, 1, T, 2048),
        "kv_write_mask": (1, 1, 2048, T),
    }
    traced = torch.jit.trace(
        Attention().half().float(),
        [torch.zeros([2 if n is T else n for n in s]) for s in shapes.values()],
    )
    states = [
        ct.StateType(ct.TensorType(shape=(1, 2, 2048, 128), dtype=np.float16), name=n)
        for n in ("k_state", "v_state")
    ]
    model = ct.convert(
        traced,
        inputs=[ct.TensorType(n, s, dtype=np.float16) for n, s in shapes.items()],
        states=states,
        minimum_deployment_target=ct.target.macOS15,
        skip_model_load=True,
    )
    config = OptimizationConfig(
        OpLinearQuantizerConfig(
            mode="linear_symmetric", dtype="int8", granularity="per_tensor"
        )
    )
    linear_quantize_weights(model, config).save(str(folder / "attention.mlpackage"))
    return folder / "attention.mlpackage"


@pytest.mark.filterwarnings("ignore")
def test_experiment_30_s_shard_keeps_its_four_convolutions(tmp_path):
    import miltorch
    from miltorch.quiet import quiet

    with quiet():
        package = attention_shard(tmp_path)
    weights = sum(p.stat().st_size for p in package.rglob("*.bin"))
    placed = placement.place_operations(
        "attention", rules.LintGraph(miltorch.read(package), weights)
    )
    assert placed.convolutions == (4, 4)
    disputed = {r["id"]: r["disputed"] for r in placed.rules if r["disputed"]}
    assert set(disputed) == {"D3", "D7", "K13", "K14", "Q4"} and all(
        "experiment 30" in words for words in disputed.values()
    )


def test_small_shards_with_a_range_are_expected_on_the_cpu(llama_bundle):
    placed = placement.predicted_placement(llama_bundle)
    assert all(p.convolutions[0] == 0 for p in placed)
    assert {"G1", "D3"} <= {r["id"] for r in placed[0].rules}
    assert any("predicted placement" in line for line in placement.lines(placed))


@pytest.mark.parametrize(
    "shape, broken", [((4, 1), True), ((1, 4), True), ((1, 1), False)]
)
def test_functions_of_t_above_1_are_seen_in_either_layout(shape, broken):
    packed = graph(
        inputs={"x": half(1, 64, *shape)}, states=state(1, 2, 64, 32), functions=2
    )
    assert ("K4" in {f.rule.id for f in rules.lint(packed)}) == broken


@pytest.mark.parametrize("T", [1, 16])
@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_functions_of_t_above_1_are_seen_whatever_the_input_is_called(kind, T):
    columns = half(1, 64, 1, T) if kind == "conv" else half(1, T, 64)
    weight = WEIGHT if kind == "conv" else W
    product = op(kind, columns, "product", x="hidden_states", weight=weight)
    made = program(
        [product],
        {"hidden_states": columns},
        ["product_out"],
        {"kv_cache_0": half(8, 2, 64, 32)},
    )
    assert ("K4" in found(rules.LintGraph(made, 5_000_000, functions=2))) == (T > 1)


def test_a_cache_written_at_pos_beside_a_range_aborts(exports):
    path = exports.checkpoint("llama")
    ranged, fixed, masked = (
        placement.predicted_placement(exports.bundle(path, **options))
        for options in ({"kv_write": "slice"}, {"kv_write": "slice", "tokens": "4"}, {})
    )
    names = [
        {n for p in ps for r in p.rules if r["id"] == "D8" for n in r["names"]}
        for ps in (ranged, fixed, masked)
    ]
    assert names == [{"pos"}, set(), set()]


def test_a_bundle_of_many_programs_says_so(exports, monkeypatch):
    """Planted: a limit of 8 programs; the routed bundle has a router and 4 experts a layer."""
    bundle = exports.bundle(exports.checkpoint("zaya"), moe="routed")
    seen = []
    monkeypatch.setitem(rules.TESTS, "G3", lambda g, op: seen.append(g.programs))
    placement.predicted_placement(bundle)
    assert (
        set(seen) == {len(bundle.manifest.shards)} and len(bundle.manifest.shards) > 8
    )


@pytest.mark.parametrize("kv_write", ["mask", "slice"])
def test_a_cache_that_a_mask_writes_is_seen(exports, kv_write):
    options = {"kv_write": kv_write, "tokens": "4", "layers_per_shard": 2}
    bundle = exports.bundle(exports.checkpoint("llama"), **options)
    broken = {r["id"] for r in placement.predicted_placement(bundle)[0].rules}
    assert ("K14" in broken) == (kv_write == "mask")
