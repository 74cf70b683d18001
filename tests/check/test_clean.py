"""No gate is RED on a clean bundle, whatever its family, seed, dimensions and compression."""

import clean
import pytest


@pytest.mark.filterwarnings("ignore:states of width")
@pytest.mark.parametrize(
    "seed", [4, 6, 12]
)  # ZAYA in fp16, Gemma int8, one of int8-tensor: see `clean.draw`
def test_no_gate_is_red_on_a_clean_bundle(exports, seed):
    assert clean.judge(exports, seed) == {}


def test_thirty_draws_hold_every_family_with_every_preset():
    drawn = {(family, options["compress"]) for family, _, options in map(clean.draw, range(30))}
    assert len(drawn) == len(clean.FAMILIES) * len(clean.PRESETS)
