"""Goldens are Hugging Face's numbers: layer by layer bit-equal to the whole model, for every
family."""

import numpy as np
import pytest
import torch
import transformers
from refusal import refused
from tiny import DIMS

from workbench import Decoder, validate
from workbench.check import golden
from workbench.check.golden import Golden
from workbench.check.trace import parse_name
from workbench.files import load_arrays, save_arrays
from workbench.models.checkpoint import Checkpoint

IDS = [5, 17, 3, 88, 61, 2, 40, 9]


@pytest.mark.parametrize("family", DIMS)
def test_layer_by_layer_equals_the_whole_model(family, exports):
    path = exports.checkpoint(family)
    reference = golden.make_golden(path, IDS)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        whole = model.eval()(torch.tensor([IDS]), output_hidden_states=True)
    assert np.array_equal(reference["logits"], whole.logits[0].numpy())
    for layer in range(1, reference.layer_count):
        expected = whole.hidden_states[layer][0].numpy()
        assert np.array_equal(reference[f"x.{layer}"], expected)
    caches = [(layer.k, layer.v) for layer in reference.trace.layers]
    rows = [value for pair in caches for value in pair if value is not None]
    assert rows and {len(value) for value in rows} == {len(IDS)}


def test_a_kept_golden_is_made_once_for_a_checkpoint_its_ids_and_a_version(
    tmp_path, exports, monkeypatch
):
    source, calls = Checkpoint(exports.checkpoint("zaya")), []
    make_golden = golden.make_golden

    def count_call(*arguments):
        calls.append(arguments)
        return make_golden(*arguments)

    monkeypatch.setattr(golden, "make_golden", count_call)
    folder = tmp_path / "deep"
    first = Golden.of(source, IDS, folder)

    def check_stored():
        stored = Golden.of(source, IDS, folder)
        assert stored.source is source and stored.meta == first.meta
        assert np.array_equal(stored.ids, IDS)
        actual, expected = stored.trace.arrays(), first.trace.arrays()
        assert actual.keys() == expected.keys()
        assert all(np.array_equal(actual[name], expected[name]) for name in actual)

    check_stored()
    assert len(calls) == 1
    first.file.write_bytes(first.file.read_bytes()[:-1])
    check_stored()  # made again, as it cannot be read
    check_stored()
    assert len(calls) == 2
    Golden.of(source, IDS[:3], folder)
    Golden.of(Checkpoint(exports.checkpoint("qwen2")), IDS, folder)
    monkeypatch.setattr(golden, "version", lambda package: "another")
    Golden.of(source, IDS, folder)
    assert len(calls) == 5 and len(list(folder.iterdir())) == 4


def test_the_weights_of_a_bundle_belong_to_one_checkpoint(llama_bundle, exports):
    with refused("exported from"):
        golden.stored_weights(Checkpoint(exports.checkpoint("llama")), llama_bundle)


def change_array(name, change):
    """A damage to the arrays of a golden: the one of this name becomes `change` of it."""

    def damage(arrays):
        arrays[name] = change(arrays[name])

    return damage


def leave_out(name):
    return lambda arrays: arrays.pop(name)


def set_last_number(value):
    def change(array):
        array = array.copy()
        array[-1, -1] = value
        return array

    return change


# a damage, and words of the message that refuses it
DAMAGES = [
    (change_array("ids", lambda ids: ids + 97), "ids from .* needs ids from 0 to 96"),
    (change_array("ids", lambda ids: -ids), "ids from -"),
    (change_array("ids", lambda ids: ids.astype(np.float32)), "ids float32"),
    (change_array("ids", lambda ids: ids[None]), "ids int64 .1, 8."),
    (change_array("ids", lambda ids: ids[:0]), "ids int64 .0."),
    (change_array("ids", lambda ids: ids[:5]), "a row for each id"),
    (leave_out("x.1"), "an array 'hidden.1'"),
    (leave_out("x.0"), "no 'hidden|no 'x.0'"),
    (leave_out("hidden.1"), "no 'hidden.1'"),
    (leave_out("k.1"), "no 'k.1'"),
    (leave_out("logits"), "no 'logits'"),
    (lambda arrays: arrays.update(k=arrays["k.1"]), "an array 'k'"),
    (change_array("logits", lambda x: x[:, :5]), "ids from"),
    (change_array("logits", lambda x: x[:5]), "a row for each id"),
    (change_array("hidden.1", lambda x: x[:, :5]), "the shape"),
    (change_array("k.0", lambda x: x.astype(np.int32)), "'k.0' int32"),
    (change_array("k.0", lambda x: x[..., None]), "'k.0' float32"),
    (change_array("x.1", set_last_number(np.nan)), "x.1.*inf or nan in row 7"),
    (change_array("v.0", set_last_number(np.nan)), "v.0.*inf or nan in row 7"),
    (change_array("logits", set_last_number(np.inf)), "logits.*inf or nan in row 7"),
]


@pytest.fixture(scope="module")
def stored(exports, tmp_path_factory):
    file = tmp_path_factory.mktemp("golden") / "g"
    return golden.make_golden(exports.checkpoint("llama"), IDS), file


@pytest.mark.parametrize("damage, words", DAMAGES)
def test_arrays_of_another_form_are_refused_when_a_golden_is_read(
    stored, damage, words
):
    whole, file = stored
    arrays, metadata = load_arrays(whole.save(file))
    damage(arrays)
    save_arrays(file, arrays, metadata)
    with refused(words):
        Golden.load(file)


@pytest.mark.parametrize("name", ["x.1", "hidden.0", "k.1", "logits"])
def test_a_golden_that_is_not_finite_is_never_green(exports, name):
    bundle = exports.bundle("llama")
    whole = golden.make_golden(exports.checkpoint("llama"), IDS)
    tensor, layer = parse_name(name)
    owner = whole.trace if layer is None else whole.trace.layers[layer]
    setattr(owner, tensor, np.full_like(whole[name], np.nan))
    whole.meta["checkpoint"] = bundle.manifest.checkpoint["sha256"]
    with refused(f"{name}.*inf or nan"):
        validate(Decoder(bundle, "portable"), whole)


def test_a_golden_of_other_dimensions_is_refused(exports):
    bundle = exports.bundle("llama")
    other = golden.make_golden(exports.checkpoint("qwen2"), IDS)
    other.meta["checkpoint"] = bundle.manifest.checkpoint["sha256"]
    with refused("layers, width, vocabulary .*those of the bundle"):
        golden.check_fits(other, bundle)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x10\0\0\0\0\0\0\0{}", b"nonsense that is long enough to look at"],
)
def test_what_is_no_golden_is_refused(tmp_path, content):
    (tmp_path / "g").write_bytes(content)
    with refused("golden"):
        Golden.load(tmp_path / "g")


def test_ids_are_checked(exports):
    path = exports.checkpoint("llama")
    for bad in ([], [97], [-1]):
        with refused("prompt ids"):
            golden.make_golden(path, bad)
