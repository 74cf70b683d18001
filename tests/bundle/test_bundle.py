"""A bundle opens from anywhere, and only as the export left it: damage is refused at opening, by
validation, or is RED in gate `interface`."""

import json
import re
import shutil

import pytest

from workbench import Bundle, Decoder, InputError
from workbench.check.interface import interface_gate
from workbench.check.validate import stored_gates


@pytest.fixture(scope="module")
def made(exports):
    return exports.bundle(exports.checkpoint("gemma3_text"), sliding="ring")


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made.root, tmp_path / "b")


def edited(copy, edit):
    manifest = json.loads((copy / "bundle.json").read_text())
    edit(manifest)
    (copy / "bundle.json").write_text(json.dumps(manifest))


def first(copy):
    return copy / json.loads((copy / "bundle.json").read_text())["shards"][0]["path"]


def test_a_bundle_opened_from_inside_stays_as_it_is(copy, monkeypatch):
    before = sorted(copy.rglob("*"))
    monkeypatch.chdir(copy)
    assert Bundle.open(".").root == Bundle.open(copy).root
    monkeypatch.chdir(first(copy))
    Bundle.open("..")
    assert sorted(copy.rglob("*")) == before and not list(copy.parent.glob(".*"))


def test_a_flipped_byte_is_found_by_validation(copy):
    weights = next(copy.rglob("weight.bin"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    decoder = Decoder(copy, "portable")
    with pytest.raises(InputError, match="bytes that differ from the manifest's SHA"):
        stored_gates(decoder)


def leave_out_weights(manifest):
    files = manifest["shards"][0]["files"]
    files[:] = [f for f in files if not f["path"].endswith("weight.bin")]


def more(copy):
    (first(copy) / "Data" / "more").write_text("x")


def alias(copy):
    (first(copy) / "Data" / "alias").symlink_to("com.apple.CoreML/model.mlmodel")


def beside_the_tokenizer(copy):
    (copy / "tokenizer").mkdir(exist_ok=True)
    (copy / "tokenizer" / "added_tokens.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (lambda copy: edited(copy, leave_out_weights), "weight.bin"),
        (more, "more"),
        (alias, "alias"),
        (beside_the_tokenizer, "added_tokens.json"),
    ],
)
def test_validation_refuses_a_file_that_the_manifest_does_not_list(copy, damage, name):
    damage(copy)
    with pytest.raises(InputError, match=f"{name}: found a file that bundle.json does"):
        Bundle.open(copy).verify()


def test_what_macos_itself_drops_into_folders_is_left_alone(copy):
    for folder in (copy, first(copy), first(copy) / "Data"):
        (folder / ".DS_Store").write_bytes(b"Bud1")
    Bundle.open(copy).verify()


def test_a_file_outside_the_bundle_is_refused(copy):
    path = next(first(copy).rglob("weight.bin"))
    path.symlink_to(path.rename(copy.parent / "weight.bin"))
    with pytest.raises(InputError, match="weight.bin: found a link to .*outside"):
        Bundle.open(copy)


def first_state(manifest):
    return next(iter(manifest["shards"][0]["states"].values()))


def other_state(manifest):
    states = manifest["shards"][0]["states"]
    states["layers.0.other_state"] = states.pop("layers.0.k_state")


def doubled(manifest):
    shards = manifest["shards"]
    shards.insert(1, shards[0] | {"name": "again", "path": "again.mlpackage"})


def swapped(manifest):
    shards = manifest["shards"]
    shards[0], shards[1] = shards[1], shards[0]


def version_1(manifest):
    """Its options are refused with it, whatever they are."""
    manifest["version"] = 1
    manifest["options"] |= {"states": "packed", "undo": True}


@pytest.mark.matrix(12, wide=30)
@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (version_1, "version: .*a bundle of version 2.*export again"),
        (swapped, "every layer once, in order"),
        (doubled, "every layer once, in order"),
        (lambda m: m["shards"].pop(0), "every layer once, in order"),
        (lambda m: m["shards"][0].update(files=[]), "shards.0.files: .*at least 1"),
        (lambda m: m.update(rope=[]), "rope tables"),
        (lambda m: m["layers"].pop(), "rope tables are not those of L layers"),
        (lambda m: m["rope"][0].update(inv_freq=[]), "at least 1 item"),
        (lambda m: m["options"].update(max_seq_len=10**30), "options.max_seq_len"),
        (lambda m: m["options"].update(batch=10**12), "options.batch"),
        (lambda m: m["dims"].update(C=10**30), "dims.C"),
        (lambda m: first_state(m).update(shape=[1, 1, 10**12, 32]), "shards.0.states"),
        (other_state, "layers.0.other_state.*should match"),
        (lambda m: m["shards"][0].update(path="a" * 5000), "shards.0.path"),
        (lambda m: m["shards"][0].update(path="a\0b"), "shards.0.path"),
        (lambda m: m["shards"][0].update(path="../b"), "must stay inside"),
        (lambda m: m["embedding"]["file"].update(path="/etc/hosts"), "embedding.file"),
        (lambda m: m["embedding"].update(scale=float("inf")), "embedding.scale"),
    ],
)
def test_a_manifest_beyond_its_schema_is_refused(copy, edit, found):
    edited(copy, edit)
    with pytest.raises(InputError, match=found) as refusal:
        Bundle.open(copy)
    assert len(str(refusal.value)) < 600 and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (lambda m: m["rope"][0]["inv_freq"].pop(), "rope_cos_"),
        (lambda m: m["options"].update(max_seq_len=64), "layers_01_01 "),
        (lambda m: m["options"].update(batch=2), "head_00 x"),
        (lambda m: m["dims"].update(C=32), "layers_00_00 x"),
        (lambda m: m["dims"].update(D=16), "k_state"),
        (lambda m: m["options"].update(layout="bc1t"), "layers_00_00 x"),
        (lambda m: first_state(m).update(shape=[1, 1, 9, 32]), "layers_00_00 .*state"),
        (lambda m: first_state(m).update(ring=5), "layers_00_00 ring"),
    ],
)
def test_a_manifest_that_does_not_agree_with_itself_is_red(copy, edit, found):
    edited(copy, edit)
    gate = interface_gate(Bundle.open(copy))
    assert gate.verdict == "RED"
    assert re.search(found, gate.reason), gate.reason


@pytest.mark.parametrize("path", ["a" * 5000, "a/" * 2500, "a\0b"])
def test_a_path_that_no_system_takes_is_refused(path):
    with pytest.raises(InputError) as refusal:
        Bundle.open(path)
    assert len(str(refusal.value)) < 600


@pytest.mark.parametrize(
    ("edit", "same"),
    [
        (lambda m: m["rope"][0].update(scale=1.5), False),
        (lambda m: m["embedding"].update(scale=2.0), False),
        (lambda m: m["checkpoint"].update(sha256="0" * 64), False),
        (lambda m: m["checkpoint"].update(name="elsewhere"), True),
        (lambda m: m["packages"].update(torch="9.9"), True),
    ],
)
def test_the_identity_covers_what_decides_how_a_bundle_is_run(made, copy, edit, same):
    edited(copy, edit)
    assert (Bundle.open(copy).identity == made.identity) == same
