"""Calibration: each matrix is compressed with the inputs that it has on a text."""

import numpy as np
import pytest
import tiny
import torch
from circle import wide
from conversions import export_small
from refusal import refused

from workbench import exporter
from workbench.bundle import Bundle, find_preset
from workbench.check.golden import stored_weights
from workbench.check.stored_values import open_parts
from workbench.check.text import check_held_out
from workbench.check.weights import weights_gate
from workbench.cli.options import CalibrationText
from workbench.exporter import calibrate, compress
from workbench.exporter.calibrate import draw_windows
from workbench.exporter.compress import InputStatistics
from workbench.exporter.inputs import InputSum, summed_inputs
from workbench.exporter.weights import WeightSource, encode_weight
from workbench.models.checkpoint import Checkpoint
from workbench.sweep.grid import make_grid

SIZE = {"num_hidden_layers": 2, "vocab_size": 320}
# the least layers of Gemma 4 whose projection two shards cut; the last layer is always a full one
TWO_KINDS = {
    "num_hidden_layers": 2,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
# whose routers choose among two stacked experts in each layer
TWO_EXPERTS = {"num_hidden_layers": 2, "num_experts": 2}
PRESETS = ["int8-channel", "lut6-g16", "lut4-g8", "int4-block32", "int8-tensor"]


def random_text(seed: int = 0) -> calibrate.Text:
    return tiny.random_text(90, seed)


def correlated_inputs(width: int, seed: int = 0) -> torch.Tensor:
    """E[x xᵀ] of inputs that share a few directions."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width // 8, generator=generator)
    x = torch.randn(4096, width // 8, generator=generator) @ mixing.T
    x += 0.3 * torch.randn(x.shape, generator=generator)
    return x.T @ x / len(x)


def statistics_of(hessian: torch.Tensor) -> InputStatistics:
    return InputStatistics.of(hessian, 0.01 * float(hessian.diagonal().mean()))


def squared_error(arrays, preset, values: torch.Tensor, hessian: torch.Tensor) -> float:
    """Σ Δ H Δᵀ of stored values."""
    stored = compress.decompress(arrays, preset, values.shape)
    change = (stored - values).float()
    return float((change @ hessian * change).sum())


def rounded_to_nearest(values: torch.Tensor, preset) -> dict[str, np.ndarray]:
    """The arrays of an export without a text."""
    weight = WeightSource("w.weight", "w", (*values.shape, 1, 1), preset=preset)
    return encode_weight(weight, values.flatten().clone())


@pytest.mark.parametrize("name", PRESETS)
def test_error_feedback_lowers_the_error_of_the_product(name):
    preset, hessian = find_preset(name), correlated_inputs(128)
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)).half()
    fitted = compress.compress_matrix(values, preset, statistics_of(hessian))
    plain = rounded_to_nearest(values, preset)
    least = squared_error(plain, preset, values, hessian)
    assert squared_error(fitted, preset, values, hessian) < 0.6 * least


@pytest.mark.parametrize("name", PRESETS)
def test_equal_arguments_give_equal_arrays_and_leave_the_values(name):
    preset, inputs = find_preset(name), statistics_of(correlated_inputs(64))
    values = torch.randn(32, 64, generator=torch.Generator().manual_seed(3)).half()
    before = values.clone()
    first, second = (compress.compress_matrix(values, preset, inputs) for _ in range(2))
    assert torch.equal(values, before)
    assert all(np.array_equal(first[role], second[role]) for role in first)


def test_uncorrelated_inputs_give_the_nearest_entries():
    preset = find_preset("lut4-g8")
    # so few values that each has a cell of its own, and k-means is exact
    values = torch.randn(16, 32, generator=torch.Generator().manual_seed(4)).half()
    plain = rounded_to_nearest(values, preset)
    fed = compress.compress_matrix(values, preset, statistics_of(torch.eye(32)))
    assert np.array_equal(plain["lut"], fed["lut"])
    assert np.array_equal(plain["indices"].reshape(-1), fed["indices"])


def test_the_order_of_the_inputs_does_not_matter():
    """GPTQ takes them by their E[x²], whatever their places."""
    values, tables, _, hessian = random_tables(8, 16, 6)
    places = torch.randperm(96, generator=torch.Generator().manual_seed(7))
    exchanged = statistics_of(hessian[places][:, places])
    first = compress._gptq_tables(values, tables, statistics_of(hessian))
    second = compress._gptq_tables(values[:, places], tables, exchanged)
    # sums are rounded in another order, so that a value midway may fall on either side
    assert (first[:, places.numpy()] == second).mean() > 0.999


def random_tables(group: int, entries: int, seed: int):
    """Values [32, 96], tables of groups, random indices, and a Hessian."""
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.standard_normal((32, 96), np.float32))
    tables = np.sort(rng.standard_normal((32 // group, entries)), 1)
    tables = np.float32(np.float16(tables))
    indices = rng.integers(0, entries, (32, 96)).astype(np.uint8)
    return values, tables, indices, correlated_inputs(96, seed).float()


def group_errors(values, tables, indices, hessian) -> np.ndarray:
    """Δ H Δᵀ of each group, by the definition."""
    dense = np.take_along_axis(tables, indices.reshape(len(tables), -1).astype(int), 1)
    change = np.float64(dense.reshape(values.shape) - values.numpy())
    errors = np.einsum("ri,ij,rj->r", change, hessian.double().numpy(), change)
    return errors.reshape(len(tables), -1).sum(1)


def change_products(values, tables, indices, hessian) -> torch.Tensor:
    """Δ H [R, C] float32 of the change Δ from values to the entries of the indices."""
    rows = len(values) // len(tables)
    selected = np.take_along_axis(tables.repeat(rows, 0), indices.astype(int), 1)
    return (torch.from_numpy(selected) - values) @ hessian


STEPS = 16


@pytest.mark.parametrize("group, entries", [(8, 16), (16, 64)])
def test_steps_lead_to_the_least_squares_of_the_indices(group, entries):
    values, tables, indices, hessian = random_tables(group, entries, 8)
    cholesky = torch.linalg.cholesky(hessian.double()).numpy()
    places = indices.reshape(len(tables), group, -1)
    least = []
    for rows, table_places in zip(values.numpy().reshape(places.shape), places):
        one_hot = np.eye(entries)[table_places]  # [group, C, entries]
        design = np.einsum("ic,gie->gce", cholesky, one_hot).reshape(-1, entries)
        target = (rows @ cholesky).reshape(-1)
        entries_of_group = np.linalg.lstsq(design, target, rcond=None)[0]
        least.append(((design @ entries_of_group - target) ** 2).sum())
    before = group_errors(values, tables, indices, hessian)
    products = change_products(values, tables, indices, hessian)
    for _ in range(STEPS):
        compress._improve_entries(tables, indices, products, hessian)
    after = group_errors(values, tables, indices, hessian)
    assert (after >= np.array(least) * (1 - 1e-6)).all()
    assert (after - least < 0.02 * (before - least)).all()


@pytest.mark.parametrize("seed", range(4))
def test_no_step_raises_the_error_of_a_group(seed):
    """And the products with H follow the entries and indices."""
    values, tables, indices, hessian = random_tables(8, 16, seed)
    products = change_products(values, tables, indices, hessian)
    for _ in range(3):
        before = group_errors(values, tables, indices, hessian)
        compress._improve_entries(tables, indices, products, hessian)
        between = group_errors(values, tables, indices, hessian)
        assert (between <= before * (1 + 1e-5)).all()
        compress._exchange_indices(
            products.numpy(), indices, tables, hessian.numpy(), 8, 1
        )
        after = group_errors(values, tables, indices, hessian)
        assert (after <= between * (1 + 1e-5)).all()
        assert (np.diff(tables, axis=1) >= 0).all()
        expected = change_products(values, tables, indices, hessian)
        torch.testing.assert_close(products, expected, rtol=1e-3, atol=1e-2)
    assert after.sum() < 0.5 * group_errors(*random_tables(8, 16, seed)).sum()


@pytest.mark.parametrize("seed", range(4))
def test_refined_tables_ascend_in_values_of_fp16(seed):
    values, tables, indices, hessian = random_tables(8, 16, seed)
    before = group_errors(values, tables, indices, hessian)
    compress._refine_tables(values, tables, indices, hessian)
    assert (group_errors(values, tables, indices, hessian) < before).all()
    assert (np.diff(tables, axis=1) >= 0).all()
    assert np.array_equal(tables, np.float32(np.float16(tables)))


def test_an_attention_sink_leaves_the_other_inputs_their_correlations():
    """Planted: an input five hundred times as long as the others."""
    generator = torch.Generator().manual_seed(9)
    mixing = torch.randn(8, 64, generator=generator)
    x = torch.randn(4, 256, 8, generator=generator) @ mixing
    x += 0.3 * torch.randn(x.shape, generator=generator)
    flat = x.reshape(-1, 64)
    ordinary = flat.T @ flat / len(flat)
    x[2, 5] *= 500
    total = InputSum()
    total.add(x)
    values = torch.randn(32, 64, generator=generator).half()
    preset = find_preset("lut4-g8")

    def error(inputs: InputStatistics) -> float:
        fitted = compress.compress_matrix(values, preset, inputs)
        return squared_error(fitted, preset, values, ordinary)

    hessian = total.total / total.count
    by_mean = InputStatistics.of(hessian, 0.01 * float(hessian.diagonal().mean()))
    assert total.count == 4 * 256
    assert error(total.compute_statistics()) < 0.7 * error(by_mean)


def test_inputs_that_are_zero_are_rounded_to_the_nearest():
    total = InputSum()
    total.add(torch.zeros(1, 8, 32))
    values = torch.randn(8, 32, generator=torch.Generator().manual_seed(4)).half()
    preset = find_preset("lut4-g8")
    fitted = compress.compress_matrix(values, preset, total.compute_statistics())
    plain = rounded_to_nearest(values, preset)
    assert np.array_equal(plain["indices"].reshape(-1), fitted["indices"])


class Block(torch.nn.Module):
    """Linear modules that share inputs, and inputs that are freed at once."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.o, self.up, self.down = (
            torch.nn.Linear(8, 8, bias=False) for _ in range(5)
        )

    def forward(self, x):
        x = x + 0.0
        x = self.o(self.q(x) * torch.sigmoid(self.k(x))) + 0.0
        for _ in range(3):
            x = self.down(torch.relu(self.up(x * 2)))
        return x


@torch.inference_mode()
def test_sums_are_of_each_modules_own_inputs():
    """Another tensor at the address of a freed one counts as another input."""
    torch.manual_seed(0)
    block = Block()
    linear = dict(block.named_children())
    expected = {name: torch.zeros(8, 8) for name in linear}

    def record(name):
        def hook(module, arguments):
            flat = arguments[0].reshape(-1, 8)
            expected[name] += flat.T @ flat

        return hook

    handles = [m.register_forward_pre_hook(record(name)) for name, m in linear.items()]
    with summed_inputs(linear) as sums:
        block(torch.randn(3, 16, 8))
    for handle in handles:
        handle.remove()
    assert sums["q"] is sums["k"]
    for name, total in sums.items():
        torch.testing.assert_close(total.total.float(), expected[name])


def test_windows_are_drawn_by_the_seed_and_begin_with_the_first_token():
    ids = [7, *range(100, 1100)]
    text = draw_windows(ids, "numbers", bos=7, seed=1, window=11, windows=5)
    assert text.ids.shape == (5, 11) and (text.ids[:, 0] == 7).all()
    assert (np.diff(text.ids[:, 1:]) == 1).all()
    assert (np.diff(text.ids[:, 1]) > 0).all()
    other = draw_windows(ids, "numbers", bos=7, seed=2, window=11, windows=5)
    assert other.sha256 != text.sha256
    whole = draw_windows(ids, "numbers", window=500, windows=16)
    assert whole.ids.shape == (2, 500)
    with refused("numbers.*1 tokens"):
        draw_windows([5], "numbers")


@pytest.mark.parametrize("family", ["llama", wide("gemma3_text")])
def test_equal_texts_give_equal_bytes_and_other_texts_others(exports, tmp_path, family):
    checkpoint = exports.checkpoint(family)
    options = {"compress": "lut4-g8", "calibration": random_text()}
    first, again = (
        export_small(checkpoint, tmp_path / name, **options) for name in "ab"
    )
    assert first.identity == again.identity
    record = first.manifest.calibration
    assert (record.tokens, record.window, record.source) == (1024, 128, "random ids")
    stored = np.load(first.root / "calibration.npy")
    assert np.array_equal(stored, options["calibration"].ids)
    options["calibration"] = random_text(seed=1)
    other = export_small(checkpoint, tmp_path / "c", **options)
    assert first.manifest.shards != other.manifest.shards
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_calibration_that_was_killed_goes_on_where_it_ended(
    exports, tmp_path, monkeypatch
):
    checkpoint = exports.checkpoint("llama", **SIZE)
    options = {"compress": "lut6-g16", "calibration": random_text()}
    whole = export_small(checkpoint, tmp_path / "whole", **options)
    shapes, last = [], 10

    def counted(values, preset, inputs):
        shapes.append(tuple(values.shape))
        if len(shapes) == last:
            raise KeyboardInterrupt
        return compress.compress_matrix(values, preset, inputs)

    monkeypatch.setattr(calibrate, "compress_matrix", counted)
    with pytest.raises(KeyboardInterrupt):
        export_small(checkpoint, tmp_path / "b", **options)
    assert (tmp_path / ".b.calibration").is_dir() and not (tmp_path / "b").exists()
    shapes, last = [], None
    resumed = export_small(checkpoint, tmp_path / "b", **options)
    assert resumed.identity == whole.identity
    # two layers of seven matrices and one slice of the head, less the first layer
    assert len(shapes) == 8
    assert not (tmp_path / ".b.calibration").exists()


def test_another_text_does_not_go_on_with_what_is_left(exports, tmp_path):
    checkpoint = exports.checkpoint("llama", **SIZE)
    folder = tmp_path / ".b.calibration"
    calibrate.prepare_work_folder(folder, {"ids": "another text"})
    (folder / "model.layers.0.mlp.up_proj.weight.npz").write_bytes(b"another's")
    bundle = export_small(
        checkpoint, tmp_path / "b", compress="lut4-g8", calibration=random_text()
    )
    assert bundle.manifest.calibration and not folder.exists()


def test_a_text_that_weights_were_fitted_to_does_not_judge_them(exports, tmp_path):
    checkpoint = exports.checkpoint("llama", **SIZE)
    text = random_text()
    bundle = export_small(
        checkpoint, tmp_path / "b", compress="lut6-g16", calibration=text
    )
    other = random_text(seed=5).ids.reshape(-1)
    check_held_out(bundle, other)
    check_held_out(bundle, [*other, *text.ids[3, 20:83]])
    with refused("64 tokens in a row of random ids"):
        check_held_out(bundle, [*other, *text.ids[3, 20:84]])
    check_held_out(export_small(checkpoint, tmp_path / "c"), text.ids.reshape(-1))


def test_a_preset_of_four_bits_is_refused_without_a_text(exports, tmp_path):
    checkpoint = exports.checkpoint("llama", **SIZE)
    with refused("lut4-g8.*no text.*--calibrate TEXT"):
        CalibrationText().check("lut4-g8")
    with refused("lut4-g16.*no text.*--calibrate TEXT"):
        CalibrationText().check("lut4-g16")
    CalibrationText().check("lut6-g16")
    with refused("lut4-g8.*no text.*draw_windows"):
        exporter.export(checkpoint, tmp_path / "b", compress="lut4-g8")
    with refused("lut4-g8.*no text.*bundle"):
        make_grid({"checkpoint": str(checkpoint), "export": {"compress": ["lut4-g8"]}})
    assert not (tmp_path / "b").exists()
    with refused("fp16.*a text.*no calibration"):
        export_small(
            checkpoint, tmp_path / "b", compress="fp16", calibration=random_text()
        )


PROJECTION = "model.per_layer_model_projection.weight"


def export_projection(exports, folder, layers: int):
    """Exports a checkpoint with a projection of embeddings for two layers, fitted to a text."""
    return export_small(
        exports.checkpoint("gemma4_text", **TWO_KINDS),
        folder,
        compress="lut4-g8",
        calibration=random_text(),
        layers_per_shard=layers,
    )


@pytest.fixture
def whole_projection(exports):
    """A bundle of one shard, which has the whole projection."""
    folder = exports.root / "whole-projection"
    tiny.once(folder, lambda path: export_projection(exports, path, layers=2))
    return Bundle.open(folder)


@pytest.mark.slow("exports two bundles")
def test_slices_of_a_projection_are_compressed_as_the_whole(
    exports, tmp_path, whole_projection
):
    """The shards' slices of the projection of embeddings for all layers."""
    source = Checkpoint(exports.checkpoint("gemma4_text", **TWO_KINDS))
    sliced = export_projection(exports, tmp_path / "b", layers=1)
    for bundle, count in ((whole_projection, 1), (sliced, 2)):
        assert bundle.manifest.calibration.nearest == []
        shards = bundle.manifest.shards
        assert sum(PROJECTION in shard.weights for shard in shards) == count
    whole, slices = (
        stored_weights(source, bundle)(PROJECTION).float()
        for bundle in (whole_projection, sliced)
    )
    assert torch.equal(whole, slices)
    preset, values = find_preset("lut4-g8"), source.tensor(PROJECTION).half()
    plain = rounded_to_nearest(values, preset)
    nearest = compress.decompress(plain, preset, values.shape).float()
    assert not torch.equal(whole, nearest)


@pytest.mark.slow("exports two bundles")
def test_a_killed_calibration_of_other_slices_is_not_continued(
    exports, tmp_path, monkeypatch, whole_projection
):
    """Another number of layers a shard cuts the projection elsewhere."""
    with monkeypatch.context() as patched:
        patched.setattr(calibrate.CompressingLayer, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            export_projection(exports, tmp_path / "b", layers=1)
    left = [path.name for path in (tmp_path / ".b.calibration").glob("*projection*")]
    assert len(left) == 2
    bundle = export_projection(exports, tmp_path / "b", layers=2)
    assert bundle.identity == whole_projection.identity


def interrupt(*arguments, **keywords):
    raise KeyboardInterrupt


def test_slices_of_a_projection_have_groups_of_one_size(exports, tmp_path):
    """Where tables for 16 rows fit the shard of two layers, but not that of one."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    changes = {"num_hidden_layers": 3, "num_kv_shared_layers": 0, "layer_types": kinds}
    checkpoint = exports.checkpoint(
        "gemma4_text", hidden_size_per_layer_input=24, **changes
    )
    bundle = export_small(
        checkpoint, tmp_path / "b", compress="lut6-g16", layers_per_shard=2
    )
    gate = weights_gate(bundle, Checkpoint(checkpoint))
    assert gate.verdict == "GREEN", gate.reason


@pytest.mark.slow("exports three bundles")
def test_the_manifest_names_what_the_text_decided_nothing_of(exports, tmp_path):
    """Experts are stacked: no linear module of Hugging Face's model has their matrices."""
    options = {"compress": "lut6-g16", "calibration": random_text()}
    llama = export_small(exports.checkpoint("llama", **SIZE), tmp_path / "a", **options)
    assert "nearest" not in (llama.root / "bundle.json").read_text()
    checkpoint = exports.checkpoint("zaya", **TWO_EXPERTS)
    zaya = export_small(checkpoint, tmp_path / "b", **options)
    nearest = zaya.manifest.calibration.nearest
    assert nearest and all(".experts." in name for name in nearest)
    plain = export_small(checkpoint, tmp_path / "c", compress="lut6-g16")
    shards = [shard for shard in plain.manifest.shards if nearest[0] in shard.weights]
    assert shards
    for shard in shards:
        twin = next(s for s in zaya.manifest.shards if s.name == shard.name)
        values = [
            open_parts(bundle, one, next(iter(one.functions or [None])))(nearest[0])
            for bundle, one in ((plain, shard), (zaya, twin))
        ]
        assert all(
            np.array_equal(values[0][role], values[1][role]) for role in values[0]
        )
