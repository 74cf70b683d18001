"""A bundle opens from any folder, and only as the export wrote it: damage is refused at opening or
by validation, or is RED in gate `interface`."""

import os
import re
import shutil

import pytest
from refusal import refused
from tiny import edit_json

from workbench import Bundle, Decoder, files
from workbench.bundle import bundle as bundles
from workbench.check.bug_gates import load_or_run_gates
from workbench.check.interface import interface_gate


@pytest.fixture(scope="module")
def bundle(exports):
    return exports.bundle("gemma3_text", sliding="ring")


@pytest.fixture
def copy(bundle, tmp_path):
    return shutil.copytree(bundle.root, tmp_path / "b")


def edited(copy, path: str, value):
    """Sets a value in bundle.json."""
    edit_json(copy / "bundle.json", (path, value))


def first(copy):
    return copy / "layers_00_00.mlpackage"


def test_a_bundle_opened_from_inside_stays_as_it_is(copy, monkeypatch):
    before = sorted(copy.rglob("*"))
    monkeypatch.chdir(copy)
    assert Bundle.open(".").root == Bundle.open(copy).root
    monkeypatch.chdir(first(copy))
    Bundle.open("..")
    assert sorted(copy.rglob("*")) == before and not list(copy.parent.glob(".*"))


def flip(path, times=None):
    """Changes a byte in place; `times` are set as a copying program would."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read()[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    if times:
        os.utime(path, ns=times)


DIFFERS = "bytes that differ from the manifest's SHA"


@pytest.mark.parametrize("file", ["weight.bin", "model.mlmodel", "embedding.*"])
def test_a_flipped_byte_is_found_by_validation_and_before_anything_runs(copy, file):
    decoder, path = Decoder(copy, "portable"), next(copy.rglob(file))
    status = path.stat()
    flip(path, (status.st_atime_ns, status.st_mtime_ns))
    with refused(DIFFERS):
        load_or_run_gates(decoder)
    with refused(DIFFERS):
        Decoder(copy, "portable")


def test_a_large_bundle_is_hashed_again_where_a_file_has_changed_alone(
    copy, monkeypatch, tmp_path
):
    monkeypatch.setattr(files, "__file__", str(tmp_path / "files.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bundles, "MIN_NOTED_BYTES", 0)
    hashed = []
    sha256 = bundles.sha256
    monkeypatch.setattr(bundles, "sha256", lambda f: hashed.append(f) or sha256(f))
    counts = []
    for _ in range(2):
        Bundle.open(copy).check_contents()
        counts.append(len(hashed))
    assert counts[0] == counts[1] == len(Bundle.open(copy).files)
    path = next(copy.rglob("weight.bin"))
    status = path.stat()
    flip(path, (status.st_atime_ns, status.st_mtime_ns))
    for _ in range(2):  # a wrong file is not noted
        with refused(DIFFERS):
            Bundle.open(copy).check_contents()


@pytest.mark.parametrize("file", ["embedding.safetensors", "weight.bin"])
def test_a_file_that_is_cut_off_under_an_open_decoder_is_refused(copy, file):
    """Reading what is no longer there would end the process with SIGBUS."""
    decoder = Decoder(copy, "portable")
    for path in copy.rglob(file):
        os.truncate(path, 0)
    with refused(file):
        decoder.generate([1, 2, 3], 2)


def longer_head(shards):
    return [*shards[:-1], shards[-1] | {"rows": [0, 2000]}]


@pytest.mark.parametrize(
    "edits", [[("dims/V", 2000), ("shards", longer_head)], [("dims/C", 32)]]
)
def test_an_embedding_table_of_other_dimensions_is_not_run(copy, edits):
    edit_json(copy / "bundle.json", *edits)
    with refused("embedding.safetensors: found .* needs tables"):
        Decoder(copy, "portable")


def test_a_manifest_without_an_end_is_refused(copy):
    (copy / "bundle.json").unlink()
    (copy / "bundle.json").symlink_to("/dev/zero")
    with refused("bundle.json: found a device; needs a regular file"):
        Bundle.open(copy)


def more(copy):
    (first(copy) / "Data" / "more").write_text("x")


def alias(copy):
    (first(copy) / "Data" / "alias").symlink_to("com.apple.CoreML/model.mlmodel")


def beside_the_tokenizer(copy):
    (copy / "tokenizer").mkdir(exist_ok=True)
    (copy / "tokenizer" / "added_tokens.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "name"),
    [(more, "more"), (alias, "alias"), (beside_the_tokenizer, "added_tokens.json")],
)
def test_validation_refuses_a_file_that_the_manifest_does_not_list(copy, damage, name):
    damage(copy)
    with refused(f"{name}: found a file that bundle.json does"):
        Bundle.open(copy).verify()


def test_what_macos_itself_drops_into_folders_is_left_alone(copy):
    for folder in (copy, first(copy), first(copy) / "Data"):
        (folder / ".DS_Store").write_bytes(b"Bud1")
    Bundle.open(copy).verify()


def test_a_file_outside_the_bundle_is_refused(copy):
    path = next(first(copy).rglob("weight.bin"))
    path.symlink_to(path.rename(copy.parent / "weight.bin"))
    with refused("weight.bin: found a link to .*outside"):
        Bundle.open(copy)


KEYS = "shards/0/states/layers.0.k_state"
ORDER = "every layer once, in order"
# place in bundle.json, value, and words of the message where they are not the place
BEYOND = [
    ("version", 1, "version 1; needs version 2.*export again"),
    ("shards", lambda shards: [shards[1], shards[0], *shards[2:]], ORDER),
    ("shards", lambda shards: shards[1:], ORDER),
    ("shards/1/layers", [0, 0], ORDER),
    ("shards/0/files", [], "shards.0.files: .*at least 1"),
    ("rope", [], "rope tables"),
    ("layers", [], "rope tables are not those of L layers"),
    ("rope/0/inv_freq", [], "at least 1 in the list"),
    ("options/max_seq_len", 10**30),
    ("options/batch", 10**12),
    ("dims/C", 10**30),
    (f"{KEYS}/shape", [1, 1, 10**12, 32], "shards.0.states"),
    (
        "shards/0/states/layers.0.other_state",
        {},
        "shards.0.states: the key .layers.0.other.*a text of the form",
    ),
    ("shards/0/path", "a" * 5000),
    ("shards/0/path", "a\0b"),
    ("shards/0/path", "../b", "must stay inside"),
    ("embedding/file/path", "/etc/hosts", "embedding.file"),
    ("embedding/scale", float("inf")),
]


@pytest.mark.matrix(12, wide=30)
@pytest.mark.parametrize("where", BEYOND, ids=lambda where: where[0])
def test_a_manifest_beyond_its_schema_is_refused(copy, where):
    path, value, *message = where
    if path == "version":  # its options are refused with it, whatever they are
        edited(copy, "options/undo", True)
    edited(copy, path, value)
    (message,) = message or [path.replace("/", ".")]
    with refused(message) as refusal:
        Bundle.open(copy)
    assert len(str(refusal.value)) < 600 and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("rope/0/inv_freq", [1.0], "rope_cos_"),
        ("options/max_seq_len", 64, "layers_01_01 "),
        ("options/batch", 2, "head_00 x"),
        ("dims/C", 32, "layers_00_00 x"),
        ("dims/D", 16, "k_state"),
        ("options/layout", "bc1t", "layers_00_00 x"),
        (f"{KEYS}/shape", [1, 1, 9, 32], "layers_00_00 .*state"),
        (f"{KEYS}/ring", 5, "layers_00_00 ring"),
    ],
)
def test_a_manifest_that_does_not_agree_with_itself_is_red(copy, path, value, reason):
    edited(copy, path, value)
    gate = interface_gate(Bundle.open(copy))
    assert gate.verdict == "RED"
    assert re.search(reason, gate.reason), gate.reason


@pytest.mark.parametrize("path", ["a" * 5000, "a/" * 2500, "a\0b"])
def test_a_path_that_no_system_takes_is_refused(path):
    with refused(".") as refusal:
        Bundle.open(path)
    assert len(str(refusal.value)) < 600


@pytest.mark.parametrize(
    ("path", "value", "same"),
    [
        ("rope/0/scale", 1.5, False),
        ("embedding/scale", 2.0, False),
        ("checkpoint/sha256", "0" * 64, False),
        ("checkpoint/name", "elsewhere", True),
        ("packages/torch", "9.9", True),
    ],
)
def test_the_identity_covers_what_decides_how_a_bundle_is_run(
    bundle, copy, path, value, same
):
    edited(copy, path, value)
    assert (Bundle.open(copy).identity == bundle.identity) == same
