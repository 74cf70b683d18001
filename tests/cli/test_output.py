"""The next step that `validate` prints after a RED result."""

from pathlib import Path

import pytest

from workbench.cli.output import READ_AND_EXPORT, format_result, step_after_red

EXPLAIN = "workbench explain b --checkpoint m"
NAMES = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"


def clause(layer: int, name: str) -> str:
    """What gate `weights` says of a tensor."""
    tensor = f"model.layers.{layer}.{name}.weight"
    return (
        f"layers_{layer:02}_{layer:02}: {tensor}: 20 times half a step of int8-channel"
    )


@pytest.mark.parametrize(
    "clauses, others, step",
    [
        (
            [clause(1, name) for name in NAMES],
            [],
            "workbench explain variant b --checkpoint m",
        ),
        ([clause(i, name) for i, name in enumerate(NAMES)], [], EXPLAIN),
        ([clause(1, "q_proj")] * 5, [], EXPLAIN),
        ([clause(1, name) for name in NAMES], ["program"], EXPLAIN),
    ],
    ids=["a layer", "five layers", "one tensor", "the program too"],
)
def test_a_layer_of_wrong_weights_leads_to_explain_variant(clauses, others, step):
    """It says whether they are another layer's."""
    gates = [{"name": "weights", "verdict": "RED", "reason": "; ".join(clauses)}]
    gates += [{"name": name, "verdict": "RED", "reason": ""} for name in others]
    result = {"verdict": "RED", "gates": gates}
    assert step_after_red(result, Path("b"), Path("m")) == step


def test_a_reason_of_interface_names_what_an_export_mends():
    gates = [{"name": "interface", "verdict": "RED", "reason": "x: dtype"}]
    step = step_after_red({"verdict": "RED", "gates": gates}, Path("b"), Path("m"))
    assert step == READ_AND_EXPORT


def test_the_figures_of_an_evaluation_have_units_and_whole_words():
    lines = format_result({"kl": {"mean": 0.5}, "same_top": 0.9, "resumed": 0})
    assert lines[0].split("mean")[0].strip() == "KL (nats)"
    assert lines[1].startswith("same top token ")
    assert lines[2].startswith("windows resumed ")
