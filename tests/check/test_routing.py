"""Another choice of an expert than Hugging Face's is a fault in exact arithmetic; layers are
compared where both picked the same."""

import pytest

from workbench import Decoder
from workbench.check.program import LIMIT, program_errors, program_gate
from workbench.models.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def routed(exports):
    checkpoint = exports.checkpoint("zaya", num_hidden_layers=2, num_experts=2)
    return exports.bundle(checkpoint, moe="routed", tokens="1-2"), Checkpoint(
        checkpoint
    )


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


def test_a_wrong_choice_of_the_host_is_red_by_the_expert_that_it_picks(routed):
    bundle, checkpoint = routed
    decoder = Decoder(bundle, "portable", "exact")
    assert program_gate(decoder, checkpoint).verdict == "GREEN"
    worst = worst_scores(decoder)
    assert program_gate(worst, checkpoint).verdict == "RED"
    errors = program_errors(worst, checkpoint)
    assert set(errors.loc[errors["ratio"] > LIMIT, "tensor"]) == {"expert"}
