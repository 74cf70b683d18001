"""`explain.variants` names the variant of a model that a bundle computes.

Each test exports a bundle with a changed configuration, module or weight and labels it as the
export of the unchanged checkpoint. The change must be named first; where no variant fits, none is
named."""

import itertools
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from in_process import cli

sys.path.append(str(Path(__file__).parents[1] / "check"))  # for its planted faults

from faults.copies import Copy
from faults.programs import replace_silu, scale_scores

from workbench.bundle import Bundle
from workbench.bundle.names import EMBEDDING
from workbench.check import golden
from workbench.explain import model_changes, variants
from workbench.exporter import export
from workbench.models import llama
from workbench.models.checkpoint import Checkpoint
from workbench.models.layers import Attention, CachedAttention, GatedMLP

pytestmark = pytest.mark.slow("an export, and every variant of its configuration")
# family → changes of its dimensions in `tiny.DIMS`: llama needs layers 1 and 2, which a test
# exchanges
CHANGED_DIMS = {"llama": {"num_hidden_layers": 3}}


@pytest.fixture
def checkpoint_of(exports) -> Callable[..., Path]:
    """A function that returns the tiny checkpoint of a family, with changes of its
    configuration that leave the weights as they are."""

    def checkpoint(family: str, **changes) -> Path:
        return exports.checkpoint(family, **CHANGED_DIMS.get(family, {}) | changes)

    return checkpoint


def export_labelled_as(
    source: Path, exported_from: Path, folder: Path, **options
) -> Bundle:
    """Exports the checkpoint `exported_from` to a bundle whose manifest names the checkpoint
    `source`."""
    options = {"max_seq_len": 32, "compress": "fp16"} | options
    bundle = export(exported_from, folder / "exported", **options)
    label = "checkpoint/sha256", Checkpoint(source).sha256
    return tiny.edited_copy(bundle, folder / "relabelled", label)


def fitting_variant(bundle: Bundle, source: Path, clearly: bool = False) -> str | None:
    """The name of the variant that explains a bundle, None if none does. Fails if variants are
    not listed by their error and, where `clearly`, if the second one's is not ten times as large."""
    fit = variants.find_variant(bundle, Checkpoint(source))
    # pytest shows this where the test fails
    print(fit.errors.head(4).to_string(), fit.conclusion)
    errors = fit.errors["relative_rms"]
    assert errors.is_monotonic_increasing
    if clearly:
        assert errors[1] > 10 * errors[0]
    return fit.variant


# --- another configuration ----------------------------------------------------------------

DEFAULT_ROPE = {"rope_theta": 1e4, "rope_type": "default"}


def rope(**parameters) -> dict[str, dict]:
    return {"rope_parameters": DEFAULT_ROPE | parameters}


LOCAL, GLOBAL = "sliding_attention", "full_attention"  # types of layers
YARN = tiny.DIMS["ministral3"]["rope_parameters"]
# the variant's name → a family, and the changes of its configuration that must be found
CONFIGURATIONS = {
    "rope theta 500000": ("llama", rope(rope_theta=5e5)),
    "rope theta 123456": ("qwen3", rope(rope_theta=123456.0)),
    "rope theta 500000 in full_attention": (
        "gemma3_text",
        {
            "rope_parameters": {
                LOCAL: DEFAULT_ROPE,
                GLOBAL: DEFAULT_ROPE | {"rope_theta": 5e5},
            }
        },
    ),
    "rope scaling linear 2": ("llama", rope(rope_type="linear", factor=2.0)),
    "rope scaling linear 3": ("qwen2", rope(rope_type="linear", factor=3.0)),
    "rope scaling llama3 8": ("llama", rope(**model_changes.LLAMA3, factor=8.0)),
    "eps 0.0001": ("llama", {"rms_norm_eps": 1e-4}),
    "eps 0.001": ("gemma4_text", {"rms_norm_eps": 1e-3}),
    "no window": ("gemma3_text", {"sliding_window": 32}),
    "window 2, a half": ("gemma3_text", {"sliding_window": 2}),
    "window 10, twice as much": ("gemma3_text", {"sliding_window": 10}),
    "attention scale 1/√head_dim": ("gemma3_text", {"query_pre_attn_scalar": 32}),
    "layers with and without window exchanged": (
        "gemma3_text",
        {"layer_types": [GLOBAL, LOCAL, GLOBAL]},
    ),
    "rope in every layer": ("smollm3", {"no_rope_layers": [1, 1, 1]}),
    "rope scaling yarn 2": ("ministral3", {"rope_parameters": YARN | {"factor": 2.0}}),
}


@pytest.mark.matrix(1, wide=3)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_another_configuration_is_named_first(checkpoint_of, tmp_path, name):
    family, changes = CONFIGURATIONS[name]
    source, changed = checkpoint_of(family), checkpoint_of(family, **changes)
    bundle = export_labelled_as(source, changed, tmp_path)
    assert fitting_variant(bundle, source, clearly=True) == name


def test_a_variant_that_fits_only_the_first_layers_is_not_named(
    checkpoint_of, tmp_path, monkeypatch
):
    """Variants are first compared on layers 0 and 1, and all three fit these."""
    source = checkpoint_of("smollm3")
    # the configuration's `no_rope_layers` has a 1 for each layer with rope
    flags = {
        "rope in two layers": [1, 1, 0],
        "the same again": [1, 1, 0],
        "rope in all layers": [1, 1, 1],
    }
    listed = {
        name: model_changes.Variant(config={"no_rope_layers": layers_with_rope})
        for name, layers_with_rope in flags.items()
    }
    monkeypatch.setattr(variants, "list_variants", lambda *_: listed)
    changed = checkpoint_of("smollm3", no_rope_layers=flags["rope in all layers"])
    bundle = export_labelled_as(source, changed, tmp_path)
    assert fitting_variant(bundle, source) == "rope in all layers"


# --- another module -----------------------------------------------------------------------
#
# Functions that take the place of methods in `workbench.models.layers` during an export, with
# their signatures; `original_*` are the methods themselves.

original_rotate = CachedAttention.rotate
original_attend = CachedAttention.attend
original_forward = Attention.forward
original_mlp_init = GatedMLP.__init__


def rotate_interleaved_pairs(core, x, io):
    """Rotates channels 2i and 2i + 1 together, instead of i and i + rotary / 2."""
    order = torch.arange(core.rotary).reshape(-1, 2).T.reshape(-1)
    rotated = original_rotate(core, x[..., order], io)
    return rotated[..., torch.argsort(order)]


def attend_to_tiled_heads(core, q, *arguments):
    """Query head h attends to key/value head h % H_kv, instead of h // (H / H_kv)."""
    H, H_kv = core.queries.count, core.keys.count
    order = torch.arange(H).reshape(-1, H_kv).T.reshape(-1)
    attended = original_attend(core, q[:, order], *arguments)
    return attended[:, torch.argsort(order)]


def normalize_at(place: str):
    def forward(module, x, cache, io):
        module.norm_at = place
        return original_forward(module, x, cache, io)

    return forward


def forward_without_norms(module, x, cache, io):
    for norm in (module.q_norm, module.k_norm):
        norm.forward = partial(skip_norm, norm)
    return original_forward(module, x, cache, io)


def skip_norm(norm, x, *arguments):
    """x itself; the norm's gain stays in the program, as every stored tensor must."""
    return x + 0 * type(norm).forward(norm, x, *arguments)


def halve_attention(module, x, cache, io):
    return original_forward(module, x, cache, io) * 0.5


def layer_without_biases(plan, index, options, settings):
    return llama.DecoderLayer(plan, index, options)


def init_with_exact_gelu(module, C, width, act, *bias):
    original_mlp_init(module, C, width, torch.nn.functional.gelu, *bias)


@dataclass(frozen=True)
class ModuleChange:
    """A family, and the attribute of a class or module in `workbench.models` that an export
    has `replacement` for."""

    family: str
    target: object
    attribute: str
    replacement: Callable


# the variant's name → the change that must be found
MODULES = {
    "rope pairs interleaved": ModuleChange(
        "llama", CachedAttention, "rotate", rotate_interleaved_pairs
    ),
    "key/value heads tiled over the query heads": ModuleChange(
        "llama", CachedAttention, "attend", attend_to_tiled_heads
    ),
    "q/k norm after rope": ModuleChange(
        "qwen3", Attention, "forward", normalize_at("rotated")
    ),
    "q/k norm left out": ModuleChange(
        "qwen3", Attention, "forward", forward_without_norms
    ),
    "q/k norm before rope": ModuleChange(
        "hunyuan_v1_dense", Attention, "forward", normalize_at("heads")
    ),
    "biases left out": ModuleChange("qwen2", llama, "layer", layer_without_biases),
    "activation exact GELU": ModuleChange(
        "gemma3_text", GatedMLP, "__init__", init_with_exact_gelu
    ),
}


@pytest.mark.matrix(1, wide=3)
@pytest.mark.parametrize(
    ("name", "compress"), list(zip(MODULES, itertools.cycle(["fp16", "int8-tensor"])))
)
def test_another_module_is_named_first(
    checkpoint_of, tmp_path, monkeypatch, name, compress
):
    change = MODULES[name]
    source = checkpoint_of(change.family)
    monkeypatch.setattr(change.target, change.attribute, change.replacement)
    bundle = export_labelled_as(source, source, tmp_path, compress=compress)
    assert fitting_variant(bundle, source, clearly=True) == name


# --- other weights and tables -------------------------------------------------------------


@pytest.mark.matrix(1, wide=2)
@pytest.mark.parametrize("compress", ["fp16", "int8-tensor", "lut6-g16"])
def test_exchanged_layers_are_named_first(checkpoint_of, tmp_path, compress):
    source = checkpoint_of("llama")
    changed = shutil.copytree(source, tmp_path / "changed")
    with tiny.edited_weights(changed) as tensors:
        of_layer_1 = [name for name in tensors if ".layers.1." in name]
        for name in of_layer_1:
            other = name.replace(".layers.1.", ".layers.2.")
            tensors[name], tensors[other] = tensors[other], tensors[name]
    bundle = export_labelled_as(source, changed, tmp_path, compress=compress)
    variant = fitting_variant(bundle, source)
    assert variant == "layer order: 1 has 2's weights, 2 has 1's weights"


def zero_last_quarter(table: list[float]) -> list[float]:
    count = len(table) // 4
    return [*table[:-count], *[0.0] * count]


def test_a_table_of_frequencies_of_no_model_is_named(exports, checkpoint_of, tmp_path):
    source = checkpoint_of("llama")
    change = "rope/0/inv_freq", zero_last_quarter
    bundle = tiny.edited_copy(exports.bundle(source), tmp_path / "bundle", change)
    fit = variants.find_variant(bundle, Checkpoint(source))
    assert fit.variant == "rope frequencies of the bundle's manifest"
    # the tiny model has heads of 32 channels, of which the last 4 of 16 pairs are zeroed
    assert (
        "4 of 16 frequencies are not Hugging Face's: number 12 is 0" in fit.conclusion
    )


def test_a_factor_of_a_table_is_named(exports, checkpoint_of, tmp_path):
    """A scaled table that no base and no scaling of its own explains."""
    source = checkpoint_of("llama")
    change = "rope/0/inv_freq", lambda table: [0.98 * entry for entry in table]
    bundle = tiny.edited_copy(exports.bundle(source), tmp_path / "bundle", change)
    config = Checkpoint(source).config
    words = model_changes.describe_tables(bundle.manifest, config)
    assert words == "frequencies are 0.98 times Hugging Face's"
    sound = exports.bundle(source).manifest
    assert model_changes.describe_tables(sound, config) == ""


@pytest.mark.parametrize("factor", [1.05, 0.3])
def test_an_attention_scale_of_no_name_is_fitted(
    exports, checkpoint_of, tmp_path, factor
):
    """As of a converter that misreads the scale, in every layer alike."""
    source = checkpoint_of("llama")
    planted = Copy(exports.bundle(source, compress="fp16").root, tmp_path / "planted")
    for layer in range(CHANGED_DIMS["llama"]["num_hidden_layers"]):
        scale_scores(factor)(planted, layer)
    variant = fitting_variant(Bundle.open(planted.seal()), source, clearly=True)
    assert variant and variant.endswith(" times the configured one")
    # the constant of the program is rounded to fp16
    fitted = float(variant.split()[3])
    assert fitted == pytest.approx(factor, rel=2**-10)


def test_a_relu_in_every_layer_is_named(exports, checkpoint_of, tmp_path):
    source = checkpoint_of("llama")
    planted = Copy(exports.bundle(source, compress="fp16").root, tmp_path / "planted")
    for layer in range(CHANGED_DIMS["llama"]["num_hidden_layers"]):
        replace_silu("relu")(planted, layer)
    bundle = Bundle.open(planted.seal())
    assert fitting_variant(bundle, source, clearly=True) == "activation ReLU"


# --- no variant, and the configured one ---------------------------------------------------


def test_a_fault_of_another_kind_has_no_variant(checkpoint_of, tmp_path, monkeypatch):
    source = checkpoint_of("llama")
    monkeypatch.setattr(Attention, "forward", halve_attention)
    bundle = export_labelled_as(source, source, tmp_path)
    assert fitting_variant(bundle, source) is None
    result = cli("explain", "variant", bundle.root, "--checkpoint", source)
    assert result.exit_code == 0
    assert "No variant explains" in result.stdout


def test_two_faults_at_once_have_no_variant(checkpoint_of, tmp_path):
    source = checkpoint_of("llama")
    changed = checkpoint_of("llama", rms_norm_eps=1e-3, **rope(rope_theta=5e5))
    bundle = export_labelled_as(source, changed, tmp_path)
    assert fitting_variant(bundle, source) is None


@pytest.mark.matrix(1, wide=3)
@pytest.mark.parametrize("family", sorted(tiny.DIMS))
def test_a_sound_bundle_of_any_family_is_as_configured(exports, checkpoint_of, family):
    source = checkpoint_of(family)
    bundle = exports.bundle(source, compress="int8-tensor")
    assert fitting_variant(bundle, source) == variants.CONFIGURED


def test_no_variant_is_the_model_as_configured(checkpoint_of, exports):
    def names(family: str) -> set[str]:
        source = checkpoint_of(family)
        manifest = exports.bundle(source).manifest
        listed = model_changes.list_variants(Checkpoint(source), manifest, stored=None)
        return {*listed}

    tiled = "key/value heads tiled over the query heads"
    llama = names("llama")
    configured = {"rope theta 10000", "rope scaling none", "activation SiLU"}
    assert not {*configured, "biases left out"} & llama
    assert {"rope theta 500000", "activation exact GELU", tiled} <= llama
    qwen2 = names("qwen2")  # one key head, and biases
    assert "biases left out" in qwen2 and tiled not in qwen2


def test_the_variant_without_biases_reads_the_embedding_of_the_bundle(
    checkpoint_of, exports
):
    source = checkpoint_of("qwen2")
    checkpoint, bundle = Checkpoint(source), exports.bundle(source)
    stored = golden.stored_weights(checkpoint, bundle)
    embedding = object()
    stored.slices[EMBEDDING] = [embedding]
    listed = model_changes.list_variants(checkpoint, bundle.manifest, stored)
    assert listed["biases left out"].weights.embedding is embedding
