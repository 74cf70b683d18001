"""A bundle opens from anywhere, and only as the export left it."""

import json
import shutil

import pytest

from workbench import Bundle, Decoder, InputError
from workbench.check.validate import stored_gates


@pytest.fixture(scope="module")
def made(exports):
    return exports.bundle(
        exports.checkpoint("zaya", num_hidden_layers=2, num_experts=2), moe="routed"
    )


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made.root, tmp_path / "b")


def test_a_bundle_opened_from_inside_stays_as_it_is(copy, monkeypatch):
    before = sorted(copy.rglob("*"))
    monkeypatch.chdir(copy)
    assert Bundle.open(".").root == Bundle.open(copy).root
    assert sorted(copy.rglob("*")) == before
    monkeypatch.chdir(
        copy / "tokenizer"
        if (copy / "tokenizer").exists()
        else next(p for p in copy.iterdir() if p.is_dir())
    )
    Bundle.open("..")
    assert sorted(copy.rglob("*")) == before and not list(copy.parent.glob(".*"))


def test_an_older_version_is_refused_by_what_it_is(copy):
    """Its options are refused with it, whatever they are."""
    manifest = json.loads((copy / "bundle.json").read_text())
    manifest["version"] = 1
    manifest["options"] |= {"states": "packed", "undo": True}
    (copy / "bundle.json").write_text(json.dumps(manifest))
    with pytest.raises(
        InputError, match="version: .*a bundle of version 2.*export again"
    ):
        Bundle.open(copy)


def test_a_flipped_byte_is_found_by_validation(copy):
    weights = next(copy.rglob("weight.bin"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    bundle = Bundle.open(copy)
    decoder = Decoder(bundle, "portable")
    with pytest.raises(InputError, match="bytes that differ from the manifest's SHA"):
        bundle.verify()
    with pytest.raises(InputError, match="bytes that differ"):
        stored_gates(decoder)


def swapped(shards, kind):
    first, second = [i for i, shard in enumerate(shards) if shard["kind"] == kind][:2]
    shards[first], shards[second] = shards[second], shards[first]


def doubled(shards):
    shards.insert(1, shards[0] | {"name": "again", "path": "again.mlpackage"})


def test_the_manifest_of_an_export_says_each_thing_once_and_in_order(copy):
    for edit, found in [
        (lambda shards: swapped(shards, "router"), "every layer once, in order"),
        (doubled, "every layer once, in order"),
        (lambda shards: shards.pop(0), "every layer once, in order"),
        (
            lambda shards: shards[0].update(files=[]),
            "shards.0.files: List should have at least 1 item",
        ),
    ]:
        whole = (copy / "bundle.json").read_text()
        manifest = json.loads(whole)
        edit(manifest["shards"])
        (copy / "bundle.json").write_text(json.dumps(manifest))
        with pytest.raises(InputError, match=found):
            Bundle.open(copy)
        (copy / "bundle.json").write_text(whole)
    Bundle.open(copy)
