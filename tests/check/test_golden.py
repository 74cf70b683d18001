"""Goldens are Hugging Face's numbers: layer by layer bit-equal to the whole model, for every
family."""

import numpy as np
import pytest
import torch
import transformers
from refusal import refused
from tiny import DIMS

from workbench.check import golden
from workbench.check.golden import Golden
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


def test_a_kept_golden_is_made_once_for_a_checkpoint_its_ids_and_a_version(
    tmp_path, exports, monkeypatch
):
    source, made = Checkpoint(exports.checkpoint("zaya")), []
    make = golden.make_golden
    monkeypatch.setattr(
        golden, "make_golden", lambda *given: made.append(given) or make(*given)
    )
    folder = tmp_path / "deep"
    first = Golden.of(source, IDS, folder)

    def is_kept():
        kept = Golden.of(source, IDS, folder)
        assert kept.source is source and kept.meta == first.meta
        assert (
            np.array_equal(kept.ids, IDS) and kept.values.keys() == first.values.keys()
        )
        assert all(np.array_equal(v, kept[name]) for name, v in first.values.items())

    is_kept()
    assert len(made) == 1
    first.file.write_bytes(first.file.read_bytes()[:-1])
    is_kept()  # made again, as it cannot be read
    is_kept()
    assert len(made) == 2
    Golden.of(source, IDS[:3], folder)
    Golden.of(Checkpoint(exports.checkpoint("qwen2")), IDS, folder)
    monkeypatch.setattr(golden, "version", lambda package: "another")
    Golden.of(source, IDS, folder)
    assert len(made) == 5 and len(list(folder.iterdir())) == 4


def test_the_weights_of_a_bundle_belong_to_one_checkpoint(llama_bundle, exports):
    with refused("exported from"):
        golden.stored_weights(Checkpoint(exports.checkpoint("llama")), llama_bundle)


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
