"""Nothing that looks into a decoder stays behind in it, however the looking ends: hooks, the
literal graph, sequences."""

import numpy as np
import pytest
from tiny import prompt

from miltorch import Executable
from workbench import Decoder, InputError
from workbench.bundle.names import EXPERT_IN
from workbench.check import checklist, fidelity, golden, validate
from workbench.explain import trace
from workbench.models.checkpoint import Checkpoint
from workbench.studies import cache_reuse
from workbench.sweep import timing

IDS = prompt(97, 7)


@pytest.fixture(scope="module")
def looked_into(exports):
    """A bundle with four layers in its shard, and a golden that validation puts in their places."""
    checkpoint = exports.checkpoint("llama", num_hidden_layers=4)
    bundle = exports.bundle(checkpoint, layers_per_shard=4, t_max=3)
    return bundle, golden.make_golden(Checkpoint(checkpoint), prompt(97, 6, seed=1))


LOOKS = {
    "validation": lambda decoder, reference: validate.validate(decoder, reference),
    "pass": lambda decoder, reference: fidelity.run_golden(decoder, reference, 2),
    "checklist": lambda decoder, reference: checklist.check_bundle(
        decoder, golden=reference
    ),
    "probe": lambda decoder, _: checklist.write_probe(
        decoder, points=[(1, 0), (2, 1), (3, 2)]
    ),
    "trace": lambda decoder, _: trace.trace_decoder(decoder, IDS),
    "profile": lambda decoder, _: timing.profile(decoder, depth=2, calls=2),
}


def attributes(decoder) -> list:
    """What of a decoder and its models a look may have replaced."""
    models = [*decoder.layers, *decoder.heads, *decoder.experts.models.values()]
    return [
        decoder.fast,
        decoder.experts.load,
        *((model.hook, model.fast) for model in models),
    ]


@pytest.mark.matrix(6)
@pytest.mark.parametrize("calls", [None, 1, 3])
@pytest.mark.parametrize("name", LOOKS)
def test_a_look_leaves_the_decoder_as_it_was(looked_into, monkeypatch, name, calls):
    """Ended by Jupyter's stop button after some calls of a shard, or by itself."""
    bundle, reference = looked_into
    decoder, other = (Decoder(bundle, "portable", fast=True) for _ in range(2))
    tokens = decoder.generate(IDS, 6, stop=())
    for each in (decoder, other):
        each.begin()
        each.prefill(IDS)
    before, run, done = attributes(decoder), Executable.run_steps, []

    def stopped(self, *arguments):
        outputs = run(self, *arguments)
        done.append(self)
        if len(done) == calls:
            raise KeyboardInterrupt
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(Executable, "run_steps", stopped)
        if calls is None:
            LOOKS[name](decoder, reference)
        else:
            with pytest.raises(KeyboardInterrupt):
                LOOKS[name](decoder, reference)
    assert done and attributes(decoder) == before
    for token in (5, 42):  # the sequence that ran goes on
        assert np.array_equal(
            decoder.decode_one_token(token), other.decode_one_token(token)
        )
    assert decoder.generate(IDS, 6, stop=()) == tokens


def test_a_hook_is_set_in_a_with_statement_alone(looked_into):
    decoder, seen = Decoder(looked_into[0], "portable", fast=True), []
    model = decoder.layers[0]
    with pytest.raises(AttributeError):
        model.hook = print
    with (
        pytest.raises(KeyboardInterrupt),
        decoder.hooked(lambda shard: lambda op, outputs: seen.append(shard.name)),
    ):
        with model.hooked(lambda op, outputs: None):
            decoder.prefill(IDS)
            assert set(seen) == {m.shard.name for m in decoder.heads}
        decoder.prefill(IDS)
        assert set(seen) == {m.shard.name for m in (*decoder.layers, *decoder.heads)}
        raise KeyboardInterrupt
    assert not any(m.hook for m in (*decoder.layers, *decoder.heads))


@pytest.mark.shim
def test_core_ml_has_no_hooks_and_says_so(looked_into):
    from miltorch import shim

    shim.install()
    try:
        decoder = Decoder(looked_into[0], "coreml")
        for look in (LOOKS["trace"], LOOKS["profile"]):
            with pytest.raises(InputError, match="runtime coreml.*portable"):
                look(decoder, None)
        fidelity.run_golden(decoder, looked_into[1], 2)  # sees what Core ML shows
    finally:
        shim.uninstall()


def test_experts_that_load_within_are_hooked_and_literal_too_and_both_end(exports):
    bundle = exports.bundle(
        exports.checkpoint("zaya", num_hidden_layers=2, num_experts=2),
        moe="routed",
        t_max=2,
    )
    decoder, seen = Decoder(bundle, "portable", fast=True), set()
    load, (late, later) = decoder.experts.load, list(decoder.experts.shards)[:2]

    def call(key):
        model = decoder.experts.model(*key)
        shapes = {
            name: [1 if n == "T" else n for n in shape]
            for name, shape in model.shard.inputs.items()
        }
        assert EXPERT_IN in shapes
        model.predict(
            {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        )

    with decoder.set_aside():
        with decoder.hooked(lambda shard: lambda op, outputs: seen.add(shard.name)):
            call(late)
        call(later)
        assert not any(model.fast for model in decoder.experts.models.values())
    assert seen == {decoder.experts.shards[late].name} and decoder.experts.load is load
    assert all(
        model.fast and not model.hook for model in decoder.experts.models.values()
    )


def test_a_stopped_cell_of_the_reuse_matrix_leaves_no_method_replaced(
    looked_into, monkeypatch
):
    decoder = Decoder(looked_into[0], "portable", fast=True)
    methods = [dict(vars(owner)).keys() for owner in (decoder, decoder.layers[0])]

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "generate", stop)
        with pytest.raises(KeyboardInterrupt), cache_reuse.count_calls(decoder):
            cache_reuse._decode_cell(decoder, [IDS], [2], None, streaming=False)
    assert [
        dict(vars(owner)).keys() for owner in (decoder, decoder.layers[0])
    ] == methods
    with cache_reuse.count_calls(decoder) as calls:
        records = cache_reuse._decode_cell(decoder, [IDS], [2], None, streaming=False)
    assert len(records[0]) == 2 and len(calls) == -(-len(IDS) // 3) + 1
