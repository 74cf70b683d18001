"""The work of other exporters' programs is read off their packages."""

import pytest
from adoptions import SOUND

from workbench import Bundle
from workbench.ane import roofline
from workbench.ane.work import call_work

pytestmark = pytest.mark.slow("converts the packages of a style, up to eight programs")


@pytest.mark.matrix(2, wide=4)
@pytest.mark.parametrize("style", sorted(SOUND))
def test_an_adopted_bundle_has_its_matrices_and_reads_its_caches(adoptions, style):
    bundle = Bundle.open(adoptions.folder(style))
    work, d = call_work(bundle), bundle.manifest.dims
    attention = d.C * (2 * d.H + 2 * d.H_kv) * d.D
    assert sum(work.weights.values()) > d.L * attention + d.C * d.V
    rows = [
        layer.shape[-2] for s in bundle.manifest.shards for layer in s.states.values()
    ]
    stored = sum(2 * d.H_kv * n * d.D for n in rows)
    assert stored <= work.cache_bytes <= work.repeated_cache_bytes
    assert work.calls >= 1 and roofline.by_chip(work)["ms"].gt(0).all()
