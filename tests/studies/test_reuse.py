"""The cache-reuse matrix is GREEN on every trained checkpoint, and every bug seen in the wild,
planted, turns it RED."""

import numpy as np
import pytest
import trained
from faults_reuse import FAULTS, ZAYA

from workbench import InputError
from workbench.check.gates import NOT_RUN, RED
from workbench.prompt_cache import formats
from workbench.studies import cache_bug, cache_reuse


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", trained.NAMES)
def test_the_matrix_is_green(name, exports):
    lengths = {"tiny-gemma3": (90,), "tiny-zaya": (33,), "tiny-qwen2": (31,)}.get(
        name, (31, 64)
    )
    found = cache_reuse.check_reuse(
        trained.decoder(exports, name),
        trained.decoder(exports, name, trained.BATCH),
        lengths=lengths,
        max_new=4,
    )
    assert found.verdict == "GREEN", [c for c in found.cells if c.verdict == RED]
    ran = [c for c in found.cells if c.verdict != NOT_RUN]
    assert (
        len(ran) == 20 * len(lengths) and sum(c.batch > 1 for c in ran) == len(ran) / 2
    )
    assert {c.reason for c in found.cells if c.verdict == NOT_RUN} == {
        "a cold run restores nothing"
    }
    assert all(c.tokens == ([4] if c.batch == 1 else [2, 4, 4]) for c in ran)


def test_the_matrix_is_green_in_fp16_arithmetic_and_names_what_does_not_fit(exports):
    pair = (
        trained.decoder(exports, "tiny-llama", b, "declared")
        for b in (1, trained.BATCH)
    )
    found = cache_reuse.check_reuse(*pair, lengths=(32, trained.S - 3), max_new=4)
    assert found.verdict == "GREEN"
    assert all(
        "do not fit" in c.reason or c.format == "q4"
        for c in found.cells
        if c.verdict == NOT_RUN
    )
    assert {c.context for c in found.cells if c.verdict == NOT_RUN} == {
        32,
        trained.S - 3,
    }


def test_a_cache_that_q4_leaves_in_fp16_is_so_in_the_cold_run_too(exports, monkeypatch):
    decoder = trained.decoder(exports, "tiny-llama")
    decoder.begin()
    decoder.prefill(list(range(20)))
    errors = formats.encode_rows(decoder.snapshot(), "q4").errors
    monkeypatch.setattr(formats, "OUTLIER", float(np.median(list(errors.values()))))
    found = cache_reuse.check_reuse(decoder, lengths=(20, 33), max_new=4)
    assert found.verdict == "GREEN", [c.reason for c in found.cells if c.verdict == RED]


def test_green_needs_every_temperature_on_both_paths(exports):
    decoder = trained.decoder(exports, "tiny-llama")
    assert cache_reuse.check_reuse(decoder, lengths=(trained.S,)).verdict == NOT_RUN


def test_contexts_lie_around_the_edges_of_blocks():
    assert cache_reuse.contexts(256) == [255, 256, 257, 511, 512, 513]


def test_bundles_that_differ_in_more_than_their_batch_are_refused(exports):
    decoder = trained.decoder(exports, "tiny-llama")
    with pytest.raises(InputError, match="differs in --batch alone"):
        cache_reuse.check_reuse(
            decoder, trained.decoder(exports, "tiny-qwen2", trained.BATCH)
        )
    with pytest.raises(InputError, match="one of batch 1"):
        cache_reuse.check_reuse(trained.decoder(exports, "tiny-llama", trained.BATCH))


@pytest.mark.matrix(8)
@pytest.mark.parametrize("name", [*FAULTS, *cache_bug.HYPOTHESES])
def test_every_fault_turns_the_matrix_red(name, exports, monkeypatch):
    checkpoint = "tiny-zaya" if name in ZAYA else "tiny-llama"
    pair = [trained.decoder(exports, checkpoint, batch) for batch in (1, trained.BATCH)]
    with cache_bug.planted_hypothesis(
        name if name in cache_bug.HYPOTHESES else None, *pair
    ):
        if name in FAULTS:
            FAULTS[name](monkeypatch, *pair)
        assert cache_reuse.check_reuse(*pair, lengths=(20,), max_new=4).verdict == RED


def test_each_hypothesis_fails_in_its_own_pattern(exports, monkeypatch):
    """Two requests on one session. Unharmed, all is well; an aliased entry fails hot and deferred
    alone; groups along tokens fail in q4 alone; a buffer without room and an unaligned view do not
    care for the temperature."""
    monkeypatch.setattr(cache_bug, "STEP", 16)
    pair = [
        trained.decoder(exports, "tiny-llama", batch, "declared")
        for batch in (1, trained.BATCH)
    ]
    rows = cache_bug.scenario(*pair, (33, 40), new=2)
    failed = {
        n: set(zip(f["format"], f["cache"], f["path"], f["context"], strict=True))
        for n, f in rows[~rows["ok"]].groupby("hypothesis")
    }
    every = set(
        zip(rows["format"], rows["cache"], rows["path"], rows["context"], strict=True)
    )
    assert failed.keys() == cache_bug.HYPOTHESES.keys()
    assert (
        failed["aliased_entry"]
        == failed["invalidated"]
        == {c for c in every if c[1:3] == ("hot", "stream")}
    )
    assert failed["groups_along_tokens"] == {c for c in every if c[0] == "q4"}
    assert failed["dropped_tokens"] == every
    assert failed["strided_view"] == {c for c in every if (c[3] - 1) % 16}
    # four bits written back twice lose a little on any path
    lost = rows[~rows["entry_ok"] & (rows["format"] == "fp16")]
    assert set(lost["hypothesis"]) == {"invalidated"} and set(lost["path"]) == {
        "stream"
    }
    table = cache_bug.patterns(rows)
    assert (
        set(table[table["hypothesis"] == "none"]["result"]) == {"ok"}
        and table["hypothesis"][0] == "the report"
    )
    assert (table[table["hypothesis"] == "the report"]["result"] == "FAIL").sum() == 5
    assert "No hypothesis gives the report's pattern" in cache_bug.cache_bug_conclusion(
        rows
    )
    assert [g.verdict for g in cache_bug.cache_bug_gates(rows)] == ["GREEN", "GREEN"]
