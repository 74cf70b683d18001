"""Snapshots in files: whole or refused, and found by the beginning of a prompt."""

import os
import subprocess
import sys

import numpy as np
import pytest
import trained
from hypothesis import given, settings
from hypothesis import strategies as st
from refusal import refused
from trained import same

from workbench.decode import Snapshot, store

SOME = settings(max_examples=30, deadline=None)
IDS = np.random.default_rng(5).integers(3, 256, 200).tolist()


def rows(seed, heads=2, n=5, D=64, scale=1.0, dtype=np.float16):
    """Random rows, each channel around a mean of its own."""
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((heads, 1, D))
    return (scale * (means + rng.standard_normal((heads, n, D)))).astype(dtype)


def random_snapshot(ids, identity="identity", min_length=0, **chosen) -> Snapshot:
    """A snapshot of random rows: the store does not care who computed them."""
    seed, n = len(ids), len(ids)
    states = {
        "layers.0.k_state": rows(seed, n=n, **chosen),
        "layers.0.v_state": rows(seed + 1, n=n, **chosen),
        "layers.0.conv_state": rows(seed + 2, n=1, **chosen)[0],
    }
    return Snapshot(tuple(ids), identity, states, min_length)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_fp16_keeps_every_bit_and_shares_nothing(dtype, tmp_path):
    snapshot = random_snapshot(IDS[:9], min_length=3, dtype=dtype)
    path = store.save(tmp_path, "chat", snapshot)
    size = sum(value.nbytes for value in snapshot.states.values())
    assert path.stat().st_size < size + 4096
    for value in store.load(tmp_path, "chat").states.values():
        value[:] = 0
    loaded = store.load(tmp_path, "chat")
    assert same(loaded, snapshot) and loaded.min_length == 3


@SOME
@given(
    seed=st.integers(0, 99),
    D=st.sampled_from([2, 32, 40, 64, 96, 128, 192, 256]),
    scale=st.sampled_from([1e-6, 1e-3, 1.0, 300.0]),
    dtype=st.sampled_from([np.float16, np.float32]),
)
def test_q4_is_within_half_a_step_of_its_own_group(seed, D, scale, dtype):
    values = rows(seed, D=D, scale=scale, dtype=dtype)
    codes, steps, low = store.quantize(values)
    width = values.shape[-1] // steps.shape[-1]
    assert width <= 64 and D % width == 0 and codes.nbytes * 2 == values.size
    dequantized = store.dequantize(codes, steps, low)
    once = values.astype(np.float16).astype(np.float32)
    error = np.abs(dequantized - once).reshape(2, 5, -1, width)
    allowed = steps[..., None].astype(np.float32) * 0.5001
    assert (error <= allowed + np.finfo(np.float16).tiny * 1e-3).all()


def test_q4_quantizes_caches_but_for_those_with_a_few_huge_channels(tmp_path):
    snapshot = random_snapshot(IDS[:40])
    snapshot.states["layers.0.k_state"][..., 3] += 90
    store.save(tmp_path, "chat", snapshot, "q4")
    loaded = store.load(tmp_path, "chat").states
    for name in ("layers.0.k_state", "layers.0.conv_state"):
        assert np.array_equal(loaded[name], snapshot.states[name])
    values = snapshot.states["layers.0.v_state"]
    expected = store.dequantize(*store.quantize(values)).astype(np.float16)
    assert np.array_equal(loaded["layers.0.v_state"], expected)
    assert not np.array_equal(expected, values)


def test_q4_refuses_what_it_cannot_hold(tmp_path):
    for value, width in ((np.nan, 64), (np.inf, 64), (0, 3)):
        with refused("q4"):
            store.quantize(np.full((1, 2, width), value, np.float16))
    with refused("one of fp16, q4"):
        store.save(tmp_path, "chat", random_snapshot(IDS[:3]), "q8")


CHILD = """
import sys
from workbench import Decoder
from workbench.decode import store
decoder = Decoder(sys.argv[1], "portable", "exact")
snapshot, rest = store.find(sys.argv[2], eval(sys.argv[3]), decoder.identity)
print(decoder.generate(rest, 6, after=snapshot, stop=()), len(rest))
"""


def test_another_process_goes_on_where_this_one_stopped(exports, tmp_path, forked):
    decoder = trained.decoder(exports, "tiny-gemma3")
    tokens = decoder.generate(IDS[:40], 6, stop=())
    decoder.begin()
    decoder.prefill(IDS[:39])
    store.save(tmp_path, "chat", decoder.snapshot())
    arguments = decoder.bundle.root, tmp_path, repr(IDS[:40])
    command = [sys.executable, "-c", CHILD, *arguments]
    assert subprocess.check_output(command, text=True) == f"{tokens} 1\n"


@SOME
@given(data=st.data())
def test_find_is_the_longest_beginning_that_can_be_used(tmp_path_factory, data):
    """Against a plain comparison of every stored sequence, over an alphabet of two tokens."""
    folder, best = tmp_path_factory.mktemp("store"), 0
    bits = st.lists(st.integers(0, 1), min_size=1, max_size=20)
    prompt = data.draw(bits)
    for i in range(4):
        ids, min_length = data.draw(bits), data.draw(st.integers(0, 6))
        identity = data.draw(st.sampled_from(["identity", "another"]))
        store.save(
            folder,
            f"s{i}",
            random_snapshot(ids, identity, min(min_length, len(ids)), D=2),
        )
        pairs = list(zip(ids, prompt[:-1]))
        length = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
        if identity == "identity" and length >= min(min_length, len(ids)):
            best = max(best, length)
    hit = store.find(folder, prompt, "identity")
    assert bool(hit) == bool(best)
    if hit:
        assert hit[0].offset == best and [*hit[0].ids, *hit[1]] == prompt


def test_a_snapshot_of_another_decoder_is_no_hit(exports, tmp_path):
    decoder = trained.decoder(exports, "tiny-gemma3")
    decoder.prefill(IDS[:20])
    store.save(tmp_path, "chat", decoder.snapshot())
    other = trained.decoder(exports, "tiny-gemma3", precision="declared")
    assert store.find(tmp_path, IDS[:21], other.identity) is None
    together = trained.decoder(exports, "tiny-gemma3", trained.BATCH)
    assert store.find(tmp_path, IDS[:21], together.identity)[0].offset == 20


DAMAGES = {
    "truncated": lambda data: data[:-5],
    "empty": lambda data: b"",
    "garbage": lambda data: b"x" * 999,
    "version": lambda data: data.replace(b'"version":"3"', b'"version":"1"'),
    "floor": lambda data: data.replace(b'"floor":"0"', b'"floor":"x"'),
    "part": lambda data: data.replace(b"v_state.low", b"v_state.lot"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_refused_with_the_next_step(name, tmp_path):
    path = store.save(tmp_path, "chat", random_snapshot(IDS[:20]), "q4")
    path.write_bytes(DAMAGES[name](path.read_bytes()))
    with refused("prefill again and save"):
        store.load(tmp_path, "chat")
    with refused("No such file"):
        store.load(tmp_path, "other")


@pytest.mark.parametrize("name", ["", "../up", ".hidden", "a/b", "a" * 101, "a\n"])
def test_names_that_could_leave_the_folder_are_refused(name, tmp_path):
    with refused("snapshot name"):
        store.save(tmp_path / "s", name, random_snapshot(IDS[:3]))
    assert not (tmp_path / "s").exists()


def test_a_full_disk_is_said_and_keeps_the_old_snapshot(tmp_path, monkeypatch):
    store.save(tmp_path, "chat", random_snapshot(IDS[:9]))

    def full(*_):
        raise OSError("No space left")

    monkeypatch.setattr(os, "replace", full)
    with refused("No space left.*free some space"):
        store.save(tmp_path, "chat", random_snapshot(IDS[:12]))
    assert same(store.load(tmp_path, "chat"), random_snapshot(IDS[:9]))
