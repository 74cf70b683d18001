"""Layers go on with the golden's choice of experts; another choice is judged by itself, and only near-ties may be one."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from tiny import prompt

from workbench import Decoder
from workbench.check import fidelity, golden
from workbench.check.price import HALF_ULP, Budget, measure_budget
from workbench.check.validate import ROUTING_FACTOR, routing, validate
from workbench.models.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def routed(exports):
    checkpoint = exports.checkpoint("zaya", num_hidden_layers=2, num_experts=2)
    bundle = exports.bundle(checkpoint, moe="routed", t_max=2)
    reference = golden.make_golden(checkpoint, prompt(109, 20))
    return bundle, reference, measure_budget(bundle, Checkpoint(checkpoint), reference)


def judge(decoder, reference, budget) -> dict[str, str]:
    """Verdicts of the gates that ran."""
    gates = validate(decoder, reference, budget=budget).gates
    return {g.name: g.verdict for g in gates if g.verdict != "not_run"}


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
    bundle, reference, budget = routed
    clean = judge(Decoder(bundle, "portable"), reference, budget)
    assert set(clean.values()) == {"GREEN"} and "routing" in clean
    found = judge(worst_scores(Decoder(bundle, "portable")), reference, budget)
    assert {name for name, verdict in found.items() if verdict == "RED"} == {"routing"}


def test_what_wrong_choices_would_do_is_not_hidden(routed):
    bundle, reference, _ = routed
    decoder = worst_scores(Decoder(bundle, "portable"))
    found = validate(decoder, reference)
    assert found.logits["cosine_min"] > 0.999 > found.free_logits["cosine_min"]
    free = fidelity.run_golden(decoder, reference, 2, "chained", forced=False)
    assert not np.allclose(free.logits, found.chained_logits, atol=1e-2)


def test_without_a_budget_nothing_says_which_choices_rounding_turns(routed):
    bundle, reference, _ = routed
    decoder = worst_scores(Decoder(bundle, "portable"))
    gates = {g.name: g for g in validate(decoder, reference, (1,)).gates}
    assert gates["routing"].verdict == "not_run" and "differ" in gates["routing"].reason


MOVE = 0.01  # of the difference of two scores, by rounding alone


@pytest.mark.parametrize(("share", "verdict"), [(0.9, "GREEN"), (1.1, "RED")])
@pytest.mark.parametrize("turned", [False, True])
def test_only_what_rounding_moves_may_be_chosen_differently(share, verdict, turned):
    margin = share * ROUTING_FACTOR * (MOVE + HALF_ULP)
    chosen = {"layer": [0, 0, 1], "position": [0, 1, 1], "run": "chained"}
    choices = pd.DataFrame(chosen | {"differs": [False, False, True], "margin": [0.5, 0.5, margin]})
    reference = SimpleNamespace(
        expert=np.array([[0, 1], [2, 3]]), margin=np.array([[0.5, 0.5], [MOVE / 2, margin]])
    )
    again = SimpleNamespace(expert=reference.expert.copy(), margin=reference.margin.copy())
    again.margin[1, 0] += MOVE
    if turned:  # the budget's own choice is another one: the difference of the scores changed sign
        again.expert[1, 0], again.margin[1, 0] = 0, MOVE / 2
    gate = routing(choices, reference, Budget(again, again), {"cosine_min": 0.9})
    assert gate.verdict == verdict
    assert gate.value == pytest.approx(share * ROUTING_FACTOR)
    assert (
        "1 of 3" in gate.reason and "layer 1, position 1" in gate.reason and "0.9000" in gate.reason
    )
