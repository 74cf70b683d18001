"""Packages of five styles become bundles, run and are proved; a planted fault is RED with its
cause named."""

import json

import exporter_styles as styles
import numpy as np
import pytest
from circle import all_wide, wide
from typer.testing import CliRunner

SOUND = ["recipe", "chunks", "rotating", "monolith", "host", "shards", "newest"]
ARGMAX_INSIDE = {"monolith", "host", "newest"}
CAUSES = {
    "theta": "rope scaling replaced by theta × factor, theta 40000",
    "norm_order": "q/k norm after rope",
    "one_mask": "no window",
}
ONE_MINUS_COSINE = 1e-6  # of keys and values in exact arithmetic, on the stored weights
SAME_CACHES = 1e-5  # relative RMS in exact arithmetic: sums in another order


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


def validate(adoptions, style, *options, code=0) -> dict:
    source = adoptions.checkpoint(style)
    folder = adoptions.folder(style)
    how = "--checkpoint", source, *options, "--json"
    return command("validate", folder, *how, code=code)


def explain(adoptions, style) -> dict:
    source = adoptions.checkpoint(style)
    how = "--checkpoint", source, "--only", "variant", "--json"
    return command("explain", adoptions.folder(style), *how)


@pytest.mark.parametrize(
    "style", [style if style in ("chunks", "host") else wide(style) for style in SOUND]
)
def test_a_sound_style_is_green_as_proposed(adoptions, style):
    result = validate(adoptions, style)
    found = gates_of(result)
    assert result["verdict"] == "GREEN"
    assert found["program"]["value"] ** 2 / 2 < ONE_MINUS_COSINE
    assert "were recognised by their values" in found["weights"]["reason"]
    inside = style in ARGMAX_INSIDE
    assert (result["logits"] is None) == inside
    assert (found["max_kl"]["verdict"] == "not_run") == inside


@pytest.mark.parametrize("style", ["theta", *all_wide("norm_order", "one_mask")])
def test_a_fault_of_the_model_is_red_and_its_cause_named(adoptions, style):
    found = gates_of(validate(adoptions, style, code=1))
    assert found["program"]["verdict"] == "RED"
    cause = explain(adoptions, style)
    assert (cause["fits"], cause["faults"]) == (CAUSES[style], [])
    errors = [row["relative_rms"] for row in cause["variants"]]
    assert errors[1] > 10 * errors[0]


@pytest.mark.wide
def test_a_prefill_that_sees_the_future_is_named(adoptions):
    found = gates_of(validate(adoptions, "future", code=1))
    assert found["program"]["verdict"] == "RED"
    assert "layer 1" in found["program"]["reason"]
    cause = explain(adoptions, "future")
    assert cause["fits"] == "as configured"  # token by token they are
    assert len(cause["faults"]) == 1
    assert "calls of T = 5" in cause["faults"][0]
    assert "they see the future" in cause["faults"][0]


def test_a_sound_style_is_as_configured(adoptions):
    cause = explain(adoptions, "chunks")
    assert (cause["fits"], cause["faults"]) == ("as configured", [])


def test_faults_are_all_planted():
    assert set(styles.FAULTS) == set(CAUSES) | {"future"}


@pytest.mark.parametrize(
    "style", ["chunks", *all_wide("rotating", "recipe", "shards", "newest")]
)
def test_token_by_token_and_in_batches_the_caches_are_equal(adoptions, style):
    from workbench.check import metrics
    from workbench.decode.snapshot import take

    decoder = adoptions.decoder(style)
    ids = np.random.default_rng(0).integers(0, 97, 20).tolist()
    one, many = decoder.fresh(), decoder.fresh()
    for token in ids:
        decoder.advance(one, [[token]])
    T = min(decoder.options.t_max, 9)
    for start in range(0, len(ids), T):
        decoder.advance(many, [ids[start : start + T]])
    a, b = take(one).states, take(many).states
    assert all(metrics.relative_rms(a[name], b[name]) < SAME_CACHES for name in a)


@pytest.mark.parametrize("style", ["shards", *all_wide("rotating", "newest")])
def test_a_restored_sequence_continues_with_the_same_bits(adoptions, style):
    decoder = adoptions.decoder(style)
    ids = np.random.default_rng(1).integers(0, 97, 18).tolist()
    decoder.prefill(ids[:13])
    snapshot = decoder.snapshot()
    expected = [decoder.decode_one_token(token) for token in ids[13:]]
    decoder.begin()
    decoder.prefill(ids[5:12])  # rows of another sequence
    decoder.begin(snapshot)
    again = [decoder.decode_one_token(token) for token in ids[13:]]
    assert np.array_equal(expected, again)


@pytest.mark.parametrize("style", ["shards", *all_wide("rotating", "newest")])
def test_a_token_that_is_taken_back_leaves_nothing(adoptions, style):
    decoder = adoptions.decoder(style)
    ids = np.random.default_rng(2).integers(0, 97, 14).tolist()
    decoder.prefill(ids[:13], tile=1)
    expected = decoder.decode_one_token(ids[13])
    decoder.trim(1)
    decoder.decode_one_token(ids[0])
    decoder.trim(1)
    assert np.array_equal(decoder.decode_one_token(ids[13]), expected)


def test_a_fast_decoder_runs_the_prefill_alone(adoptions):
    """Columns that a prefill keeps to itself are nan; the last one is there."""
    ids = list(range(9))
    whole, fast = adoptions.decoder("chunks"), adoptions.decoder("chunks", fast=True)
    hidden, _ = fast.advance(fast.fresh(), [ids])
    assert np.isnan(hidden[0, :, :8]).all() and np.isfinite(hidden[0, :, 8]).all()
    expected, _ = whole.advance(whole.fresh(), [ids])
    assert np.isfinite(expected).all()
    assert np.array_equal(expected[:, :, 8], hidden[:, :, 8])


@pytest.mark.shim
@pytest.mark.parametrize("style", ["chunks", *all_wide("recipe", "rotating", "host")])
@pytest.mark.parametrize("runtime", ["portable", "stand-in"])
def test_decoding_gives_the_tokens_of_hugging_face(adoptions, exports, style, runtime):
    from workbench import Bundle
    from workbench.check import golden
    from workbench.models.checkpoint import Checkpoint

    prompt = [5, 90, 17, 33, 2, 64, 71, 8, 40]
    text = ",".join(map(str, prompt))
    how = "--prompt-ids", text, "--max-new", 6, "--runtime", runtime, "--json"
    tokens = command("generate", adoptions.folder(style), *how)["tokens"]
    source = Checkpoint(adoptions.checkpoint(style))
    weights = golden.stored_weights(source, Bundle.open(adoptions.folder(style)))
    made = golden.make_golden(source, [*prompt, *tokens], weights, "stored")
    assert tokens == made["logits"][len(prompt) - 1 : -1].argmax(-1).tolist()


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


def adopted(adoptions, style, checkpoint, tmp_path):
    """The bundle of a style's packages with another checkpoint."""
    out = tmp_path / "bundle"
    packages = adoptions.packages(style)
    command("adopt", packages, "--checkpoint", checkpoint, "--out", out)
    return out


def test_the_text_of_a_vision_model_is_compared_with_its_own_layers(
    adoptions, tmp_path
):
    source = adoptions.checkpoint("host")
    text = config_of(source) | {"model_type": "qwen3_vl_text"}
    text["rope_parameters"] |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    whole = {"model_type": "qwen3_vl", "text_config": text}
    names = {"model.": "model.language_model."}
    target = relabelled(source, tmp_path / "vision", names, whole)
    bundle = adopted(adoptions, "host", target, tmp_path)
    found = command("validate", bundle, "--checkpoint", target, "--json")
    assert gates_of(found)["program"]["value"] < 1e-3


def test_a_norm_before_rope_is_named_where_the_model_turns_first(adoptions, tmp_path):
    source = adoptions.checkpoint("shards")
    names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
    config = config_of(source) | {"model_type": "hunyuan_v1_dense"}
    target = relabelled(source, tmp_path / "hunyuan", names, config)
    bundle = adopted(adoptions, "shards", target, tmp_path)
    found = command("validate", bundle, "--checkpoint", target, "--json", code=1)
    assert gates_of(found)["program"]["verdict"] == "RED"
    how = "--checkpoint", target, "--only", "variant", "--json"
    assert command("explain", bundle, *how)["fits"] == "q/k norm before rope"


def changed(adoptions, style, tmp_path, change):
    """The bundle of a style, but for what `change` does to the description of its
    layers in bundle.json."""
    import shutil

    target = tmp_path / "changed"
    shutil.copytree(adoptions.folder(style), target)
    manifest = json.loads((target / "bundle.json").read_text())
    change(manifest["shards"][0]["foreign"])
    (target / "bundle.json").write_text(json.dumps(manifest))
    return target


def part(raw):
    return raw["parts"][1]


MISTAKES = {
    "an unknown key": (lambda raw: raw.update(extra=1), "extra"),
    "an axis too many": (
        lambda raw: part(raw)["inputs"]["causal_mask"]["axes"].append(1),
        "causal_mask",
    ),
    "another rank of a state": (
        lambda raw: raw["states"][0].update(axes=["H", "S", "D"]),
        "kv_cache",
    ),
    "a T that a package does not take": (
        lambda raw: part(raw)["functions"][1].update(t_min=7),
        "T = 7",
    ),
    "no such function": (
        lambda raw: part(raw)["functions"][1].update(name="prefil"),
        "prefil",
    ),
    "an input left out": (
        lambda raw: part(raw)["inputs"].pop("current_pos"),
        "current_pos",
    ),
    "an input too many": (
        lambda raw: part(raw)["inputs"].update(more={"kind": "start", "axes": [1]}),
        "'more'",
    ),
    "a state of another name": (
        lambda raw: raw["states"][0].update(name="cache"),
        "kv_cache_0",
    ),
    "a layer twice": (
        lambda raw: raw["states"][0].update(layers=[0, 0]),
        "layers [0, 0]",
    ),
    "no such package": (
        lambda raw: raw["parts"][0].update(package="no.mlpackage"),
        "no.mlpackage",
    ),
    "an unknown kind": (
        lambda raw: part(raw)["inputs"]["current_pos"].update(kind="now"),
        "kind",
    ),
    "t_min above t_max": (
        lambda raw: part(raw)["functions"][1].update(t_min=9),
        "t_min = 9",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_description_that_does_not_fit_is_refused_by_name(
    adoptions, tmp_path, mistake
):
    change, name = MISTAKES[mistake]
    folder = changed(adoptions, "chunks", tmp_path, change)
    how = "--prompt-ids", "1", "--max-new", 1
    assert name in command("generate", folder, *how, code=2)


WRONG = {
    "planes of keys and values exchanged": (
        "chunks",
        lambda raw: raw["states"][0].update(order="pairs"),
    ),
    "rows that do not move as they do": (
        "newest",
        lambda raw: raw["states"][0].update(rows="absolute"),
    ),
    "a mask that blocks too little": (
        "shards",
        lambda raw: [
            p["inputs"]["attn_mask"].update(blocked=-1.0) for p in raw["parts"]
        ],
    ),
}


@pytest.mark.matrix(2, wide=9)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_description_is_red(adoptions, tmp_path, mistake):
    style, change = WRONG[mistake]
    folder = changed(adoptions, style, tmp_path, change)
    how = "--checkpoint", adoptions.checkpoint(style), "--json"
    found = gates_of(command("validate", folder, *how, code=1))
    assert found["program"]["verdict"] == "RED"


def test_matrices_that_are_not_found_are_said(adoptions, tmp_path, monkeypatch):
    from workbench.adopt import propose, weights
    from workbench.models.checkpoint import Checkpoint

    monkeypatch.setattr(weights, "ALIKE", 1.1)
    source = Checkpoint(adoptions.checkpoint("shards"))
    out = tmp_path / "bundle"
    _, assumed = propose([adoptions.packages("shards")], source, out)
    row = next(row for row in assumed if "matrices" in row["about"])
    assert row["assumed"] == "0 of 16" and "not found: lm_head.weight" in row["why"]


def test_adopt_says_what_it_assumed_and_replaces_nothing(adoptions, tmp_path):
    out = tmp_path / "bundle"
    arguments = adoptions.packages("host"), "--checkpoint", adoptions.checkpoint("host")
    result = command("adopt", *arguments, "--out", out, "--json")
    assumed = {row["about"]: row["assumed"] for row in result["assumed"]}
    assert assumed["order of planes"] == "pairs"
    assert assumed["embedding"] == "embed_weight.bin"
    assert "order of planes" in command(
        "adopt", *arguments, "--out", tmp_path / "other"
    )
    assert str(out) in command("adopt", *arguments, "--out", out, code=2)


def test_rows_that_move_are_proposed_by_their_values(adoptions, tmp_path):
    from workbench.adopt import propose
    from workbench.models.checkpoint import Checkpoint

    source = Checkpoint(adoptions.checkpoint("newest"))
    _, found = propose([adoptions.packages("newest")], source, tmp_path / "b")
    assumed = {row["about"]: row["assumed"] for row in found}
    assert assumed["rows of caches"] == "right"


def test_masks_of_sliding_layers_are_proposed_with_their_window(adoptions, tmp_path):
    from exporter_model import Apply, convert, plain

    from workbench.adopt.describe import Description, read
    from workbench.models import family_of
    from workbench.models.checkpoint import Checkpoint

    inputs = [
        plain(name, (1, 1, 1, S))
        for name, S in (("mask_sliding", 32), ("mask_local", 8))
    ]
    model = convert(Apply(None, lambda _, a, b: a[..., :8] + b), inputs, ["hidden"])
    model.save(str(tmp_path / "masks.mlpackage"))
    package = read(tmp_path / "masks.mlpackage")
    config = Checkpoint(adoptions.checkpoint("rotating")).config
    description = Description(family_of(config).plan(config), [package])
    (program,) = package.programs.values()
    whole, own = (description.input(package, program, name) for name, *_ in inputs)
    assert (whole.window, whole.rows) == (8, "absolute")
    assert (own.window, own.rows) == (8, "ring")


@pytest.mark.parametrize("style", ["chunks", wide("recipe")])
def test_a_mask_of_minus_infinity_is_no_fault(adoptions, style):
    result = command("explain", adoptions.folder(style), "--only", "ranges", "--json")
    assert result["verdict"] == "GREEN" and result["ranges"]["first_inf"] is None


@pytest.mark.parametrize("kind", ["parts", "weights"])
def test_what_needs_hidden_states_says_so(adoptions, kind):
    how = "--checkpoint", adoptions.checkpoint("host"), "--only", kind
    problem = command("explain", adoptions.folder("host"), *how, code=2)
    assert "caches and logits alone" in problem


def test_without_a_checkpoint_the_gates_of_states_and_rows_run(adoptions):
    found = gates_of(command("validate", adoptions.folder("chunks"), "--json"))
    assert (
        found["write_address"]["verdict"] == found["stale_rows"]["verdict"] == "GREEN"
    )


def test_a_state_of_integers_is_refused_by_name(adoptions):
    import miltorch

    program = miltorch.read(adoptions.packages("host") / "chunk_0.mlpackage")
    program.states["kv_cache_0"] = miltorch.Type("INT8", (4, 3, 32, 96), "state")
    with pytest.raises(miltorch.InputError, match="kv_cache_0.*INT8"):
        miltorch.Executable(program)
