"""Snapshots on disk and in memory: whole or refused, found by what they begin with, shared by
processes."""

import errno
import json
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import trained
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench import InputError
from workbench.decode import Snapshot, snapshot
from workbench.decode.snapshot import UndoDepth, layout
from workbench.prompt_cache import Store, store

IDS = np.random.default_rng(5).integers(3, 256, 200).tolist()


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-zaya"])
def decoder(request, exports):
    return trained.decoder(exports, request.param)


@pytest.fixture
def llama(exports):
    return trained.decoder(exports, "tiny-llama")


def filled(decoder, ids, value=None) -> Snapshot:
    """A snapshot of random rows (or of one value): what is stored need not have been computed."""
    rng = np.random.default_rng(len(ids))
    states = {
        n: np.asarray(
            rng.standard_normal(s) if value is None else np.full(s, value), np.float32
        )
        for n, s in layout(decoder.manifest, len(ids)).items()
    }
    floor = int(UndoDepth(decoder.manifest).floor(len(ids), len(ids)))
    return Snapshot(tuple(ids), decoder.identity, states, floor)


def same(a: Snapshot, b: Snapshot) -> bool:
    return (
        (a.ids, a.identity) == (b.ids, b.identity)
        and a.states.keys() == b.states.keys()
        and all(
            v.dtype == b.states[n].dtype and np.array_equal(v, b.states[n])
            for n, v in a.states.items()
        )
    )


def test_a_session_comes_back_from_memory_and_from_disk(decoder, tmp_path):
    kept, given_ = Store(tmp_path, decoder), filled(decoder, IDS[:40])
    saved = kept.save("chat", given_)
    assert saved.path.parent == tmp_path and saved.bytes == saved.path.stat().st_size
    assert (saved.error, saved.full_bytes) == (
        0,
        given_.nbytes,
    ) and saved.bytes < given_.nbytes + 4096
    assert same(kept.load("chat"), given_)
    kept.cool()
    assert same(kept.load("chat"), given_) and same(
        Store(tmp_path, decoder).load("chat"), given_
    )
    assert kept.names() == ["chat"]
    kept.delete("chat")
    with pytest.raises(InputError, match="no such file"):
        kept.load("chat")


def test_what_memory_gives_out_is_never_shared(decoder, tmp_path):
    kept, given_ = Store(tmp_path, decoder), filled(decoder, IDS[:20])
    kept.save("chat", given_)
    first, second = kept.load("chat"), kept.load("chat")
    assert not any(
        np.shares_memory(v, second.states[n]) or np.shares_memory(v, given_.states[n])
        for n, v in first.states.items()
    )
    for value in first.states.values():
        value[:] = 0
    decoder.generate([5], 3, after=kept.load("chat"), stop=())
    assert same(kept.load("chat"), given_)


def test_memory_has_a_budget_and_the_least_used_leaves_first(llama, tmp_path):
    # bytes of 20 tokens in fp32: 4 layers of K and V, 2 heads of 32
    size = 1024 * 20 * 2
    kept = Store(tmp_path, llama, hot_bytes=int(2.5 * size))
    for name in ("a", "b"):
        kept.save(name, filled(llama, IDS[:20]))
    kept.load("a")
    kept.save("c", filled(llama, IDS[:20]))
    assert set(kept.hot) == {"a", "c"}
    kept.load("b")
    assert set(kept.hot) == {"c", "b"}
    kept.save("huge", filled(llama, IDS[:100]))
    assert not kept.hot and same(kept.load("huge"), filled(llama, IDS[:100]))


CHILD = """
import sys
from workbench import Decoder
from workbench.prompt_cache import Store
decoder = Decoder(sys.argv[1], "portable", "exact")
hit = Store(sys.argv[2], decoder).find(eval(sys.argv[3]))
print([int(t) for t in decoder.generate(hit.rest, 6, after=hit.snapshot, stop=())], hit.temperature, len(hit.rest))
print(decoder.snapshot().states["layers.0.k_state"].tobytes().hex()[-64:])
"""


def test_another_process_goes_on_where_this_one_stopped(decoder, tmp_path, forked):
    tokens = decoder.generate(IDS[:40], 6, stop=())
    rows = decoder.snapshot().states["layers.0.k_state"].tobytes().hex()[-64:]
    decoder.begin()
    decoder.prefill(IDS[:32])
    decoder.prefill(IDS[32:39])
    Store(tmp_path, decoder).save("chat", decoder.snapshot())
    decoder.begin(decoder.snapshot())
    decoder.generate(
        IDS[39:40], 6, after=Store(tmp_path, decoder).load("chat"), stop=()
    )
    rows = decoder.snapshot().states["layers.0.k_state"].tobytes().hex()[-64:]
    child = subprocess.run(
        [sys.executable, "-c", CHILD, decoder.bundle.root, tmp_path, repr(IDS[:40])],
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout.splitlines() == [f"{tokens} warm 1", rows]


# Prefixes


def test_the_longest_beginning_wins_in_whole_blocks_or_whole(llama, tmp_path):
    kept = Store(tmp_path, llama, block=16)
    kept.save("long", filled(llama, IDS[:70]))
    kept.save("short", filled(llama, IDS[:21]))
    kept.save("other", filled(llama, IDS[100:150]))

    def found(ids):
        hit = kept.find(ids)
        if hit:
            assert list(hit.snapshot.ids) + hit.rest == list(ids)
        return (hit.name, hit.snapshot.offset) if hit else None

    assert found(IDS[:80]) == ("long", 70)  # longer
    assert found(IDS[:70]) == ("long", 69)  # exact: the last token runs again
    assert found(IDS[:69]) == ("long", 64)  # shorter, between blocks
    assert found(IDS[:50] + [1, 2, 3]) == ("long", 48)  # parts inside a block
    # whole, though no multiple of a block
    assert found(IDS[:22] + [1]) == ("short", 21)
    assert found(IDS[:21]) == ("short", 20)
    assert (
        found(IDS[:12]) is None and found([1, 2, 3]) is None and found(IDS[:1]) is None
    )
    assert found(IDS[1:60]) is None  # the same blocks at other positions


def test_what_cannot_go_back_is_found_whole_or_not_at_all(exports, tmp_path):
    decoder = trained.decoder(exports, "tiny-zaya")
    kept = Store(tmp_path, decoder, block=16)
    kept.save("a", filled(decoder, IDS[:40]))
    assert kept.find(IDS[:41]).snapshot.offset == 40
    assert (
        kept.find(IDS[:40]) is None
        and kept.find(IDS[:39]) is None
        and kept.find(IDS[:32] + [1] * 20) is None
    )


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_find_is_the_longest_beginning_that_can_be_used(llama, tmp_path_factory, data):
    """Against a plain comparison of every stored sequence, over an alphabet of two tokens."""
    kept = Store(tmp_path_factory.mktemp("store"), llama, block=4)
    bits = st.lists(st.integers(0, 1), min_size=1, max_size=20)
    stored = [data.draw(bits) for _ in range(4)]
    for i, ids in enumerate(stored):
        kept.save(f"s{i}", filled(llama, ids))
    prompt = data.draw(bits)
    best = 0
    for ids in stored:
        common = next(
            (i for i, (a, b) in enumerate(zip(ids, prompt)) if a != b),
            min(len(ids), len(prompt)),
        )
        best = max(
            best,
            min(common if common == len(ids) else common // 4 * 4, len(prompt) - 1),
        )
    hit = kept.find(prompt)
    assert (hit.snapshot.offset if hit else 0) == best


def test_any_difference_in_identity_is_a_miss(llama, exports, tmp_path):
    """Another precision, checkpoint, export option, compression or tokenizer; another batch alone
    is the same."""
    Store(tmp_path, llama).save("chat", filled(llama, IDS[:40]))
    assert (
        Store(tmp_path, trained.decoder(exports, "tiny-llama", trained.BATCH))
        .find(IDS[:41])
        .snapshot.offset
        == 40
    )
    others = [
        trained.decoder(exports, "tiny-llama", precision="declared"),
        trained.decoder(exports, "tiny-qwen2"),
    ]
    for other in others:
        kept = Store(tmp_path, other)
        assert kept.find(IDS[:41]) is None and "identity" in kept.refused["chat"]
        with pytest.raises(InputError, match="identity"):
            kept.load("chat")
    manifest = llama.manifest
    files = [f.model_copy(update={"sha256": "0" * 64}) for f in manifest.tokens.files]
    options = [
        manifest.options.model_copy(update=u)
        for u in ({"max_seq_len": 64}, {"t_max": 4}, {"compress": "int8-tensor"})
    ]
    changed = [
        *({"options": o} for o in options),
        {"tokens": manifest.tokens.model_copy(update={"files": files})},
        {"family": "qwen3"},
        {"checkpoint": manifest.checkpoint | {"sha256": "0" * 64}},
    ]
    found = {
        snapshot.identity(manifest.model_copy(update=c), "exact")
        for c in [{}, *changed]
    }
    assert len(found) == 7


# Faults


def damaged(path: Path, header=None, body=None) -> None:
    """Rewrites a file with another header or other bytes."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    found = json.loads(data[8 : 8 + length])
    if header:
        header(found)
    packed = json.dumps(found).encode()
    path.write_bytes(
        struct.pack("<Q", len(packed))
        + packed
        + (body or (lambda b: b))(data[8 + length :])
    )


def meta(**changed):
    return lambda header: header["__metadata__"].update(changed)


def swap_shape(header):
    header["layers.0.k_state"]["shape"] = header["layers.0.k_state"]["shape"][::-1]


def point_outside(header):
    header["layers.0.k_state"]["data_offsets"] = [0, 1 << 60]


FAULTS = {
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-5]), "whole snapshot"),
    "empty": (lambda p: p.write_bytes(b""), "whole snapshot"),
    "garbage": (lambda p: p.write_bytes(os.urandom(999)), "whole snapshot"),
    "flipped": (
        lambda p: damaged(p, body=lambda b: b[:-9] + bytes([b[-9] ^ 1]) + b[-8:]),
        "digest",
    ),
    "two saves mixed": (
        lambda p: damaged(
            p, body=lambda b: b[: len(b) // 2] + bytes(len(b) - len(b) // 2)
        ),
        "digest",
    ),
    "another save id": (lambda p: damaged(p, meta(save_id="0" * 32)), "digest"),
    "unknown version": (lambda p: damaged(p, meta(version="1")), "version '1'"),
    "unknown format": (lambda p: damaged(p, meta(format="pickle")), "format 'pickle'"),
    "foreign": (lambda p: damaged(p, meta(identity="f" * 64)), "identity ffffffffffff"),
    "offset": (lambda p: damaged(p, meta(offset="39")), "ids as I32"),
    "huge offset": (lambda p: damaged(p, meta(offset="9" * 40)), "offset"),
    "no offset": (lambda p: damaged(p, meta(offset="-1")), "offset"),
    "dtype": (lambda p: damaged(p, meta(dtype="object")), "dtype 'object'"),
    "a tensor too few": (
        lambda p: damaged(p, lambda h: h.update({"x": h.pop("layers.0.k_state")})),
        "missing or unknown",
    ),
    "other shape": (lambda p: damaged(p, swap_shape), "layers.0.k_state as"),
    "outside": (lambda p: damaged(p, point_outside), "whole snapshot"),
    "huge header": (
        lambda p: p.write_bytes(struct.pack("<Q", 1 << 40) + p.read_bytes()[8:]),
        "header",
    ),
    "symlink": (
        lambda p: (
            p.rename(p.with_suffix(".kept")),
            p.symlink_to(p.with_suffix(".kept")),
        ),
        "symlink",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_file_is_refused_with_the_reason_and_nothing_else_happens(
    name, llama, tmp_path
):
    kept = Store(tmp_path, llama)
    kept.save("bad", filled(llama, IDS[:40]))
    kept.save("good", filled(llama, IDS[:20]))
    kept.cool()
    llama.begin()
    llama.prefill(IDS[:7])
    before = llama.snapshot()
    damage, reason = FAULTS[name]
    damage(kept.folder / "bad.safetensors")
    with pytest.raises(InputError, match=reason):
        llama.begin(kept.load("bad"))
    assert same(llama.snapshot(), before)
    assert kept.find(IDS[:41]).name == "good"


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_changes_what_is_loaded(llama, tmp_path, at, bit):
    kept, given_ = Store(tmp_path, llama), filled(llama, IDS[:3])
    data = bytearray(kept.save("chat", given_).path.read_bytes())
    data[int(at * len(data))] ^= 1 << bit
    (tmp_path / "chat.safetensors").write_bytes(data)
    kept.cool()
    try:
        assert same(kept.load("chat"), given_)  # a blank in the header
    except InputError:
        pass


@pytest.mark.parametrize(
    "name", ["", "../up", "/etc/x", ".hidden", "a/b", "a" * 101, "a\n", "ü"]
)
def test_names_that_could_leave_the_folder_are_refused(name, llama, tmp_path):
    with pytest.raises(InputError, match="snapshot name"):
        Store(tmp_path / "s", llama).save(name, filled(llama, IDS[:3]))
    assert not list((tmp_path / "s").iterdir())


def test_nothing_of_another_decoder_and_nothing_empty_is_saved(llama, tmp_path):
    kept = Store(tmp_path, llama)
    for bad in (replace(filled(llama, IDS[:3]), identity="f" * 64), filled(llama, [])):
        with pytest.raises(InputError, match="at least one token, identity"):
            kept.save("chat", bad)
    assert not kept.names()


@pytest.mark.parametrize(
    "step", ["safetensors.numpy.save_file", "os.fsync", "os.replace"]
)
def test_a_full_disk_keeps_the_old_snapshot_and_leaves_no_litter(
    step, llama, tmp_path, monkeypatch
):
    kept = Store(tmp_path, llama)
    kept.save("chat", filled(llama, IDS[:9]))

    def full(*arguments, **_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(step, full)
    with pytest.raises(InputError, match="No space left.*free some room"):
        kept.save("chat", filled(llama, IDS[:12]))
    assert [p.name for p in tmp_path.iterdir()] == ["chat.safetensors"]
    assert same(kept.load("chat"), filled(llama, IDS[:9]))


def test_a_disk_that_fills_up_for_real(llama, tmp_path):
    """The writer itself runs into a limit on file sizes."""
    import resource

    kept, before = Store(tmp_path, llama), resource.getrlimit(resource.RLIMIT_FSIZE)
    kept.save("chat", filled(llama, IDS[:9]))
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(InputError, match="room"):
            kept.save("chat", filled(llama, IDS[:100]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [p.name for p in tmp_path.iterdir()] == ["chat.safetensors"]
    assert same(kept.load("chat"), filled(llama, IDS[:9]))


def stand_in(decoder):
    """What a store asks of a decoder, small enough to hand to another process."""
    return SimpleNamespace(
        identity=decoder.identity,
        manifest=decoder.manifest,
        runtime=decoder.runtime,
        precision=decoder.precision,
        arithmetic=decoder.arithmetic,
    )


KILLS = """
import os, signal, sys, time
from types import SimpleNamespace
import numpy as np
from workbench import Bundle
from workbench.decode import Snapshot
from workbench.prompt_cache import Store
from workbench.decode.snapshot import UndoDepth, layout

decoder = SimpleNamespace(identity="a" * 64, manifest=Bundle.open(sys.argv[1]).manifest, runtime="portable", precision="exact", arithmetic="exact")

def filled(i):
    ids = tuple(range(10 + i % 50))
    return Snapshot(ids, "a" * 64, {n: np.full(s, i, np.float32) for n, s in layout(decoder.manifest, len(ids)).items()}, 0)

def whole(held):
    first = next(iter(held.states.values())).flat[0]
    return held.offset == 10 + first % 50 and all((v == first).all() for v in held.states.values())

Store(sys.argv[2], decoder).save("chat", filled(0))
rng, found = np.random.default_rng(0), set()
for kill in range(200):
    child = os.fork()
    if not child:
        try:
            kept = Store(sys.argv[2], decoder)
            for i in range(1000):
                kept.save("chat", filled(7 * kill + i))
        finally:
            os._exit(1)
    time.sleep(rng.uniform(0.001, 0.015))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    held = Store(sys.argv[2], decoder).load("chat")
    assert whole(held), kill
    found.add(int(next(iter(held.states.values())).flat[0]))
assert "torch" not in sys.modules  # a fork of a large process would be slow
print(len(found))
"""


def test_killed_while_saving_the_old_or_the_new_is_there_never_a_mixture(
    llama, tmp_path
):
    """200 kills at every moment of a save; what they leave behind goes once it is old."""
    done = subprocess.run(
        [sys.executable, "-c", KILLS, llama.bundle.root, tmp_path],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and int(done.stdout) > 20, done.stderr
    for file in tmp_path.glob(".*"):
        os.utime(file, (0, 0))
    Store(tmp_path, llama)
    assert [p.name for p in tmp_path.iterdir()] == ["chat.safetensors"]


def share(folder, decoder, number) -> None:
    kept = Store(folder, decoder)
    for i in range(6):
        mine, ours = (
            filled(decoder, [number, *IDS[: 8 + i]]),
            filled(decoder, IDS[: 20 + number]),
        )
        kept.save(f"own-{number}", mine)
        kept.save("ours", ours)
        kept.cool()
        assert same(kept.load(f"own-{number}"), mine)
        theirs = kept.load("ours")
        assert same(theirs, filled(decoder, IDS[: theirs.offset]))
        hit = kept.find([number, *IDS[:30]])
        assert hit.name == f"own-{number}" and hit.snapshot.offset == 9 + i


def test_sixteen_processes_share_one_store(llama, tmp_path):
    decoder, fork = stand_in(llama), multiprocessing.get_context("fork")
    children = [
        fork.Process(target=share, args=(tmp_path, decoder, n)) for n in range(16)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [c.exitcode for c in children] == [0] * 16
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        f"{n}.safetensors" for n in ("ours", *(f"own-{i}" for i in range(16)))
    )
    assert store.STALE_SECONDS == 3600
