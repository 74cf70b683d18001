"""A bundle scores in lm-evaluation-harness as Hugging Face's model does there."""

import pytest
import trained
from refusal import refused

pytest.importorskip("lm_eval", reason="needs the extra: workbench[harness]")
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from workbench.harness import BundleModel

pytestmark = pytest.mark.wide
TEXT = "set river amber ; set stone blue ; get river"


def requests(kind, *arguments):
    return [Instance(kind, {}, request, i) for i, request in enumerate(arguments)]


@pytest.fixture
def models(exports):
    path = trained.DATA / "tiny-llama"
    bundle = exports.bundle(path, max_seq_len=32)
    peer = HFLM(str(path), device="cpu", dtype="float32", max_length=32, batch_size=1)
    return BundleModel(bundle.root, precision="exact", fast=False), peer


@pytest.mark.filterwarnings("ignore")
def test_scores_and_texts_are_those_of_hugging_faces_model(models):
    ours, peer = models
    pairs = requests(
        "loglikelihood",
        (TEXT, " amber"),
        (TEXT, " blue"),
        ("", "set river"),
        (8 * TEXT, " amber"),
    )
    scores, expected = ours.loglikelihood(pairs), peer.loglikelihood(pairs)
    for (nats, greedy), (reference, top) in zip(scores, expected, strict=True):
        assert nats == pytest.approx(reference, abs=2e-2) and greedy == top
    rolling = requests("loglikelihood_rolling", (TEXT,), (5 * TEXT,))
    reference = peer.loglikelihood_rolling(rolling)
    assert ours.loglikelihood_rolling(rolling) == pytest.approx(reference, rel=2e-3)
    until = {"until": [";"], "max_gen_toks": 4, "do_sample": False}
    texts = requests(
        "generate_until", (TEXT, until), (TEXT, until | {"until": ["mber"]})
    )
    generated = ours.generate_until(texts)
    assert generated == peer.generate_until(texts) and "am" in generated[0]


def test_sampling_is_refused(models):
    texts = requests("generate_until", (TEXT, {"do_sample": True}))
    with refused("greedy"):
        models[0].generate_until(texts)
