"""Packages of several functions: each computes what a package of that one T does, over weights that
are stored once."""

import pytest
import tiny
from conversions import conversions, files

from miltorch.quiet import coremltools
from workbench import Bundle, InputError
from workbench.bundle import Options
from workbench.export import export, options

CHOSEN = {"max_seq_len": 16, "compress": "int8-tensor"}


@pytest.fixture(scope="module")
def source(exports):
    return exports.checkpoint("zaya", num_hidden_layers=3, num_experts=2)


@pytest.fixture(scope="module")
def bundle(exports, source) -> Bundle:
    return exports.bundle(source, tokens="1,4", **CHOSEN)


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
            {"tokens": "2,3", "compress": "lut4", "sliding": "ring", "layout": "bc1t"},
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
