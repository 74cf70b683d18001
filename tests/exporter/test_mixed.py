"""What formats are chosen by: candidates are compressed for their inputs, estimates agree
with what is measured, and the choice stays within the limit when it is measured anew."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from refusal import refused
from tiny import DATA

from workbench.bundle.presets import find_preset
from workbench.check.text import task_text
from workbench.decode.tokenizer import encode_text
from workbench.exporter import candidates as exporter_candidates
from workbench.exporter import mixed, replaceable
from workbench.exporter.allocation import Limit, Quality
from workbench.exporter.calibrate import Text
from workbench.exporter.candidates import (
    CandidateValues,
    compressed_values,
    store_candidates,
)
from workbench.exporter.compress import InputStatistics
from workbench.exporter.losses import estimate_losses
from workbench.exporter.mixed import (
    SearchSettings,
    measure_and_choose,
    read_allocation,
    write_allocation,
)
from workbench.exporter.replaceable import ReplaceableModel, linear_modules, load_model
from workbench.models.checkpoint import Checkpoint

WINDOW = 64


@pytest.fixture(scope="module")
def source():
    return Checkpoint(DATA / "tiny-llama")


@pytest.fixture(scope="module")
def texts(source):
    """Windows of the held-out tasks for calibration and for selection."""
    ids = encode_text(source.path, task_text())
    windows = torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).reshape(-1, WINDOW)
    return windows[:8], windows[8:20]


@pytest.fixture
def model(source):
    return load_model(source)


@pytest.fixture(scope="module")
def modules(source):
    names = [n for n in source.matrices if "embed" not in n]
    return linear_modules(load_model(source), source, [*names, source.head])


def presets_of(modules, *names):
    return {tensor: [find_preset(name) for name in names] for tensor in modules}


def test_the_head_of_a_tied_checkpoint_has_a_copy_of_the_matrix(source, model, modules):
    assert modules[source.head] == "lm_head"
    model.lm_head.weight.zero_()
    assert model.get_input_embeddings().weight.abs().sum() > 0


def test_each_matrix_is_compressed_for_its_inputs(
    model, texts, modules, tmp_path, monkeypatch
):
    """A compression that stores E[x²] of the inputs in place of each row."""

    def mean_squares(values, preset, inputs):
        return {"rows": np.broadcast_to(inputs.mean_squares, values.shape)}

    def rows(arrays, preset, shape):
        return torch.from_numpy(arrays["rows"].copy()).half()

    monkeypatch.setattr(exporter_candidates, "compress_matrix", mean_squares)
    monkeypatch.setattr(exporter_candidates, "decompress", rows)
    candidates = CandidateValues(tmp_path)
    presets = presets_of(modules, "lut4-g8")
    store_candidates(model, modules, texts[0], presets, candidates)
    expected = {}
    for tensor, name in modules.items():

        def watch(module, arguments, tensor=tensor):
            expected[tensor] = arguments[0].detach().square().mean((0, 1))

        model.get_submodule(name).register_forward_pre_hook(watch)
    with torch.inference_mode():
        model(input_ids=texts[0])
    for tensor in modules:
        row = candidates.load(tensor, "lut4-g8")[0]
        torch.testing.assert_close(row, expected[tensor], rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["lut4-g8", "int8-channel"])
def test_slices_of_a_matrix_are_compressed_as_the_whole(name, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 32, generator=generator).half()
    importance = torch.rand(32, generator=generator) + 0.1
    inputs = InputStatistics.of(torch.diag(importance), 0.01)
    preset = find_preset(name)
    whole = compressed_values(values, preset, inputs)
    monkeypatch.setattr(exporter_candidates, "HEAD_ROWS", 16)
    assert torch.equal(compressed_values(values, preset, inputs), whole)
    assert 0 < (whole - values).abs().max() < 1


@pytest.mark.parametrize("family", ["granitemoehybrid", "gemma4_unified_text"])
def test_logits_are_those_of_hugging_face_s_model(family, exports):
    """One family divides its logits, another one bounds them."""
    model = load_model(Checkpoint(exports.checkpoint(family)))
    ids = torch.arange(12)[None]
    measurement = ReplaceableModel.from_unchanged(model, {}, ids)
    logits = measurement.logits(
        measurement.unchanged_hidden[0], measurement.unchanged_head
    )
    with torch.inference_mode():
        expected = model(input_ids=ids).logits[0]
    assert torch.allclose(logits, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(
        measurement.unchanged_hidden[0] @ measurement.unchanged_head.T, expected
    )


def test_an_unchanged_model_has_no_distance(model, texts, modules):
    quality = ReplaceableModel.from_unchanged(model, modules, texts[1][:2]).quality()
    assert quality.kl == pytest.approx(0, abs=1e-9)
    assert (quality.perplexity_ratio, quality.same_top) == (1, 1)


def test_a_measurement_is_the_same_with_and_without_kept_probabilities(
    model, texts, modules, monkeypatch
):
    """A third measurement reads the probabilities that the first two have kept."""
    tensor = next(iter(modules))

    def measure(kept_bytes):
        monkeypatch.setattr(replaceable, "KEPT_BYTES", kept_bytes)
        measurement = ReplaceableModel.from_unchanged(model, modules, texts[1][:2])
        original = measurement.modules[tensor].weight.clone()
        qualities = [measurement.quality()]
        for factor in (0.5, 0.8):
            measurement.replace_matrix(tensor, factor * original)
            qualities.append(measurement.quality())
        measurement.replace_matrix(tensor, original)
        return qualities, len(measurement.kept_log_p)

    without, none_kept = measure(0)
    with_some, some_kept = measure(100_000)
    with_all, all_kept = measure(1 << 30)
    assert without == with_some == with_all
    assert 0 == none_kept < some_kept < all_kept
    assert without[1].kl > without[2].kl > 0


@pytest.mark.parametrize(
    "ending, within",
    [("embed_tokens.weight", 1.1), ("layers.3.mlp.down_proj.weight", 1.5)],
)
def test_estimates_agree_with_measurements_where_tokens_do_not_mix(
    model, texts, modules, tmp_path, ending, within
):
    """Of small changes of the head and of the last matrix before it."""
    (tensor,) = (name for name in modules if name.endswith(ending))
    matrix = model.get_submodule(modules[tensor]).weight
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(matrix.shape, generator=generator)
    changed = matrix + 0.02 * matrix.std() * noise
    candidates = CandidateValues(tmp_path)
    candidates.save(tensor, "lut4-g8", changed)
    module = {tensor: modules[tensor]}
    measurement = ReplaceableModel.from_unchanged(
        model, module, texts[1].reshape(3, -1)
    )
    losses = estimate_losses(measurement, presets_of(module, "lut4-g8"), candidates, 0)
    measurement.replace_matrix(tensor, candidates.load(tensor, "lut4-g8"))
    kl = measurement.quality().kl
    assert kl > 1e-6
    assert 1 / within < losses[tensor, "lut4-g8"] / kl < within


@pytest.mark.parametrize(
    "tensor, within",
    [
        ("model.layers.5.per_layer_projection.weight", 1.5),
        ("model.layers.5.per_layer_input_gate.weight", 1.5),
        ("model.per_layer_model_projection.weight", 3),
    ],
)
def test_estimates_agree_where_each_layer_has_an_embedding(
    exports, tmp_path, tensor, within
):
    """Second embeddings are looked up by token ids, since two tokens may have the same first
    embedding."""
    source = Checkpoint(exports.checkpoint("gemma4_text"))
    model = load_model(source)
    table = model.get_input_embeddings().weight
    table[:2] = table[2:4]
    module = linear_modules(model, source, [tensor])
    matrix = model.get_submodule(module[tensor]).weight
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(matrix.shape, generator=generator)
    candidates = CandidateValues(tmp_path)
    candidates.save(tensor, "lut4-g8", matrix + 0.02 * matrix.std() * noise)
    ids = torch.randint(0, 100, (4, 64), generator=generator)
    measurement = ReplaceableModel.from_unchanged(model, module, ids)
    losses = estimate_losses(measurement, presets_of(module, "lut4-g8"), candidates, 0)
    measurement.replace_matrix(tensor, candidates.load(tensor, "lut4-g8"))
    kl = measurement.quality().kl
    assert kl > 1e-8
    assert 1 / within < losses[tensor, "lut4-g8"] / kl < within


def test_fp16_is_estimated_to_cost_nothing(model, texts, modules, tmp_path):
    measurement = ReplaceableModel.from_unchanged(model, modules, texts[1][:2])
    presets = presets_of(modules, "fp16")
    losses = estimate_losses(measurement, presets, CandidateValues(tmp_path), 0)
    assert set(losses.values()) == {0.0}


@pytest.fixture(scope="module")
def stored(source, texts, modules, tmp_path_factory):
    """The candidates of every matrix."""
    candidates = CandidateValues(tmp_path_factory.mktemp("candidates"))
    presets = presets_of(modules, *mixed.CANDIDATES)
    store_candidates(load_model(source), modules, texts[0], presets, candidates)
    return candidates


def allocate(source, texts, modules, stored, kl=0.005, **options):
    """A search on tiny-llama with stored candidates."""
    model = load_model(source)
    shapes = {t: tuple(model.get_submodule(m).weight.shape) for t, m in modules.items()}
    fitted = {t: {n: find_preset(n) for n in mixed.CANDIDATES} for t in modules}
    settings = SearchSettings(Text(texts[1].numpy(), "tasks"), Limit(kl=kl), **options)
    measurement = ReplaceableModel.from_unchanged(model, modules, texts[1])
    return measure_and_choose(measurement, shapes, fitted, stored, settings)


def test_a_choice_stays_within_its_limit_when_it_is_measured_anew(
    source, texts, modules, stored
):
    result = allocate(source, texts, modules, stored, kl=0.005)
    uniform = {choice.name: choice for choice in result.uniform}
    assert result.chosen.quality.kl <= 0.005 < uniform["lut4-g8"].quality.kl
    assert result.chosen.bytes < uniform["int8-channel"].bytes
    fresh = ReplaceableModel.from_unchanged(load_model(source), modules, texts[1])
    for tensor, preset in result.chosen.formats.items():
        fresh.replace_matrix(tensor, stored.load(tensor, preset))
    assert fresh.quality() == result.chosen.quality
    assert result.chosen in result.frontier
    assert np.diff([choice.bytes for choice in result.frontier]).min() > 0
    assert result.exported is None


def test_an_allocation_is_read_from_its_file(source, texts, modules, stored, tmp_path):
    result = allocate(source, texts, modules, stored)
    write_allocation(result, tmp_path / "allocation.json")
    read = read_allocation(tmp_path / "allocation.json")

    def without_formats(choices):
        return tuple(replace(choice, formats={}) for choice in choices)

    assert read == replace(
        result,
        frontier=without_formats(result.frontier),
        uniform=without_formats(result.uniform),
    )


def test_the_same_seed_gives_the_same_choice(source, texts, modules, stored):
    first, second = (allocate(source, texts, modules, stored) for _ in range(2))
    assert first == second


def test_other_limits_and_presets_are_measured_beside_the_choice(
    source, texts, modules, stored
):
    plain = allocate(source, texts, modules, stored)
    more = allocate(source, texts, modules, stored, further_limits=(0.01, 0.002))
    assert more.chosen == plain.chosen
    kls = [choice.quality.kl for choice in more.frontier if choice.quality]
    plain_kls = [choice.quality.kl for choice in plain.frontier if choice.quality]
    # a choice that is measured for the limit itself serves a further one near to it
    assert len(plain_kls) < len(kls) <= len(plain_kls) + 2
    for limit in (0.01, 0.002):
        assert any(limit / 2 < kl < 1.5 * limit for kl in kls)


class ModelWithoutLossWhereFormatsDiffer:
    """A model whose KL is the one of `kls` where all matrices have one preset, and 0 where
    they have several, as of a difference that rounding hides."""

    kls = dict(zip(mixed.CANDIDATES, (0.04, 0.02, 0.01, 0.0)))

    def __init__(self):
        self.presets = {}

    def replace_matrix(self, tensor, preset):
        self.presets[tensor] = preset

    def quality(self):
        first, *others = {*self.presets.values()}
        kl = 0.0 if others else self.kls[first]
        return Quality(kl, kl, 1.0, 1.0)


class PresetNames:
    """Candidates whose values are the names of their presets."""

    def load(self, tensor, preset):
        return preset


def test_a_measured_kl_of_zero_predicts_no_further_choice(monkeypatch):
    """The choice that is exported is measured as 0 nats and predicted as more. A further
    limit still has a choice whose prediction keeps it."""
    tensors = [f"t{i}" for i in range(8)]
    losses = {
        (tensor, name): kl / len(tensors)
        for tensor in tensors
        for name, kl in ModelWithoutLossWhereFormatsDiffer.kls.items()
    }
    monkeypatch.setattr(mixed, "estimate_losses", lambda *_: losses)
    result = measure_and_choose(
        ModelWithoutLossWhereFormatsDiffer(),
        dict.fromkeys(tensors, (64, 64)),
        {t: {n: find_preset(n) for n in mixed.CANDIDATES} for t in tensors},
        PresetNames(),
        SearchSettings(None, Limit(kl=0.025), further_limits=(0.015,)),
    )
    assert result.chosen.quality.kl == 0 < result.chosen.predicted_kl
    measured = [choice for choice in result.frontier if choice.quality]
    predicted = [c.predicted_kl for c in measured if c.predicted_kl <= 0.015]
    assert any(kl > 0.012 for kl in predicted), [c.predicted_kl for c in measured]


class UnpackingChip:
    """A chip on which every byte takes as long as another one, and a weight in a table as
    long as one byte."""

    chip = "test"

    def matrix_time(self, weights, preset):
        return weights * preset.bits / 8, float(weights) * preset.is_table

    def call_time(self, weights):
        parts = [self.matrix_time(n, find_preset(name)) for name, n in weights.items()]
        ms = max(map(sum, zip(*parts)))
        return ms, ms / 2, ms * 3


def test_milliseconds_are_minimized_in_place_of_bytes(source, texts, modules, stored):
    """Where tables take as long as bytes, the fastest choice has matrices in other
    formats than the smallest one has."""
    options = {"timing": UnpackingChip()}
    smallest = allocate(source, texts, modules, stored, **options).chosen
    fastest = allocate(source, texts, modules, stored, minimizes="ms", **options).chosen
    assert fastest.quality.kl <= 0.005
    assert fastest.ms == pytest.approx(fastest.price)
    ends = fastest.low_ms, fastest.high_ms
    assert ends == pytest.approx((fastest.ms / 2, fastest.ms * 3))
    assert fastest.ms <= smallest.ms
    assert fastest.bytes >= smallest.bytes


def test_milliseconds_under_a_limit_of_bytes_are_refused(texts):
    text = Text(texts[1].numpy(), "tasks")
    with refused("--ms-on.*limit of bytes"):
        SearchSettings(text, Limit(bytes=10**6), UnpackingChip(), minimizes="ms")


def test_stored_candidates_are_not_compressed_again(
    source, texts, modules, stored, monkeypatch, tmp_path
):
    stored = CandidateValues(shutil.copytree(stored.folder, tmp_path / "candidates"))

    def refuse(*arguments):
        raise AssertionError("compressed again")

    monkeypatch.setattr(exporter_candidates, "compress_matrix", refuse)
    presets = presets_of(modules, *mixed.CANDIDATES)
    store_candidates(load_model(source), modules, texts[0], presets, stored)
    stored.path(next(iter(modules)), "lut4-g8").unlink()
    with pytest.raises(AssertionError, match="compressed again"):
        store_candidates(load_model(source), modules, texts[0], presets, stored)


def test_a_matrix_that_is_no_linear_layer_is_refused(source, model):
    with refused("mixed.*experts.0"):
        linear_modules(model, source, ["model.layers.0.mlp.experts.0"])
