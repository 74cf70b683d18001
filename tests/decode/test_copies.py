"""Layers that keep a copy of an earlier layer's cache: each sequence of a batch is, bit for bit,
itself decoded alone; snapshots hold the rows once."""

import numpy as np
import pytest
import tiny
from circle import wide
from refusal import refused

from workbench import Decoder
from workbench.decode import Sequences, store

S, T_MAX = 24, 4
# the rows of sharing layers are in another program than those that they copy
SIZES = {"num_hidden_layers": 4, "layer_types": tiny.SLIDING[:2] * 2}
OPTIONS = {"max_seq_len": S, "sliding": "ring", "layers_per_shard": 2}
CALLS = [4, 3, 1, 4, 2, 4, 1, 4, 1]
OWNERS, COPIES = range(2), {2: 0, 3: 1}
pytestmark = pytest.mark.slow("exports a bundle of several sequences")


@pytest.fixture(scope="module")
def checkpoint(exports):
    return exports.checkpoint("gemma4_text", **SIZES)


@pytest.fixture(scope="module")
def bundle(exports, checkpoint):
    return exports.bundle(checkpoint, batch=2, **OPTIONS)


def run(seqs: Sequences, chunk: list[list[int]], T: int) -> np.ndarray:
    """One call of T columns; returns the logits [2, T, V]."""
    hidden, _ = seqs.advance(chunk, min_columns=T)
    return seqs.decoder.logits(hidden)


def decoded_alone(decoder: Decoder, ids: list[int], seq: int):
    """Logits of every token of one sequence whose neighbour waits, and its states at the end."""
    seqs, logits, start = decoder.new_sequences(), [], 0
    for T in CALLS:
        chunk: list[list[int]] = [[], []]
        chunk[seq] = ids[start : start + T]
        logits.append(run(seqs, chunk, T)[seq])
        start += T
    return np.concatenate(logits), states_of(seqs, seq)


def states_of(seqs: Sequences, seq: int) -> dict[str, np.ndarray]:
    return {name: state.read(name)[seq] for state, name in seqs.named_states}


@pytest.mark.parametrize("precision", ["exact", wide("declared")])
def test_an_interrupted_batch_equals_each_sequence_alone_up_to_the_last_row(
    bundle, tmp_path, precision
):
    """Tokens are taken back, and a sequence is stored, overwritten and restored, before and past
    the window of its rings."""
    decoder = Decoder(bundle, "portable", precision)
    V = decoder.manifest.dims.V
    ids = [tiny.prompt(V, S, seed) for seed in (1, 2)]
    junk = tiny.prompt(V, T_MAX, 3)
    seqs, start = decoder.new_sequences(), 0
    logits: list[list[np.ndarray]] = [[], []]
    for number, T in enumerate(CALLS):
        chunk = [row[start : start + T] for row in ids]
        for seq, values in enumerate(run(seqs, chunk, T)):
            logits[seq].append(values)
        start += T
        if number in (1, 5):  # 7 and 18 tokens
            store.save(tmp_path, "first", seqs.snapshot(0))
            run(seqs, [junk, []], T_MAX)
            seqs.put(0, store.load(tmp_path, "first"))
        if number in (2, 6):
            run(seqs, [[], junk[:3]], 3)
            assert seqs.trim(3, seq=1) == 3
    assert start == S
    for seq, row in enumerate(ids):
        expected, states = decoded_alone(decoder, row, seq)
        assert np.array_equal(np.concatenate(logits[seq]), expected)
        actual = states_of(seqs, seq)
        assert actual.keys() == states.keys()
        for name, value in states.items():
            assert value.any() and np.array_equal(actual[name], value), name
        for copy, owner in COPIES.items():
            for leaf in ("k_state", "v_state"):
                assert np.array_equal(
                    actual[f"layers.{copy}.{leaf}"], actual[f"layers.{owner}.{leaf}"]
                )
    with refused(f"below max_seq_len = {S}"):
        seqs.advance([[1], []])


def test_a_snapshot_holds_the_rows_of_owners_and_continues_in_other_calls(
    exports, checkpoint, bundle, tmp_path
):
    decoder = Decoder(bundle, "portable", "exact")
    prompt = tiny.prompt(decoder.manifest.dims.V, 13, 4)
    expected = decoder.generate([prompt, []], 9, stop=())[0]
    decoder.begin()
    decoder.prefill([prompt[:-1], []], tile=3)
    snapshot = decoder.snapshot(0)
    assert {*snapshot.states} == {
        f"layers.{i}.{leaf}" for i in OWNERS for leaf in ("k_state", "v_state")
    }
    file = store.save(tmp_path, "chat", snapshot)
    # what the rows and the ids take, behind the header and its length
    size = int.from_bytes(file.read_bytes()[:8], "little")
    arrays = [np.array(snapshot.ids, np.int32), *snapshot.states.values()]
    assert file.stat().st_size == 8 + size + sum(array.nbytes for array in arrays)
    stored = store.load(tmp_path, "chat")
    # one sequence, in calls of one token; the other place of a batch, in calls of four
    alone = exports.decoder(checkpoint, **OPTIONS)
    assert alone.generate(prompt[-1:], 9, after=stored, stop=()) == expected
    trimmed = stored.trim(3)
    decoder.begin([None, trimmed])
    decoder.prefill([[], prompt[-4:-1]], tile=T_MAX)
    continued = decoder.generate(
        [[], prompt[-1:]], 9, after=[None, decoder.snapshot(1)], stop=()
    )
    assert continued[1] == expected


def test_a_copy_that_a_restore_loses_changes_the_tokens(bundle):
    """Planted: the sharing layers' rows are lost."""
    decoder = Decoder(bundle, "portable", "exact")
    prompt = tiny.prompt(decoder.manifest.dims.V, 13, 4)
    sound = decoder.prefill([prompt, []])[0]
    decoder.begin()
    decoder.prefill([prompt[:-1], []])
    decoder.begin([decoder.snapshot(0), None])
    for state, name in decoder.seqs.named_states:
        if int(name.split(".")[1]) in COPIES:
            state.write(name, np.zeros_like(state.read(name)))
    lost = decoder.prefill([prompt[-1:], []])[0]
    assert tiny.relative(lost, sound) > 1e-3
