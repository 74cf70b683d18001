"""Shards in one compiled call give what they give one by one, bit for bit."""

import weakref

import numpy as np
import pytest

from workbench import Decoder

BUNDLES = [
    ("llama", {"kv_write": "mask"}),
    ("llama", {"layers_per_shard": 2, "batch": 3}),
    ("qwen2", {"compress": "int8-channel", "layout": "bc1t", "batch": 2}),
    ("gemma3_text", {"sliding": "ring", "undo": 1}),
    ("gemma3_text", {"states": "packed"}),
    ("zaya", {"batch": 2, "undo": 1}),
    ("lfm2", {"undo": 1}),
    ("qwen3_5_text", {"undo": 1}),
]


class Apart:
    """In place of a chain: every shard runs by itself."""

    def run(self, inputs, states):
        return None


def decoders(bundle) -> tuple[Decoder, Decoder]:
    """One that runs shards together, and one that does not."""
    together, apart = (Decoder(bundle, "portable", fast=True) for _ in range(2))
    apart.chain = apart.head_chain = Apart()
    return together, apart


def states(decoder) -> list[np.ndarray]:
    return [state.read(name) for state, name in decoder.named_states]


def step(decoder, ids) -> np.ndarray:
    return decoder.logits(decoder.advance(ids, len(ids[0])))


@pytest.fixture
def llama(exports):
    decoder = Decoder(
        exports.bundle(exports.checkpoint("llama")), "portable", fast=True
    )
    decoder.prefill([1, 2, 3], tile=1)
    return decoder


@pytest.mark.matrix(4)
@pytest.mark.filterwarnings("ignore:states of width")
@pytest.mark.parametrize("family, options", BUNDLES, ids=str)
def test_shards_together_are_the_shards_one_by_one(exports, family, options):
    bundle = exports.bundle(exports.checkpoint(family), t_max=8, **options)
    B, V = bundle.manifest.options.batch, bundle.manifest.dims.V
    pair, rng = decoders(bundle), np.random.default_rng(0)
    for T in (1, 2, 1, 2, 1):
        ids = rng.integers(0, V, (B, T)).tolist()
        np.testing.assert_array_equal(*(step(decoder, ids) for decoder in pair))
    for decoder in pair:
        snapshot = decoder.snapshot()
        decoder.trim(1)
        decoder.begin([snapshot] * B)
        decoder.decode_one_token([1] * B)
        decoder.trim(1, B - 1)
    ids = rng.integers(0, V, (B, 2)).tolist()
    np.testing.assert_array_equal(*(step(decoder, ids) for decoder in pair))
    for one, other in zip(*map(states, pair), strict=True):
        np.testing.assert_array_equal(one, other)
    assert [len(chain.chains) for chain in (pair[0].chain, pair[0].head_chain)] == [
        2,
        2,
    ]


def test_logits_of_a_call_outlive_the_next_one(llama):
    first = step(llama, [[1]])
    copy = first.copy()
    step(llama, [[2]])
    np.testing.assert_array_equal(first, copy)


def test_every_shard_s_time_is_measured(llama):
    llama.decode_one_token(1)
    times = llama.times
    assert llama.chain.chains and len(times.layers) == len(llama.layers)
    assert len(times.cpu_ms) == len(times.native_ms) == len(llama.layers) + 1
    assert min(times.layers) > 0 and min(times.cpu_ms) > 0
    assert sum(times.layers) + times.head < times.total
    assert set(times.native_ms) == {None}


def test_a_hook_runs_shards_one_by_one(llama):
    shards = []
    with llama.hooked(lambda shard: lambda op, outputs: shards.append(shard.name)):
        llama.decode_one_token(1)
    assert {model.shard.name for model in llama.layers + llama.heads} == set(shards)


def test_a_write_mask_that_is_not_one_hot_runs_shards_one_by_one(exports):
    results = []
    for decoder in decoders(exports.bundle(exports.checkpoint("llama"))):
        decoder.prefill([1, 2, 3], tile=1)
        inputs = decoder.host.inputs

        def blurred(*arguments, inputs=inputs):
            io = inputs(*arguments)
            io["kv_write_mask"][0, 0, 3:5] = 0.5
            return io

        decoder.host.inputs = blurred
        results.append([step(decoder, [[1]]), *states(decoder)])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_states_that_are_dropped_give_their_memory_back(llama):
    llama.decode_one_token(1)
    cells = [cell for state in llama.states for cell in state.raw.cells.values()]
    values = [weakref.ref(cell.value) for cell in cells]
    del cells
    llama.begin()
    assert not any(value() is not None for value in values)


def test_shards_around_experts_run_one_by_one(exports):
    bundle = exports.bundle(exports.checkpoint("zaya"), moe="routed")
    decoder = Decoder(bundle, "portable", fast=True)
    decoder.prefill([1, 2, 3], tile=1)
    decoder.decode_one_token(4)
    assert decoder.head_chain.chains and not decoder.chain.chains
