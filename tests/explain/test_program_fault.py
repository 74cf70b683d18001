"""`explain` is RED where gate `program` is, and says where: the layer, and the epsilon that the
bundle has in place of the configuration's."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from in_process import invoke

from miltorch.coremltools_import import protobuf_module
from miltorch.program import spec_path
from workbench.bundle import Bundle
from workbench.explain import program_fault
from workbench.files import sha256
from workbench.models.checkpoint import Checkpoint

LAYER = 1


@pytest.fixture(scope="module")
def sound(exports):
    """A checkpoint and its bundle."""
    checkpoint = exports.checkpoint("llama")
    return checkpoint, exports.bundle(checkpoint, max_seq_len=64, compress="fp16")


def enlarge_epsilon(bundle: Bundle, folder: Path, norm: str) -> Path:
    """Copies a bundle into a folder and makes a norm's epsilon of layer `LAYER` 10 times as large.
    bundle.json has the file's new hash, so that only a gate can show the edit."""
    shutil.copytree(bundle.root, folder)
    (shard,) = (s for s in bundle.manifest.shards if LAYER in s.layer_range)
    path = spec_path(folder / shard.path)
    spec = protobuf_module("Model_pb2").Model.FromString(path.read_bytes())
    (function,) = spec.mlProgram.functions.values()
    (epsilon,) = (
        op.attributes["val"].immediateValue.tensor.bytes
        for op in function.block_specializations[function.opset].operations
        if op.type == "const" and f"{norm}_eps0" in op.outputs[0].name
    )
    epsilon.values = (np.frombuffer(epsilon.values, np.float16) * 10).tobytes()
    path.write_bytes(spec.SerializeToString())
    manifest = json.loads((folder / "bundle.json").read_text())
    for entry in manifest["shards"][bundle.manifest.shards.index(shard)]["files"]:
        file = folder / entry["path"]
        entry |= {"sha256": sha256(file), "bytes": file.stat().st_size}
    (folder / "bundle.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.slow("splits the error and runs gate `program`")
def test_a_changed_epsilon_is_red_and_named_although_the_usual_inputs_hide_it(
    sound, tmp_path
):
    checkpoint, bundle = sound
    options = "--checkpoint", checkpoint, "--prompt-ids", "1,2,3,4"
    explained = invoke("explain", bundle.root, *options)
    assert explained["verdict"] == "GREEN" and explained["fits"] == "as configured"
    planted = enlarge_epsilon(bundle, tmp_path / "planted", "post_attention_layernorm")
    explained = invoke("explain", planted, *options)
    verdicts = {gate["name"]: gate["verdict"] for gate in explained["gates"]}
    assert explained["verdict"] == verdicts["program"] == "RED"
    assert verdicts["weights"] == verdicts["reauthoring"] == "GREEN"
    assert explained["fits"].startswith("epsilon ")
    for words in (
        f"Layer {LAYER} computes something else",
        "at small inputs only (update; T = ",
        f"in post_attention_layernorm of layer {LAYER}",
        "The stored weights are right",
    ):
        assert words in explained["conclusion"]


@pytest.mark.slow("runs gate `program` on an export")
def test_an_epsilon_is_found_beside_layers_with_recurrent_states(exports, tmp_path):
    """The other layers of such a model are not left out of the fit."""
    checkpoint = exports.checkpoint("lfm2")
    bundle = exports.bundle(checkpoint, max_seq_len=64, compress="fp16")
    planted = Bundle.open(
        enlarge_epsilon(bundle, tmp_path / "planted", "post_attention_layernorm")
    )
    answer = program_fault.judge_program(planted, Checkpoint(checkpoint))
    assert answer.gate.verdict == "RED"
    assert answer.cause.endswith(f"in ffn_norm of layer {LAYER}")


def wrong_rows(*rows: tuple) -> pd.DataFrame:
    """Rows of gate `program` that are over its limit."""
    columns = ["layer", "tensor", "T", "mode", "kind"]
    return pd.DataFrame(rows, columns=columns).astype({"layer": "Int64"})


@pytest.mark.parametrize(
    "rows, sentence",
    [
        (
            [(2, "k", 1, "isolated", "scaled"), (2, "update", 4, "isolated", "start")],
            "Layer 2 computes something else than the checkpoint's configuration says "
            "(k, update; T = 1, 4).",
        ),
        (
            [(None, "logits", 4, "isolated", "scaled")],
            "The final norm or the head computes something else than the checkpoint's "
            "configuration says at small inputs only (logits; T = 4).",
        ),
        (
            [(layer, "hidden", 1, "chained", "start") for layer in (3, 4)],
            "Layer 3 computes something else than the checkpoint's "
            "configuration says (hidden; T = 1).",
        ),
    ],
)
def test_the_sentence_says_which_layers_tensors_and_calls_are_wrong(rows, sentence):
    right = [(layer, "hidden", 1, "chained", "start") for layer in range(3)]
    table = wrong_rows(*right, *rows)
    assert program_fault._describe_place(wrong_rows(*rows), table) == sentence


CHAINED = "k", "v"
OUTPUTS = "k", "v", "hidden"


@pytest.mark.parametrize(
    "compared, wrong, subject",
    [
        (
            CHAINED,
            {2: "kv", 3: "kv"},
            "Layer 1 behind its K and V, or layer 2 computes",
        ),
        (CHAINED, {0: "kv"}, "Layer 0 computes"),
        (
            CHAINED,
            {},
            "Layer 3 behind its K and V, the final norm or the head computes",
        ),
        (OUTPUTS, {2: "k", 3: "kv"}, "Layer 2 computes"),
        (OUTPUTS, {}, "The final norm or the head computes"),
    ],
)
def test_a_fault_behind_k_and_v_is_not_laid_to_the_next_layer_alone(
    compared, wrong, subject
):
    """Where layers read each other's outputs, K and V of the next layer are the first wrong
    values."""
    every = [(n, name, 1, "chained", "start") for n in range(4) for name in compared]
    logits = (None, "logits", 1, "chained", "start")
    rows = [(n, name, 1, "chained", "start") for n in wrong for name in wrong[n]]
    sentence = program_fault._describe_place(
        wrong_rows(*rows, logits), wrong_rows(*every, logits)
    )
    assert sentence.startswith(f"{subject} something else")


RIGHT = {"layer": 1, "tensor": "k", "T": 1, "mode": "isolated", "ratio": 0.1}


@pytest.mark.parametrize(
    "tensors, words",
    [
        (["update"], "K and V are right"),
        (["k", "update"], "k_proj, its norm or rope"),
        (["v"], "v_proj or its norm"),
        (["k", "v", "update"], "the layer's first norm"),
    ],
)
def test_the_wrong_tensors_say_which_parts_can_be_wrong(tensors, words):
    wrong = pd.DataFrame([RIGHT | {"tensor": name, "ratio": 2.0} for name in tensors])
    table = pd.concat([wrong, pd.DataFrame([RIGHT | {"ratio": 0.1}])])
    assert words in program_fault._describe_suspects(wrong, table)
    # behind a wrong layer of a chained pass everything is wrong
    chained = wrong.assign(mode="chained")
    assert program_fault._describe_suspects(chained, table) is None
    # a layer with a recurrent state has no K and no V
    without = table.assign(tensor="update")
    other = wrong.assign(tensor="update")
    assert program_fault._describe_suspects(other, without) is None


def test_an_epsilon_is_found_between_those_that_are_tried_first():
    found, distance = program_fault._minimize(
        lambda eps: abs(eps / 3e-6 - 1), 1e-6, 1e-5
    )
    assert found == pytest.approx(3e-6, rel=1e-5) and distance <= 1e-5
