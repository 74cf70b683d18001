"""Draws of clean bundles hold what they promise; `test_prove` asks the gates of some, `make prove`
of all."""

import clean


def test_the_first_draws_hold_every_family_with_every_preset():
    count = len(clean.FAMILIES) * len(clean.PRESETS)
    drawn = {
        (family, options["compress"])
        for family, _, options in map(clean.draw, range(count))
    }
    assert len(drawn) == count


def test_draws_hold_batches_rings_and_routed_experts():
    options = [options for _, _, options in map(clean.draw, range(60))]
    for name, value in (("batch", 3), ("sliding", "ring"), ("moe", "routed")):
        assert any(drawn.get(name) == value for drawn in options)
