"""An export holds the checkpoint's weights, its manifest describes them, and weights that fp16 or
the preset cannot hold are refused."""

import json
import resource
import shutil
import subprocess
import sys
from itertools import product

import pytest
import tiny
import torch
from circle import wide
from conversions import export_small
from in_process import cli
from refusal import refused
from tiny import ROOT, WEIGHTS

from workbench import Bundle, exporter
from workbench.exporter import writing
from workbench.models.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def llama(exports):
    return exports.checkpoint("llama")


def test_a_bf16_checkpoint_is_rounded_to_fp16_and_nothing_else(exports, tmp_path):
    path = tiny.random_checkpoint(
        tmp_path / "c", "llama", dtype="bfloat16", num_hidden_layers=1
    )
    model = tiny.hf(path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    g = tiny.golden(model, tiny.prompt(97, 6))
    assert tiny.logits_error(exports.decoder(path), g, 2) < 2e-6


UP, EMBEDDING = "layers.{}.mlp.up_proj", "embed_tokens"
# name of a weight, change of it (None: it is left out), words of the message
UNUSABLE = [
    (UP.format(1), None, "no tensor 'model.layers.1.mlp.up_proj.weight'"),
    (EMBEDDING, None, "no tensor 'model.embed_tokens.weight'"),
    ("layers.0.self_attn.k_proj", lambda t: t[:32], r"shape \[32, 64\]"),
    (UP.format(0), lambda t: t.float() * 1e6, "magnitudes up to 65504"),
    (UP.format(0), lambda t: t / 0, "magnitudes up to 65504"),
    (UP.format(0), lambda t: t * torch.nan, "a value of nan"),
    (UP.format(0), lambda t: t * 0 + 40000, "up to 32752"),
    (UP.format(1), lambda t: t.to(torch.int8), "dtype I8 of tensor .*up_proj"),
    (EMBEDDING, lambda t: t.float() * 1e6, "beyond fp16|magnitudes up to 65504"),
]


@pytest.mark.parametrize("name, edit, message", UNUSABLE)
def test_unusable_weights_are_refused_by_name(
    checkpoint_copy, tmp_path, name, edit, message
):
    with tiny.edited_weights(checkpoint_copy) as weights:
        weight = weights.pop(f"model.{name}.weight")
        if edit:
            weights[f"model.{name}.weight"] = edit(weight)
    # 32,752 is the largest weight that a scale of int8 holds
    compress = "int8-tensor" if "32752" in message else "fp16"
    with refused(message):
        export_small(checkpoint_copy, tmp_path / "b", compress=compress)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_an_option_is_refused_before_a_weight_is_read(exports, tmp_path, monkeypatch):
    """The plan of Gemma depends on its weights."""
    checkpoint = exports.checkpoint("gemma3_text")
    monkeypatch.setattr(
        Checkpoint, "tensor", lambda *_: pytest.fail("a weight is read")
    )
    with refused("sliding = window.*leave out --sliding"):
        export_small(checkpoint, tmp_path / "b", sliding="window")
    assert not (tmp_path / "b").exists()


def test_a_target_below_a_file_is_refused(llama, tmp_path):
    (tmp_path / "file").write_text("")
    with refused("Not a directory.*file"):
        export_small(llama, tmp_path / "file" / "b")


def test_a_bundle_stops_where_generate_of_hugging_face_does(exports, tmp_path):
    import transformers

    whole = exports.checkpoint("llama", num_hidden_layers=1, eos_token_id=3)
    path = shutil.copytree(whole, tmp_path / "c")
    (path / "generation_config.json").unlink(missing_ok=True)
    assert Checkpoint(path).tokens.eos == [3]
    for eos, expected in (({}, []), (5, [5]), ([5, 7], [5, 7])):
        fields = {"eos_token_id": eos} if eos else {}
        (path / "generation_config.json").write_text(json.dumps(fields))
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        assert model.generation_config.eos_token_id == (eos or None)
        assert Checkpoint(path).tokens.eos == expected
    assert export_small(path, tmp_path / "b").manifest.tokens.eos == expected


WIDTH_1 = {"hidden_size": 1, "intermediate_size": 1, "head_dim": 2}
WIDTH_1 |= {"num_attention_heads": 1, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    "options", [{}, {"compress": "int8-tensor", "layers_per_shard": 2}]
)
def test_weights_too_small_for_a_weight_file_are_held_by_the_program(exports, options):
    checkpoint = exports.checkpoint("llama", **WIDTH_1)
    decoder = exports.decoder(checkpoint, **options)
    assert not list(decoder.bundle.root.glob("layers*/**/weight.bin"))
    g = tiny.golden(exports.hf(checkpoint), [1, 2, 3, 4])
    assert tiny.logits_error(decoder, g, 4) < 2e-6


def test_the_shard_of_an_expert_is_of_one_layer(exports):
    path = exports.checkpoint("zaya", num_hidden_layers=2, num_experts=2)
    experts = exports.bundle(path, moe="routed", tokens="1-2").shards("expert")
    one = (0, 1), (1, 2)
    assert {(shard.layers, shard.rows) for shard in experts} == {*product(one, one)}


@pytest.mark.slow("exports several bundles")
def test_what_a_killed_export_has_left_is_no_bundle_and_not_used(
    llama, exports, tmp_path
):
    other = exports.bundle(exports.checkpoint("llama", num_hidden_layers=1))
    shutil.copytree(other.root, tmp_path / ".b.partial")
    with refused("unfinished export.*run: workbench export"):
        Bundle.open(tmp_path / "b")
    bundle = export_small(llama, tmp_path / "b")
    assert bundle.identity == exports.bundle(llama, max_seq_len=16).identity
    packages = {shard.path for shard in bundle.manifest.shards}
    names = {path.name for path in bundle.root.iterdir()} - packages
    assert names == {"bundle.json", "embedding.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    with refused("a finished bundle"):
        export_small(llama, tmp_path / "b")


@pytest.mark.slow("exports in processes of their own, which are killed")
@pytest.mark.parametrize(
    "kills", [wide(4), pytest.param(30, marks=pytest.mark.exhaustive)]
)
def test_exports_killed_at_any_moment_leave_nothing_once_run_again(
    exports, tmp_path, kills
):
    source = exports.checkpoint("llama", num_hidden_layers=12, vocab_size=40_000)
    command = [sys.executable, "-m", "tests.exporter.kills"]
    command += [source, tmp_path, str(kills)]
    subprocess.run(command, check=True, cwd=ROOT)


# coremltools drops what it half wrote
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("limit", [50, 3_000])
def test_a_full_disk_ends_in_one_message_and_the_next_run_completes(
    llama, tmp_path, limit
):
    """Files may not grow beyond `limit` bytes, which the system reports as it does a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with refused("choose another target"):
            export_small(llama, tmp_path / "b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "b").exists()
    assert export_small(llama, tmp_path / "b").manifest.shards


def test_a_checkpoint_that_shrinks_while_it_is_read_is_named(
    checkpoint_copy, tmp_path, monkeypatch
):
    real = writing.convert_shard

    def shrink(*arguments):
        template = real(*arguments)  # meanwhile the embeddings are read
        (checkpoint_copy / WEIGHTS).write_bytes(
            (checkpoint_copy / WEIGHTS).read_bytes()[:5000]
        )
        return template

    monkeypatch.setattr(writing, "convert_shard", shrink)
    with refused(f"{WEIGHTS}.*no whole safetensors"):
        export_small(checkpoint_copy, tmp_path / "b")


@pytest.mark.slow("starts a process that imports torch")
def test_a_bundle_runs_without_the_checkpoint_or_the_export_code(
    exports, llama, tmp_path
):
    bundle = shutil.copytree(exports.bundle(llama).root, tmp_path / "moved")
    code = "import sys\nfor room in ('exporter', 'models'):\n"
    code += "    sys.modules[f'workbench.{room}'] = None\n"
    code += "from workbench import Decoder\n"
    code += f"decoder = Decoder({str(bundle)!r}, precision='exact')\n"
    code += "print(decoder.generate([1, 2, 3], 4, stop=[]))"
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert eval(output) == exports.decoder(llama).generate([1, 2, 3], 4, stop=[])


def test_a_cache_longer_than_the_model_s_positions_is_refused(
    checkpoint_copy, tmp_path
):
    tiny.edit_json(checkpoint_copy / "config.json", ("max_position_embeddings", 64))
    with refused("max_seq_len = 65.*at most 64, the max_position_embeddings"):
        exporter.export(checkpoint_copy, tmp_path / "b", max_seq_len=65)
    assert not (tmp_path / "b").exists()


def test_an_export_without_a_tokenizer_says_so(llama, tmp_path):
    ended = cli("export", llama, tmp_path / "b", "--max-seq-len", "16")
    assert "has no tokenizer" in ended.stdout and "--prompt-ids" in ended.stdout
