"""One layer of real dimensions on the Neural Engine: its result says what ran."""

import in_process
import pytest

from workbench import log
from workbench.studies.real_layer import measure_real_layer
from workbench.sweep import process

DIMS = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
}
RUN = {"T": [1], "depth": [4], "n_gen": 2, "repetitions": 1}


@pytest.mark.parametrize(
    ("runtime", "share", "words"),
    [
        pytest.param(
            "stand-in:plan-ane", 1.0, "nothing is measured", marks=pytest.mark.shim
        ),
        pytest.param(
            "stand-in:fallback", 0.0, "not on the Neural Engine", marks=pytest.mark.shim
        ),
        pytest.param("stand-in:load14-ne", None, "failed", marks=pytest.mark.shim),
        ("portable", None, "no Core ML here"),
    ],
)
def test_a_layer_is_measured_for_the_neural_engine_or_says_why_not(
    runtime, share, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # a log and bundles of its own
    monkeypatch.setattr(process, "call", in_process.call)
    (row,) = measure_real_layer(
        runtime, DIMS, tmp_path, experiment="34", **RUN
    ).to_dict("records")
    assert words in row["result"] and row["runtime"] == runtime.partition(":")[0]
    assert row.get("ane_ops_share") == share
    runs = log.load("runs")
    assert len(runs) == (runtime != "portable")
    if share is not None:
        assert runs["compute_units"][0] == "CPU_AND_NE"
