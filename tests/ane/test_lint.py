"""Every rule fires on a program made to break it, names what breaks it, and is silent on a program
that breaks none."""

import numpy as np
import pytest
from mil.one_op import program

import miltorch
from miltorch import Type
from miltorch.program import Op, Ref
from workbench.ane import placement, rules


def half(*shape, kind="tensor") -> Type:
    return Type("FLOAT16", shape, kind)


X = half(1, 64, 1, 32)
W = half(64, 64)
KV = half(1, 2, 64, 32)
WEIGHT = np.ones((64, 64, 1, 1), np.float16)
STATE = {"k_state": half(1, 2, 64, 32, kind="state")}


def op(kind: str, out: Type | None = X, name: str | None = None, **inputs) -> Op:
    """An operation; strings among its inputs are names of values."""
    bound = {k: Ref(v) if isinstance(v, str) else v for k, v in inputs.items()}
    return Op(kind, name or kind, bound, [(f"{name or kind}_out", out)] if out else [])


def graph(*ops: Op, inputs=None, states=None, weights=5_000_000, **properties):
    """A program of a convolution and more operations."""
    conv = op("conv", x="x", weight=WEIGHT)
    result = program([conv, *ops], {"x": X} | (inputs or {}), ["conv_out"], states)
    return rules.LintGraph(result, weights, **properties)


def compressed(weight: dict, **properties) -> rules.LintGraph:
    """A program with a product by a weight of 8 or 4 bits."""
    kind = "constexpr_blockwise_shift_scale"
    return graph(
        op(kind, W, **weight), op("matmul", x="x", y=f"{kind}_out"), **properties
    )


def palette(*shape: int, **properties) -> rules.LintGraph:
    """A program with a weight in a palette of a shape."""
    table = {"lut": np.zeros(shape), "indices": np.zeros((64, 64), np.uint8)}
    return graph(op("constexpr_lut_to_dense", W, **table), **properties)


def added(*shape) -> rules.LintGraph:
    """A program that adds an input of a shape to itself."""
    return graph(
        op("add", half(*shape), x="big", y="big"), inputs={"big": half(*shape)}
    )


INT8 = {"data": np.arange(-64, 64, dtype=np.int8), "scale": np.ones((2, 1))}
INT4 = {"data": np.full((64, 64), 7, np.int8), "scale": np.ones((64, 2))}
FOUR = {"x": half(1, 64, 4, 32)}
RANGE = {"t": half(1, 64, 1, None)}
POS = {"pos": Type("INT32", (1,))}
FULL = Type("FLOAT32", (1, 64, 1, 32))
WHOLE = Type("INT32", (1, 64, 1, 32))
THREE = dict.fromkeys("abc", STATE["k_state"])
BLEND = (
    op("read_state", KV, input="k_state"),
    op("mul", KV, x="read_state_out", y="x"),
    op("add", KV, x="mul_out", y="x"),
    op("write_state", None, data="add_out", input="k_state"),
)
SLICED = (
    op("read_state", KV, input="k_state"),
    op("slice_update", KV, x="read_state_out", update="x"),
    op("write_state", None, data="slice_update_out", input="k_state"),
)
MASKED = {"query": "x", "key": "x", "value": "x", "attn_mask": "x"}
# rule → (a program that breaks it, what must be named)
BROKEN = {
    "T1": (graph(op("add", FULL, x="x", y="x")), "add"),
    "T3": (graph(op("cast", WHOLE, x="x", dtype="int32")), "cast"),
    "T4": (graph(op("reshape", half(1, 2, 2, 2, 8, 32), x="x")), "reshape"),
    "S1": (graph(inputs={"narrow": half(1, 64, 1, 4)}), "narrow"),
    "S4": (added(1, 70000, 1, 32), "add"),
    "S10": (graph(op("transpose", X, x="x", perm=np.array([0, 1, 3, 2]))), "transpose"),
    "S12": (added(1, 8, 1024, 128), "add"),
    "D1": (graph(inputs=RANGE), "t"),
    "D3": (graph(inputs=RANGE), "t"),
    "D7": (graph(inputs={"x": half(1, 64, 1, None)}, states=STATE), "x"),
    "D8": (graph(inputs=RANGE | POS, states=STATE), "pos"),
    "K2": (graph(states={"k_state": half(1, 2, 64, 48, kind="state")}), "k_state"),
    "K3": (graph(states=THREE), "a"),
    "K4": (graph(inputs=FOUR, states=STATE, functions=2), "k_state"),
    "K10": (palette(1, 1, 16, 1, states=STATE), "constexpr_lut_to_dense"),
    "K12": (graph(states={"k_state": half(1, 2, 2048, 32, kind="state")}), "k_state"),
    "K13": (graph(states=STATE), "k_state"),
    "K14": (graph(*BLEND, states=STATE), "write_state"),
    "K15": (graph(states=STATE), "k_state"),
    "K16": (graph(*SLICED, states=STATE), "write_state"),
    "O1": (graph(op("cumsum", x="x")), "cumsum"),
    "O3": (graph(op("cos", x="x"), generation=2), "cos"),
    "O15": (graph(op("softmax", x="x", axis=np.array(-1))), "softmax"),
    "O16": (
        graph(op("scaled_dot_product_attention", **MASKED)),
        "scaled_dot_product_attention",
    ),
    "G1": (graph(weights=100_000), "conv"),
    "G2": (graph(weights=3_000_000_000), "conv"),
    "G3": (graph(programs=697), "conv"),  # ZAYA1's routers, experts, slices of the head
    "G4": (graph(weights=1_100_000_000), "conv"),
    "G5": (graph(weights=3_000_000_000), "conv"),
    "G6": (graph(weights=1_800_000_000), "conv"),
    "Q3": (compressed(INT4), "matmul"),
    "Q4": (compressed(INT8), "matmul"),
    "Q5": (palette(16), "constexpr_lut_to_dense"),
    "Q7": (palette(8, 1, 16, 1), "constexpr_lut_to_dense"),
    "Q6": (compressed(INT8, generation=1), "constexpr_blockwise_shift_scale"),
    "N7": (graph(op("softplus", x="x")), "softplus"),
}
LOOKED_FOR = {rule.id: rule for rule in rules.rules() if rule.of != "-"}


def broken_rules(g: rules.LintGraph) -> dict[str, list[str]]:
    """Rule → the names of what breaks it."""
    return {finding.rule.id: finding.names for finding in rules.lint(g)}


@pytest.mark.matrix(24, wide=99)
@pytest.mark.parametrize("id", LOOKED_FOR)
def test_every_rule_fires_on_a_program_that_breaks_it(id):
    """One that is disputed moves nothing but the count for the case that it holds."""
    kind = LOOKED_FOR[id].of.split()[0].rstrip("*")  # of a rule of kinds alone
    broken, name = BROKEN.get(id) or (graph(op(kind, x="x")), kind)
    assert name in broken_rules(broken)[id]
    on_cpu = placement.place_operations("s", broken).cpu
    assert not on_cpu or not LOOKED_FOR[id].disputed


def test_a_program_that_breaks_none_is_clean():
    """State itself is disputed (K13), and any decoder of a conversation pauses (K15)."""
    assert broken_rules(graph()) == {}
    written = op("write_state", None, data="mul_out", input="k_state")
    stateful = graph(op("mul", x="x", y="x"), written, states=STATE)
    assert broken_rules(stateful).keys() == {"K13", "K15"}
    bare = program([op("relu", x="x")], {"x": X}, ["relu_out"], STATE)
    assert "K4" not in broken_rules(rules.LintGraph(bare, 5_000_000, functions=2))


def test_new_rules_are_silent_on_what_their_sources_ran():
    """Weights split into files of 1.2 GB, a fused attention without a mask, groups of 16
    channels, a state that is written as a whole."""
    split = graph(weights=2_400_000_000, largest_file=1_200_000_000)
    unmasked = {name: "x" for name in ("query", "key", "value")}
    assert "G5" not in broken_rules(split)
    assert "O16" not in broken_rules(
        graph(op("scaled_dot_product_attention", **unmasked))
    )
    assert "Q7" not in broken_rules(palette(4, 1, 16, 1))
    assert "Q7" not in broken_rules(palette(8, 1, 64, 1))
    read, _, write = SLICED
    whole = op("slice_update", KV, x="read_state_out", update="read_state_out")
    assert "K16" not in broken_rules(graph(read, whole, write, states=STATE))
    assert "K16" not in broken_rules(graph(*BLEND, states=STATE))
    assert "G6" not in broken_rules(graph(weights=1_700_000_000))


def test_every_rule_says_where_it_is_from_and_what_to_do():
    for rule in rules.rules():
        assert rule.effect in ("cpu", "stays", "fails", "wrong", "slow"), rule
        assert rule.confidence in "HML" and rule.advice, rule
        sources = [word.partition("#")[0] for word in rule.source.split()]
        assert all(source in rules.RULE_SOURCES for source in sources), rule


@pytest.mark.parametrize(
    ("id", "eligible", "ane"),
    [("O1", 1, 1), ("G1", 1, 0), ("K2", 1, 0), ("N7", 2, 2), ("D3", 1, 1)],
)
def test_eligible_and_expected_are_told_apart(id, eligible, ane):
    placed = placement.place_operations("shard", BROKEN[id][0])
    assert (placed.source, placed.eligible, placed.ane) == ("predicted", eligible, ane)
    assert placed.ane + placed.cpu == placed.ops
    assert placed.convolutions == (min(ane, 1), 1)
    assert id in {finding.rule.id for finding in placed.findings}


@pytest.mark.parametrize("id", ["D3", "D7", "K3", "K13", "K14", "Q4"])
def test_a_disputed_rule_moves_the_count_for_the_case_that_it_holds(id):
    """On inputs or states it keeps the whole program off the Neural Engine."""
    placed = placement.place_operations("shard", BROKEN[id][0])
    assert placed.ane == placed.ops
    assert placed.ane_if_disputed_hold < placed.ane
    if LOOKED_FOR[id].of in placement.PROGRAM_VALUES:
        assert placed.ane_if_disputed_hold == 0


# --- real exports


def test_a_shard_as_experiment_30_s_keeps_its_convolutions(exports):
    """int8 per tensor, a range of T, states, and weights as large as there."""
    bundle = exports.bundle("llama", compress="int8-tensor")
    program = miltorch.read(bundle.package(bundle.shards("layers")[0]))
    graph = rules.LintGraph(program, 5_000_000)
    placed = placement.place_operations("attention", graph)
    assert placed.convolutions[0] == placed.convolutions[1] > 0
    broken = [finding.rule for finding in placed.findings]
    disputed = {rule.id: rule.disputed for rule in broken if rule.disputed}
    assert set(disputed) == {"D3", "D7", "K13", "K14", "Q4"}
    assert all("experiment 30" in words for words in disputed.values())
