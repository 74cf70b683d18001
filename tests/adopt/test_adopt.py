"""Packages of five styles are proposed, run and proved; a planted fault is RED with its cause
named."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from workbench.studies import exporter_styles as styles

SOUND = ["recipe", "chunks", "rotating", "monolith", "host", "shards"]
ARGMAX_INSIDE = {"monolith", "host"}
NOT_ASKED = {
    "monolith": {"logits", "causality", "same_for_every_T"},
    "host": {"logits", "top_values", "causality", "same_for_every_T"},
}
CAUSES = {
    "theta": "rope scaling replaced by theta × factor, theta 40000",
    "norm_order": "q/k norm after rope",
    "one_mask": "no window",
}


def command(*arguments, code=0) -> dict | str:
    """What a command prints, as JSON where it was asked for."""
    from workbench.cli.app import app

    result = CliRunner().invoke(
        app, [str(a) for a in arguments], catch_exceptions=code == 2
    )
    if code == 2:
        return str(result.exception)
    assert result.exit_code == code, result.output
    return json.loads(result.output) if "--json" in arguments else result.output


def gates_of(result: dict) -> dict[str, dict]:
    return {gate["name"]: gate for gate in result["gates"]}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("style", SOUND)
def test_a_sound_style_is_green_as_proposed(adoptions, style):
    result = command("validate", adoptions.folder(style), "--json")
    found = gates_of(result)
    skipped = {name for name, gate in found.items() if gate["verdict"] == "not_run"}
    assert result["verdict"] == "GREEN"
    assert skipped == {"updates"} | NOT_ASKED.get(style, set())
    # int4 or not: on the weights that are stored
    assert found["keys_and_values"]["value"] < 1e-5
    assert all(found[name]["reason"] for name in skipped)
    assert (result["logits"] is None) == (style in ARGMAX_INSIDE)


@pytest.mark.parametrize("style", CAUSES)
def test_a_fault_of_the_model_is_red_and_its_cause_named(adoptions, style):
    folder = adoptions.folder(style)
    found = gates_of(command("validate", folder, "--json", code=1))
    assert {n for n, g in found.items() if g["verdict"] == "RED"} <= {
        "keys_and_values",
        "logits",
        "top_tokens",
    }
    assert found["keys_and_values"]["verdict"] == "RED"
    cause = command(
        "explain", folder, "--checkpoint", adoptions.checkpoint(style), "--json"
    )
    assert cause["fits"] == CAUSES[style]
    errors = [row["relative_rms"] for row in cause["variants"]]
    assert errors[1] > 10 * errors[0]


def test_a_prefill_that_sees_the_future_is_named(adoptions):
    folder = adoptions.folder("future")
    found = gates_of(command("validate", folder, "--json", code=1))
    assert "prefill_rotate at T = 4" in found["causality"]["reason"]
    assert {n for n, g in found.items() if g["verdict"] == "RED"} >= {
        "causality",
        "same_for_every_T",
        "keys_and_values",
    }
    assert "first bad: layer 1, position 8" in found["keys_and_values"]["reason"]
    cause = command(
        "explain", folder, "--checkpoint", adoptions.checkpoint("future"), "--json"
    )
    assert cause["fits"] == "as configured"  # token by token they are
    assert "prefill_rotate" in cause["faults"][0]


def relabelled(source, target, names, config):
    """A checkpoint with another configuration and other names of its tensors."""
    from safetensors.torch import load_file, save_file

    weights = load_file(source / "model.safetensors")
    for old, new in names.items():
        weights = {name.replace(old, new): value for name, value in weights.items()}
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def config_of(source):
    return json.loads((source / "config.json").read_text())


def test_the_text_of_a_vision_model_is_compared_with_its_own_layers(
    adoptions, tmp_path
):
    source = adoptions.checkpoint("host")
    text = config_of(source) | {"model_type": "qwen3_vl_text"}
    text["rope_parameters"] |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    whole = {"model_type": "qwen3_vl", "text_config": text}
    names = {"model.": "model.language_model."}
    target = relabelled(source, tmp_path / "vision", names, whole)
    found = command(
        "validate", adoptions.folder("host"), "--checkpoint", target, "--json"
    )
    assert gates_of(found)["keys_and_values"]["value"] < 1e-5


def test_a_norm_before_rope_is_named_where_the_model_turns_first(adoptions, tmp_path):
    source = adoptions.checkpoint("shards")
    names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
    config = config_of(source) | {"model_type": "hunyuan_v1_dense"}
    target = relabelled(source, tmp_path / "hunyuan", names, config)
    folder = adoptions.folder("shards")
    found = gates_of(
        command("validate", folder, "--checkpoint", target, "--json", code=1)
    )
    assert found["keys_and_values"]["verdict"] == "RED"
    cause = command("explain", folder, "--checkpoint", target, "--json")
    assert cause["fits"] == "q/k norm before rope"


def test_a_sound_style_is_as_configured(adoptions):
    folder = adoptions.folder("chunks")
    cause = command(
        "explain", folder, "--checkpoint", adoptions.checkpoint("chunks"), "--json"
    )
    assert (cause["fits"], cause["faults"]) == ("as configured", [])


@pytest.mark.shim
@pytest.mark.parametrize("style", ["chunks", "recipe", "rotating", "host"])
@pytest.mark.parametrize("runtime", ["portable", "stand-in"])
def test_decoding_gives_the_tokens_of_hugging_face(adoptions, exports, style, runtime):

    from workbench.adopt import passes
    from workbench.adopt.weights import stored_weights

    prompt, count = [5, 90, 17, 33, 2, 64, 71, 8, 40], 6
    arguments = (
        "--prompt-ids",
        ",".join(map(str, prompt)),
        "--max-new",
        count,
        "--runtime",
        runtime,
    )
    tokens = command("decode", adoptions.folder(style), *arguments, "--json")["tokens"]
    exact = adoptions.adapter(style)
    reader, missing = stored_weights(exact, exact.checkpoint)
    assert not missing
    whole = [*prompt, *tokens]
    logits = passes.reference(exact.checkpoint, whole, reader).logits
    expected = logits[len(prompt) - 1 : -1].argmax(-1)
    assert tokens == expected.tolist()


def test_logits_are_written_row_by_row(adoptions, tmp_path):
    file, folder = tmp_path / "logits.npy", adoptions.folder("chunks")
    result = command(
        "decode",
        folder,
        "--prompt-ids",
        "1,2,3",
        "--max-new",
        4,
        "--logits",
        file,
        "--json",
    )
    logits = np.load(file)
    assert logits.shape == (5, 97) and logits.dtype == np.float32
    assert logits[:4].argmax(-1).tolist() == result["tokens"]
    arguments = "--prompt-ids", "1", "--max-new", 2, "--logits", file
    problem = command("decode", adoptions.folder("host"), *arguments, code=2)
    assert "argmax inside" in problem


@pytest.mark.parametrize("style", ["chunks", "rotating"])
def test_reuse_continues_restored_caches(adoptions, style):
    result = command("reuse", adoptions.folder(style), "--json")
    assert result["verdict"] == "GREEN"
    assert {(c["cache"], c["batch"]) for c in result["cells"]} == {
        ("warm", 1),
        ("hot", 1),
    }


def changed(adoptions, style, tmp_path, change):
    """A folder like the proposed one, but for what `change` does to it."""
    source = adoptions.folder(style)
    raw = yaml.safe_load((source / "foreign.yaml").read_text())
    for part in raw["parts"]:
        part["package"] = str((source / part["package"]).resolve())
    raw["checkpoint"] = str(adoptions.checkpoint(style))
    change(raw)
    (tmp_path / "foreign.yaml").write_text(yaml.safe_dump(raw))
    return tmp_path


MISTAKES = {
    "an unknown key": (lambda raw: raw.update(extra=1), "extra"),
    "an axis too many": (lambda raw: axes(raw, "causal_mask").append(1), "causal_mask"),
    "another rank of a state": (
        lambda raw: raw["states"][0].update(axes=["H", "S", "D"]),
        "kv_cache",
    ),
    "a T that a package does not take": (
        lambda raw: functions(raw)[1].update(t_min=7),
        "T = 7",
    ),
    "no such function": (lambda raw: functions(raw)[1].update(name="prefil"), "prefil"),
    "an input left out": (
        lambda raw: raw["parts"][1]["inputs"].pop("current_pos"),
        "current_pos",
    ),
    "an input too many": (
        lambda raw: raw["parts"][1]["inputs"].update(more={"kind": "start"}),
        "'more'",
    ),
    "a state of another name": (
        lambda raw: raw["states"][0].update(name="cache"),
        "kv_cache_0",
    ),
    "a layer twice": (lambda raw: raw["states"][0].update(layers=[0, 0]), "layer 0"),
    "no such package": (
        lambda raw: raw["parts"][0].update(package="no.mlpackage"),
        "no.mlpackage",
    ),
    "an unknown kind": (
        lambda raw: raw["parts"][1]["inputs"]["current_pos"].update(kind="now"),
        "kind",
    ),
    "t_min above t_max": (lambda raw: functions(raw)[1].update(t_min=9), "t_min = 9"),
}


def axes(raw, name):
    return raw["parts"][1]["inputs"][name]["axes"]


def functions(raw):
    return raw["parts"][1]["functions"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_file_that_does_not_fit_is_refused_by_name(adoptions, tmp_path, mistake):
    change, name = MISTAKES[mistake]
    folder = changed(adoptions, "chunks", tmp_path, change)
    assert name in command("check", folder, code=2)


def wrong(raw, **values):
    raw["states"][0].update(values)


WRONG = {
    "keys_and_values": ("chunks", lambda raw: wrong(raw, order="pairs")),
    "write_address": ("rotating", lambda raw: wrong(raw, rows="ring")),
    "stale_rows": ("shards", lambda raw: blocked(raw, -1.0)),
}


def blocked(raw, value):
    for part in raw["parts"][:2]:
        part["inputs"]["attn_mask"]["blocked"] = value


@pytest.mark.parametrize("gate", WRONG)
def test_each_gate_sees_what_it_is_for(adoptions, tmp_path, gate):
    style, change = WRONG[gate]
    folder = changed(adoptions, style, tmp_path, change)
    found = gates_of(command("validate", folder, "--json", code=1))
    assert found[gate]["verdict"] == "RED"


def test_a_cache_that_is_not_restored_whole_is_red(adoptions, monkeypatch):
    from workbench.adopt import gates
    from workbench.adopt.adapter import Adapter

    adapter, write = adoptions.adapter("shards"), Adapter.write
    monkeypatch.setattr(
        Adapter, "write", lambda a, s, v: write(a, s, dict(list(v.items())[1:]))
    )
    assert {cell.verdict for cell in gates.reuse_cells(adapter)} == {"RED"}


def test_matrices_that_are_not_found_are_said(adoptions, monkeypatch):
    from workbench.adopt import weights

    monkeypatch.setattr(weights, "ALIKE", 1.1)
    found = gates_of(command("validate", adoptions.folder("shards"), "--json"))
    assert "were not recognised" in found["keys_and_values"]["reason"]
    assert found["keys_and_values"]["threshold"] > 1e-3


def test_check_needs_no_golden(adoptions):
    found = gates_of(command("check", adoptions.folder("recipe"), "--json"))
    assert found["causality"]["verdict"] == found["stale_rows"]["verdict"] == "GREEN"


def test_a_golden_gives_the_prompt_and_without_a_checkpoint_all_there_is(
    adoptions, tmp_path
):
    golden, style = tmp_path / "golden", "recipe"
    source, other = adoptions.checkpoint(style), adoptions.checkpoint("shards")
    command("golden", source, "--out", golden, "--prompt-ids", "1,2,3,4,5")
    result = command("validate", adoptions.folder(style), "--golden", golden, "--json")
    assert result["worst"]["position"] < 5
    assert gates_of(result)["golden_is_of_this_checkpoint"]["verdict"] == "GREEN"
    bare = changed(adoptions, style, tmp_path, lambda raw: raw.pop("checkpoint"))
    result = command("validate", bare, "--golden", golden, "--json")
    assert "compression counts too" in gates_of(result)["keys_and_values"]["reason"]
    assert "--checkpoint" in command("validate", bare, code=2)
    command("golden", other, "--out", golden, "--prompt-ids", "1,2,3,4,5")
    found = gates_of(
        command(
            "validate", adoptions.folder(style), "--golden", golden, "--json", code=1
        )
    )
    assert found["golden_is_of_this_checkpoint"]["verdict"] == "RED"


def test_the_schema_documents_every_field():
    schema = json.loads(command("adopt", "--schema"))
    for name, model in (schema["$defs"] | {"Foreign": schema}).items():
        assert model["description"], name
        for field, about in model["properties"].items():
            assert about.get("description") or "$ref" in about, f"{name}.{field}"


def test_adopt_says_what_it_assumed_and_replaces_nothing(adoptions, tmp_path):
    arguments = adoptions.packages("host"), "--checkpoint", adoptions.checkpoint("host")
    result = command("adopt", *arguments, "--out", tmp_path, "--json")
    assert any("pairs" in note for note in result["assumed"])
    assert any("embed_weight.bin" in note for note in result["assumed"])
    assert "a folder without one" in command(
        "adopt", *arguments, "--out", tmp_path, code=2
    )
    assert "not all of PACKAGES" in command("adopt", *arguments[:1], code=2)


def test_a_command_that_takes_bundles_alone_says_what_lies_there(adoptions):
    problem = command("error", adoptions.folder("host"), "--checkpoint", "x", code=2)
    assert "adopted packages" in problem


@pytest.mark.parametrize("words", ["export build/x", "golden --out x"])
def test_what_takes_no_adopted_packages_says_what_does(adoptions, words):
    name, *others = words.split()
    problem = command(name, adoptions.folder("host"), *others, code=2)
    assert "adopted packages" in problem and "validate, check, decode" in problem


@pytest.mark.parametrize(
    "words",
    [
        "validate --all-t",
        "validate --tasks x",
        "validate --only portable",
        "check --memory 16G",
        "explain --record --checkpoint x",
        "trace --record",
        "residency --record",
        "decode --literal --prompt-ids 1",
        "reuse --batch-bundle x",
    ],
)
def test_an_option_for_bundles_alone_is_refused_not_ignored(adoptions, words):
    name, option, *others = words.split()
    problem = command(name, adoptions.folder("host"), option, *others, code=2)
    assert problem.startswith(f"{option}: found packages without a bundle")


@pytest.mark.parametrize("style", ["recipe", "chunks"])
def test_a_mask_of_minus_infinity_is_no_fault(adoptions, style):
    result = command("trace", adoptions.folder(style), "--json")
    assert result["verdict"] == "GREEN" and result["first_inf"] is None


def test_trace_and_residency_take_a_function_of_a_package(adoptions):
    package = adoptions.packages("chunks") / "tiny_FFN_PF_chunk_02of02.mlpackage"
    found = command(
        "trace", package, "--function", "prefill", "--position", 8, "--json"
    )
    assert found["verdict"] == "GREEN"
    placed = command("residency", package, "--function", "prefill", "--json")
    assert placed["source"] == "predicted"
    assert [shard["shard"] for shard in placed["shards"]] == [f"{package.stem} prefill"]
    every = command("residency", adoptions.folder("chunks"), "--json")["shards"]
    assert len(every) == 6


def test_a_state_of_integers_is_refused_by_name(adoptions):
    import miltorch

    program = miltorch.read(adoptions.packages("host") / "chunk_0.mlpackage")
    program.states["kv_cache_0"] = miltorch.Type("INT8", (4, 3, 32, 96), "state")
    with pytest.raises(miltorch.InputError, match="kv_cache_0.*INT8"):
        miltorch.Executable(program)


def test_the_documented_file_is_one():
    from workbench.adopt import schema

    page = Path(schema.__file__).parents[2] / "docs" / "adopt.md"
    text = page.read_text().partition("```yaml\n")[2].partition("```")[0]
    assert len(schema.parse(yaml.safe_load(text), "docs").states) == 2


def test_faults_are_all_planted():
    assert set(styles.FAULTS) == set(CAUSES) | {"future"}
