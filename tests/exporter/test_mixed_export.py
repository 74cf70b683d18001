"""A bundle whose matrices have several presets: each is stored as the manifest says, the
bundle is sound, and its own values stay within the limit."""

import shutil

import numpy as np
import pytest
import torch
from conversions import list_files
from refusal import refused
from tiny import DATA, once

from workbench import Bundle, Golden, export, validate
from workbench.bundle.presets import find_preset
from workbench.check.gates import NOT_RUN, RED
from workbench.check.golden import stored_weights
from workbench.check.text import check_held_out, default_ids, task_text
from workbench.decode import Decoder
from workbench.decode.tokenizer import encode_text
from workbench.exporter import Compression, bundle_name, candidates, make_options, mixed
from workbench.exporter.allocation import Limit
from workbench.exporter.calibrate import draw_windows
from workbench.exporter.mixed import SearchSettings, read_allocation
from workbench.exporter.replaceable import ReplaceableModel, linear_modules, load_model
from workbench.models.checkpoint import Checkpoint

pytestmark = pytest.mark.usefixtures("shared_conversions")

PRESETS = ("lut4-g8", "int8-channel", "lut6-g16", "fp16")
SOURCE = DATA / "tiny-llama"
IDS = encode_text(SOURCE, task_text())
TEXT = draw_windows(IDS[:512], "tasks", window=64)
SELECTION = draw_windows(IDS[600:1368], "more tasks", window=64)


@pytest.fixture(scope="module")
def source():
    return Checkpoint(SOURCE)


@pytest.fixture(scope="module")
def formats(source):
    """Every matrix of the layers and the head, each with the next preset."""
    names = [name for name in source.matrices if "layers." in name] + [source.head]
    return {name: PRESETS[i % len(PRESETS)] for i, name in enumerate(names)}


def export_mixed(folder, calibration=TEXT, **presets):
    """Exports with `formats` or `search`."""
    options = {"compress": "mixed", "max_seq_len": 64}
    return export(SOURCE, folder, calibration=calibration, **options, **presets)


@pytest.fixture(scope="module")
def bundle(formats, exports):
    folder = exports.root / "mixed-formats"
    once(folder, lambda path: export_mixed(path, formats=formats))
    return Bundle.open(folder)


def test_the_manifest_names_every_matrix_s_preset(bundle, formats):
    manifest = Bundle.open(bundle.root).manifest
    assert manifest.options.compress == "mixed"
    assert manifest.formats == formats
    tensor = next(iter(formats))
    assert manifest.preset_of(tensor) == find_preset(formats[tensor])
    assert manifest.selection is None


def test_no_gate_is_red(bundle, source):
    """Gates that may have nothing to judge are those of tasks and devices."""
    result = validate(Decoder(bundle), Golden.of(source, default_ids(source, 17)))
    words = {gate.name: gate.verdict for gate in result.gates}
    assert RED not in words.values(), result.gates
    idle = {name for name, verdict in words.items() if verdict == NOT_RUN}
    assert idle <= {"answers", "device"}


def test_layers_of_equal_formats_share_a_program(formats, bundle, tmp_path):
    """In layer 2 one matrix has another format than in the other layers."""
    by_module = {
        name: "lut4-g8" if "mlp" in name else "int8-channel" for name in formats
    }
    by_module["model.layers.2.mlp.up_proj.weight"] = "lut6-g16"
    exported = export_mixed(tmp_path / "b", formats=by_module)
    templates = [shard.template for shard in exported.manifest.shards[:4]]
    assert len(set(templates[:2] + templates[3:])) == 1
    assert len(set(templates)) == 2


def test_the_same_preset_for_all_matrices_gives_the_bytes_of_that_preset(
    formats, tmp_path
):
    one_preset = dict.fromkeys(formats, "int8-channel")
    mixed_bundle = export_mixed(tmp_path / "mixed", formats=one_preset)
    options = {"calibration": TEXT, "max_seq_len": 64}
    expected = export(SOURCE, tmp_path / "b", compress="int8-channel", **options)
    assert list_files(mixed_bundle) == list_files(expected)


def test_a_matrix_under_another_preset_is_red(bundle, formats):
    """The manifest is changed, not the packages."""
    from workbench.check.interface import interface_gate

    first, second = list(formats)[:2]
    exchanged = formats | {first: formats[second], second: formats[first]}
    manifest = bundle.manifest.model_copy(update={"formats": exchanged})
    assert interface_gate(bundle).verdict != RED
    assert interface_gate(Bundle(bundle.root, manifest)).verdict == RED


SEARCH = SearchSettings(SELECTION, Limit(kl=0.005))


@pytest.fixture(scope="module")
def chosen_out(exports):
    """A folder of bundles with one whose formats a search chose."""

    def make(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORKBENCH_OUT", str(folder))
            export_mixed(None, search=SEARCH)

    return once(exports.root / "mixed-chosen", make)


@pytest.fixture(scope="module")
def chosen(chosen_out):
    """A bundle whose formats a search chose."""
    (manifest,) = chosen_out.rglob("bundle.json")
    return Bundle.open(manifest.parent)


def test_a_chosen_bundle_keeps_the_search_and_its_texts(chosen, formats):
    assert Bundle.open(chosen.root).identity == chosen.identity
    record = chosen.manifest.selection
    allocation = read_allocation(chosen.root / record.allocation.path)
    assert allocation.chosen.formats == chosen.manifest.formats
    assert allocation.chosen.formats.keys() == formats.keys()
    assert {choice.name for choice in allocation.uniform} == set(mixed.CANDIDATES)
    assert record.source == "more tasks"
    np.testing.assert_array_equal(chosen.selection_ids, SELECTION.ids)
    np.testing.assert_array_equal(chosen.calibration_ids, TEXT.ids)


@pytest.mark.parametrize(
    "file", ["calibration.npy", "selection.npy", "allocation.json"]
)
def test_a_changed_byte_of_a_text_or_of_the_choices_is_found(chosen, file, tmp_path):
    """What a gate or a figure reads beside the packages is as it was written, too."""
    copy = shutil.copytree(chosen.root, tmp_path / "b")
    content = bytearray((copy / file).read_bytes())
    content[-1] ^= 1
    (copy / file).write_bytes(content)
    with refused("bytes that differ from the manifest's SHA"):
        Bundle.open(copy).verify()


def test_the_values_of_the_bundle_have_the_recorded_quality(chosen, source):
    """Read from the packages by code that the exporter does not use."""
    allocation = read_allocation(chosen.root / "allocation.json")
    read = stored_weights(source, chosen)
    model = load_model(source)
    modules = linear_modules(model, source, chosen.manifest.formats)
    measurement = ReplaceableModel.from_unchanged(
        model, modules, torch.from_numpy(SELECTION.ids).long()
    )
    for tensor in modules:
        measurement.replace_matrix(tensor, read(tensor).float())
    quality = measurement.quality()
    assert quality.kl == pytest.approx(allocation.exported.kl, rel=1e-4)
    assert quality.kl <= 0.005
    assert quality.kl_p99 == pytest.approx(allocation.exported.kl_p99, rel=1e-3)


def test_an_export_above_the_limit_takes_a_costlier_choice(tmp_path, monkeypatch):
    """Where the compression of the export is worse than that of the search."""
    qualities = []
    measure = mixed._stored_quality

    def worse(*arguments):
        quality = measure(*arguments)
        if not qualities:
            quality = mixed.replace(quality, kl=0.006)
        qualities.append(quality)
        return quality

    monkeypatch.setattr(mixed, "_stored_quality", worse)
    bundle = export_mixed(tmp_path / "b", search=SEARCH)
    allocation = read_allocation(bundle.root / "allocation.json")
    assert len(qualities) == 2
    assert allocation.exported == qualities[1]
    assert allocation.chosen.formats == bundle.manifest.formats
    costs = {(c.tensor, c.preset): c.loss for c in allocation.costs}
    predicted = sum(costs[pair] for pair in allocation.chosen.formats.items())
    assert predicted == pytest.approx(allocation.chosen.predicted_kl)


def test_an_interrupted_search_goes_on_with_the_formats_that_it_has(
    chosen, tmp_path, monkeypatch
):
    """And ends in the bundle of a search that was not interrupted."""

    def interrupt(*arguments, **keywords):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(mixed, "measure_and_choose", interrupt)
        with pytest.raises(KeyboardInterrupt):
            export_mixed(tmp_path / "b", search=SEARCH)
    assert not (tmp_path / "b").exists()
    monkeypatch.setattr(candidates, "compress_matrix", pytest.fail)
    assert export_mixed(tmp_path / "b", search=SEARCH).identity == chosen.identity
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_an_export_that_never_keeps_the_limit_is_refused(tmp_path, monkeypatch):
    worst = mixed.Quality(kl=0.5, kl_p99=1.0, perplexity_ratio=2.0, same_top=0.1)
    monkeypatch.setattr(mixed, "_stored_quality", lambda *arguments: worst)
    with refused("--max-kl.*0.5"):
        export_mixed(tmp_path / "b", search=SEARCH)
    assert not (tmp_path / "b").exists()


def test_a_chosen_bundle_of_the_folder_of_bundles_is_opened_again(
    chosen_out, chosen, monkeypatch
):
    monkeypatch.setenv("WORKBENCH_OUT", str(chosen_out))
    monkeypatch.setattr(mixed, "choose_and_compress", pytest.fail)
    assert export_mixed(None, search=SEARCH).root == chosen.root
    left = [path.name for path in chosen.root.parent.iterdir()]
    assert not [name for name in left if "calibration" in name]


@pytest.mark.parametrize("text", [TEXT, SELECTION], ids=["calibration", "selection"])
def test_a_text_that_chose_or_fitted_the_bundle_does_not_judge_it(chosen, text):
    row = text.ids[2].tolist()
    check_held_out(chosen, row[:63])
    with refused(f"64 tokens in a row of {text.source}"):
        check_held_out(chosen, [5, *row[:64], 5])


def test_the_choice_differs_in_name_by_everything_that_decides_it(formats):
    options = make_options(compress="mixed")
    changed = formats | {next(iter(formats)): "fp16"}
    searches = [
        SearchSettings(SELECTION, Limit(kl=0.005)),
        SearchSettings(SELECTION, Limit(kl=0.002)),
        SearchSettings(SELECTION, Limit(bytes=10**6)),
        SearchSettings(TEXT, Limit(kl=0.005)),
    ]
    variants = [Compression(formats=chosen) for chosen in (formats, changed)]
    variants += [Compression(search=settings) for settings in searches]
    names = {bundle_name("m", "x", options, compression) for compression in variants}
    assert len(names) == len(variants)


@pytest.mark.parametrize(
    "change, words",
    [
        (None, "no preset for each matrix"),
        ({"model.layers.0.mlp.gate_proj.weight": None}, "gate_proj.*no preset"),
        ({"model.norm.weight": "fp16"}, "norm.*no matrix"),
        ({"model.layers.0.mlp.gate_proj.weight": "lut4"}, "gate_proj.*lut4"),
        ({"model.layers.0.mlp.gate_proj.weight": "lut3-g8"}, "gate_proj.*lut3-g8"),
        ({"model.layers.0.mlp.gate_proj.weight": "mixed"}, "gate_proj.*mixed"),
    ],
)
def test_formats_that_do_not_fit_are_refused(formats, tmp_path, change, words):
    if change is not None:
        change = {
            tensor: name
            for tensor, name in (formats | change).items()
            if name is not None
        }
    with refused(words):
        export_mixed(tmp_path / "b", formats=change)
    assert not (tmp_path / "b").exists()


def test_formats_without_mixed_are_refused(formats, tmp_path):
    with refused("formats"):
        export(SOURCE, tmp_path / "b", compress="int8-channel", formats=formats)


def test_formats_beside_a_search_are_refused(formats, tmp_path):
    with refused("formats and a search.*leave one out"):
        export_mixed(tmp_path / "b", formats=formats, search=SEARCH)


def test_mixed_without_a_text_is_refused(formats, tmp_path):
    with refused("mixed.*no text"):
        export_mixed(tmp_path / "b", formats=formats, calibration=None)


def test_mixed_stack_of_experts_is_refused(tmp_path):
    """Hugging Face's model has them in one tensor, which no search changes."""
    ids = encode_text(DATA / "tiny-zaya", task_text())
    text = draw_windows(ids[:256], "tasks", window=64)
    settings = SearchSettings(
        draw_windows(ids[300:500], "more", window=64), Limit(kl=0.005)
    )
    with refused("--compress mixed.*no linear layer"):
        export(
            DATA / "tiny-zaya",
            tmp_path / "b",
            compress="mixed",
            search=settings,
            calibration=text,
        )
    assert not (tmp_path / "b").exists()
