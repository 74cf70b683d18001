"""Layers go on with the golden's choice of experts; another choice is judged by itself, and only
near-ties may be one."""

from pathlib import Path
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

DATA = Path(__file__).parents[2] / "data"


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
        step.function = lambda original=step.function, **arguments: (
            -original(**arguments)
        )
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
    choices = pd.DataFrame(
        chosen | {"differs": [False, False, True], "margin": [0.5, 0.5, margin]}
    )
    reference = SimpleNamespace(
        expert=np.array([[0, 1], [2, 3]]),
        margin=np.array([[0.5, 0.5], [MOVE / 2, margin]]),
    )
    again = SimpleNamespace(
        expert=reference.expert.copy(), margin=reference.margin.copy()
    )
    again.margin[1, 0] += MOVE
    if turned:  # the budget's own choice is another one: the difference of the scores changed sign
        again.expert[1, 0], again.margin[1, 0] = 0, MOVE / 2
    gate = routing(choices, reference, Budget(again, again), {"cosine_min": 0.9})
    assert gate.verdict == verdict
    assert gate.value == pytest.approx(share * ROUTING_FACTOR)
    assert (
        "1 of 3" in gate.reason
        and "layer 1, position 1" in gate.reason
        and "0.9000" in gate.reason
    )


@pytest.mark.parametrize(
    ("run", "verdict"), [("chained", "GREEN"), ("isolated at T = 1", "RED")]
)
def test_a_chained_choice_may_move_as_far_as_errors_of_the_layers_before_add_up(
    run, verdict
):
    reference = SimpleNamespace(
        expert=np.array([[0, 1]]), margin=np.array([[0.5, 0.2]])
    )
    alone, added_up = (
        SimpleNamespace(expert=reference.expert, margin=reference.margin + move)
        for move in (MOVE, 0.15)
    )
    row = {"layer": 0, "position": 1, "run": run, "differs": True, "margin": 0.2}
    gate = routing(
        pd.DataFrame([row]), reference, Budget(alone, added_up), {"cosine_min": 0.9}
    )
    assert gate.verdict == verdict


def test_forced_experts_are_used_and_the_router_s_own_choice_is_recorded(exports):
    checkpoint = Checkpoint(
        exports.checkpoint("zaya", num_hidden_layers=2, num_experts=2)
    )
    ids = prompt(109, 6)
    free = golden.make_golden(checkpoint, ids)

    def forced(expert: np.ndarray) -> golden.Golden:
        model = golden.empty_model(checkpoint.config)
        golden.force_experts(model, expert)
        return golden.make_golden(checkpoint, ids, model=model)

    np.testing.assert_array_equal(forced(free.expert).hidden, free.hidden)
    other = forced((free.expert + 1) % 3)
    np.testing.assert_array_equal(other.expert[0], free.expert[0])
    assert np.abs(other.update[0] - free.update[0]).max(axis=-1).min() > 1e-3


def test_a_trained_checkpoint_in_four_bits_is_sound(exports):
    """Rounded to four bits, choices of its last layer turn that an isolated layer would not."""
    checkpoint = Checkpoint(DATA / "tiny-zaya")
    bundle = exports.bundle(checkpoint.path, compress="int4-block32", max_seq_len=32)
    reference = golden.make_golden(checkpoint, prompt(checkpoint.config.vocab_size, 24))
    budget = measure_budget(bundle, checkpoint, reference)
    gates = {
        g.name: g
        for g in validate(Decoder(bundle, "portable"), reference, budget=budget).gates
    }
    assert gates["routing"].verdict == "GREEN" and gates["routing"].value > 0
