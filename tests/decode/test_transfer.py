"""A prompt runs in one bundle and its tokens are decoded in another: the same tokens, the same
states, and gates that see every way in which the copy can go wrong."""

import json
from functools import partial

import numpy as np
import pytest
import tiny
from typer.testing import CliRunner

from workbench import Decoder, InputError
from workbench.check import handover
from workbench.cli.app import app
from workbench.decode import prefill_by, transfer

PROMPT, MORE = 13, 6


@pytest.fixture(scope="module")
def pair(exports, tiny_llama):
    """A prefill bundle of wide calls and a decode bundle of T = 1, unlike in all that may differ
    but their weights."""
    prefill = exports.bundle(
        tiny_llama.path,
        functions=(4, 16),
        max_seq_len=48,
        layers_per_shard=2,
        states="packed",
    )
    decode = exports.bundle(tiny_llama.path, t_max=1, max_seq_len=64, layout="bc1t")
    return prefill, decode


@pytest.mark.parametrize("runtime", ["portable", "coreml"])
def test_a_stream_goes_on_from_a_prompt_that_another_bundle_ran(shimmed, pair, runtime):
    ids = tiny.prompt(90, PROMPT)
    source, target = (Decoder(bundle, runtime, "exact") for bundle in pair)
    alone = list(target.stream(ids, MORE, stop=[]))
    records = list(
        target.stream(ids, MORE, stop=[], prefill=partial(prefill_by, source, target))
    )
    assert [r.token for r in records] == [r.token for r in alone]
    for ours, theirs in zip(records, alone, strict=True):
        assert tiny.relative(ours.logits, theirs.logits) < (
            1e-5 if runtime == "portable" else 1e-2
        )
    assert source.offsets.tolist() == [PROMPT] and target.offsets.tolist() == [
        PROMPT + MORE - 1
    ]
    assert target.ids == alone_ids(ids, records)


def alone_ids(ids, records) -> list[list[int]]:
    return [[*ids, *(r.token for r in records[:-1])]]


def test_a_batch_moves_with_sequences_of_their_own_lengths(exports, tiny_llama):
    chosen = {"batch": 2, "max_seq_len": 32}
    source = exports.decoder(tiny_llama.path, t_max=8, **chosen)
    target = exports.decoder(tiny_llama.path, t_max=1, compress="fp16", **chosen)
    prompts = [tiny.prompt(90, 9), tiny.prompt(90, 4, seed=1)]
    alone = target.generate(prompts, MORE, stop=[])
    moved = target.generate(
        prompts, MORE, stop=[], prefill=partial(prefill_by, source, target)
    )
    assert moved == alone and target.offsets.tolist() == [9 + MORE - 1, 4 + MORE - 1]


def test_nothing_runs_where_bundles_do_not_belong_together(exports, pair, tiny_llama):
    _, target = (Decoder(bundle, "portable", "exact") for bundle in pair)
    other = exports.decoder(exports.checkpoint("llama"))
    target.prefill([1, 2, 3])
    for source, found in [
        (other, "one checkpoint"),
        (exports.decoder(tiny_llama.path, batch=2), "batch 1"),
    ]:
        with pytest.raises(InputError, match=found):
            prefill_by(source, target, [[1, 2, 3, 4]])
        assert source.offsets.tolist() == [0] * source.options.batch
    small = exports.decoder(tiny_llama.path, max_seq_len=8)
    with pytest.raises(InputError, match="max_seq_len = 8"):
        prefill_by(small, target, [1] * 9)
    assert target.ids == [[1, 2, 3]]
    with pytest.raises(InputError, match="whole prompt"):
        list(
            target.stream(
                [1], 1, after="running", prefill=partial(prefill_by, small, target)
            )
        )


def test_a_snapshot_behind_a_hand_over_is_one_of_the_decoding_bundle(pair):
    """Reuse: what is kept and restored goes on with the same bits."""
    ids = tiny.prompt(90, PROMPT)
    source, target = (Decoder(bundle, "portable", "exact") for bundle in pair)
    prefill_by(source, target, ids)
    snapshot = target.snapshot()
    assert snapshot.identity == target.identity
    expected = [
        target.decode_one_token(token) for token in tiny.prompt(90, MORE, seed=1)
    ]
    target.begin(snapshot)
    again = [target.decode_one_token(token) for token in tiny.prompt(90, MORE, seed=1)]
    assert np.array_equal(expected, again)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    "family, changed, first, then",
    [
        (
            "gemma3_text",
            {},
            {"sliding": "ring", "t_max": 8},
            {"t_max": 1, "states": "packed"},
        ),
        (
            "gemma3_text",
            {},
            {"functions": (1, 8)},
            {"sliding": "ring", "functions": (1, 2)},
        ),
        (
            "zaya",
            {"num_hidden_layers": 2, "num_experts": 2},
            {"functions": (2, 6)},
            {"t_max": 1},
        ),
        (
            "llama",
            {},
            {"kv_write": "slice", "t": "fixed"},
            {"kv_write": "slice", "t_max": 1},
        ),
        ("llama", {}, {"compress": "int8-tensor"}, {"t_max": 1, "batch": 1}),
    ],
)
def test_every_gate_holds_across_the_hand_over(exports, family, changed, first, then):
    checkpoint = exports.checkpoint(family, **changed)
    source = exports.decoder(checkpoint, max_seq_len=32, **first)
    target = exports.decoder(checkpoint, max_seq_len=40, **then)
    target.prefill([1, 2, 3] if "slice" not in then.values() else [1])
    before = [list(ids) for ids in target.ids]
    found = {g.name: g.verdict for g in handover.handover_gates(source, target)}
    same = source.options.compress == target.options.compress
    assert found == {
        "handover_rows": "GREEN",
        "handover_write_address": "GREEN",
        "handover_continues": "GREEN" if same else "not_run",
    }
    assert target.ids == before


FAULTS = {
    "one row late": (
        "handover_rows",
        lambda n, v: np.roll(v, 1, axis=1) if v.ndim == 3 else v,
    ),
    "keys as values": (
        "handover_rows",
        lambda n, v: v * 1.01 if n.endswith("k_state") else v,
    ),
    "last row lost": (
        "handover_rows",
        lambda n, v: np.where(np.arange(v.shape[1])[:, None] < v.shape[1] - 1, v, 0),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_copy_that_is_wrong_turns_the_gates_red(pair, monkeypatch, name):
    gate, change = FAULTS[name]
    source, target = (Decoder(bundle, "portable", "exact") for bundle in pair)
    take = Decoder.snapshot

    def changed(decoder, seq=0):
        snapshot = take(decoder, seq)
        states = {n: change(n, v) for n, v in snapshot.states.items()}
        return transfer.replace(snapshot, states=states)

    monkeypatch.setattr(Decoder, "snapshot", changed)
    found = {g.name: g.verdict for g in handover.handover_gates(source, target)}
    assert found[gate] == "RED"
    # attention takes rows in any order, so only their addresses show that they moved together
    assert (found["handover_continues"] == "RED") != (name == "one row late")


@pytest.mark.parametrize(
    "presets", [("fp16", "int4-block32"), ("int4-block32", "fp16")]
)
def test_states_negated_on_the_way_to_other_weights_are_red(
    exports, tiny_llama, monkeypatch, presets
):
    """Between unlike weights no logits can be compared; the bits of the states are."""
    source, target = (
        exports.decoder(tiny_llama.path, compress=preset, t_max=T)
        for preset, T in zip(presets, (8, 1), strict=True)
    )
    take = Decoder.snapshot

    def negated(decoder, seq=0):
        snapshot = take(decoder, seq)
        return transfer.replace(
            snapshot, states={n: -v for n, v in snapshot.states.items()}
        )

    verdicts = []
    for snapshot in (take, negated):
        monkeypatch.setattr(Decoder, "snapshot", snapshot)
        found = handover.handover_gates(source, target)
        verdicts.append({g.name.removeprefix("handover_"): g.verdict for g in found})
    sound = {"rows": "GREEN", "write_address": "GREEN", "continues": "not_run"}
    assert verdicts == [sound, sound | {"rows": "RED"}]


def test_a_position_that_is_lost_turns_the_write_address_red(pair, monkeypatch):
    source, target = (Decoder(bundle, "portable", "exact") for bundle in pair)
    copy = transfer.copy_state

    def late(source, target):
        copy(source, target)
        target.offsets += 1

    monkeypatch.setattr(transfer, "copy_state", late)
    found = {g.name: g for g in handover.handover_gates(source, target)}
    assert found["handover_write_address"].verdict == "RED"
    assert "rows [2] changed, not 1" in found["handover_write_address"].reason


def test_a_cache_that_nothing_writes_turns_the_write_address_red(pair):
    source, target = (Decoder(bundle, "portable", "exact") for bundle in pair)
    real = target.host.inputs

    def unwritten(*arguments):
        io = real(*arguments)
        return io | {name: value * 0 for name, value in io.items() if "write" in name}

    target.host.inputs = unwritten
    found = {g.name: g for g in handover.handover_gates(source, target)}
    assert found["handover_write_address"].verdict == "RED"
    assert "no row" in found["handover_write_address"].reason


def test_a_cache_too_small_for_a_hand_over_is_not_judged(exports, tiny_llama):
    decoders = [
        exports.decoder(tiny_llama.path, max_seq_len=4, t_max=T) for T in (2, 1)
    ]
    assert [g.verdict for g in handover.handover_gates(*decoders)] == ["not_run"]


def run(*arguments: str, code: int = 0) -> dict:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_the_commands_take_a_prefill_bundle(pair, tiny_llama, llama_golden, tmp_path):
    prefill, decode = (str(bundle.root) for bundle in pair)
    alone = run("decode", decode, "--prompt-ids", "1,4,69,173,13", "--max-new", "5")
    rows = str(tmp_path / "rows.npy")
    moved = run(
        *("decode", decode, "--prompt-ids", "1,4,69,173,13", "--max-new", "5"),
        *("--prefill-bundle", prefill, "--logits", rows),
    )
    assert moved["tokens"] == alone["tokens"] and np.load(rows).shape[0] == 6
    assert (alone["prefill"]["calls"], moved["prefill"]["calls"]) == (5, 1)
    assert moved["prefill"]["bundle"] == pair[0].root.name
    llama_golden.save(tmp_path / "g")
    names = {"handover_rows", "handover_write_address", "handover_continues"}
    for command in ("check", "validate"):
        arguments = (command, decode, "--golden", str(tmp_path / "g"))
        found = run(*arguments, "--prefill-bundle", prefill)
        gates = {g["name"]: g["verdict"] for g in found["gates"]}
        assert {gates[name] for name in names} == {"GREEN"} and found[
            "verdict"
        ] == "GREEN"
        assert not names & {g["name"] for g in run(*arguments)["gates"]}


def test_export_takes_functions(tiny_llama, tmp_path):
    found = run(
        *("export", str(tiny_llama.path), str(tmp_path / "b"), "--max-seq-len", "16"),
        *("--functions", "1,2"),
    )
    assert found["stamped"] == 3
    assert run("check", str(tmp_path / "b"))["verdict"] == "GREEN"
    result = CliRunner().invoke(
        app, ["export", str(tiny_llama.path), str(tmp_path / "c"), "--functions", "1;2"]
    )
    assert isinstance(result.exception, InputError) and "write 1,4" in str(
        result.exception
    )
