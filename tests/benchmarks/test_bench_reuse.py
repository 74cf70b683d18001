import pytest
import trained

from workbench import InputError
from workbench.benchmarks import reuse


def test_every_figure_stands_beside_its_peer_with_raw_samples(exports):
    rows = reuse.bench_reuse(
        trained.decoder(exports, "tiny-llama", precision="declared"),
        contexts=(20, 60),
        rounds=2,
    )
    found = {r["name"]: r for r in rows}
    assert list(found) == [
        "ttft_warm_ms_20",
        "ttft_hot_ms_20",
        "ttft_warm_ms_60",
        "ttft_hot_ms_60",
        "q4_bytes",
        "restore",
        "snapshot",
        "save",
        "read",
    ]
    assert all(
        r["value"] > 0 and r["peer_value"] > 0 and len(r["samples"]) == r["n"]
        for r in rows
    )
    assert all(
        r["peer"] == "cold" and r["n"] == 2
        for n, r in found.items()
        if n.startswith("ttft")
    )
    assert (
        found["q4_bytes"]["value"] < found["q4_bytes"]["peer_value"]
        and 0 < found["q4_bytes"]["error"] < 0.25
    )


@pytest.mark.parametrize("contexts", [(1, 20), (trained.S + 1,)])
def test_contexts_that_cannot_be_measured_are_refused(exports, contexts):
    with pytest.raises(InputError, match="max_seq_len"):
        reuse.bench_reuse(
            trained.decoder(exports, "tiny-llama", precision="declared"),
            contexts=contexts,
        )
