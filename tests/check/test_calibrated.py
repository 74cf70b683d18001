"""Gate `weights` on matrices that were fitted to a calibration text: sound ones are GREEN, planted
faults RED, in bundles of a small model and in wide random matrices."""

from collections import Counter
from hashlib import sha256
from itertools import product
from types import SimpleNamespace

import cases
import numpy as np
import pytest
import tiny
import torch
from cases import Case
from circle import wide
from faults.copies import Copy

from workbench import Bundle, export
from workbench.bundle import find_preset
from workbench.bundle.presets import Preset
from workbench.check import calibrated, row_statistics
from workbench.check.deviation import Deviation
from workbench.check.gates import RED
from workbench.check.row_statistics import InputWeights, Moment, matrix_deviations
from workbench.check.stored_values import fitted_rows
from workbench.check.weights import weights_gate
from workbench.exporter import inputs as exporter_inputs
from workbench.exporter.compress import InputStatistics, compress_matrix
from workbench.models.checkpoint import Checkpoint

pytestmark = pytest.mark.usefixtures("shared_conversions")

PRESETS = cases.FITTED
# one preset of integers and one of tables; `make test-all` has the others, too
ONE_OF_A_KIND = "int8-channel", "lut4-g8"
PRESETS_OF_PLANTS = [name if name in ONE_OF_A_KIND else wide(name) for name in PRESETS]
TWO_LAYERS = {"num_hidden_layers": 2}
# family → changes of its tiny dimensions
OTHER_FAMILIES = {
    "gemma3_text": TWO_LAYERS
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen2": TWO_LAYERS,
    "zaya": TWO_LAYERS | {"num_experts": 2},
    "lfm2": TWO_LAYERS | {"layer_types": ["conv", "full_attention"]},
}


@pytest.fixture
def fitted(exports):
    """Sound bundles of a trained model by their preset."""

    def bundle(preset: str) -> Bundle:
        folder, _ = cases.export_sound(exports, Case("base", "fitted", preset))
        return Bundle.open(folder)

    return bundle


@pytest.mark.slow("exports a bundle and judges its weights")
@pytest.mark.parametrize("preset", PRESETS)
def test_sound_bundles_are_green(fitted, tiny_llama, preset):
    gate = weights_gate(fitted(preset), tiny_llama)
    assert gate.verdict == "GREEN", gate.reason
    # seven matrices of each of four layers, and the head
    assert "29 matrices were fitted to a calibration text" in gate.reason


@pytest.mark.slow("exports a bundle and judges its weights")
@pytest.mark.parametrize(
    "family", ["gemma3_text", "zaya", *map(wide, ["qwen2", "lfm2"])]
)
def test_sound_bundles_of_other_families_are_green(exports, tmp_path, family):
    """Of one layer of each kind, or of two where all are of one kind."""
    checkpoint = exports.checkpoint(family, **OTHER_FAMILIES[family])
    text = tiny.random_text(90)
    options = {"compress": "lut4-g8", "max_seq_len": 16, "calibration": text}
    gate = weights_gate(
        export(checkpoint, tmp_path / "b", **options), Checkpoint(checkpoint)
    )
    assert gate.verdict == "GREEN", gate.reason


@pytest.mark.slow("exports a bundle and judges its weights")
@pytest.mark.parametrize(
    ("limit", "verdict"), [(row_statistics.MEDIAN_ERROR_LIMIT, "GREEN"), (1e-9, RED)]
)
def test_a_fitted_matrix_is_read_once(fitted, tiny_llama, monkeypatch, limit, verdict):
    """Also where every matrix exceeds its limits and is judged by other inputs, too."""
    bundle = fitted("int8-channel")  # an export reads matrices, too
    reads = Counter()
    read = Checkpoint.tensor

    def count(checkpoint, name, rows=None):
        reads[name] += 1
        return read(checkpoint, name, rows)

    monkeypatch.setattr(Checkpoint, "tensor", count)
    monkeypatch.setattr(row_statistics, "MEDIAN_ERROR_LIMIT", limit)
    assert weights_gate(bundle, tiny_llama).verdict == verdict
    matrices = calibrated.fitted_tensors(tiny_llama) - {tiny_llama.head}
    assert {name: reads[name] for name in matrices} == dict.fromkeys(matrices, 1)


@pytest.mark.slow("exports two bundles and judges their weights")
@pytest.mark.parametrize("sizes", [{"tokens": "1,4"}, {"layers_per_shard": 2}], ids=str)
def test_every_copy_of_a_matrix_is_judged(exports, tmp_path, sizes):
    """Each function of a package stores the matrices of its shard."""
    checkpoint = exports.checkpoint("llama")
    options = {"compress": "lut4-g8", "max_seq_len": 16} | sizes
    bundle = export(
        checkpoint, tmp_path / "b", calibration=tiny.random_text(90), **options
    )
    gate = weights_gate(bundle, Checkpoint(checkpoint))
    assert gate.verdict == "GREEN", gate.reason
    assert "matrices were fitted to a calibration text" in gate.reason


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_is_red(fitted, tiny_llama, tmp_path, value):
    copy = Copy(fitted("int8-channel").root, tmp_path / "copy")
    scale = copy.weight("model.layers.1.self_attn.v_proj.weight").arrays["scale"]
    values = scale.read().copy()
    values.flat[3] = value
    scale.write(values)
    gate = weights_gate(Bundle.open(copy.seal()), tiny_llama)
    assert gate.verdict == RED
    tensor = "model.layers.1.self_attn.v_proj.weight"
    assert f"{tensor}: a scale that is not a finite number" in gate.reason


FAULTY = [
    case if case.preset in ONE_OF_A_KIND else wide(case)
    for case in cases.faulty_cases()
    if case.fault.bundle == "fitted"
]


@pytest.mark.slow("exports a bundle and plants a fault")
@pytest.mark.parametrize("case", FAULTY, ids=str)
def test_faults_in_files_are_red(exports, case):
    with cases.open_subject(exports, case) as subject:
        assert subject.weights_gate.verdict == RED


def scale_embedding(copy):
    copy.edit_embedding(lambda table: table * np.float16(1.05))


def leave_out_a_tensor(copy):
    copy.shard(1)["weights"].pop("model.layers.1.mlp.up_proj.weight")


@pytest.mark.parametrize("plant", [scale_embedding, leave_out_a_tensor])
def test_what_no_text_was_fitted_to_is_judged_too(fitted, tiny_llama, tmp_path, plant):
    copy = Copy(fitted("lut4-g8").root, tmp_path / "copy")
    plant(copy)
    assert weights_gate(Bundle.open(copy.seal()), tiny_llama).verdict == RED


def test_other_token_ids_than_the_manifest_names_are_red(fitted, tiny_llama, tmp_path):
    copy = Copy(fitted("lut4-g8").root, tmp_path / "copy")
    folder = copy.seal()
    ids = np.load(folder / "calibration.npy")
    np.save(folder / "calibration.npy", ids[:, ::-1].copy())
    gate = weights_gate(Bundle.open(folder), tiny_llama)
    assert gate.verdict == RED and "token ids" in gate.reason


IDS = np.arange(12, dtype=np.int32).reshape(3, 4)


def bundle_with_ids(ids: np.ndarray, **changes) -> SimpleNamespace:
    """What `calibration_ids` reads of a bundle that keeps `ids`; the manifest's entry is
    that of `IDS` but for `changes`."""
    entry = {
        "ids_sha256": sha256(ids.astype("<i4").tobytes()).hexdigest(),
        "tokens": IDS.size,
        "window": IDS.shape[1],
    }
    manifest = SimpleNamespace(
        calibration=SimpleNamespace(**entry | changes), dims=SimpleNamespace(V=12)
    )
    return SimpleNamespace(manifest=manifest, calibration_ids=ids)


@pytest.mark.parametrize("dtype", ["<i4", ">i4", np.int64])
def test_ids_of_the_manifest_are_given(dtype):
    ids = calibrated.calibration_ids(bundle_with_ids(IDS.astype(dtype)))
    np.testing.assert_array_equal(ids, IDS)


@pytest.mark.parametrize(
    ("ids", "changes", "message"),
    [
        (IDS, {"window": 3}, "windows of 3"),
        (IDS, {"tokens": 8}, "not the 8 integers"),
        (IDS.ravel(), {}, r"int32 \[12\], not"),
        (IDS[None], {}, r"int32 \[1, 3, 4\], not"),
        (np.int32(5), {"tokens": 1}, r"int32 \[\], not"),
        (IDS + 0.25, {}, "float64"),
        (IDS, {"ids_sha256": "0" * 64}, "another SHA-256"),
        (IDS + 1, {}, "from 1 to 12, not all in the vocabulary of 12"),
        (IDS - 1, {}, "from -1 to 10, not all in the vocabulary of 12"),
    ],
    ids="window tokens row stack number fractions hash above below".split(),
)
def test_other_ids_than_the_manifest_s_are_refused(ids, changes, message):
    with pytest.raises(ValueError, match=message):
        calibrated.calibration_ids(bundle_with_ids(ids, **changes))


@pytest.mark.parametrize("preset", PRESETS_OF_PLANTS)
def test_statistics_of_another_layer_are_red(tiny_llama, tmp_path, monkeypatch, preset):
    """Planted in the exporter: every layer is compressed with the inputs of the first."""
    first: dict[int, torch.Tensor] = {}

    class OfFirstLayer(InputStatistics):
        @classmethod
        def of(cls, hessian: torch.Tensor, damping: float) -> InputStatistics:
            return InputStatistics.of(first.setdefault(len(hessian), hessian), damping)

    monkeypatch.setattr(exporter_inputs, "InputStatistics", OfFirstLayer)
    text = tiny.random_text(tiny_llama.config.vocab_size)
    options = {"compress": preset, "max_seq_len": 64, "calibration": text}
    bundle = export(tiny_llama.path, tmp_path / "b", **options)
    gate = weights_gate(bundle, tiny_llama)
    assert gate.verdict == RED and "median" in gate.reason


# --- wide matrices ---


WIDTH, ROWS = 576, 64


def correlated_inputs(seed: int) -> torch.Tensor:
    """Inputs [4096, WIDTH] of unequal size that share directions."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(WIDTH, 96, generator=generator)
    x = torch.randn(4096, 96, generator=generator) @ mixing.T
    x += 5 * torch.randn(x.shape, generator=generator)
    return x * torch.exp(0.5 * torch.randn(WIDTH, generator=generator))


def statistics_of(x: torch.Tensor) -> InputStatistics:
    """What the exporter knows of inputs x."""
    return exporter_inputs.InputSum.of(x).compute_statistics()


def weights_of(seed: int) -> torch.Tensor:
    """Weights [ROWS, WIDTH] with heavy tails and rows of unequal size."""
    rng = np.random.default_rng(seed)
    values = rng.standard_t(5, (ROWS, WIDTH)) * np.exp(
        0.3 * rng.standard_normal((ROWS, 1))
    )
    return torch.from_numpy(values * 0.02).half()


def judge(
    values: torch.Tensor,
    exported_values: torch.Tensor,
    preset: Preset,
    inputs: torch.Tensor,
    exported_inputs: torch.Tensor,
) -> list[Deviation]:
    """The deviations that gate `weights` measures of one matrix.

    Args:
        values: the checkpoint's weights [ROWS, WIDTH].
        exported_values: the weights that the exporter compresses; others are a planted fault.
        inputs: the inputs [n, WIDTH] of the matrix on the text.
        exported_inputs: the inputs that the exporter fits to; others are a planted fault.
    """
    statistics = statistics_of(exported_inputs)
    arrays = compress_matrix(exported_values.clone(), preset, statistics)
    if preset.is_integer:
        parts = {
            "data": arrays["data"].reshape(values.shape),
            "scale": arrays["scale"].reshape(len(values), -1),
        }
    else:
        entries = 1 << preset.bits
        parts = {
            "indices": arrays["indices"].reshape(values.shape),
            "lut": arrays["lut"].reshape(-1, 1, 1, 1, entries, 1),
        }
    rows = fitted_rows("w", 0, parts, values.float(), preset)
    return matrix_deviations([rows], InputWeights.of([Moment.of(inputs)]))


def reasons_of_faults(deviations: list[Deviation]) -> list[str]:
    return [deviation.reason for deviation in deviations if not deviation.is_sound]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PRESETS)
def test_wide_sound_matrices_are_green(name, seed):
    values, inputs = weights_of(seed), correlated_inputs(seed)
    assert not reasons_of_faults(
        judge(values, values, find_preset(name), inputs, inputs)
    )


# int4-block32 with seed 2 is left out: its lost weights are of 0.7 steps, and their loss is 5.0
# standard deviations, below the limit of 6. With the other seeds the lost weights are of 2.0 and 2.5
# steps, and the loss is 15.6 and 16.4 standard deviations.
LOST_INPUTS = [
    (name, seed)
    for name, seed in product(PRESETS, range(3))
    if (name, seed) != ("int4-block32", 2)
]


@pytest.mark.parametrize("name", ["lut4-g8", "int4-block32"])
def test_a_short_text_hides_a_row_times_1_05_at_4_bits(name):
    """A row that is GREEN with 256 inputs is RED with all of them."""
    values, inputs = weights_of(0), correlated_inputs(0)
    scaled = values.clone()
    scaled[20] *= 1.05
    for count, is_red in ((256, False), (len(inputs), True)):
        text_inputs = inputs[:count]
        reasons = reasons_of_faults(
            judge(values, scaled, find_preset(name), text_inputs, text_inputs)
        )
        assert any("row 20" in reason for reason in reasons) == is_red


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("int8-channel", 1.02),
        ("lut6-g16", 1.02),
        ("lut4-g8", 1.05),
        ("int4-block32", 1.05),
    ],
)
def test_a_row_that_the_exporter_scaled_is_red(name, factor, seed):
    values, inputs = weights_of(seed), correlated_inputs(seed)
    scaled = values.clone()
    scaled[20] *= factor
    reasons = reasons_of_faults(
        judge(values, scaled, find_preset(name), inputs, inputs)
    )
    assert any("row 20" in reason and "slope" in reason for reason in reasons)


@pytest.mark.parametrize(("name", "seed"), LOST_INPUTS)
def test_inputs_that_the_exporter_lost_in_one_row_are_red(name, seed):
    values, inputs = weights_of(seed), correlated_inputs(seed)
    damaged = values.clone()
    damaged[20, 96:112] = 0
    reasons = reasons_of_faults(
        judge(values, damaged, find_preset(name), inputs, inputs)
    )
    assert any("row 20" in reason and "of 16 inputs" in reason for reason in reasons)


@pytest.mark.parametrize("name", PRESETS)
def test_a_wide_matrix_with_the_statistics_of_other_inputs_is_red(name):
    values, inputs, others = weights_of(0), correlated_inputs(0), correlated_inputs(1)
    reasons = reasons_of_faults(
        judge(values, values, find_preset(name), inputs, others)
    )
    assert any("median" in reason for reason in reasons)


def test_a_table_of_few_entries_is_red():
    """The stored entries are the nearest of a table that uses 8 of its 64 entries."""
    values, inputs = weights_of(0), correlated_inputs(0)
    preset = find_preset("lut6-g16")
    groups = np.float32(values).reshape(ROWS // 16, -1)
    ends = np.linspace(groups.min(1), groups.max(1), 8, axis=1)
    tables = np.float32(np.float16(ends.repeat(8, 1)))
    indices = np.abs(groups[..., None] - tables[:, None]).argmin(-1)
    parts = {
        "indices": np.uint8(indices).reshape(values.shape),
        "lut": np.float16(tables).reshape(-1, 1, 1, 1, 64, 1),
    }
    rows = fitted_rows("w", 0, parts, values.float(), preset)
    reasons = reasons_of_faults(
        matrix_deviations([rows], InputWeights.of([Moment.of(inputs)]))
    )
    assert any("even grid" in reason for reason in reasons)


def test_a_table_for_a_whole_tensor_shows_its_cost_beside_groups():
    """Rows of unequal size with heavy tails: one table serves the large rows."""
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.standard_normal((ROWS // 8, 1, 1)))
    values = 0.02 * rng.standard_t(3, (ROWS // 8, 8, WIDTH)) * sizes
    values = torch.from_numpy(values.reshape(ROWS, WIDTH)).half()
    inputs = correlated_inputs(0)
    output = values.float() @ inputs.T
    costs, whole = {}, f"lut4-g{ROWS}"
    for name in (whole, "lut4-g8"):
        preset = find_preset(name)
        arrays = compress_matrix(values, preset, statistics_of(inputs))
        stored = arrays["lut"].reshape(-1, 16)[
            np.arange(ROWS)[:, None] // preset.group,
            arrays["indices"].reshape(ROWS, WIDTH),
        ]
        change = (torch.from_numpy(np.float32(stored)) - values.float()) @ inputs.T
        costs[name] = float((change.square().sum(1) / output.square().sum(1)).mean())
    assert costs[whole] > 2 * costs["lut4-g8"]


@pytest.mark.parametrize("width", [1, 384, 385, 1000])
def test_a_moment_sums_the_products_of_all_pairs_of_inputs(width):
    """Its blocks of columns may be one, several, or end with a narrow one."""
    x = torch.randn(3, 20, width, generator=torch.Generator().manual_seed(width))
    moment = Moment.of(x)
    flat = x.double().reshape(-1, width)
    assert torch.allclose(moment.total, flat.T @ flat, rtol=0, atol=1e-4)
    assert torch.equal(moment.total, moment.total.T)
    assert torch.allclose(moment.squares, flat.square().sum(1))
