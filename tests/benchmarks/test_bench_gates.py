"""What looking costs is measured beside its peer, with every sample."""

from workbench.benchmarks import checks


def test_costs_have_a_peer_and_their_samples(llama_bundle, tiny_llama):
    rows = checks.tracing(llama_bundle, T=2, depth=3, rounds=2)
    rows += checks.validating(
        llama_bundle, tiny_llama, positions=6, Ts=(1, 2), rounds=1
    )
    assert [r["name"] for r in rows] == [
        "trace_declared_ms",
        "trace_ms_per_token",
        "validate_ms",
        "program_causality_ms",
    ]
    assert [r["n"] for r in rows] == [2, 2, 1, 1]
    assert all(min(r["samples"] + r["peer_samples"]) > 0 for r in rows)
    assert all(abs(r["ratio"] * r["value"] / r["peer_value"] - 1) < 1e-9 for r in rows)
