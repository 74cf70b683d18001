"""Calibration: each matrix is compressed with the inputs that it has on a text."""

import numpy as np
import pytest
import torch
from conversions import small
from refusal import refused

from workbench.bundle import find_preset
from workbench.check.text import check_held_out
from workbench.cli.common import CalibrationText
from workbench.exporter import calibrate, compress
from workbench.exporter.calibrate import draw_windows, summed_inputs
from workbench.exporter.compress import InputStatistics
from workbench.exporter.weights import WeightSource, stored

SIZE = {"num_hidden_layers": 2, "vocab_size": 320}
PRESETS = ["int8-channel", "lut6-g16", "lut4-g8", "int4-block32", "int8-tensor"]


def random_text(seed: int = 0, V: int = 90, count: int = 1024) -> calibrate.Text:
    ids = np.random.default_rng(seed).integers(0, V, count)
    return draw_windows(ids.tolist(), "random ids", seed=seed, window=128)


def correlated_inputs(width: int, seed: int = 0) -> torch.Tensor:
    """E[x xᵀ] of inputs that share a few directions."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width // 8, generator=generator)
    x = torch.randn(4096, width // 8, generator=generator) @ mixing.T
    x += 0.3 * torch.randn(x.shape, generator=generator)
    return x.T @ x / len(x)


def rounded_to_nearest(values: torch.Tensor, preset) -> dict[str, np.ndarray]:
    """The arrays of an export without a text."""
    weight = WeightSource("w.weight", "w", (*values.shape, 1, 1), preset=preset)
    return stored(weight, values.flatten().clone())


@pytest.mark.parametrize("name", PRESETS)
def test_error_feedback_lowers_the_error_of_the_product(name):
    preset, hessian = find_preset(name), correlated_inputs(128)
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)).half()

    def error(arrays) -> float:
        stored = compress.decompress(arrays, preset, values.shape)
        change = (stored - values).float()
        return float((change @ hessian * change).sum())

    fitted = compress.compress_matrix(values, preset, InputStatistics.of(hessian))
    assert error(fitted) < 0.6 * error(rounded_to_nearest(values, preset))


@pytest.mark.parametrize("name", PRESETS)
def test_equal_arguments_give_equal_arrays_and_leave_the_values(name):
    preset, inputs = find_preset(name), InputStatistics.of(correlated_inputs(64))
    values = torch.randn(32, 64, generator=torch.Generator().manual_seed(3)).half()
    before = values.clone()
    first, second = (compress.compress_matrix(values, preset, inputs) for _ in range(2))
    assert torch.equal(values, before)
    assert all(np.array_equal(first[role], second[role]) for role in first)


def test_uncorrelated_inputs_give_the_nearest_entries():
    preset = find_preset("lut4-g8")
    values = torch.randn(16, 64, generator=torch.Generator().manual_seed(4)).half()
    plain = rounded_to_nearest(values, preset)
    inputs = InputStatistics.of(torch.eye(64))
    fed = compress.compress_matrix(values, preset, inputs)
    assert np.array_equal(plain["lut"], fed["lut"])
    assert np.array_equal(plain["indices"].reshape(-1), fed["indices"])


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


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_equal_texts_give_equal_bytes_and_other_texts_others(exports, tmp_path, family):
    checkpoint = exports.checkpoint(family)
    options = {"compress": "lut4-g8", "calibration": random_text()}
    first, again = (small(checkpoint, tmp_path / name, **options) for name in "ab")
    assert first.identity == again.identity
    record = first.manifest.calibration
    assert (record.tokens, record.window, record.source) == (1024, 128, "random ids")
    stored = np.load(first.root / "calibration.npy")
    assert np.array_equal(stored, options["calibration"].ids)
    options["calibration"] = random_text(seed=1)
    other = small(checkpoint, tmp_path / "c", **options)
    assert first.manifest.shards != other.manifest.shards
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_calibration_that_was_killed_goes_on_where_it_ended(
    exports, tmp_path, monkeypatch
):
    checkpoint = exports.checkpoint("llama", **SIZE)
    options = {"compress": "lut6-g16", "calibration": random_text()}
    whole = small(checkpoint, tmp_path / "whole", **options)
    shapes, last = [], 10

    def counted(values, preset, inputs):
        shapes.append(tuple(values.shape))
        if len(shapes) == last:
            raise KeyboardInterrupt
        return compress.compress_matrix(values, preset, inputs)

    monkeypatch.setattr(calibrate, "compress_matrix", counted)
    with pytest.raises(KeyboardInterrupt):
        small(checkpoint, tmp_path / "b", **options)
    assert (tmp_path / ".b.calibration").is_dir() and not (tmp_path / "b").exists()
    shapes, last = [], None
    resumed = small(checkpoint, tmp_path / "b", **options)
    assert resumed.identity == whole.identity
    # two layers of seven matrices and one slice of the head, less the first layer
    assert len(shapes) == 8
    assert not (tmp_path / ".b.calibration").exists()


def test_another_text_does_not_go_on_with_what_is_left(exports, tmp_path):
    checkpoint = exports.checkpoint("llama", **SIZE)
    folder = tmp_path / ".b.calibration"
    calibrate.prepare(folder, {"ids": "another text"})
    (folder / "model.layers.0.mlp.up_proj.weight.npz").write_bytes(b"another's")
    bundle = small(
        checkpoint, tmp_path / "b", compress="lut4-g8", calibration=random_text()
    )
    assert bundle.manifest.calibration and not folder.exists()


def test_a_text_that_weights_were_fitted_to_does_not_judge_them(exports, tmp_path):
    checkpoint = exports.checkpoint("llama", **SIZE)
    text = random_text()
    bundle = small(checkpoint, tmp_path / "b", compress="lut6-g16", calibration=text)
    other = random_text(seed=5).ids.reshape(-1)
    check_held_out(bundle, other)
    check_held_out(bundle, [*other, *text.ids[3, 20:83]])
    with refused("64 tokens in a row of random ids"):
        check_held_out(bundle, [*other, *text.ids[3, 20:84]])
    check_held_out(small(checkpoint, tmp_path / "c"), text.ids.reshape(-1))


def test_a_preset_of_four_bits_is_refused_without_a_text(exports, tmp_path):
    checkpoint = exports.checkpoint("llama", **SIZE)
    with refused("lut4-g8.*no text.*--calibrate TEXT"):
        CalibrationText().check("lut4-g8")
    with refused("lut4-g16.*no text.*--calibrate TEXT"):
        CalibrationText().check("lut4-g16")
    CalibrationText().check("lut6-g16")
    with refused("fp16.*a text.*no calibration"):
        small(checkpoint, tmp_path / "b", compress="fp16", calibration=random_text())
