"""The sentences and tables of single notebooks, from figures made for the test."""

import numpy as np
import pandas as pd
import pytest

from workbench.ane.rule import RULES
from workbench.check.gates import at_most
from workbench.studies import conclusions


def test_the_prediction_of_routed_experts_counts_the_programs_that_a_process_loads():
    """40 routers, 40 · 16 experts and 17 slices of the head are beyond rule G3's limit; 40 layers
    are not."""
    table = conclusions.routing_prediction().set_index("experts")
    assert table["programs"].to_dict() == {"dense": 57, "routed": 40 + 640 + 17}
    assert "128 loaded programs" in RULES["G3"].says and RULES["G3"].disputed


def fidelity(cosines: dict[tuple, float]) -> pd.DataFrame:
    """Rows of the log's table by (layer, position, T) → cosine of the isolated update."""
    rows = pd.DataFrame(list(cosines), columns=["layer", "position", "T"])
    other = {"tensor": "update", "mode": "isolated", "psnr_db": 60.0, "max_abs": 0.1}
    return rows.assign(cosine=list(cosines.values()), finite=True, **other)


def test_the_worst_cells_are_different_cells_with_digits_left_of_their_cosine():
    rows = fidelity(
        {(0, 3, T): 1 - 1e-7 * T for T in (1, 2, 4)} | {(1, 5, 1): 1 - 2e-7}
    )
    table = conclusions.worst(rows)
    assert table[["layer", "position", "T"]].values.tolist() == [[0, 3, 4], [1, 5, 1]]
    assert table["1 − cosine"].tolist() == pytest.approx([4e-7, 2e-7], rel=1e-6)
    rows.loc[3, "cosine"] = np.nan
    assert conclusions.worst(rows)["layer"].tolist() == [1, 0]  # no number is the worst


def test_layers_show_how_far_they_are_by_prompt():
    table = conclusions.by_layer(
        {"[2, 42]": fidelity({(0, 0, 1): 1 - 1e-7, (0, 1, 1): 1 - 3e-7})}
    )
    assert table["[2, 42]"].loc[0].to_dict() == pytest.approx(
        {"worst": 3e-7, "mean": 2e-7}, 1e-6
    )


def test_gates_of_several_prompts_name_theirs_and_what_is_of_the_bundle_is_there_once():
    of_bundle = at_most("weights", 0.5, 1.05, "38 tensors")
    kl = {
        "[1]": at_most("max_kl", 0.1, 0.05, "mean"),
        "[2]": at_most("max_kl", 0.01, 0.05, "mean"),
    }
    gates = conclusions.gates_by_prompt(
        {prompt: [of_bundle, gate] for prompt, gate in kl.items()}
    )
    assert [(g.name, g.reason) for g in gates] == [
        ("weights", "38 tensors"),
        ("max_kl", "prompt [1]: mean"),
        ("max_kl", "prompt [2]: mean"),
    ]
    (alone,) = conclusions.gates_by_prompt({"[1]": [kl["[1]"]]})
    assert alone.reason == "prompt [1]: mean"


def test_the_program_s_cost_against_length_and_T_stands_in_words_beside_the_decode_path_s():
    settings = {"max_seq_len": [16, 16, 64, 64], "T": [1, 4, 1, 4], "machine": "M4"}
    fast, literal = (
        pd.DataFrame(
            settings | {"value": values, "run_id": "r", "unit": "ms", "invalid": None}
        )
        for values in ([1.0, 2.0, 1.0, 2.0], [2.0, 3.0, 6.0, 9.0])
    )
    both = conclusions.both_paths(fast, literal)
    assert both.groupby("path", sort=False)["value"].sum().tolist() == [6.0, 20.0]
    decode, program = conclusions.path_conclusion(both).splitlines()
    assert (
        decode.startswith("decode path: ")
        and "1.00 times" in decode
        and "2.00 times" in decode
    )
    assert "every operation of the program: " in program
    assert (
        "3.00 times the time of one at 16" in program
        and "1.50 times that of T = 1" in program
    )


@pytest.mark.parametrize(("rounds", "said"), [(1, True), (2, True), (3, False)])
def test_a_ranking_of_fewer_than_three_rounds_says_so(rounds, said):
    found = pd.DataFrame(
        {
            "name": ["a", "b"],
            "tokens_per_s": [20.0, 10.0],
            "worst_cosine": [0.99, 0.999],
            "verdict": "GREEN",
            "machine": "M4",
            "n": rounds,
        }
    )
    words = conclusions.choice_conclusion(found)
    assert ("Preliminary" in words) == said
