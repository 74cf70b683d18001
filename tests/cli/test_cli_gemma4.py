"""Commands take a model with copied caches and second embeddings, in presets that are fitted to a
text, too."""

from pathlib import Path

import numpy as np
import pytest
import tiny
from circle import wide
from in_process import invoke

from workbench import Bundle, Checkpoint, Golden
from workbench.explain.weights import measure_costs
from workbench.widgets import Explorer

pytestmark = pytest.mark.usefixtures("shared_conversions")

# A sliding and a full layer, and one of each kind that shares its rows: with two layers a shard these
# are in another shard than those.
LAYERS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# like a published model → family, changes of its tiny dimensions
FORMS = {
    "E2B": ("gemma4_text", LAYERS),
    "E4B": (
        "gemma4_text",
        LAYERS | {"use_double_wide_mlp": False, "num_key_value_heads": 2},
    ),
    "dense": ("gemma4_unified_text", {}),
}
PROMPT = [2, 90, 17, 33, 5, 64, 71, 8, 40]
PROMPT_IDS = "--prompt-ids", ",".join(map(str, PROMPT))
# Two layers of E2B and E4B have q, k, v and o of attention, three matrices of the MLP and two of the
# second embeddings; two layers share k and v. The model adds the projection of those embeddings and
# the head.
MATRICES_WITH_EMBEDDINGS = 2 * (4 + 3 + 2) + 2 * (2 + 3 + 2) + 1 + 1
# Two sliding layers have q, k, v and o and three matrices of the MLP; in the full layer V is K.
MATRICES_OF_DENSE = 2 * (4 + 3) + (3 + 3) + 1
MATRICES = {
    "E2B": MATRICES_WITH_EMBEDDINGS,
    "E4B": MATRICES_WITH_EMBEDDINGS,
    "dense": MATRICES_OF_DENSE,
}
PROJECTION = "model.per_layer_model_projection.weight"


@pytest.fixture(scope="module")
def checkpoint(exports):
    return exports.checkpoint("gemma4_text", **LAYERS)


def test_a_plan_counts_both_tables_and_every_copy(exports, checkpoint):
    options = "--max-seq-len", 32, "--layers-per-shard", 2, "--compress", "lut6-g16"
    of_checkpoint = invoke("plan", checkpoint, *options)["bytes"]
    bundle = exports.bundle(checkpoint, compress="lut6-g16", layers_per_shard=2)
    of_bundle = invoke("plan", bundle.root)["bytes"]
    dims = bundle.manifest.dims
    tables = 2 * dims.V * (dims.C + dims.L * dims.P)
    assert of_checkpoint["embedding"] == tables
    assert tables < of_bundle["embedding"] < tables + 1024
    # two sliding layers with heads of 16 channels, two full ones with 32
    rows = 32 * (2 * 16 + 2 * 32)
    assert of_checkpoint["kv"] == of_bundle["kv"] == 2 * 2 * rows


@pytest.fixture(scope="module")
def id_files(tmp_path_factory):
    """Options for each fitted preset: token ids to calibrate with, and to select with."""
    folder = tmp_path_factory.mktemp("ids")
    files = {"calibrate": tiny.prompt(100, 1024, 1), "select": tiny.prompt(100, 512, 2)}
    for name, ids in files.items():
        np.save(folder / f"{name}.npy", np.int32(ids))
    calibrate, select = (folder / f"{name}.npy" for name in files)
    options = {
        preset: ["--compress", preset, "--calibrate-ids", calibrate]
        for preset in ("int8-channel", "lut6-g16", "lut4-g8", "mixed")
    }
    options["mixed"] += ["--select-ids", select, "--max-kl", 0.01]
    return options


def export_fitted(
    exports, id_files, form: str, preset: str, *options
) -> tuple[Path, Path]:
    """Exports the checkpoint of a form in a preset, once for all tests. Returns the folders of
    checkpoint and bundle."""
    family, changes = FORMS[form]
    source = exports.checkpoint(family, **changes)
    out = exports.root / f"fitted-{form}-{preset}{'-'.join(map(str, options))}"

    def make(folder):
        command = "export", source, folder, "--max-seq-len", 32
        invoke(*command, *id_files[preset], *options)

    return source, tiny.once(out, make)


@pytest.mark.slow("exports a bundle and validates it")
@pytest.mark.parametrize(
    ("form", "preset"),
    [
        # tables of both widths, a search, and both architectures; other tests have the bundles of
        # E2B, too
        ("E2B", "lut4-g8"),
        ("E2B", "mixed"),
        ("dense", "lut6-g16"),
        wide("E4B", "int8-channel"),
        wide("E2B", "int8-channel"),
        wide("E2B", "lut6-g16"),
        wide("E4B", "lut6-g16"),
        wide("E4B", "lut4-g8"),
        wide("E4B", "mixed"),
        wide("dense", "int8-channel"),
        wide("dense", "lut4-g8"),
        wide("dense", "mixed"),
    ],
)
def test_fitted_presets_are_green(exports, id_files, form, preset):
    source, bundle = export_fitted(
        exports, id_files, form, preset, "--layers-per-shard", 2
    )
    manifest = Bundle.open(bundle).manifest
    assert manifest.calibration.nearest == []
    document = invoke("validate", bundle, "--checkpoint", source, *PROMPT_IDS)
    gates = {gate["name"]: gate for gate in document["gates"]}
    assert "RED" not in {gate["verdict"] for gate in gates.values()}, gates
    fitted = MATRICES[form]
    if preset == "mixed":
        assert len(manifest.formats) == fitted
        fitted = sum(name != "fp16" for name in manifest.formats.values())
    reason = gates["weights"]["reason"]
    assert f"; {fitted} matrices were fitted to a calibration text" in reason


@pytest.mark.slow("exports a bundle")
@pytest.mark.parametrize("layers", [wide(1), 2, 4])
def test_layers_that_share_rows_are_explained_in_every_tiling(
    exports, checkpoint, layers
):
    """The rows of a source are those of its stored weights, whichever shard it is in."""
    options = {"compress": "lut6-g16", "layers_per_shard": layers}
    bundle = exports.bundle(checkpoint, **options)
    command = "explain", "parts", bundle.root, "--checkpoint", checkpoint
    result = invoke(*command, *PROMPT_IDS)
    assert result["verdict"] == "GREEN", result["gates"]
    assert all(part["reauthoring"] < 1e-5 for part in result["parts"])


@pytest.mark.slow("exports a bundle and explains it")
@pytest.mark.parametrize("preset", [wide("lut4-g8"), "mixed"])
def test_commands_take_a_fitted_bundle(exports, id_files, tmp_path, preset):
    source, bundle = export_fitted(
        exports, id_files, "E2B", preset, "--layers-per-shard", 2
    )
    explained = invoke("explain", bundle, "--checkpoint", source, *PROMPT_IDS)
    # weights that were fitted to a text are left to `validate`
    assert explained["verdict"] == "not_run" and explained["fits"], explained
    plan = invoke("plan", bundle, "--memory", "16G", "--chip", "M4")
    assert plan["bytes"]["weights"] > 0
    golden = Golden.of(Checkpoint(source), PROMPT)
    costs, _ = measure_costs(Bundle.open(bundle), Checkpoint(source), golden)
    assert {2, 3} <= {*costs["layer"]}
    golden.save(tmp_path / "g")
    grid = {"bundle": [str(bundle)], "golden": str(tmp_path / "g")}
    explorer = Explorer(grid | {"run": {"n_gen": 2}}, None, root=tmp_path)
    assert explorer.missing()[0].label.startswith(f"{preset}, max_seq_len 32")


@pytest.mark.slow("exports a mixed bundle")
def test_a_search_chooses_a_format_for_the_projection_of_all_layers(exports, id_files):
    _, bundle = export_fitted(
        exports, id_files, "E2B", "mixed", "--layers-per-shard", 2
    )
    formats = Bundle.open(bundle).manifest.formats
    assert PROJECTION in formats and len({*formats.values()}) > 1
