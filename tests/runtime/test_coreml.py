"""The coreml runtime over the shim: the same code that talks to Core ML on a Mac, and the same results as portable."""

import numpy as np
import pytest

from workbench import Decoder
from workbench.models import checkpoint
from workbench.runtime import load, shim


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    from workbench.export import export

    folder = tmp_path_factory.mktemp("coreml")
    source = checkpoint.random(folder / "source", "llama", hidden_size=64, intermediate_size=96, num_attention_heads=2,
                               num_key_value_heads=1, head_dim=32, num_hidden_layers=2, vocab_size=97)  # fmt: skip
    return export(source, folder / "bundle", progress=False, max_seq_len=16, t_max=4, compress="int8-channel")


@pytest.fixture(autouse=True)
def installed():
    shim.install()
    yield
    shim.uninstall()


def test_both_runtimes_generate_the_same_tokens_and_logits(bundle):
    prompt = [5, 17, 42, 3, 88]
    records = {
        runtime: list(Decoder(bundle, runtime=runtime).stream(prompt, 6, stop=[])) for runtime in ("coreml", "portable")
    }
    assert [r.token for r in records["coreml"]] == [r.token for r in records["portable"]]
    for ours, theirs in zip(records["coreml"], records["portable"], strict=True):
        assert np.array_equal(ours.logits, theirs.logits)


def test_states_read_and_write_alike(bundle):
    shard = next(iter(bundle.shards("layers")))
    model = load(bundle, shard, "coreml")
    one, other = model.make_state(), model.make_state()
    for name in shard.states:
        value = np.random.default_rng(0).normal(size=one.read(name).shape).astype(np.float16)
        one.write(name, value)
        assert np.array_equal(one.read(name), value) and not other.read(name).any()
