"""A prompt that cannot be decoded to its end, and a file that cannot be written, are refused
before anything is decoded; calls that compile are in no figure."""

import time
import weakref

import numpy as np
import pytest
from refusal import refused

from workbench.decode import Sequences
from workbench.decode.timed import timed_generation

# the bundle that most tests share has as many rows, and refuses a position past them as any other
S, IDS = 32, [3, 14, 15, 9, 2, 6]


@pytest.fixture
def decoder(exports):
    return exports.decoder("llama", max_seq_len=S)


@pytest.mark.parametrize(
    "max_new, name, message",
    [
        (S - len(IDS) + 1, "logits.npy", "position 32; needs .* max_seq_len = 32"),
        (2, "/proc/logits.npy", "a folder that can be written"),
        (2, ".", "a folder"),
        (-1, None, "new tokens: found -1"),
    ],
)
def test_a_generation_that_cannot_be_finished_is_refused_before_a_token_is_decoded(
    decoder, tmp_path, monkeypatch, max_new, name, message
):
    monkeypatch.setattr(
        Sequences, "advance", lambda *_: pytest.fail("a token is decoded")
    )
    with refused(message):
        timed_generation(decoder, IDS, max_new, tmp_path / name if name else None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("max_new", [0, S - len(IDS)])
def test_logits_are_written_under_exactly_the_name_given(decoder, tmp_path, max_new):
    timed_generation(decoder, IDS, max_new, tmp_path / "logits")
    assert [path.name for path in tmp_path.iterdir()] == ["logits"]
    assert np.load(tmp_path / "logits").shape == (max_new + 1, 97)


def test_without_a_file_no_logits_are_kept_and_calls_are_those_that_ran(
    exports, monkeypatch
):
    """A slice write takes no dummy columns: two calls of 4 tokens and 3 of one."""
    decoder = exports.decoder("llama", tokens="1,4", kv_write="slice")
    stream, seen = decoder.stream, []

    def watched(*arguments, **more):
        for record in stream(*arguments, **more):
            assert sum(ref() is not None for ref in seen) <= 1
            seen.append(weakref.ref(record.logits))
            yield record

    monkeypatch.setattr(decoder, "stream", watched)
    assert timed_generation(decoder, [*IDS, *IDS[1:]], 4)["prefill"]["calls"] == 5
    assert len(seen) == 4


def test_calls_that_compile_are_in_no_figure_and_are_counted(decoder, monkeypatch):
    """The first call of each width takes 300 ms longer, as one that compiles."""
    advance, compiled = Sequences.advance, set()

    def compiling(seqs, chunk, *rest, **more):
        width = len(chunk[0])
        if width not in compiled:
            compiled.add(width)
            time.sleep(0.3)
        return advance(seqs, chunk, *rest, **more)

    monkeypatch.setattr(Sequences, "advance", compiling)
    result = timed_generation(decoder, IDS, 4)
    prefill, decode = result["prefill"], result["decode"]
    assert prefill["ms"] < 300 and prefill["first_calls"] == 2  # of 4 and of 2 tokens
    assert prefill["first_calls_ms"] >= 600
    assert prefill["tokens_per_s"] == pytest.approx(len(IDS) / prefill["ms"] * 1e3)
    first, *later = decode["samples_ms"]
    assert first >= 300 > max(later) and decode["first_calls"] == 1
    # tokens over time, not the inverse of a median
    assert decode["tokens_per_s"] == pytest.approx(1e3 * len(later) / sum(later))
