"""The option `tokens`: its meaning, and shards with a function for each of several T."""

import pytest
from refusal import refused

from miltorch.coremltools_import import coremltools
from workbench.bundle import Options
from workbench.exporter import make_options


def test_coremltools_loads_each_function_and_leaves_the_bytes_as_they_were(exports):
    bundle = exports.bundle("llama", tokens="1,4")
    models = coremltools().models
    path = str(bundle.package(bundle.manifest.shards[0]))
    for name, T in (("t1", 1), ("t4", 4)):
        model = models.MLModel(path, function_name=name, skip_model_load=True)
        description = model._get_function_description(name)
        shapes = {i.name: list(i.type.multiArrayType.shape) for i in description.input}
        assert shapes["x"][2] == T
    bundle.verify()


def test_tokens_say_what_a_call_may_have():
    for tokens, t_max, shapes in (("1-4", 4, ()), ("4", 4, (4,)), ("1,8", 8, (1, 8))):
        chosen = make_options(tokens=tokens)
        assert (chosen.t_max, chosen.fixed_sizes) == (t_max, shapes)
        assert Options.model_validate_json(chosen.model_dump_json()) == chosen
    assert make_options(tokens=4) == make_options(tokens="4")
    assert make_options(tokens="1,8").tiling.functions == {"t1": 1, "t8": 8}
    # a call of another number of tokens has dummies or, where it cannot, is split
    assert [make_options(tokens="1,8").tiling.width(T) for T in (1, 2, 8)] == [1, 8, 8]
    sliced = make_options(tokens="1,4", kv_write="slice")
    assert [sliced.tiling.call_size(n) for n in (1, 3, 4, 7)] == [1, 1, 4, 4]


@pytest.mark.parametrize(
    "tokens", ["4,1", "1,1", "0,4", "0", "2-4", "1-", "", "1, 4", [1, 4], "1,1024"]
)
def test_tokens_that_mean_nothing_are_refused(tokens):
    with refused("tokens"):
        make_options(tokens=tokens)
