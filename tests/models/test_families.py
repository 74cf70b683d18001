"""Each family reads its configurations as transformers does, and refuses by name what its layers
cannot compute."""

import json
import shutil

import numpy as np
import pytest
import tiny
import transformers
from circle import wide
from refusal import refused

from workbench.check import golden
from workbench.checkpoint_checks import FAMILIES
from workbench.exporter import export
from workbench.models import family_of
from workbench.models.checkpoint import Checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
BOTH = dict.fromkeys(("full_attention", "sliding_attention"), PARTIAL)
LONG = tiny.DIMS["phi3"]["rope_parameters"]
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
FP16_MAX = 65504
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}

DYNAMIC = YARN | {"rope_type": "dynamic"}
REFUSED_CONFIGURATIONS = {  # family → (changed fields, words of the message)
    "llama": [
        ({"rope_parameters": YARN}, "yarn"),
        ({"rope_parameters": DYNAMIC}, "dynamic"),
        ({"rope_parameters": PARTIAL}, "partial"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"is_causal": False}, "is_causal"),
        ({"num_key_value_heads": 3}, "4 query heads, 3 key heads"),
    ],
    "qwen2": [
        ({"use_sliding_window": True, "max_window_layers": 0}, "layer types"),
        ({"hidden_size": 63}, "a rotary width of 21"),
    ],
    "gemma3_text": [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "gelu"}, "'gelu'"),
        ({"rope_parameters": BOTH}, "partial rotary factor"),
    ],
    "zaya": [
        ({"attention_bias": True}, "attention_bias"),
        ({"lm_head_bias": True}, "lm_head_bias"),
        ({"cca_time0": 3}, "cca_time0, cca_time1 = 3, 2"),
        ({"hidden_act": "gelu"}, "'gelu'"),
    ],
    "mistral": [({"layer_types": ["full_attention"] * 2}, "layer_types")],
    "ministral3": [
        ({"rope_parameters": YARN}, "llama_4_scaling_beta = None"),
        ({"rope_parameters": LONG | {"llama_4_scaling_beta": 0.1}}, "longrope"),
    ],
    "smollm3": [
        ({"use_sliding_window": True, "sliding_window": 8}, "sliding_attention"),
        (
            {"no_rope_layers": [1], "layer_types": ["full_attention"] * 3},
            "no_rope_layers of 1",
        ),
    ],
    "olmo3": [
        ({"layer_types": ["full_attention", *["chunked_attention"] * 2]}, "chunked"),
        ({"sliding_window": None}, "sliding_window"),
    ],
    "hunyuan_v1_dense": [
        ({"rope_parameters": DYNAMIC}, "without alpha"),
        ({"head_dim": None}, "head_dim"),
    ],
    "lfm2": [
        ({"layer_types": ["conv", *tiny.SLIDING[:2]]}, "'sliding"),
        ({"layer_types": ["conv"] * 3}, "conv alone"),
        ({"conv_L_cache": 1}, "conv_L_cache = 1"),
    ],
    "qwen3_5_text": [({"layer_types": ["conv", *["full_attention"] * 2]}, "'conv'")],
    "granitemoehybrid": [
        ({"num_local_experts": 4}, "num_local_experts = 4"),
        ({"time_step_limit": (0.0, 0.1)}, "time_step_limit"),
        ({"logits_scaling": 0}, "logits_scaling = 0"),
    ],
}


@pytest.mark.matrix(15, wide=99)
@pytest.mark.parametrize(
    "model_type, changed, message",
    [(name, *case) for name, cases in REFUSED_CONFIGURATIONS.items() for case in cases],
)
def test_what_is_not_supported_is_refused_by_name(model_type, changed, message):
    dims = tiny.DIMS[model_type] | changed
    config = transformers.AutoConfig.for_model(model_type, **dims)
    with refused(message) as refusal:
        family_of(config).plan(config)
    assert model_type in str(refusal.value)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_another_activation_is_refused_with_those_that_are_supported(model_type):
    name = "gelu_pytorch_tanh" if model_type.startswith("gemma") else "silu"
    config = transformers.AutoConfig.for_model(model_type, **tiny.DIMS[model_type])
    field = (
        "hidden_activation" if hasattr(config, "hidden_activation") else "hidden_act"
    )
    family_of(config).plan(config)
    setattr(config, field, "relu6")
    with refused(f"'relu6'; needs '{name}', the one activation") as refusal:
        family_of(config).plan(config)
    # the whole list too: each family is in it or is one of all others
    listed, _, others = str(refusal.value).partition(", 'silu' in every other")
    assert others and (f" {model_type}" in listed) == (name != "silu")


@pytest.mark.parametrize(
    ("families", "option", "most"),
    [
        (("ministral3", "phi3"), {"max_seq_len": 513}, 512),
        (("qwen3_5_text", "granitemoehybrid"), {"tokens": "1-9"}, 8),
    ],
)
def test_more_positions_or_tokens_than_a_family_has_are_refused(
    exports, tmp_path, families, option, most
):
    """From position 512 on, Ministral's queries grow and transformers computes Phi's cache anew with
    another rope table. More than 8 tokens a call would round a matrix state too coarsely in fp16."""
    ((name, value),) = option.items()
    for family in families:
        with refused(f"{name} = {value}.*{family}.* {most}"):
            export(exports.checkpoint(family), tmp_path / "b", **option)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "family, changed",
    [
        ("mistral", {"sliding_window": 0}),
        ("llama", {"num_hidden_layers": 0}),
        ("llama", {"vocab_size": 50}),
        ("granitemoehybrid", {"embedding_multiplier": None}),
    ],
)
def test_numbers_that_no_model_has_are_refused(exports, tmp_path, family, changed):
    path = shutil.copytree(exports.checkpoint(family), tmp_path / "c")
    tiny.edit_json(path / "config.json", *changed.items())
    with refused("check (that )?config.json"):
        export(path, tmp_path / "b")


def test_a_matrix_that_is_stored_transposed_is_refused(exports, tmp_path):
    path = shutil.copytree(exports.checkpoint("llama"), tmp_path / "c")
    name = "model.layers.1.mlp.up_proj.weight"
    with tiny.edited_weights(path) as weights:
        weights[name] = weights[name].T.contiguous()
    with refused(f"{name}.*64, 96.*check that config.json"):
        export(path, tmp_path / "b")


def test_a_tied_head_with_weights_of_its_own_is_not_the_embedding(exports, tmp_path):
    """As transformers, which then ties nothing."""
    path = shutil.copytree(exports.checkpoint("llama"), tmp_path / "c")
    with tiny.edited_weights(path) as weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0)
    g = exports.golden(path, 6)
    assert tiny.logits_error(exports.decoder(path), g, 4) < tiny.EXACT_LIMIT
    reference = golden.make_golden(Checkpoint(path), g.ids)
    assert tiny.relative(reference["logits"], g.logits) < tiny.EXACT_LIMIT


def test_an_unknown_family_is_refused_with_the_list_of_known_ones():
    with refused("'gpt2'.*llama"):
        family_of(transformers.AutoConfig.for_model("gpt2"))


@pytest.mark.parametrize(
    "prefix", ["model.language_model.", wide("language_model.model.")]
)
def test_the_text_part_of_a_multimodal_gemma_is_found(exports, tmp_path, prefix):
    path = tiny.random_checkpoint(tmp_path / "c", "gemma3_text", **ONE_LAYER)
    text = json.loads((path / "config.json").read_text())
    g = exports.golden(path, 6)
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (path / "config.json").write_text(json.dumps(whole))
    with tiny.edited_weights(path) as weights:
        for name in list(weights):
            weights[name.replace("model.", prefix)] = weights.pop(name)
    assert tiny.logits_error(exports.decoder(path), g, 4) < tiny.EXACT_LIMIT


BIASES = {"attention_bias": True, "mlp_bias": True}
# (family, changed fields): sizes and flags beside the random ones that `make prove` draws for every
# family
UNUSUAL_CONFIGURATIONS = [
    ("llama", BIASES | {"tie_word_embeddings": False}),
    # a width of heads that the Neural Engine dislikes
    ("llama", {"head_dim": 20}),
    ("qwen2", {"num_attention_heads": 1}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": LINEAR}),
    ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("zaya", {"num_experts": 1, "head_dim": 128}),
    ("smollm3", BIASES | {"hidden_size": 66}),
    ("olmo2", {"hidden_size": 84, "attention_bias": True}),
    # flags that other families have, which transformers ignores here
    ("hunyuan_v1_dense", BIASES),
    ("mistral", BIASES),
    ("phi3", {"num_key_value_heads": 1}),
    ("lfm2", {"conv_L_cache": 2, "hidden_size": 60}),
    ("lfm2", {"conv_L_cache": 6, "conv_bias": True, "block_ffn_dim_multiplier": 1.3}),
    ("lfm2", {"block_auto_adjust_ff_dim": False, "tie_word_embeddings": False}),
    ("qwen3_5_text", {"linear_num_key_heads": 1, "linear_conv_kernel_dim": 3}),
    ("granitemoehybrid", {"mamba_n_groups": 2, "mamba_d_conv": 3}),
    ("granitemoehybrid", {"mamba_conv_bias": False, "mamba_proj_bias": True}),
    ("granitemoehybrid", {"position_embedding_type": "rope", "attention_bias": True}),
]
HYBRIDS = "lfm2", "qwen3_5_text", "granitemoehybrid"


@pytest.mark.matrix(1, wide=6)
@pytest.mark.parametrize("family, changed", UNUSUAL_CONFIGURATIONS)
def test_one_layer_of_odd_dimensions_decodes_as_hugging_face(exports, family, changed):
    # the layers of a hybrid are of several types
    one_layer = {} if family in HYBRIDS else {"num_hidden_layers": 1}
    checkpoint = exports.checkpoint(family, **one_layer, **changed)
    decoder, g = exports.decoder(checkpoint), exports.golden(checkpoint, 14)
    limit = tiny.MATRIX_EXACT_LIMIT if family in HYBRIDS else tiny.EXACT_LIMIT
    for sizes, width in (([1], 4), ([2, 3], 0), ([4], 0)):
        assert tiny.logits_error(decoder, g, *sizes, width=width) < limit


def test_scores_beyond_fp16_before_scaling_stay_finite(exports, tmp_path):
    """Qwen 2.5 has key biases of norm 600 to 900: q kᵀ overflows fp16 unless q is scaled first."""
    path = tiny.random_checkpoint(
        tmp_path / "c", "qwen2", num_hidden_layers=1, head_dim=128
    )
    prefix = "model.layers.0.self_attn"
    q_bias, k_bias = f"{prefix}.q_proj.bias", f"{prefix}.k_proj.bias"
    with tiny.edited_weights(path) as weights:
        direction = weights[k_bias] / weights[k_bias].norm()
        # three query heads share the key head
        weights |= {k_bias: 921 * direction, q_bias: 100 * direction.repeat(3)}
    outputs, attention = [], exports.hf(path).model.layers[0].self_attn
    for projection in (attention.q_proj, attention.k_proj):
        projection.register_forward_hook(
            lambda module, inputs, output: outputs.append(output)
        )
    g = exports.golden(path, 8)
    # of the first token: [heads, 128]
    query, key = (output[0, 0].reshape(-1, 128) for output in outputs)
    assert (query @ key.T).max() > FP16_MAX
    declared = exports.decoder(path, "declared")
    assert np.isfinite(tiny.decode_in_chunks(declared, g.ids, [4])).all()
    # float32 rounds scores this large by more than others, which softmax shows
    assert tiny.logits_error(exports.decoder(path), g, 4) < 1e-4
