"""Packages of several functions: each computes what a package of that one T does, over weights that
are stored once."""

import itertools

import pytest
import tiny
from conversions import conversions, files

from miltorch.quiet import coremltools
from workbench import Bundle, InputError
from workbench.bundle import Options
from workbench.export import export, options, package

CHOSEN = {"max_seq_len": 16, "compress": "int8-tensor"}


@pytest.fixture(scope="module")
def source(exports):
    return exports.checkpoint("zaya", num_hidden_layers=3, num_experts=2)


@pytest.fixture(scope="module")
def bundle(exports, source) -> Bundle:
    return exports.bundle(source, tokens="1,4", **CHOSEN)


def without_names(function) -> list:
    """A function's operations without the names that coremltools numbers through all functions."""
    (block,) = function.block_specializations.values()
    operations = [
        type(op).FromString(op.SerializeToString()) for op in block.operations
    ]
    numbered = "coreml_update_state_"
    for op in operations:
        if op.type == "write_state" or op.outputs[0].name.startswith(numbered):
            del op.attributes["name"]
        for result in op.outputs:
            result.name = numbered if result.name.startswith(numbered) else result.name
        for argument in itertools.chain.from_iterable(
            a.arguments for a in op.inputs.values()
        ):
            if argument.name.startswith(numbered):
                argument.name = numbered
    return operations


def test_each_function_is_the_program_of_its_t_and_weights_are_stored_once(
    exports, source, bundle
):
    fixed = {
        f"t{T}": exports.bundle(source, tokens=str(T), **CHOSEN)
        for T in bundle.manifest.options.shapes
    }
    for i, shard in enumerate(bundle.manifest.shards):
        ours = package.read_package(bundle.package(shard))
        assert dict(shard.functions) == {"t1": 1, "t4": 4}
        assert ours.description.defaultFunctionName == "t1"
        assert set(ours.mlProgram.functions) == set(fixed)
        for name, other in fixed.items():
            theirs = package.read_package(other.package(other.manifest.shards[i]))
            (main,) = theirs.mlProgram.functions.values()
            function = ours.mlProgram.functions[name]
            assert [p.name for p in function.inputs] == [p.name for p in main.inputs]
            assert list(function.inputs) == list(main.inputs)
            assert without_names(function) == without_names(main)
            described = next(f for f in ours.description.functions if f.name == name)
            for part in ("input", "output", "state"):
                assert list(getattr(described, part)) == list(
                    getattr(theirs.description, part)
                )
    weights = [
        {
            f.path: (f.bytes, f.sha256)
            for s in b.manifest.shards
            for f in s.files
            if f.path.endswith(".bin")
        }
        for b in (bundle, *fixed.values())
    ]
    assert weights[0] and weights[0] == weights[1] == weights[2]
    one = {f.path: f.bytes for s in fixed["t4"].manifest.shards for f in s.files}
    two = {f.path: f.bytes for s in bundle.manifest.shards for f in s.files}
    print(
        f"\nbytes: one function {sum(one.values()):,}, two {sum(two.values()):,}; weight files "
        f"{sum(size for size, _ in weights[0].values()):,} in both"
    )


@pytest.mark.matrix(0, wide=1)
@pytest.mark.parametrize(
    "family, changed, chosen, repeated",
    [
        (
            "llama",
            {},
            {"tokens": "1,2,4", "compress": "int8-tensor", "kv_write": "slice"},
            1,
        ),
        (
            "gemma3_text",
            {
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            {
                "tokens": "2,3",
                "compress": "lut4",
                "sliding": "ring",
                "layout": "bc1t",
            },
            2,
        ),
        (
            "zaya",
            {"num_experts": 2, "num_hidden_layers": 2},
            {"tokens": "1,4", "compress": "int4-block32", "moe": "routed"},
            4,
        ),
        (
            "zaya",
            {"num_hidden_layers": 4},
            {"tokens": "1,16", "layers_per_shard": 2},
            1,
        ),
    ],
)
def test_shards_of_several_functions_are_the_bytes_of_their_conversions(
    exports, tmp_path, family, changed, chosen, repeated
):
    source = exports.checkpoint(family, **changed)
    made = export(source, tmp_path / "b", progress=False, max_seq_len=16, **chosen)
    shapes = {shard.template for shard in made.manifest.shards}
    assert len(made.manifest.shards) - len(shapes) == repeated
    assert files(made) == conversions(made, source, tmp_path / "again")
    for shard in made.manifest.shards:
        assert ",".join(map(str, shard.functions.values())) == chosen["tokens"]


def test_coremltools_loads_each_function(bundle):
    models = coremltools().models
    path = str(bundle.package(bundle.manifest.shards[0]))
    for name, T in (("t1", 1), ("t4", 4)):
        model = models.MLModel(path, function_name=name, skip_model_load=True)
        description = model._get_function_description(name)
        shapes = {i.name: list(i.type.multiArrayType.shape) for i in description.input}
        assert shapes["x"][2] == T


def test_tokens_say_what_a_call_may_have():
    for tokens, t_max, shapes in (("1-4", 4, ()), ("4", 4, (4,)), ("1,8", 8, (1, 8))):
        chosen = options(tokens=tokens)
        assert (chosen.t_max, chosen.shapes) == (t_max, shapes)
        assert Options.model_validate_json(chosen.model_dump_json()) == chosen
    assert options(tokens=4) == options(tokens="4")
    assert options(tokens="1,8").functions == {"t1": 1, "t8": 8}
    assert [options(tokens="1,8").width(T) for T in (1, 2, 8)] == [1, 8, 8]
    assert [options(tokens="4").width(T) for T in (1, 4)] == [4, 4]
    assert [options(tokens="1-4").width(T) for T in (1, 3)] == [1, 3]
    sliced = options(tokens="1,4", kv_write="slice")
    assert [sliced.taken(n) for n in (1, 3, 4, 7)] == [1, 1, 4, 4]
    assert [options(tokens="1,8").taken(n) for n in (1, 3, 9)] == [1, 3, 9]


@pytest.mark.parametrize(
    "tokens", ["4,1", "1,1", "0,4", "0", "2-4", "1-", "", "1, 4", [1, 4], "1,1024"]
)
def test_tokens_that_mean_nothing_are_refused(tokens):
    with pytest.raises(InputError, match="tokens"):
        options(tokens=tokens)


def test_functions_share_a_weight_file_or_are_refused(exports, tmp_path):
    checkpoint = exports.checkpoint("llama", **tiny.WIDTH_1)
    with (
        pytest.warns(UserWarning, match="width 2"),
        pytest.raises(InputError, match="so small.*with --tokens"),
    ):
        export(checkpoint, tmp_path / "b", progress=False, max_seq_len=8, tokens="1,2")
    assert not list(tmp_path.iterdir())
