"""Fidelity rows of unusual but faithful models: identity layers, values that are all NaN, goldens
of another model."""

import warnings

import numpy as np
import pytest
import safetensors.torch
from tiny import prompt

from workbench import Decoder
from workbench.check import golden, states
from workbench.check.price import measure_budget
from workbench.check.validate import validate
from workbench.errors import InputError
from workbench.explain import error
from workbench.export import export
from workbench.models.checkpoint import Checkpoint


def changed(exports, folder, edit, **dims):
    """A small random llama whose tensors `edit` has changed, and its fp16 bundle."""
    source = exports.checkpoint("llama", **dims)
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        edit(name, tensor)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return Checkpoint(folder), export(
        folder, folder.parent / "bundle", max_seq_len=32, progress=False
    )


@pytest.fixture(scope="module")
def identity(exports, tmp_path_factory):
    """The second layer hands its input on, as layers do that were added to a trained model or
    pruned from it."""

    def silence(name, tensor):
        if name in (
            "model.layers.1.self_attn.o_proj.weight",
            "model.layers.1.mlp.down_proj.weight",
        ):
            tensor.zero_()

    return changed(exports, tmp_path_factory.mktemp("identity") / "checkpoint", silence)


def test_a_layer_that_adds_nothing_is_faithful_when_it_adds_nothing(identity):
    checkpoint, bundle = identity
    reference = golden.make_golden(checkpoint, prompt(97, 20))
    assert not reference["update.1"].any()
    judged = validate(Decoder(bundle, "portable"), reference, (1, 4))
    assert judged.verdict == "GREEN"
    found = states.state_gates(Decoder(bundle, "portable"))
    assert {g.verdict for g in found} == {"GREEN"}


def test_a_layer_that_adds_nothing_has_no_error_to_split(identity):
    checkpoint, bundle = identity
    splits = error.split_error(checkpoint, bundle, prompt(97, 8))
    assert {g.verdict for g in error.error_gates(splits)} == {"GREEN"}
    assert (
        splits["isolated"]
        .layers()
        .set_index("layer")
        .loc[1, ["storage", "reauthoring", "precision", "total"]]
        .eq(0)
        .all()
    )


def test_an_update_where_hugging_face_has_none_is_red(identity):
    checkpoint, bundle = identity
    reference = golden.make_golden(checkpoint, prompt(97, 20))
    decoder = Decoder(bundle, "portable")
    predict_calls = decoder.layers[1].predict_calls
    decoder.layers[1].predict_calls = lambda *operands: [
        {name: value * np.float32(1.01) for name, value in outputs.items()}
        for outputs in predict_calls(*operands)
    ]
    judged = validate(
        decoder, reference, (1, 4), budget=measure_budget(bundle, checkpoint, reference)
    )
    (gate,) = (g for g in judged.gates if g.name == "budget")
    assert gate.verdict == "RED" and "layer 1, update" in gate.reason


def test_values_that_are_all_nan_are_red_and_no_row_is_missing(exports, tmp_path):
    def enlarge(name, tensor):
        if "norm" in name:
            tensor.fill_(30000)

    checkpoint, bundle = changed(exports, tmp_path / "checkpoint", enlarge)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what overflows says so
        reference = golden.make_golden(checkpoint, prompt(97, 8))
        budget = measure_budget(bundle, checkpoint, reference)
        judged = validate(Decoder(bundle, "portable"), reference, (1, 2), budget=budget)
    verdicts = {g.name: g.verdict for g in judged.gates}
    assert {verdicts["max_kl"], verdicts["budget"]} == {"RED"}
    counts = judged.rows.groupby(["layer", "tensor", "mode"])["T"].count()
    assert counts.loc[:, ["k", "v"]].nunique() == 2  # of isolated and of chained passes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = states.state_gates(Decoder(bundle, "portable"))
    checked = {gate.name: gate.verdict for gate in found}
    assert checked["state_life"] == checked["stale_rows"] == "RED"


@pytest.mark.parametrize("dims", [{"num_hidden_layers": 3}, {"vocab_size": 120}])
def test_a_golden_of_other_dimensions_is_refused_before_anything_runs(
    dims, llama_bundle, exports
):
    reference = golden.make_golden(exports.checkpoint("llama", **dims), prompt(97, 4))
    with pytest.raises(InputError, match="one of checkpoint"):
        validate(Decoder(llama_bundle, "portable"), reference)


def test_the_weights_of_a_bundle_belong_to_one_checkpoint(llama_bundle, exports):
    with pytest.raises(InputError, match="exported from"):
        golden.stored_weights(Checkpoint(exports.checkpoint("llama")), llama_bundle)
