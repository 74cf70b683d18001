"""Layers go on with the golden's choice of experts; another choice is judged by itself, and only near-ties may be one."""

import numpy as np
import pandas as pd
import pytest
from tiny import prompt

from workbench import Decoder
from workbench.check import fidelity, golden
from workbench.check.validate import routing, validate


@pytest.fixture(scope="module")
def routed(exports):
    checkpoint = exports.checkpoint("zaya", num_hidden_layers=2, num_experts=2)
    return exports.bundle(checkpoint, moe="routed", t_max=2), golden.make_golden(
        checkpoint, prompt(109, 20)
    )


def judge(decoder, reference) -> dict[str, str]:
    return {g.name: g.verdict for g in validate(decoder, reference).gates}


def worst_scores(decoder) -> Decoder:
    """The host would pick the expert with the lowest score of each layer."""
    for model in decoder.layers:
        step = next(
            s
            for s in model.executable.body.steps
            if s.outputs and s.outputs[0][0] == "router_scores"
        )
        step.function = lambda original=step.function, **arguments: -original(**arguments)
    return decoder


def test_a_wrong_choice_of_the_host_is_seen_by_the_routing_gate_alone(routed):
    bundle, reference = routed
    assert set(judge(Decoder(bundle, "portable"), reference).values()) == {"GREEN"}
    found = judge(worst_scores(Decoder(bundle, "portable")), reference)
    assert {name for name, verdict in found.items() if verdict == "RED"} == {"routing"}


def test_what_wrong_choices_would_do_is_not_hidden(routed):
    bundle, reference = routed
    decoder = worst_scores(Decoder(bundle, "portable"))
    found = validate(decoder, reference)
    assert found.logits["cosine_min"] > 0.999 > found.free_logits["cosine_min"]
    free = fidelity.run_golden(decoder, reference, 2, "chained", forced=False)
    assert not np.allclose(free.logits, found.chained_logits, atol=1e-2)


@pytest.mark.parametrize(("margin", "verdict"), [(0.009, "GREEN"), (0.011, "RED")])
def test_only_near_ties_may_be_chosen_differently(margin, verdict):
    sure = pd.DataFrame(
        {"layer": 0, "position": [0, 1], "run": "chained", "differs": False, "margin": 0.5}
    )
    tie = pd.DataFrame(
        {"layer": 1, "position": [7], "run": "chained", "differs": True, "margin": margin}
    )
    gate = routing(pd.concat([sure, tie], ignore_index=True), 0.01, {"cosine_min": 0.9})
    assert (gate.verdict, gate.value) == (verdict, margin)
    assert (
        "1 of 3" in gate.reason and "layer 1, position 7" in gate.reason and "0.9000" in gate.reason
    )
