"""The decode path against the literal graph: the same bits where one rounding decides, close where
sums are reordered."""

import os

import mutants
import numpy as np
import pytest
import tiny
import torch
from hypothesis import strategies as st
from one_op import Op, Ref, Type, given, program, tensor

import miltorch
from miltorch import Executable
from miltorch.fast import kernels, machine, patterns, products, tiles
from miltorch.fast import program as fast
from miltorch.fast.matching import PatternGraph
from miltorch.fast.program import FastProgram
from miltorch.ops import linear
from workbench import Decoder
from workbench.errors import InputError

F16 = "FLOAT16"
SHAPE = (2, 3, 1, 5)
ATTRIBUTES = {
    "clip": {"alpha": -1.0, "beta": 0.5},
    "reduce_max": {"axes": [1], "keep_dims": True},
    "reduce_min": {"axes": [1], "keep_dims": False},
    "reshape": {"shape": [3, -1]},
    "transpose": {"perm": [1, 0, 3, 2]},
    "softmax": {"axis": 3},
    "split": {"axis": 3, "split_sizes": [2, 3]},
    "squeeze": {"axes": [2]},
    "expand_dims": {"axes": [0]},
    "tile": {"reps": [1, 2, 1, 1]},
    "cast": {"dtype": "fp16"},
    "slice_by_index": {"begin": [0, 0, 0, 1], "end": [2, 3, 1, 4]},
    "concat": {"axis": 1},
    "stack": {"axis": 0},
}
COMPARISONS = ("greater", "less", "greater_equal", "less_equal", "equal")
# vectorised, so not bit-equal
ULPS = {"exp": 1, "sin": 1, "cos": 1, "sigmoid": 1, "silu": 1, "tanh": 1, "softmax": 1}
BUNDLES = [
    ("llama", {}),
    ("llama", {"kv_write": "slice"}),
    ("qwen2", {"compress": "int8-tensor"}),
    ("qwen2", {"compress": "int8-channel", "layout": "bc1t"}),
    ("qwen3", {"compress": "int4-block32"}),
    ("gemma3_text", {"sliding": "ring", "batch": 2}),
    ("gemma3_text", {"states": "packed"}),
    ("zaya", {}),
    ("zaya", {"moe": "routed", "compress": "int8-channel"}),
]


MORE = [  # tails, matrix states, partial rotations
    (family, {})
    for family in (
        "lfm2",
        "qwen3_5_text",
        "granitemoehybrid",
        "phi3",
        "mistral",
        "smollm3",
    )
]


def ids_of(value):
    return value if isinstance(value, str) else "-".join(map(str, value.values()))


def one(kind: str, count: int):
    """A program of one operation on `count` fp16 tensors of `SHAPE`."""
    attributes = {
        name: np.asarray(v) if not isinstance(v, str) else v
        for name, v in ATTRIBUTES.get(kind, {}).items()
    }
    names = [f"x{i}" for i in range(count)]
    operands = (
        {"values": [Ref(n) for n in names]}
        if kind in ("concat", "stack")
        else dict(zip("xy", map(Ref, names)))
    )
    if kind == "select":
        operands = dict(zip(("cond", "a", "b"), map(Ref, names)))
    outputs = [
        (f"y{i}", Type("BOOL" if kind in COMPARISONS else F16, (None,)))
        for i in range(2 if kind == "split" else 1)
    ]
    op = Op(kind, kind, operands | attributes, outputs)
    return program([op], {n: Type(F16, SHAPE) for n in names}, [n for n, _ in outputs])


def arity(kind: str) -> int:
    binary = (
        "add",
        "sub",
        "mul",
        "real_div",
        "maximum",
        "minimum",
        "concat",
        "stack",
        *COMPARISONS,
    )
    return 3 if kind == "select" else 2 if kind in binary else 1


@pytest.mark.parametrize("kind", sorted(fast.DIRECT - {"gather"}))
@given(seed=st.integers(0, 99), scale=st.sampled_from([1e-4, 1.0, 300.0]))
def test_an_operation_on_fp16_equals_its_rule_in_float32_rounded_once(
    kind, seed, scale
):
    rng, made = np.random.default_rng(seed), one(kind, arity(kind))
    values = {
        name: tensor((rng.normal(size=SHAPE) * scale).astype(np.float16))
        for name in made.inputs
    }
    if kind == "sqrt":
        values = {name: value.abs() for name, value in values.items()}
    wanted, found = (
        Executable(made).run(dict(values), {}),
        FastProgram(made).run(dict(values), {}),
    )
    for name in wanted:
        if kind in ULPS:
            bits = (
                v.half().view(torch.int16).int() for v in (wanted[name], found[name])
            )
            assert int(torch.sub(*bits).abs().max()) <= ULPS[kind]
        else:
            assert torch.equal(wanted[name], found[name])


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 130),
    count=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_int8_products_use_weights_rounded_to_fp16(rows, columns, count, seed):
    rng = np.random.default_rng(seed)
    weight = rng.integers(-128, 128, (rows, columns)).astype(np.int8)
    scale = rng.uniform(1e-3, 1e-1, rows).astype(np.float16).astype(np.float32)
    x = torch.from_numpy(rng.normal(size=(count, columns)).astype(np.float16))
    dense = (weight * scale[:, None]).astype(np.float16).astype(np.float64)
    found = tiles.product(weight, scale, x).numpy()
    np.testing.assert_allclose(
        found, x.double().numpy() @ dense.T, rtol=1e-5, atol=1e-4
    )


@pytest.mark.usefixtures("torch_products")
@pytest.mark.parametrize(
    "family, options",
    BUNDLES,
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())),
)
def test_decoding_stays_close_to_the_literal_graph(exports, family, options):
    """Every logit within 1% of the largest, every state row within 4 units in the last place of its
    largest value."""
    bundle = exports.bundle(exports.checkpoint(family), **options)
    fast_one, literal = (Decoder(bundle, "portable", fast=f) for f in (True, False))
    rng = np.random.default_rng(0)
    prompt = rng.integers(
        0, bundle.manifest.dims.V, (bundle.manifest.options.batch, 8)
    ).tolist()
    prompt = prompt if len(prompt) > 1 else prompt[0]
    logits = [(fast_one.prefill(prompt), literal.prefill(prompt))]
    for _ in range(6):
        tokens = np.atleast_1d(logits[-1][1].argmax(-1)).tolist()
        logits.append(tuple(d.decode_one_token(tokens) for d in (fast_one, literal)))
    for found, wanted in logits:
        assert tiny.relative(found, wanted) < 1e-2
    for one_state, other in zip(fast_one.states, literal.states, strict=True):
        for name in one_state.shard.states:
            assert (
                tiny.relative(
                    one_state.read(name).astype(float), other.read(name).astype(float)
                )
                < 4 * 2**-10
            )


def calls(bundle, kind="layers"):
    made = FastProgram(miltorch.read(bundle.package(bundle.shards(kind)[0])))
    functions = [getattr(n.function, "func", n.function) for n in made.nodes]
    return [getattr(f, "__name__", type(f).__name__) for f in functions], made


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "zaya"])
def test_caches_and_attention_of_every_family_are_recognised(exports, family):
    names, _ = calls(exports.bundle(exports.checkpoint(family)))
    assert (
        names.count("_write_rows") == 2
        and names.count("_write_positions") == 1
        and names.count("_attend_visible") == 1
    )
    assert names.count("Linear") == (4 if family != "zaya" else 7)


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "zaya"])
def test_a_norm_and_a_rotation_give_what_their_operations_give(exports, family, T):
    """On the operands of the literal graph: rotations bit for bit, norms within a unit in the last
    place of the largest."""
    decoder = Decoder(
        exports.bundle(exports.checkpoint(family)), "portable", fast=False
    )
    model, seen = decoder.layers[0], {}
    io = decoder.host.inputs(np.array([5]), np.array([T]), T)
    rng = np.random.default_rng(T)
    io["x"] = (
        rng.normal(size=(1, decoder.manifest.dims.C, T, 1))
        .astype(np.float16)
        .astype(np.float32)
        * 7
    )
    with model.hooked(
        lambda op, results: seen.update(
            zip((name for name, _ in op.outputs), results, strict=True)
        )
    ):
        decoder.run_layers(0, io, np.array([T]))
    graph = PatternGraph(
        model.program,
        (("mul", patterns.rms_norm_pattern), ("concat", patterns.rotation)),
    )
    seen |= {name: torch.from_numpy(np.float32(value)) for name, value in io.items()}
    kinds = [graph.producers[name].kind for name in graph.special]
    assert kinds.count("mul") >= 2 and kinds.count("concat") == 2
    for name, [(function, operands, _)] in graph.special.items():
        found, wanted = (
            function(*[seen[o].half() for o in operands]).float(),
            seen[name],
        )
        assert (
            torch.equal(found, wanted)
            or graph.producers[name].kind == "mul"
            and tiny.relative(found, wanted) < 2**-10
        )


def test_a_norm_of_something_not_finite_is_nowhere_mistaken_for_a_number():
    constants = (
        np.ones(4, np.float32),
        np.float32([2**-14, 65504, 0]),
        *[np.float32([1e-3])] * 2,
        np.float32([]),
    )
    for bad in (np.nan, np.inf, -np.inf):
        found = kernels.rms_norm_rows(torch.tensor([[1, bad, 2, 3]]).half(), *constants)
        assert found[0, 1].isnan() and (
            found.isnan().all() if np.isnan(bad) else found[0, 0] == 0
        )


TAPED = [
    ("llama", {}),
    ("qwen2", {"compress": "int8-tensor"}),
    ("qwen3", {"compress": "int8-channel", "layout": "bc1t"}),
    ("llama", {"layers_per_shard": 2, "states": "separate"}),
    ("llama", {"batch": 3}),
    ("gemma3_text", {"sliding": "ring", "batch": 2}),
    ("zaya", {}),
    ("zaya", {"batch": 2, "compress": "int8-channel"}),
    ("lfm2", {}),
    ("qwen3_5_text", {}),
    ("granitemoehybrid", {"batch": 2}),
]


@pytest.mark.matrix(15)
@pytest.mark.parametrize("T", [1, 2, 4, 7])
@pytest.mark.parametrize("family, options", TAPED, ids=ids_of)
def test_tokens_on_tape_are_the_tokens_call_by_call(exports, family, options, T):
    """States and logits within four units in the last place of the largest value: sums and
    exponentials are others."""
    bundle = exports.bundle(exports.checkpoint(family), t_max=8, **options)
    taped, plain = (Decoder(bundle, "portable", fast=True) for _ in range(2))
    for model in plain.layers + plain.heads:
        model.fast.bytecodes = Untaped()
    rng, B = np.random.default_rng(T), bundle.manifest.options.batch
    if B * T > 11:
        return
    for _ in range(4):
        ids = rng.integers(0, bundle.manifest.dims.V, (B, T)).tolist()
        found, wanted = (d.logits(d.advance(ids, T)) for d in (taped, plain))
        assert tiny.relative(found, wanted) < 4 * 2**-10
    assert all(
        all(model.fast.bytecodes.values()) for model in taped.layers + taped.heads
    )
    for one_state, other in zip(taped.states, plain.states, strict=True):
        for name in one_state.shard.states:
            assert (
                tiny.relative(
                    one_state.read(name).astype(float), other.read(name).astype(float)
                )
                < 4 * 2**-10
            )


class Untaped(dict):
    """Tapes that are never found, nor kept."""

    def get(self, shapes):
        return None

    def __contains__(self, shapes):
        return True


@pytest.mark.matrix(6)
@pytest.mark.parametrize("family, options", BUNDLES + MORE, ids=ids_of)
def test_calls_of_a_few_tokens_of_every_family_are_on_tape_and_longer_ones_are_not(
    exports, family, options
):
    bundle = exports.bundle(exports.checkpoint(family), t_max=8, **options)
    decoder = Decoder(bundle, "portable", fast=True)
    B = bundle.manifest.options.batch
    for T in (1, 3, 8):
        decoder.advance([[1] * T] * B, T)
    if bundle.manifest.options.kv_write == "slice":
        assert not any(decoder.layers[0].fast.bytecodes.values())
        return
    for model in decoder.layers:
        assert [bool(tape) for tape in model.fast.bytecodes.values()] == [
            True,
            True,
            8 * B < 12,
        ]


def test_a_program_with_an_operation_that_has_no_instruction_runs_call_by_call(exports):
    decoder = Decoder(
        exports.bundle(exports.checkpoint("llama"), kv_write="slice"),
        "portable",
        fast=True,
    )
    decoder.prefill([1])
    assert list(decoder.layers[0].fast.bytecodes.values()) == [None]


def first_layer(exports):
    """A layer after two tokens, and the inputs of the third."""
    decoder = Decoder(
        exports.bundle(exports.checkpoint("llama")), "portable", fast=True
    )
    decoder.prefill([1, 2], tile=1)
    io = decoder.host.inputs(np.array([2]), np.array([1]), 1)
    hidden = np.random.default_rng(0).normal(size=(1, decoder.manifest.dims.C, 1, 1))
    return decoder.layers[0], io | {"x": hidden.astype(np.float32)}


def test_a_tape_reads_inputs_however_they_are_laid_out(exports):
    model, io = first_layer(exports)
    spread = io | {"x": np.repeat(io["x"], 2, axis=1)[:, ::2]}
    made = [
        model.predict({n: given[n] for n in model.shard.inputs}, model.make_state())[
            "hidden"
        ]
        for given in (io, spread)
    ]
    assert not spread["x"].flags.c_contiguous and np.array_equal(*made)


def test_a_tape_leaves_a_write_mask_that_is_not_one_hot_to_the_formula(exports):
    model, io = first_layer(exports)
    io["kv_write_mask"][0, 0, 3:5] = 0.5
    made = []
    for path in (model.fast, None):
        state, model.fast = model.make_state(), path
        model.predict({name: io[name] for name in model.shard.inputs}, state)
        made.append({name: state.read(name) for name in model.shard.states})
    for name, wanted in made[1].items():
        assert (
            wanted[:, :, 3:5].any()
            and tiny.relative(made[0][name].astype(float), wanted.astype(float))
            < 4 * 2**-10
        )


@given(seed=st.integers(0, 99), scale=st.sampled_from([1e-3, 1.0, 30.0]))
def test_the_exponential_is_that_of_numpy(seed, scale):
    x = (
        (np.random.default_rng(seed).normal(size=50) * scale)
        .clip(-87, 88)
        .astype(np.float32)
    )
    np.testing.assert_allclose(
        [kernels._exp(v) for v in x], np.exp(x.astype(float)), rtol=3e-7
    )


@pytest.mark.parametrize("scale", [6e-8, 3e-5, 511.0])
def test_int8_products_by_extreme_scales_are_those_of_the_literal_graph(scale):
    rng = np.random.default_rng(0)
    weight = rng.integers(-128, 128, (9, 77)).astype(np.int8)
    scales = np.full(9, np.float16(scale), np.float32)
    dense = (weight * scales[:, None]).astype(np.float16).astype(np.float64)
    for count in (1, 3):
        x = torch.from_numpy(rng.normal(size=(count, 77)).astype(np.float32))
        expected = x.double().numpy() @ dense.T
        outputs = tiles.product(weight, scales, x).numpy()
        assert abs(outputs - expected).max() <= 2e-6 * abs(expected).max()


def test_int8_weights_stay_int8(exports):
    _, made = calls(exports.bundle(exports.checkpoint("qwen2"), compress="int8-tensor"))
    held = [
        n.function.weight.dtype
        for n in made.nodes
        if isinstance(n.function, products.Linear)
    ]
    assert len(held) == 4 and set(held) == {np.dtype(np.int8)}
    # norms: less than one projection
    assert sum(v.nbytes for v in made.values if isinstance(v, torch.Tensor)) < 96 * 64


def test_fp16_products_use_weights_as_they_are():
    rng = np.random.default_rng(0)
    weight, x = (
        rng.normal(size=(9, 130)).astype(np.float16),
        torch.from_numpy(rng.normal(size=(3, 130)).astype(np.float16)),
    )
    for rows in (x, x[:1]):
        found = tiles.product(
            weight.view(np.uint16), np.ones(9, np.float32), rows
        ).numpy()
        np.testing.assert_allclose(
            found, rows.double().numpy() @ weight.astype(float).T, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("panel", [1, 131, 1 << 19])  # a row at a time, two, all
def test_a_product_by_panels_is_the_whole_product(dtype, panel, monkeypatch):
    monkeypatch.setattr(linear, "PANEL", panel)
    rng = np.random.default_rng(0)
    weight, x = rng.normal(0, 30, (7, 130)).astype(dtype), rng.normal(size=(20, 130))
    product = linear.panel_product(
        torch.from_numpy(x.astype(np.float32))
        .T.contiguous()
        .T,  # columns first, as layers give them
        torch.from_numpy(weight),
    )
    np.testing.assert_allclose(
        product.numpy(), x @ weight.T.astype(float), rtol=1e-5, atol=1e-3
    )


@pytest.mark.parametrize(("rows", "size"), [(1, 40), (3, 40), (6, 40), (2, 900)])
def test_narrow_products_round_after_every_32_terms(rows, size):
    rng = np.random.default_rng(rows)
    # sums of 32 are exact in float32
    weight, x = (
        rng.integers(-size, size, (n, 320)).astype(np.float16) for n in (9, rows)
    )
    expected = np.zeros((rows, 9), np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        for part in zip(
            np.split(x.astype(float), 10, 1),
            np.split(weight.astype(float), 10, 1),
            strict=True,
        ):
            expected = (expected + part[0] @ part[1].T).astype(np.float16)
    found = kernels.narrow_product(weight.view(np.uint16), torch.from_numpy(x).float())
    np.testing.assert_array_equal(found.numpy(), expected.astype(np.float32))
    assert np.isfinite(expected).all() == (size == 40)


def test_without_fp16_conversions_in_hardware_the_literal_graph_runs(
    exports, monkeypatch
):
    monkeypatch.setattr(kernels, "available", lambda: False)
    assert not any(
        model.fast
        for model in Decoder(
            exports.bundle(exports.checkpoint("qwen2")), "portable", fast=True
        ).layers
    )


@pytest.mark.parametrize(
    "mask",
    [
        [[1.0, 1.0], [0, 0], [0, 0]],
        [[0.5, 0], [0, 0], [0, 1.0]],
        [[1.0, 0], [1.0, 0], [0, 0]],
    ],
)
def test_a_write_mask_that_is_not_one_hot_takes_the_formula(mask):
    mask, rows = (
        torch.tensor([[mask]]).half(),
        torch.arange(8.0).reshape(1, 2, 2, 2).half(),
    )
    cell = miltorch.interpret.StateCell(torch.ones(1, 2, 3, 2))
    assert patterns._write_positions(mask) is None
    patterns._write_rows(False, cell, mask, patterns._write_positions(mask), rows)
    expected = 1 - mask.float().sum(-1, keepdim=True) + mask.float() @ rows.float()
    assert torch.equal(cell.value, expected)


def test_columns_blocked_for_some_queries_only_are_kept():
    blocked = torch.full((1, 1, 2, 6), kernels.BLOCKED).half()
    blocked[..., 0, 1:3] = blocked[..., 1, 2:4] = 0
    assert patterns._span(blocked)[:2] == (1, 4)
    blocked[..., 1, :] = kernels.BLOCKED
    # a query that sees nothing attends to everything alike
    assert patterns._span(blocked)[:2] == (0, 6)


def test_hooks_and_gates_see_the_literal_graph(exports):
    decoder = Decoder(
        exports.bundle(exports.checkpoint("llama")), "portable", fast=True
    )
    path = [model.fast for model in decoder.layers]
    with decoder.set_aside():
        assert (
            not any(model.fast for model in decoder.layers + decoder.heads)
            and not decoder.fast
        )
    assert [model.fast for model in decoder.layers] == path and decoder.fast
    seen = []
    with decoder.hooked(lambda shard: lambda op, results: seen.append(op.kind)):
        decoder.prefill([1, 2])
    assert "softmax" in seen


def mutated(bundle, change):
    """The program of a bundle's first layers after `change`, which gets its operations by kind."""
    program = miltorch.read(bundle.package(bundle.shards("layers")[0]))
    kinds: dict[str, list] = {}
    for op in program.block.ops:
        kinds.setdefault(op.kind, []).append(op)
    change(kinds)
    return program


def without(kind: str, parameter: str):
    return lambda kinds: [op.inputs.pop(parameter, None) for op in kinds[kind]]


@pytest.mark.parametrize(
    "kind, parameter",
    [
        ("add", "y"),
        ("real_div", "x"),
        ("mul", "y"),
        ("reshape", "shape"),
        ("concat", "values"),
        ("write_state", "data"),
        ("softmax", "x"),
        ("conv", "weight"),
        ("clip", "alpha"),
    ],
)
def test_an_operation_without_an_operand_is_refused_as_the_literal_graph_refuses_it(
    exports, kind, parameter
):
    program = mutated(
        exports.bundle(exports.checkpoint("llama")), without(kind, parameter)
    )
    runner = fast.ready(program, lambda: Executable(program)) or Executable(program)
    inputs = mutants.calls(program, np.random.default_rng(0))[0]
    for path in (Executable(program), runner):
        with pytest.raises(InputError):
            path.run(dict(inputs), miltorch.make_state(program))


def test_a_form_may_raise_anything_and_means_no_match(exports):
    program = mutated(exports.bundle(exports.checkpoint("llama")), lambda kinds: None)

    def broken(graph, op):
        raise RuntimeError("a surprise")

    both, one = (
        PatternGraph(program, pairs).special
        for pairs in (
            (("mul", broken), ("conv", patterns.linear_pattern)),
            (("conv", patterns.linear_pattern),),
        )
    )
    assert both.keys() == one.keys() and len(one) > 3


def test_an_interleaved_concat_is_no_rotation(exports):
    def interleave(kinds):
        for op in kinds["concat"]:
            op.inputs["interleave"] = np.array(True)

    program = mutated(exports.bundle(exports.checkpoint("llama")), interleave)
    assert PatternGraph(program, (("concat", patterns.rotation),)).special == {}


@pytest.mark.parametrize("T", [1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_spreads_over_the_cache_as_the_formula_spreads_it(T, value):
    mask, rows = torch.eye(3, T)[None, None].half(), torch.ones(1, 2, T, 2).half()
    rows[0, 0, 0, 1] = value
    for old in (1.0, value):
        cells = [miltorch.interpret.StateCell(torch.ones(1, 2, 3, 2)) for _ in range(2)]
        for cell in cells:
            cell.value[0, 1, 0, 0] = old
        patterns._write_rows(
            False, cells[0], mask, patterns._write_positions(mask), rows
        )
        patterns._write_rows(False, cells[1], mask, None, rows)
        np.testing.assert_array_equal(*(cell.value.numpy() for cell in cells))


@pytest.mark.parametrize(
    "slots, rows",
    [
        ([[3]], (1, 2, 1, 2)),
        ([[0]], (1, 2, 2, 2)),
        ([[0], [0]], (1, 2, 1, 2)),
        ([[0]], (1, 3, 1, 2)),
    ],
)
def test_a_write_past_the_cache_or_of_other_rows_is_refused(slots, rows):
    with pytest.raises((ValueError, IndexError)):
        kernels.write_rows(
            np.zeros((1, 2, 3, 2), np.float32),
            np.array(slots),
            np.ones(rows, np.float32),
        )


@pytest.mark.parametrize(
    "family, options",
    BUNDLES,
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())),
)
def test_no_sound_bundle_falls_back_to_the_literal_graph(exports, family, options):
    decoder = Decoder(
        exports.bundle(exports.checkpoint(family), **options), "portable", fast=True
    )
    batch = decoder.manifest.options.batch
    decoder.prefill([[1, 2, 3]] * batch if batch > 1 else [1, 2, 3])
    models = decoder.layers + decoder.heads
    assert all(model.fast and "executable" not in vars(model) for model in models)
    assert not any(
        isinstance(tape, Executable)
        for model in models
        for tape in model.fast.bytecodes.values()
    )


@pytest.mark.parametrize("compress", ["fp16", "int8-tensor", "int4-block32", "lut4"])
def test_the_outline_of_a_program_holds_no_weights(exports, monkeypatch, compress):
    """What stays are constants of norms and shapes: less than one projection of 96 × 64 in a byte
    each."""
    monkeypatch.setattr(fast, "LARGE", 1000)
    _, made = calls(exports.bundle(exports.checkpoint("qwen2"), compress=compress))
    body = made.outline.body
    constants = [
        value for step in body.steps for value in step.constants.values()
    ] + list(body.constants.values())
    held = {
        v.untyped_storage().data_ptr(): v.untyped_storage().nbytes()
        for v in constants
        if isinstance(v, torch.Tensor)
    }
    assert sum(held.values()) < 96 * 64


@pytest.mark.parametrize("T", [1, 2, 12])
def test_scores_as_low_as_the_mask_attend_to_blocked_columns_as_the_formula_does(T):
    rng = np.random.default_rng(T)
    q, key, value = (
        torch.from_numpy(rng.normal(size=shape).astype(np.float16))
        for shape in ((1, 1, T, 4), (1, 1, 6, 4), (1, 1, 6, 4))
    )
    # visible scores near -15,000, blocked ones near 0 - 10,000
    q[..., 0], key[..., :3, 0], key[..., 3:, 0] = (150, -100, 0)
    mask = torch.full((1, 1, T, 6), kernels.BLOCKED).half()
    mask[..., :3] = 0
    weights = torch.softmax(
        (q.float() @ key.float().transpose(-1, -2)).half() + mask, -1
    )
    cells = [miltorch.interpret.StateCell(v.float()) for v in (key, value)]
    found = patterns._attend_visible(q, *cells, mask, patterns._span(mask))
    np.testing.assert_allclose(
        found.float(), weights.float() @ value.float(), atol=2e-3
    )
    assert weights[..., :3].max() < 1e-3


def test_compiled_functions_older_than_their_kernels_are_dropped(tmp_path):
    kernels_file, stale, fresh = (
        tmp_path / name for name in ("k.py", "machine.a.nbi", "machine.b.nbi")
    )
    for seconds, path in enumerate((stale, kernels_file, fresh)):
        path.touch()
        os.utime(path, (seconds, seconds))
    gone = tmp_path / "removed by another process meanwhile.nbi"
    gone.symlink_to(tmp_path / "nowhere")
    machine.drop_stale_machine_code(tmp_path, kernels_file)
    assert not stale.exists() and fresh.exists()
