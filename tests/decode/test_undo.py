"""Tokens that are undone leave nothing behind, in whatever kind of state; `make prove` runs more of
the programs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import programs
import pytest
import tiny

from workbench import Decoder, InputError
from workbench.check.undo import undo_gate
from workbench.decode import copy_state
from workbench.export import shards
from workbench.prompt_cache import Store

FAMILIES = "gemma3_text", "lfm2", "zaya"  # rings, tails, both tails of CCA
SAMPLE = 3  # programs
GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request, exports):
    """A decoder of three sequences that can undo."""
    return exports.decoder(
        exports.checkpoint(request.param), **programs.options(request.param, 0)
    )


def ids(decoder, count: int, seed: int = 0) -> list[list[int]]:
    """Tokens of each sequence."""
    return np.reshape(
        tiny.prompt(decoder.manifest.dims.V, 3 * count, seed), (3, count)
    ).tolist()


@pytest.mark.parametrize("seed", range(SAMPLE))
def test_a_random_program_ends_as_the_tokens_that_count_alone(decoder, seed):
    assert not programs.fault_of(decoder, seed)


def test_a_program_notices_an_undo_that_forgets_the_tail(exports):
    decoder = exports.decoder(exports.checkpoint("lfm2"), **programs.options("lfm2", 0))
    host = decoder.host.inputs
    decoder.host.inputs = lambda offsets, counts, T, *_: host(offsets, counts, T)
    assert any(programs.fault_of(decoder, seed) for seed in range(SAMPLE))


@pytest.mark.matrix(2)
@pytest.mark.filterwarnings("ignore:states of width 80")
@pytest.mark.parametrize("pair", [{}, {"state_pair": True}], ids=["one", "pair"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid"])
def test_a_matrix_goes_back_to_the_first_token_of_the_last_call(exports, family, pair):
    decoder = exports.decoder(
        exports.checkpoint(family), **programs.options(family, 0) | pair
    )
    decoder.begin()
    decoder.prefill(ids(decoder, 18))  # in calls of 4: the last has two tokens
    for trim in (decoder.snapshot().trim, decoder.trim):
        with pytest.raises(InputError, match="3 to undo; needs at most 2"):
            trim(3)
    assert decoder.trim(1) == 1 and decoder.snapshot().floor == 16
    assert not any(programs.fault_of(decoder, seed) for seed in range(SAMPLE))
    assert undo_gate(decoder).verdict == "GREEN"


def test_programs_that_have_run_are_not_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(programs, "SHAPES", programs.SHAPES[:1])
    monkeypatch.setattr(
        programs, "fault_of", lambda decoder, seed: "" if seed else "a fault"
    )
    for _ in range(2):
        assert programs.prove(["llama"], 2, tmp_path / "programs.jsonl") == 1
        assert (
            "llama: 1 of 2 programs as their tokens alone llama/0"
            in capsys.readouterr().out
        )
    assert len((tmp_path / "programs.jsonl").read_text().splitlines()) == 2


def test_a_call_is_undone_and_no_more(decoder):
    """Further back than t_max tokens no tail and no ring goes; what is refused changes nothing."""
    decoder.begin()
    decoder.prefill(ids(decoder, 17))
    before = decoder.snapshot(1)
    assert before.floor == 13 and before.trim(4).floor == 13
    for trim in (before.trim, lambda count: decoder.trim(count, 1)):
        with pytest.raises(InputError, match="5 to undo; needs at most 4"):
            trim(5)
    assert not programs.differing(decoder.snapshot(1), before)
    assert decoder.trim(3, 1) == 3 and decoder.offsets.tolist() == [17, 14, 17]
    assert not programs.differing(decoder.snapshot(1), before.trim(3))
    with pytest.raises(InputError, match="2 to undo; needs at most 1"):
        decoder.trim(2, 1)
    decoder.decode_one_token([5, 5, 5])
    assert decoder.floors.tolist() == [14, 13, 14]


def test_what_was_undone_stays_undone_in_a_snapshot_that_is_restored(decoder):
    prompt = ids(decoder, 14)
    decoder.begin()
    decoder.prefill(prompt)
    decoder.trim(2)
    decoder.begin([decoder.snapshot(0).trim(1), None, None])
    assert decoder.floors.tolist() == [10, 0, 0]
    after = decoder.prefill([[3, 1], [], []])[0]
    decoder.begin()
    assert (
        tiny.relative(after, decoder.prefill([prompt[0][:11] + [3, 1], [], []])[0])
        < 1e-5
    )


def test_a_stored_snapshot_is_used_up_to_its_depth(decoder, tmp_path):
    prompt = ids(decoder, 16)[0]
    decoder.begin()
    decoder.prefill([prompt, [], []])
    decoder.trim(1)
    kept, snapshot = Store(tmp_path, decoder, block=4), decoder.snapshot(0)
    kept.save("chat", snapshot)
    kept.cool()
    hit = kept.find(prompt[:15])  # its last token is run again
    assert (hit.snapshot.offset, hit.snapshot.floor, hit.rest) == (
        14,
        12,
        prompt[14:15],
    )
    assert not programs.differing(kept.load("chat"), snapshot)
    assert kept.find([*prompt[:12], 0, 0]).snapshot.offset == 12
    assert kept.find([*prompt[:11], 0, 0]) is None
    path = kept.save("deeper", replace(snapshot, floor=0)).path  # than its states go
    with pytest.raises(InputError, match="floor '0'"):
        Store(tmp_path, decoder).load(path.name.partition(".")[0])


@pytest.mark.parametrize("family", ["lfm2", "zaya"])
def test_a_sequence_moves_between_bundles_with_and_without_undo(exports, family):
    checkpoint, chosen = exports.checkpoint(family), programs.options(family, 0)
    undoing = exports.decoder(checkpoint, **chosen)
    plain = exports.decoder(checkpoint, **chosen | {"undo": False})
    prompt, more = ids(undoing, 9), ids(undoing, 2, 1)
    undoing.begin()
    undoing.prefill(prompt)
    undoing.trim(2, 1)
    copy_state(undoing, plain)
    copy_state(plain, undoing)
    assert undoing.floors.tolist() == plain.floors.tolist() == [9, 7, 9]
    found = [each.prefill(more) for each in (undoing, plain)]
    plain.begin()
    alone = plain.prefill([prompt[0], prompt[1][:7], prompt[2]])
    alone = plain.prefill(more)
    assert all(tiny.relative(each, alone) < 1e-5 for each in found)
    with pytest.raises(
        InputError, match="1 to undo; needs at most 0: .*export with --undo"
    ):
        plain.trim(1)


def test_the_guide_s_speculative_decoding_gives_the_tokens_of_decoding_alone(exports):
    checkpoint = exports.checkpoint("lfm2")
    bundle = exports.bundle(checkpoint, max_seq_len=96, undo=True)
    decoder, prompt = Decoder(bundle), tiny.prompt(157, 9)
    alone = decoder.generate(prompt, 72, stop=())

    def draft(ids):  # right but for every fifth token
        rest = list(enumerate(alone))[len(ids) - len(prompt) :]
        return [token if i % 5 else (token + 1) % 157 for i, token in rest]

    section = GUIDE.read_text().partition("Speculative decoding")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    names = {"draft": draft, "prompt": prompt}
    exec(code.replace("build/lfm2", str(bundle.root)), names)
    assert (
        names["tokens"] == alone[: len(names["tokens"])] and len(names["tokens"]) >= 64
    )
    assert names["decoder"].ids[0] == prompt + names["tokens"]


def test_undo_leaves_room_behind_every_tail(exports):
    from workbench.models import family_of
    from workbench.models.checkpoint import Checkpoint

    source = Checkpoint(exports.checkpoint("zaya"))
    plan = family_of(source.config).plan(source.config)
    options = exports.bundle(
        source.path, **programs.options("zaya", 0)
    ).manifest.options
    (spec, *_) = shards.specs(plan, options)
    assert spec.inputs["tail_select"] == [3, 6, "T"] and spec.inputs["tail_keep"] == [
        3,
        6,
        6,
    ]
    assert spec.inputs["tail_first"] == [3, 2, 6]
    assert spec.buffers["layers_0_conv_state"] == [3, 6, 6 * 32]
    assert spec.buffers["layers_0_v_delayed_state"] == [3, 5, 32]


def test_the_gate_sees_undo_on_sound_bundles(decoder):
    gate = undo_gate(decoder)
    assert gate.verdict == "GREEN" and "tokens undone" in gate.reason
