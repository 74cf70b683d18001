"""Bundles of another configuration or another module under the checkpoint's name: the
variant that they compute is named first; where no variant fits, none is named."""

import itertools
import shutil
from functools import partial

import pytest
import tiny
import torch
from in_process import cli

from workbench.bundle.names import EMBEDDING
from workbench.explain import variants
from workbench.exporter import export
from workbench.models import layers, llama
from workbench.models.checkpoint import Checkpoint

pytestmark = pytest.mark.slow("an export, and every variant of its configuration")
DIMS = {"llama": {"num_hidden_layers": 3}}


@pytest.fixture
def checkpoint_of(exports):
    """Family, and changes of its configuration that leave the weights as they are →
    checkpoint."""
    return lambda family, **changed: exports.checkpoint(
        family, **DIMS.get(family, {}) | changed
    )


def relabelled(source, exported_from, folder, **options):
    """A bundle of `exported_from` whose manifest names the checkpoint `source`."""
    options = {"max_seq_len": 32, "compress": "fp16"} | options
    bundle = export(exported_from, folder / "exported", **options)
    label = "checkpoint/sha256", Checkpoint(source).sha256
    return tiny.edited(bundle, folder / "relabelled", label)


def best_variant(bundle, source, clearly: bool = False) -> str | None:
    """The variant that explains a bundle; `clearly`: the error of the next one must be
    ten times as large."""
    frame, fits = variants.explain_bundle(bundle, Checkpoint(source))
    print(frame.head(4).to_string(), variants.conclusion(fits))
    errors = frame["relative_rms"]
    assert errors.is_monotonic_increasing
    assert not clearly or errors[1] > 10 * errors[0]
    return fits


BASE = {"rope_theta": 1e4, "rope_type": "default"}


def rope(**parameters):
    return {"rope_parameters": BASE | parameters}


LOCAL, GLOBAL = "sliding_attention", "full_attention"
YARN = tiny.DIMS["ministral3"]["rope_parameters"]
CONFIGURATIONS = {
    "rope theta 500000": ("llama", rope(rope_theta=5e5)),
    "rope theta 123456": ("qwen3", rope(rope_theta=123456.0)),
    "rope theta 500000 in full_attention": (
        "gemma3_text",
        {"rope_parameters": {LOCAL: BASE, GLOBAL: BASE | {"rope_theta": 5e5}}},
    ),
    "rope scaling linear 2": ("llama", rope(rope_type="linear", factor=2.0)),
    "rope scaling linear 3": ("qwen2", rope(rope_type="linear", factor=3.0)),
    "rope scaling llama3 8": ("llama", rope(**variants.LLAMA3, factor=8.0)),
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


@pytest.mark.matrix(2, wide=2)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_another_configuration_is_named_first(checkpoint_of, tmp_path, name):
    family, changes = CONFIGURATIONS[name]
    source, changed = checkpoint_of(family), checkpoint_of(family, **changes)
    assert best_variant(relabelled(source, changed, tmp_path), source, True) == name


def test_what_fits_the_first_layers_alone_is_not_best_variant(
    checkpoint_of, tmp_path, monkeypatch
):
    source = checkpoint_of("smollm3")
    flags = {"some": [1, 1, 0], "as many": [1, 1, 0], "all": [1, 1, 1]}
    tried = {}
    for name, layers_with_rope in flags.items():
        tried[name] = variants.Variant(config={"no_rope_layers": layers_with_rope})
    monkeypatch.setattr(variants, "list_variants", lambda trial: tried)
    changed = checkpoint_of("smollm3", no_rope_layers=flags["all"])
    assert best_variant(relabelled(source, changed, tmp_path), source) == "all"


GEOMETRY, ATTENTION = layers.AttentionGeometry, layers.Attention
GATED, FORWARD = layers.GatedMLP, ATTENTION.forward
ROTATE, ATTEND = GEOMETRY.rotate, GEOMETRY.attend


def interleaved(shape, x, io):
    order = torch.arange(shape.rotary).reshape(-1, 2).T.reshape(-1)
    return ROTATE(shape, x[..., order], io)[..., torch.argsort(order)]


def tiled(shape, q, *given):
    order = torch.arange(shape.H).reshape(-1, shape.H_kv).T.reshape(-1)
    return ATTEND(shape, q[:, order], *given)[:, torch.argsort(order)]


def norms_at(place):
    def forward(module, x, cache, io):
        module.norm_at = place
        return FORWARD(module, x, cache, io)

    return forward


def norm_left_out(module, x, cache, io):
    """The norms' gains stay in the program, as every stored tensor must."""
    for norm in (module.q_norm, module.k_norm):
        norm.forward = partial(unnormed, norm)
    return FORWARD(module, x, cache, io)


def unnormed(norm, x, *given):
    return x + 0 * type(norm).forward(norm, x, *given)


def half_of_attention(module, x, cache, io):
    return FORWARD(module, x, cache, io) * 0.5


def without_bias(plan, index, options, **_):
    return llama.DecoderLayer(plan, index, options)


def gelu(inner):
    def init(module, C, width, act, *bias):
        inner(module, C, width, torch.nn.functional.gelu, *bias)

    return init


MODULES = {
    "rope pairs interleaved": ("llama", GEOMETRY, "rotate", interleaved),
    "key/value heads tiled over the query heads": ("llama", GEOMETRY, "attend", tiled),
    "q/k norm after rope": ("qwen3", ATTENTION, "forward", norms_at("rotated")),
    "q/k norm left out": ("qwen3", ATTENTION, "forward", norm_left_out),
    "q/k norm before rope": (
        "hunyuan_v1_dense",
        *(ATTENTION, "forward", norms_at("heads")),
    ),
    "biases left out": ("qwen2", llama, "layer", without_bias),
    "activation exact GELU": (
        "gemma3_text",
        *(GATED, "__init__", gelu(GATED.__init__)),
    ),
}


@pytest.mark.matrix(2, wide=2)
@pytest.mark.parametrize(
    ("name", "compress"), list(zip(MODULES, itertools.cycle(["fp16", "int8-tensor"])))
)
def test_another_module_is_named_first(
    checkpoint_of, tmp_path, monkeypatch, name, compress
):
    family, *change = MODULES[name]
    source = checkpoint_of(family)
    monkeypatch.setattr(*change)
    bundle = relabelled(source, source, tmp_path, compress=compress)
    assert best_variant(bundle, source, True) == name


@pytest.mark.matrix(1, wide=2)
@pytest.mark.parametrize("compress", ["fp16", "int8-tensor", "lut6-g16"])
def test_exchanged_layers_are_named_first(checkpoint_of, tmp_path, compress):
    source = checkpoint_of("llama")
    changed = shutil.copytree(source, tmp_path / "changed")
    pair = ".layers.1.", ".layers.2."
    with tiny.edited_weights(changed) as tensors:
        for name in [name for name in tensors if pair[0] in name]:
            other = name.replace(*pair)
            tensors[name], tensors[other] = tensors[other], tensors[name]
    bundle = relabelled(source, changed, tmp_path, compress=compress)
    variant = best_variant(bundle, source)
    assert variant == "layer order: 1 has 2's weights, 2 has 1's weights"


def cut(table):
    last = len(table) // 4
    return [*table[:-last], *[0.0] * last]


def test_a_table_of_frequencies_of_no_model_is_named(exports, checkpoint_of, tmp_path):
    source = checkpoint_of("llama")
    bundle = tiny.edited(
        exports.bundle(source), tmp_path / "bundle", ("rope/0/inv_freq", cut)
    )
    assert best_variant(bundle, source) == "rope frequencies of the bundle's manifest"


def test_a_fault_of_another_kind_has_no_variant(checkpoint_of, tmp_path, monkeypatch):
    source = checkpoint_of("llama")
    monkeypatch.setattr(ATTENTION, "forward", half_of_attention)
    bundle = relabelled(source, source, tmp_path)
    assert best_variant(bundle, source) is None
    result = cli("explain", "variant", bundle.root, "--checkpoint", source)
    assert result.exit_code == 0
    assert "No variant explains" in result.stdout


def test_two_faults_at_once_have_no_variant(checkpoint_of, tmp_path):
    source = checkpoint_of("llama")
    changed = checkpoint_of("llama", rms_norm_eps=1e-3, **rope(rope_theta=5e5))
    assert best_variant(relabelled(source, changed, tmp_path), source) is None


@pytest.mark.matrix(2, wide=2)
@pytest.mark.parametrize("family", sorted(tiny.DIMS))
def test_a_sound_bundle_of_any_family_is_as_configured(exports, checkpoint_of, family):
    source = checkpoint_of(family)
    bundle = exports.bundle(source, compress="int8-tensor")
    assert best_variant(bundle, source) == variants.CONFIGURED


def test_without_biases_tokens_are_looked_up_as_the_bundle_does(checkpoint_of, exports):
    source = checkpoint_of("qwen2")
    trial = variants.run_trial(exports.bundle(source), Checkpoint(source))
    table = object()
    trial.read.slices[EMBEDDING] = [table]
    unbiased = variants.list_variants(trial)["biases left out"]
    assert unbiased.read.embedding is table
