"""No gate is RED on a clean bundle, whatever its family, seed, dimensions and compression."""

import numpy as np
import pytest
from tiny import DIMS, prompt

from workbench import Decoder
from workbench.eval import golden
from workbench.eval.checklist import check
from workbench.eval.validate import validate

FAMILIES = sorted(DIMS)
PRESETS = ["fp16", "int8-tensor", "int8-channel"]


def draw(seed: int) -> tuple[str, dict, dict]:
    """A family, changes to its tiny dimensions, and export options."""
    rng = np.random.default_rng(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    changes = {"seed": seed, "hidden_size": int(rng.choice([64, 96, 128]))}
    options = {"compress": str(rng.choice(PRESETS)), "t_max": int(rng.choice([2, 4])), "layers_per_shard": int(rng.choice([1, 2])),
               "kv_write": str(rng.choice(["mask", "slice"]))}  # fmt: skip
    return family, changes, options


def judge(exports, seed: int) -> dict[str, str]:
    """Reasons of the RED gates of the bundle that `seed` draws."""
    family, changes, options = draw(seed)
    checkpoint = exports.checkpoint(family, **changes)
    decoder = Decoder(exports.bundle(checkpoint, **options), "portable")
    reference = golden.make(checkpoint, prompt(decoder.manifest.dims.V, 20, seed))
    found = [*check(decoder, golden=reference), *validate(decoder, reference).gates]
    return {g.name: g.reason for g in found if g.verdict == "RED"}


@pytest.mark.filterwarnings("ignore:states of width")  # odd head widths are drawn too; the portable runtime takes them
@pytest.mark.parametrize("seed", range(3))
def test_no_gate_is_red_on_a_clean_bundle(exports, seed):
    assert judge(exports, seed) == {}
