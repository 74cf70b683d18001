"""An export holds the checkpoint's own weights, says what it holds, and refuses what it cannot
keep."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from conversions import small
from safetensors.torch import load_file, save_file

from workbench import Bundle, InputError
from workbench import export as exporting

WEIGHTS, ROOT = "model.safetensors", Path(__file__).parents[2]


@pytest.fixture(scope="module")
def llama(exports):
    return exports.checkpoint("llama")


@pytest.fixture
def copy(llama, tmp_path):
    return shutil.copytree(llama, tmp_path / "copy")


def test_program_values_name_the_module_they_came_from(exports, llama):
    for shard in exports.bundle(llama, layers_per_shard=2).shards("layers"):
        paths = set(shard.modules.values())
        assert {
            "layers.0.self_attn.q_proj",
            "layers.1.mlp.down_proj",
            "layers.1.input_layernorm",
        } <= paths


def test_a_bf16_checkpoint_is_rounded_to_fp16_and_nothing_else(exports, tmp_path):
    path = tiny.random(tmp_path / "c", "llama", dtype="bfloat16", num_hidden_layers=1)
    model = tiny.hf(path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    g = tiny.golden(model, tiny.prompt(97, 6))
    assert (
        tiny.relative(tiny.chained(exports.decoder(path), g.ids, [2]), g.logits) < 2e-6
    )


def change(path, **tensors):
    weights = load_file(path / WEIGHTS)
    for name, edit in tensors.items():
        weights[name] = edit(weights[name])
    save_file(
        {n: t.contiguous() for n, t in weights.items() if t is not None}, path / WEIGHTS
    )


@pytest.mark.parametrize(
    "name, edit, options, found",
    [
        (
            "model.layers.1.mlp.up_proj.weight",
            lambda t: None,
            {},
            "no tensor 'model.layers.1.mlp.up_proj.weight'",
        ),
        (
            "model.embed_tokens.weight",
            lambda t: None,
            {},
            "no tensor 'model.embed_tokens.weight'",
        ),
        (
            "model.layers.0.self_attn.k_proj.weight",
            lambda t: t[:32],
            {},
            r"shape \[32, 64\]",
        ),
        (
            "model.layers.0.mlp.up_proj.weight",
            lambda t: t.float() * 1e6,
            {},
            "magnitudes up to 65504",
        ),
        (
            "model.layers.0.mlp.up_proj.weight",
            lambda t: t / 0,
            {},
            "magnitudes up to 65504",
        ),
        (
            "model.layers.0.mlp.up_proj.weight",
            lambda t: t * torch.nan,
            {},
            "a value of nan",
        ),
        (
            "model.layers.0.mlp.up_proj.weight",
            lambda t: t * 0 + 40000,
            {"compress": "int8-tensor"},
            "up to 32752",
        ),
        (
            "model.layers.1.mlp.up_proj.weight",
            lambda t: t.to(torch.int8),
            {},
            "up_proj.*dtype I8",
        ),
        (
            "model.embed_tokens.weight",
            lambda t: t.float() * 1e6,
            {},
            "beyond fp16|magnitudes up to 65504",
        ),
    ],
)
def test_unusable_weights_are_refused_by_name(
    copy, tmp_path, name, edit, options, found
):
    change(copy, **{name: edit})
    with pytest.raises(InputError, match=found):
        small(copy, tmp_path / "b", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_a_target_below_a_file_is_refused(llama, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="Not a directory.*file"):
        small(llama, tmp_path / "file" / "b")


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"eos_token_id": [5, 7]}, [5, 7]),
        ({"eos_token_id": 5}, [5]),
        ({}, []),
        (None, [3]),
    ],
)
def test_a_bundle_stops_where_generate_of_hugging_face_does(
    exports, tmp_path, own, expected
):
    import transformers

    path = shutil.copytree(
        exports.checkpoint("llama", num_hidden_layers=1, eos_token_id=3), tmp_path / "c"
    )
    (path / "generation_config.json").unlink(missing_ok=True)
    if own is not None:
        (path / "generation_config.json").write_text(json.dumps(own))
    eos = transformers.AutoModelForCausalLM.from_pretrained(
        path, local_files_only=True
    ).generation_config.eos_token_id
    made = small(path, tmp_path / "b")
    assert (
        made.manifest.tokens.eos
        == expected
        == (eos if isinstance(eos, list) else [] if eos is None else [eos])
    )


@pytest.mark.parametrize(
    "options", [{}, {"compress": "int8-tensor", "layers_per_shard": 2}]
)
def test_weights_too_small_for_a_weight_file_are_held_by_the_program(exports, options):
    checkpoint = exports.checkpoint("llama", **tiny.WIDTH_1)
    decoder = exports.decoder(checkpoint, **options)
    assert not list(decoder.bundle.root.glob("layers*/**/weight.bin"))
    g = tiny.golden(exports.hf(checkpoint), [1, 2, 3, 4])
    assert tiny.relative(tiny.chained(decoder, g.ids, [4]), g.logits) < 2e-6


@pytest.mark.parametrize(
    "options, found",
    [
        ({"max_seq_len": 2, "tokens": "1-4"}, "tokens"),
        ({"compress": "int3"}, "compress"),
        ({"batch": 0}, "batch"),
        ({"colour": "red"}, "colour"),
        ({"kv_write": "scatter"}, "kv_write"),
    ],
)
def test_options_out_of_range_are_refused_by_name(llama, tmp_path, options, found):
    with pytest.raises(InputError, match=found):
        small(llama, tmp_path / "b", **options)


def test_what_a_killed_export_has_left_is_no_bundle_and_not_used(
    llama, exports, tmp_path
):
    other = exports.bundle(exports.checkpoint("llama", num_hidden_layers=1))
    shutil.copytree(other.root, tmp_path / ".b.partial")
    with pytest.raises(InputError, match="unfinished export.*run: workbench export"):
        Bundle.open(tmp_path / "b")
    bundle = small(llama, tmp_path / "b")
    assert bundle.identity == exports.bundle(llama, max_seq_len=16).identity
    assert {path.name for path in bundle.root.iterdir()} == {
        "bundle.json",
        "embedding.safetensors",
        *(s.path for s in bundle.manifest.shards),
    }
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    with pytest.raises(InputError, match="a finished bundle"):
        small(llama, tmp_path / "b")


@pytest.mark.slow("exports in processes of their own, which are killed")
@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(4, marks=pytest.mark.wide),
        pytest.param(30, marks=pytest.mark.exhaustive),
    ],
)
def test_exports_killed_at_any_moment_leave_nothing_once_run_again(moments):
    found = subprocess.run(
        [sys.executable, "-m", "tests.export.kills", str(moments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("same bytes") == moments


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
        with pytest.raises(
            InputError, match="too large|could not write.*choose another target"
        ):
            small(llama, tmp_path / "b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "b").exists()
    assert small(llama, tmp_path / "b").manifest.shards


def test_a_checkpoint_that_shrinks_while_it_is_read_is_named(
    copy, tmp_path, monkeypatch
):
    real = exporting.Template

    def shrink(*arguments):
        template = real(*arguments)  # meanwhile the embeddings are read
        (copy / WEIGHTS).write_bytes((copy / WEIGHTS).read_bytes()[:5000])
        return template

    monkeypatch.setattr(exporting, "Template", shrink)
    with pytest.raises(InputError, match=f"{WEIGHTS}.*no whole safetensors"):
        small(copy, tmp_path / "b")


def test_a_bundle_runs_without_the_checkpoint_or_the_export_code(
    exports, llama, tmp_path
):
    bundle = shutil.copytree(exports.bundle(llama).root, tmp_path / "moved")
    script = (
        "import sys; sys.modules['workbench.export'] = sys.modules['workbench.models'] = None\n"
        f"from workbench import Decoder; print(Decoder({str(bundle)!r}, precision='exact').generate([1, 2, 3], 4, stop=[]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == str(
        exports.decoder(llama).generate([1, 2, 3], 4, stop=[])
    )
