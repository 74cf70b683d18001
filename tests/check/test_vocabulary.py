"""Nothing that a validation keeps grows with the vocabulary: not the head, its logits, the host's
tables."""

import numpy as np
import pytest
import tiny
import torch

from workbench import Bundle, Decoder
from workbench.bundle import bundle as bundles
from workbench.check import golden, program, validate, weights
from workbench.check.bug_gates import bug_gates
from workbench.check.compare import rms
from workbench.check.hf import HEAD_ROWS, Reference
from workbench.check.stretches import reference_stretches
from workbench.exporter import shards
from workbench.models.checkpoint import Checkpoint

ROWS = 40  # of a slice of the head; it divides no vocabulary here
FAMILY = "gemma4_text"  # scales and bounds its logits, and has two tables on the host
# a layer of each kind: nothing here depends on rows that layers share
LAYERS = {
    "num_hidden_layers": 2,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.fixture(scope="module")
def source(exports):
    return Checkpoint(exports.checkpoint(FAMILY, **LAYERS))


@pytest.fixture(scope="module")
def sliced(source, tmp_path_factory):
    """A bundle whose head has several slices."""
    folder = tmp_path_factory.mktemp("sliced") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "HEAD_ROWS", ROWS)
        bundle = tiny.export(source.path, folder, max_seq_len=32, batch=2)
    assert len(bundle.shards("head")) == 3
    return bundle


def count_loaded_slices(decoder):
    """The number of slices of the head whose weights are in memory."""
    return sum(bool(model.executables) for model in decoder.heads)


def test_the_gate_compares_one_slice_of_the_logits_at_a_time(
    sliced, source, monkeypatch
):
    widths = set()
    compare = program.sum_of_squares

    def record_width(reference, actual=None):
        widths.add(reference.shape[-1])
        return compare(reference, actual)

    monkeypatch.setattr(program, "sum_of_squares", record_width)
    decoder = Decoder(sliced, "portable", "exact", keeps_head=False)
    stored = golden.stored_weights(source, sliced, keep_dtype=True, head=False)
    reference = Reference(source, stored)
    stretches = reference_stretches(sliced.manifest, reference, False)
    traces = [
        trace
        for stretch in (*stretches.start, *stretches.scaled, *stretches.end)
        for trace in (stretch.trace, *stretch.perturbed.values())
    ]
    assert traces and all(trace.logits is None for trace in traces)
    table = program.program_errors(decoder, source, stretches=stretches)
    assert widths == {ROWS, sliced.manifest.dims.V % ROWS}
    assert source.head not in stored.slices and not count_loaded_slices(decoder)
    check_logits(table, sliced, source, stretches)


def check_logits(table, bundle, source, stretches):
    """The figures of the longest calls over the end are those of whole arrays of logits."""
    decoder = Decoder(bundle, "portable", "exact")
    T = decoder.options.t_max
    whole = Reference(source, golden.stored_weights(source, bundle, keep_dtype=True))
    scale = bundle.manifest.stream_scale
    hidden = np.stack([one.final_input[-T:].T for one in stretches.end])
    for seq, actual in enumerate(decoder.logits(hidden / scale)):
        stretch = stretches.end[seq]
        expected, nudged = (
            whole.logits(torch.from_numpy(trace.normed[-T:])).numpy()
            for trace in (stretch.trace, stretch.perturbed["isolated"])
        )
        rows = table[(table["tensor"] == "logits") & (table["mode"] == "isolated")]
        rows = rows[(rows["seq"] == seq) & (rows["T"] == T)]
        rows = rows[rows["position"] >= stretch.end - T].iloc[:T]
        assert [*rows["position"]] == [*range(stretch.end - T, stretch.end)]
        # the two sides sum in another order than calls that run together
        unit = program.program_unit(hidden.shape[1])
        limits = unit(rms(expected, nudged), rms(expected))
        assert np.allclose(rows["size"], rms(expected), rtol=1e-6)
        assert np.allclose(rows["distance"], rms(expected, actual), atol=1e-5)
        assert np.allclose(rows["ratio"], rows["distance"] / limits, rtol=0.05)


def test_slices_of_the_head_in_another_order_are_red(sliced, source):
    decoder = Decoder(sliced, "portable", "exact", keeps_head=False)
    assert program.program_gate(decoder, source).verdict == "GREEN"
    decoder.heads.reverse()
    assert program.program_gate(decoder, source).verdict == "RED"
    del decoder.heads[0]
    results = bug_gates(sliced, source, decoder=decoder)
    reasons = {gate.name: gate.reason for gate in results if gate.verdict == "RED"}
    assert "80 logits" in reasons["program"]


def test_a_decoder_that_keeps_no_head_reads_it_for_every_call(sliced):
    keeping = Decoder(sliced, "portable")
    reading = Decoder(sliced, "portable", keeps_head=False)
    assert count_loaded_slices(keeping) == 3 and not count_loaded_slices(reading)
    ids = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    for _ in range(2):
        logits = [decoder.prefill(ids) for decoder in (keeping, reading)]
        assert np.array_equal(*logits) and not count_loaded_slices(reading)
    settings = [decoder.plain.settings for decoder in (keeping, reading)]
    assert [one.keeps_head for one in settings] == [True, False]
    fast = Decoder(sliced, "portable", fast=True, keeps_head=False)
    assert fast.prefill(ids).shape == logits[0].shape and not count_loaded_slices(fast)


@pytest.mark.parametrize("keep_dtype", [True, False])
def test_a_head_that_is_read_slice_by_slice_is_the_whole_one(
    sliced, source, keep_dtype
):
    whole = golden.stored_weights(source, sliced, keep_dtype=keep_dtype)
    parts = golden.stored_weights(source, sliced, keep_dtype=keep_dtype, head=False)
    assert source.head in whole.slices and source.head not in parts.slices
    expected = whole(source.head)
    assert torch.equal(parts(source.head), expected)
    for read in (whole, parts):
        slices = [*read.head_slices()]
        assert [len(part) for part in slices] == [40, 40, 21]
        assert torch.equal(torch.cat(slices).float(), expected.float())


def test_a_head_that_no_shard_stores_is_the_checkpoints(sliced, source):
    bundle = Bundle.open(sliced.root)
    for shard in bundle.shards("head"):
        del shard.weights[source.head]
    (rows,) = golden.read_head(source, bundle)
    assert len(rows) <= HEAD_ROWS
    assert torch.equal(rows, source.tensor(source.head).half())


def test_tables_of_the_host_are_compared_through_mappings_that_end(
    sliced, source, monkeypatch
):
    monkeypatch.setattr(bundles, "MAPPED_BYTES", 1 << 12)
    bundle = Bundle.open(sliced.root)
    for name, table in bundle.embedding.items():
        parts = [*bundle.table_rows(name)]
        assert len(parts) > 1 and max(part.nbytes for _, part in parts) <= 1 << 12
        assert [rows.start for rows, _ in parts] == [
            0,
            *(rows.stop for rows, _ in parts[:-1]),
        ]
        assert np.array_equal(np.concatenate([part for _, part in parts]), table)
    # names alone: whoever read a table here would fail
    bundle.__dict__["embedding"] = dict.fromkeys(bundle.embedding)
    assert weights.weights_gate(bundle, source).verdict == "GREEN"


def test_a_validation_keeps_no_head(sliced, source, monkeypatch):
    decoders, readers = [], []

    def opened(*arguments, **options):
        decoders.append(Decoder(*arguments, **options))
        return decoders[-1]

    read = validate.stored_weights

    def observed(*arguments, **options):
        readers.append(read(*arguments, **options))
        return readers[-1]

    monkeypatch.setattr(program, "Decoder", opened)
    monkeypatch.setattr(validate, "stored_weights", observed)
    decoder = Decoder(sliced, "portable", keeps_head=False)
    reference = golden.Golden.of(source, tiny.prompt(101, 8), sliced.root.parent)
    result = validate.validate(decoder, reference, ignore_stored=True)
    assert result.verdict == "GREEN"
    assert decoders and readers
    assert not any(map(count_loaded_slices, [decoder, *decoders]))
    assert not any(source.head in one.slices for one in readers)
