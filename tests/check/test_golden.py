"""Goldens are Hugging Face's numbers: layer by layer bit-equal to the whole model, for every
family."""

import numpy as np
import pytest
import torch
import transformers
from tiny import DIMS

from workbench.check import golden
from workbench.check.golden import Golden
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint

IDS = [5, 17, 3, 88, 61, 2, 40, 9]


@pytest.mark.parametrize("family", DIMS)
def test_layer_by_layer_equals_the_whole_model(family, exports):
    path = exports.checkpoint(family)
    found = golden.make_golden(path, IDS)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        whole = model.eval()(torch.tensor([IDS]), output_hidden_states=True)
    assert np.array_equal(found["logits"], whole.logits[0].numpy())
    for layer in range(1, found.layers):
        expected = whole.hidden_states[layer][0].numpy()
        assert np.array_equal(found[f"x.{layer}"], expected)
    rows = [v for name, v in found.values.items() if name[:2] in ("k.", "v.")]
    assert rows and {len(value) for value in rows} == {len(IDS)}


def test_stored_weights_of_a_compressed_bundle_differ_and_explain_its_logits(exports):
    source = Checkpoint(exports.checkpoint("llama"))
    bundle = exports.bundle(source.path, compress="int8-tensor")
    stored = golden.make_golden(
        source, IDS, golden.stored_weights(source, bundle), bundle.identity
    )
    decoder = exports.decoder(source.path, compress="int8-tensor")
    plain = golden.make_golden(source, IDS)
    decoder.begin()
    made = decoder.prefill(IDS)
    scale = np.abs(stored["logits"][-1]).max()
    assert (
        np.abs(made - stored["logits"][-1]).max()
        < 1e-4 * scale
        < np.abs(made - plain["logits"][-1]).max()
    )


def test_a_saved_golden_loads_as_it_was(tmp_path, exports):
    made = golden.make_golden(exports.checkpoint("zaya"), IDS)
    loaded = Golden.load(made.save(tmp_path / "deep" / "g.safetensors"))
    assert np.array_equal(made.ids, loaded.ids)
    assert made.values.keys() == loaded.values.keys()
    for name, value in made.values.items():
        assert np.array_equal(value, loaded[name])
    assert made.meta == loaded.meta and [
        p.name for p in (tmp_path / "deep").iterdir()
    ] == ["g.safetensors"]


def test_a_kept_golden_is_made_once_for_a_checkpoint_its_ids_and_a_version(
    tmp_path, exports, monkeypatch
):
    source, made = Checkpoint(exports.checkpoint("llama")), []
    make = golden.make_golden
    monkeypatch.setattr(
        golden, "make_golden", lambda *given: made.append(given) or make(*given)
    )
    first = Golden.of(source, IDS, tmp_path)
    again = Golden.of(source, IDS, tmp_path)
    assert len(made) == 1 and again.source is source and again.file.is_file()
    assert np.array_equal(first["logits"], again["logits"])
    assert first.meta == again.meta
    Golden.of(source, IDS[:3], tmp_path)
    Golden.of(Checkpoint(exports.checkpoint("qwen2")), IDS, tmp_path)
    monkeypatch.setattr(golden, "version", lambda package: "another")
    Golden.of(source, IDS, tmp_path)
    assert len(made) == 4 == len(list(tmp_path.iterdir()))


def test_a_kept_golden_that_cannot_be_read_is_made_again(tmp_path, exports):
    source = Checkpoint(exports.checkpoint("llama"))
    first = Golden.of(source, IDS, tmp_path)
    first.file.write_bytes(first.file.read_bytes()[:-1])
    again = Golden.of(source, IDS, tmp_path)
    assert np.array_equal(again["logits"], first["logits"])
    assert np.array_equal(Golden.load(first.file)["logits"], first["logits"])


def test_the_weights_of_a_bundle_belong_to_one_checkpoint(llama_bundle, exports):
    with pytest.raises(InputError, match="exported from"):
        golden.stored_weights(Checkpoint(exports.checkpoint("llama")), llama_bundle)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x10\0\0\0\0\0\0\0{}", b"nonsense that is long enough to look at"],
)
def test_what_is_no_golden_is_refused(tmp_path, content):
    (tmp_path / "g").write_bytes(content)
    with pytest.raises(InputError, match="golden"):
        Golden.load(tmp_path / "g")


def test_ids_are_checked(exports):
    path = exports.checkpoint("llama")
    for bad in ([], [97], [-1]):
        with pytest.raises(InputError, match="prompt ids"):
            golden.make_golden(path, bad)
