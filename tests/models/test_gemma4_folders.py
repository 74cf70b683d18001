"""Every form in which a folder of Gemma 4 comes gives Hugging Face's tokens and a GREEN export: as
published and as saved again, with and without the towers and the K and V of sharing layers.

The published models differ in what these tests need:
- E2B and E4B (`gemma4_text`): a second embedding for each layer, and last layers that share K and V
  of earlier ones;
- 12B (`gemma4_unified_text`): V is K in full layers, which have fewer key heads;
- 31B (`gemma4_text`): the layers of 12B in a configuration of E2B without its additions.
A published folder is a multimodal wrapper: the text model beside a vision and an audio tower.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny
import torch
import transformers
from in_process import invoke
from safetensors.torch import load_file, save_file

from workbench import Decoder, export
from workbench.exporter.allocation import Limit
from workbench.exporter.mixed import SearchSettings
from workbench.models.checkpoint import Checkpoint

IDS, NEW = [2, 17, 42, 3, 88], 12
PREFIX = "model.language_model."


class TextModel(NamedTuple):
    """A tiny text model."""

    model_type: str
    changes: dict
    """Of the tiny dimensions of this type."""
    sources: dict[int, int] = {}
    """Layer that shares K and V → the layer whose K and V it reads."""


E2B = TextModel(
    "gemma4_text",
    {"num_hidden_layers": 4, "layer_types": tiny.SLIDING[:2] * 2},
    {2: 0, 3: 1},
)
# the least that has a layer with rows that nothing reads
TWO_LAYERS = TextModel(
    "gemma4_text",
    {
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 1,
        "layer_types": ["full_attention"] * 2,
    },
    {1: 0},
)
TWELVE_B = TextModel("gemma4_unified_text", {})
# the model type of E2B with the dimensions of 12B
THIRTY_ONE_B = TextModel(
    "gemma4_text",
    tiny.DIMS["gemma4_unified_text"]
    | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
)

VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8)
VISION |= dict(num_attention_heads=2, num_key_value_heads=2, patch_size=4)
VISION |= dict(position_embedding_size=16)
AUDIO = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
AUDIO |= dict(output_proj_dims=16, subsampling_conv_channels=[4, 4])
SEVERAL_EOS, ONE_EOS = [1, 100, 50], 1
"""Ids that end a text, as in generation_config.json."""


@dataclass(frozen=True)
class Form:
    """How a checkpoint of a text model is stored.

    Attributes:
        has_towers: in a multimodal wrapper beside a vision and an audio tower, with its
            prefix.
        has_shared_rows: sharing layers have projections of K and V, which nothing reads.
        is_published: the configuration has `global_head_dim`, as published ones have; otherwise
            `per_layer_config`, which transformers writes.
        eos: in generation_config.json; None: there is no such file.
    """

    text_model: TextModel
    has_towers: bool = True
    has_shared_rows: bool = False
    is_published: bool = True
    eos: list[int] | int | None = None


FORMS = {
    "E2B_as_published": Form(E2B, has_shared_rows=True, eos=SEVERAL_EOS),
    "12B_as_published": Form(TWELVE_B, eos=SEVERAL_EOS),
}
MORE_FORMS = {
    "E2B_without_rows_of_sharing_layers": Form(E2B, eos=SEVERAL_EOS),
    "E2B_saved_again": Form(E2B, is_published=False, eos=SEVERAL_EOS),
    "E2B_text_as_published": Form(
        E2B, has_towers=False, has_shared_rows=True, eos=ONE_EOS
    ),
    "E2B_text_saved_again": Form(E2B, has_towers=False, is_published=False),
    "12B_saved_again": Form(TWELVE_B, is_published=False, eos=ONE_EOS),
    "31B_as_published": Form(THIRTY_ONE_B),
    "31B_text_saved_again": Form(THIRTY_ONE_B, has_towers=False, is_published=False),
}
CASES = [
    *FORMS.items(),
    *(pytest.param(*form, marks=pytest.mark.wide) for form in MORE_FORMS.items()),
]


def text_checkpoint(exports, model: TextModel) -> Path:
    """The text model alone, as transformers saves it."""
    return exports.checkpoint(model.model_type, **model.changes)


def published_fields(config: dict) -> dict:
    """A text model's configuration with the names of published ones in place of
    `per_layer_config`."""
    # the entry of one full layer stands for those of all
    sizes = next(iter(config["per_layer_config"].values()))
    fields = {key: value for key, value in config.items() if key != "per_layer_config"}
    fields["global_head_dim"] = sizes["head_dim"]
    if "num_key_value_heads" in sizes:
        fields["num_global_key_value_heads"] = sizes["num_key_value_heads"]
    return fields


def save_with_towers(text: Path, folder: Path) -> None:
    """Saves a text model as the text part of a multimodal one with random towers."""
    config = json.loads((text / "config.json").read_text())
    towers = {"vision_config": VISION, "audio_config": AUDIO}
    kind = "Gemma4"
    if config["model_type"] == "gemma4_unified_text":
        kind, towers = "Gemma4Unified", {"vision_config": {"patch_size": 4}}
        towers["vision_config"] |= {"mm_embed_dim": 16, "position_embedding_size": 16}
    wrapper = getattr(transformers, f"{kind}Config")(text_config=config, **towers)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(wrapper).half()
    model.save_pretrained(folder)
    with tiny.edited_weights(folder) as weights:
        for name, tensor in load_file(text / tiny.WEIGHTS).items():
            name = PREFIX + name.removeprefix("model.")
            assert weights[name].shape == tensor.shape
            weights[name] = tensor


def save_alone(text: Path, folder: Path) -> None:
    """Copies a text model."""
    folder.mkdir()
    for name in ("config.json", tiny.WEIGHTS):
        (folder / name).write_bytes((text / name).read_bytes())


def publish_config(folder: Path) -> None:
    """Gives the configuration of the text model the names of published ones."""
    config = json.loads((folder / "config.json").read_text())
    if "text_config" in config:
        config["text_config"] = published_fields(config["text_config"])
    else:
        config = published_fields(config)
    (folder / "config.json").write_text(json.dumps(config))


def add_rows_of_sharing_layers(
    folder: Path, prefix: str, sources: dict[int, int]
) -> None:
    """Stores random projections of K and V for layers that read those of others."""
    weights = load_file(folder / tiny.WEIGHTS)
    for sharing, source in sources.items():
        for name in ("k_proj", "v_proj", "k_norm"):
            weight = weights[f"{prefix}layers.{source}.self_attn.{name}.weight"]
            name = f"{prefix}layers.{sharing}.self_attn.{name}.weight"
            weights[name] = torch.randn_like(weight)
    save_file(weights, folder / tiny.WEIGHTS, metadata={"format": "pt"})


def write_eos(folder: Path, eos: list[int] | int | None) -> None:
    """Writes generation_config.json with these ids, or none."""
    file = folder / "generation_config.json"
    file.unlink(missing_ok=True)
    if eos is not None:
        file.write_text(json.dumps({"eos_token_id": eos}))


def store_form(form: Form, text: Path, folder: Path) -> None:
    """Writes a checkpoint of a text model in a form."""
    if form.has_towers:
        save_with_towers(text, folder)
    else:
        save_alone(text, folder)
    if form.is_published:
        publish_config(folder)
    if form.has_shared_rows:
        prefix = PREFIX if form.has_towers else "model."
        add_rows_of_sharing_layers(folder, prefix, form.text_model.sources)
    write_eos(folder, form.eos)


def greedy(path: Path) -> list[int]:
    with torch.inference_mode():
        model = tiny.hf(path)
        tokens = model.generate(
            torch.tensor([IDS]), max_new_tokens=NEW, do_sample=False
        )
    return tokens[0, len(IDS) :].tolist()


@pytest.mark.slow("exports a bundle of its own and runs both models")
@pytest.mark.parametrize("name, form", CASES)
def test_a_folder_gives_hugging_face_s_tokens_and_is_green(
    exports, tmp_path, name, form
):
    text = text_checkpoint(exports, form.text_model)
    path = tmp_path / "checkpoint"
    store_form(form, text, path)
    checkpoint = Checkpoint(path)
    assert checkpoint.prefix == (PREFIX if form.has_towers else "model.")
    others = [name for name in checkpoint.header if not name.startswith(PREFIX)]
    assert not form.has_towers or any("vision" in tensor for tensor in others)
    bundle = tiny.export(path, tmp_path / "bundle", max_seq_len=32, compress="fp16")
    expected = [form.eos] if isinstance(form.eos, int) else form.eos
    assert bundle.manifest.tokens.eos == (expected or [1])
    stored = {tensor for shard in bundle.manifest.shards for tensor in shard.weights}
    assert all(
        tensor.startswith(checkpoint.prefix) or tensor == checkpoint.head
        for tensor in stored
    )
    assert not any("layers.3.self_attn.k_" in tensor for tensor in stored)
    tokens = Decoder(bundle, "portable", "exact").generate(IDS, NEW)
    assert tokens == greedy(path) == greedy(text)
    command = "validate", bundle.root, "--checkpoint", path, "--prompt-ids"
    result = invoke(*command, ",".join(map(str, IDS)))
    assert (result["verdict"], result["quality"]) == ("GREEN", "WITHIN")


@pytest.mark.slow("searches the formats of two bundles")
def test_a_published_folder_is_fitted_as_its_text_model(exports, tmp_path):
    """Its towers, and the K and V of sharing layers, which nothing reads, change no byte."""
    text = text_checkpoint(exports, TWO_LAYERS)
    published = Form(TWO_LAYERS, has_shared_rows=True, eos=SEVERAL_EOS)
    store_form(published, text, tmp_path / "published")
    settings = SearchSettings(tiny.random_text(100, 2, count=256), Limit(kl=0.01))
    bundles = []
    for path in (text, tmp_path / "published"):
        bundle = export(
            path,
            tmp_path / f"bundle-{path.name}",
            compress="mixed",
            search=settings,
            calibration=tiny.random_text(100, 1, count=256),
            max_seq_len=32,
        )
        bundles.append(bundle.manifest)
    assert list(bundles[0].formats.values()) == list(bundles[1].formats.values())
    assert [shard.files for shard in bundles[0].shards] == [
        shard.files for shard in bundles[1].shards
    ]
