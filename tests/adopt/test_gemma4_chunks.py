"""Packages with the interface of public exports of Gemma 4 are adopted: GREEN as they should be,
RED where full-attention layers turn every pair of channels."""

from pathlib import Path

import numpy as np
import pytest
import tiny
from exporter_gemma4 import Chunked, chunked
from in_process import invoke
from refusal import refused

from workbench import Bundle, Decoder
from workbench.models.checkpoint import Checkpoint

pytestmark = pytest.mark.slow("converts four packages")
# the two chunks with caches have a layer of either kind, the two stateless ones a layer of one kind
SIZES = {"layer_types": ["sliding_attention", "full_attention"] * 3}
SIZES |= {"num_hidden_layers": 6, "num_kv_shared_layers": 2}
PROMPT = [5, 90, 17, 33, 2, 64, 71, 8, 40]
OWNERS = range(4)


@pytest.fixture(scope="module")
def checkpoint(exports) -> Path:
    return exports.checkpoint("gemma4_text", **SIZES)


def packages_of(
    checkpoint: Path, folder: Path, sound: Path | None = None, **options
) -> Path:
    """Packages with options of `Chunked`; programs are copied from `sound` ones."""
    folder.mkdir()
    chunked(folder, Chunked(checkpoint, **options), sound)
    return folder


@pytest.fixture(scope="module")
def packages(checkpoint, shared_folder) -> Path:
    return tiny.once(
        shared_folder / "gemma4_chunks", lambda folder: packages_of(checkpoint, folder)
    )


def adopted(packages: Path, checkpoint: Path, folder: Path) -> dict[str, dict]:
    """What adopt assumed of packages, by its subject."""
    source = "--checkpoint", checkpoint, "--out", folder
    rows = invoke("adopt", packages, *source)["assumed"]
    return {row["subject"]: row for row in rows}


def gates_of(bundle: Path, checkpoint: Path) -> dict[str, dict]:
    ids = ",".join(map(str, PROMPT))
    source = "--checkpoint", checkpoint, "--prompt-ids", ids
    return {gate["name"]: gate for gate in invoke("validate", bundle, *source)["gates"]}


def test_sound_packages_are_green_and_give_hugging_face_s_tokens(
    exports, checkpoint, packages, tmp_path
):
    assumed = adopted(packages, checkpoint, tmp_path / "b")
    roles = {
        "per_layer_raw": "per_layer",
        "per_layer_combined": "carried",
        "per_layer_combined_out": "carried",
        "kv13_k": "carried",
        "kv14_v": "carried",
        "cos_s": "rope_cos_local",
        "sin_f": "rope_sin_global",
        "current_pos": "start",
        "ring_pos": "ring_start",
        "token_id": "top",
        "token_logit": "top_value",
    }
    assert {name: assumed[name]["assumed"] for name in roles} == roles
    decoder = Decoder(tmp_path / "b", "portable", "exact")
    (shard,) = decoder.manifest.shards
    assert {*shard.states} == {
        f"layers.{i}.{leaf}" for i in OWNERS for leaf in ("k_state", "v_state")
    }
    expected = exports.golden(checkpoint, 24)
    token = decoded(tmp_path / "b", expected.ids).argmax()
    assert token == expected.logits[-1].argmax()
    gates = gates_of(tmp_path / "b", checkpoint)
    assert "RED" not in {gate["verdict"] for gate in gates.values()}, gates
    for name in ("interface", "host", "program", "state_life", "write_address", "undo"):
        assert gates[name]["verdict"] == "GREEN", gates[name]


def decoded(bundle: Path, ids: list[int]) -> np.ndarray:
    """The token that packages pick after `ids`, as its row of logits."""
    decoder = Decoder(bundle, "portable", "exact")
    decoder.prefill(ids[:-1])
    return decoder.decode_one_token(ids[-1])


def test_caches_of_equal_rows_and_planes_are_told_apart(exports, tmp_path):
    """A window as long as the cache: planes of both kinds of layers have one shape."""
    checkpoint = exports.checkpoint("gemma4_text", sliding_window=32, **SIZES)
    packages = packages_of(checkpoint, tmp_path / "packages")
    adopted(packages, checkpoint, tmp_path / "b")
    (shard,) = Bundle.open(tmp_path / "b").manifest.shards
    kinds = "kv_cache_sliding", "kv_cache_full"
    for i in OWNERS:
        for plane, leaf in enumerate(("k_state", "v_state")):
            tensor = shard.states[f"layers.{i}.{leaf}"].tensor
            assert tensor == f"{i // 2}/{kinds[i % 2]}/{plane}"
    expected = exports.golden(checkpoint, 24)
    token = decoded(tmp_path / "b", expected.ids).argmax()
    assert token == expected.logits[-1].argmax()
    gates = gates_of(tmp_path / "b", checkpoint)
    assert "RED" not in {gate["verdict"] for gate in gates.values()}, gates


def test_functions_of_several_tokens_run_in_every_package(
    exports, checkpoint, packages, tmp_path
):
    """Packages without a state have them, too. No call goes on past the end of a ring."""
    several = packages_of(checkpoint, tmp_path / "packages", packages, verified=4)
    adopted(several, checkpoint, tmp_path / "b")
    manifest = Bundle.open(tmp_path / "b").manifest
    assert [part.functions for part in manifest.foreign.parts] == [
        (),
        (),
        ("decode", "verify"),
        ("decode", "verify"),
    ]
    expected = exports.golden(checkpoint, 24)
    token = decoded(tmp_path / "b", expected.ids).argmax()
    assert token == expected.logits[-1].argmax()
    gates = gates_of(tmp_path / "b", checkpoint)
    assert "RED" not in {gate["verdict"] for gate in gates.values()}, gates
    result = invoke("explain", "variant", tmp_path / "b", "--checkpoint", checkpoint)
    assert {gate["verdict"] for gate in result["gates"]} == {"GREEN"}, result["gates"]


def test_full_layers_that_turn_all_pairs_are_red(checkpoint, packages, tmp_path):
    """The full layer of the first package is enough; the others are sound."""
    folder = tmp_path / "packages"
    faulty = packages_of(checkpoint, folder, packages, turns_all_pairs=True)
    adopted(faulty, checkpoint, tmp_path / "b")
    gate = gates_of(tmp_path / "b", checkpoint)["program"]
    assert gate["verdict"] == "RED" and gate["value"] > 5 * gate["threshold"], gate


def test_packages_without_a_chunk_are_refused(checkpoint, packages, tmp_path):
    chunks = sorted(packages.iterdir())
    source = Checkpoint(checkpoint)
    with refused("4 caches.*8 of 1 heads of width 16 and 1 heads of width 32"):
        invoke(
            "adopt", *chunks[1:], "--checkpoint", source.path, "--out", tmp_path / "b"
        )
    assert not (tmp_path / "b").exists()


def test_the_work_of_a_call_is_read_off_the_packages(checkpoint, packages, tmp_path):
    adopted(packages, checkpoint, tmp_path / "b")
    plan = invoke("plan", tmp_path / "b")
    # two sliding and two full layers, without the padding of narrow heads
    window = tiny.DIMS["gemma4_text"]["sliding_window"]
    assert plan["bytes"]["kv"] == 2 * 2 * (2 * window * 16 + 2 * 32 * 32)
