"""Packages of five styles become bundles, run and are proved; a planted fault is RED with its
cause named."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
from adoptions import FAULTS, SOUND, config_of, relabelled
from circle import all_wide
from in_process import cli

from workbench.check import compare
from workbench.models.checkpoint import Checkpoint

ARGMAX_INSIDE = {"monolith", "host", "newest"}
CAUSES = {
    "theta": "rope scaling replaced by theta × factor, theta 40000",
    "norm_order": "q/k norm after rope",
    "one_mask": "no window",
    "future": "as configured",  # token by token they are
}
ONE_MINUS_COSINE = 1e-6  # of keys and values in exact arithmetic, on the stored weights
SAME_CACHES = 1e-5  # relative RMS in exact arithmetic: sums in another order
PROMPT = [5, 90, 17, 33, 2, 64, 71, 8, 40]
IDS = "--prompt-ids", ",".join(map(str, PROMPT))


def command(*arguments, code=0) -> dict | str:
    """What a command prints, as JSON where it was asked for."""
    result = cli(*arguments, raises=code != 2)
    if code == 2:
        return str(result.exception)
    assert result.exit_code == code, result.output
    return json.loads(result.output) if "--json" in arguments else result.output


def gates_of(result: dict) -> dict[str, dict]:
    return {gate["name"]: gate for gate in result["gates"]}


def validate(adoptions, style, code=0) -> dict:
    source = "--checkpoint", adoptions.checkpoint(style), "--json"
    return command("validate", adoptions.folder(style), *source, code=code)


def explain(adoptions, style) -> dict:
    how = "--checkpoint", adoptions.checkpoint(style), "--only", "variant", "--json"
    return command("explain", adoptions.folder(style), *how)


def some(*quick):
    """Every sound style; those that are not `quick` in the wide circle."""
    return pytest.mark.parametrize(
        "style", [*quick, *all_wide(*sorted(SOUND.keys() - quick))]
    )


@pytest.mark.slow("converts up to eight programs and validates them")
@some("chunks", "host")
def test_a_sound_style_is_green_as_proposed(adoptions, style):
    result = validate(adoptions, style)
    found = gates_of(result)
    assert result["verdict"] == "GREEN"
    assert found["program"]["value"] ** 2 / 2 < ONE_MINUS_COSINE
    assert "were recognised by their values" in found["weights"]["reason"]
    assert (result["logits"] is None) == (style in ARGMAX_INSIDE)
    assert (found["max_kl"]["verdict"] == "not_run") == (style in ARGMAX_INSIDE)


@pytest.mark.slow("converts several programs, validates and tries every variant")
@pytest.mark.parametrize(
    "style", ["theta", *all_wide(*sorted(FAULTS.keys() - {"theta"}))]
)
def test_a_fault_is_red_and_its_cause_named(adoptions, style):
    found = gates_of(validate(adoptions, style, code=1))
    assert found["program"]["verdict"] == "RED"
    cause = explain(adoptions, style)
    assert cause["fits"] == CAUSES[style]
    if style == "future":
        assert "layer 1" in found["program"]["reason"]
        (fault,) = cause["faults"]
        assert "calls of T = 5" in fault and "they see the future" in fault
    else:
        assert cause["faults"] == []
        errors = [row["relative_rms"] for row in cause["variants"]]
        assert errors[1] > 10 * errors[0]


@some("chunks")
def test_token_by_token_and_in_batches_the_caches_are_equal(adoptions, style):
    decoder = adoptions.decoder(style)
    ids, caches = np.random.default_rng(0).integers(0, 97, 20).tolist(), []
    for T in (1, min(decoder.options.t_max, 9)):
        decoder.begin()
        decoder.prefill(ids, tile=T)
        caches.append(decoder.snapshot().states)
    one, many = caches
    errors = [compare.relative_rms(one[name], many[name]) for name in one]
    assert max(errors) < SAME_CACHES


@pytest.mark.parametrize("style", ["shards", *all_wide("rotating", "newest")])
def test_a_sequence_goes_back_by_a_snapshot_and_by_trim(adoptions, style):
    decoder = adoptions.decoder(style)
    ids = np.random.default_rng(1).integers(0, 97, 18).tolist()
    decoder.prefill(ids[:13], tile=1)
    snapshot = decoder.snapshot()
    expected = [decoder.decode_one_token(token) for token in ids[13:]]
    decoder.begin()
    decoder.prefill(ids[5:12])  # rows of another sequence
    decoder.begin(snapshot)
    decoder.decode_one_token(ids[0])
    decoder.trim(1)
    again = [decoder.decode_one_token(token) for token in ids[13:]]
    assert np.array_equal(expected, again)


def test_a_fast_decoder_runs_the_prefill_alone(adoptions):
    """Columns that a prefill keeps to itself are nan; the last one is there."""
    found = []
    for fast in (False, True):
        decoder = adoptions.decoder("chunks", fast=fast)
        found.append(decoder.advance(decoder.fresh(), [PROMPT])[0])
    whole, fast = found
    assert np.isfinite(whole).all() and np.isnan(fast[0, :, :8]).all()
    assert np.array_equal(whole[:, :, 8], fast[:, :, 8])


@pytest.mark.shim
@pytest.mark.parametrize("style", ["chunks", *all_wide("recipe", "rotating", "host")])
@pytest.mark.parametrize("runtime", ["portable", "stand-in"])
def test_decoding_gives_the_tokens_of_hugging_face(adoptions, style, runtime):
    from workbench import Bundle
    from workbench.check import golden

    folder = adoptions.folder(style)
    how = *IDS, "--max-new", 6, "--runtime", runtime, "--json"
    tokens = command("generate", folder, *how)["tokens"]
    source = Checkpoint(adoptions.checkpoint(style))
    weights = golden.stored_weights(source, Bundle.open(folder))
    made = golden.make_golden(source, [*PROMPT, *tokens], weights, "stored")
    assert tokens == made["logits"][len(PROMPT) - 1 : -1].argmax(-1).tolist()


@pytest.mark.shim
def test_a_wrong_operation_is_found_and_none_in_a_sound_one(adoptions, monkeypatch):
    import in_process

    from miltorch.shim import Proxy
    from workbench import Bundle, process
    from workbench.explain import operation
    from workbench.runtime.standin import StandInModel

    class Rolled(Proxy):
        def __init__(self, *about):
            super().__init__(*about)
            for step in self.executable.body.steps:
                if step.op.kind == "softmax":
                    step.function = partial(rolled, step.function)

    def rolled(function, **arguments):
        return function(**arguments).roll(1, -1)

    monkeypatch.setattr(process, "call", in_process.call)
    about = Bundle.open(adoptions.folder("shards")), PROMPT
    assert operation.find(*about, runtime="stand-in").verdict == "none"
    monkeypatch.setattr(StandInModel, "layer", Rolled)
    found = operation.find(*about, runtime="stand-in")
    assert [op["kind"] for op in found.ops] == ["softmax"]
    assert found.verdict == "operation"


def test_the_text_of_a_vision_model_is_compared_with_its_own_layers(
    adoptions, tmp_path
):
    source = adoptions.checkpoint("host")
    text = config_of(source) | {"model_type": "qwen3_vl_text"}
    text["rope_parameters"] |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    whole = {"model_type": "qwen3_vl", "text_config": text}
    names = {"model.": "model.language_model."}
    target = relabelled(source, tmp_path / "vision", whole, names)
    out, source = tmp_path / "bundle", ("--checkpoint", target)
    command("adopt", adoptions.packages("host"), *source, "--out", out)
    found = gates_of(command("validate", out, *source, "--json"))
    assert found["program"]["value"] < 1e-3


def changed(adoptions, style, tmp_path, change):
    """The bundle of a style, but for what `change` does to the shard of its layers in
    bundle.json."""
    target = shutil.copytree(adoptions.folder(style), tmp_path / "changed")
    manifest = json.loads((target / "bundle.json").read_text())
    change(manifest["shards"][0])
    (target / "bundle.json").write_text(json.dumps(manifest))
    return target


def role(name, value):
    """An edit of one input or output."""
    return lambda raw: raw["foreign"]["roles"].update({name: value})


def function(index, **fields):
    return lambda raw: raw["foreign"]["functions"][index].update(fields)


def swapped(raw):
    keys, values = (raw["states"][f"layers.0.{leaf}_state"] for leaf in "kv")
    keys["tensor"], values["tensor"] = values["tensor"], keys["tensor"]


def plane(raw, tensor):
    raw["states"]["layers.0.k_state"]["tensor"] = tensor


MISTAKES = [
    (lambda raw: raw["foreign"].update(extra=1), "extra"),
    (role("current_pos", "now"), "current_pos"),
    (lambda raw: raw["foreign"]["roles"].pop("current_pos"), "current_pos"),
    (role("more", "start"), "more"),
    (function(0, name="infr"), "infr"),
    (function(0, t_min=9), "t_min"),
    (function(1, t_min=7, t_max=7), "position_ids"),
    (partial(plane, tensor="0/cache/0"), "cache"),
    (partial(plane, tensor="0/model_model_kv_cache_0/4"), "kv_cache_0/4"),
    (partial(plane, tensor="k_state"), "k_state"),
    (lambda raw: raw["foreign"]["parts"][0].update(package="no.mlpackage"), "no.ml"),
]


@pytest.mark.parametrize("change, name", MISTAKES)
def test_a_description_that_does_not_fit_is_refused_by_name(
    adoptions, tmp_path, change, name
):
    folder = changed(adoptions, "chunks", tmp_path, change)
    assert name in command("generate", folder, *IDS, "--max-new", 1, code=2)


WRONG = [
    ("host", swapped),
    ("newest", lambda raw: raw["foreign"]["moves"].clear()),
    ("shards", role("attn_mask", "zeros")),
]


@pytest.mark.matrix(2, wide=9)
@pytest.mark.parametrize("style, change", WRONG)
def test_a_wrong_description_is_red(adoptions, tmp_path, style, change):
    folder = changed(adoptions, style, tmp_path, change)
    how = "--checkpoint", adoptions.checkpoint(style), "--json"
    found = gates_of(command("validate", folder, *how, code=1))
    assert found["program"]["verdict"] == "RED"


def proposed(adoptions, style, out) -> dict[str, dict]:
    how = "--checkpoint", adoptions.checkpoint(style), "--out", out, "--json"
    found = command("adopt", adoptions.packages(style), *how)
    return {row["about"]: row for row in found["assumed"]}


def test_adopt_says_what_it_assumed_and_replaces_nothing(
    adoptions, tmp_path, monkeypatch
):
    from workbench.adopt import weights

    assumed = proposed(adoptions, "host", tmp_path / "b")
    assert assumed["layers.1.k_state"]["assumed"] == "0/kv_cache_0/2"
    assert "0.01" in assumed["layers.1.k_state"]["why"]
    moves = proposed(adoptions, "newest", tmp_path / "c")["caches of 32 rows"]
    assert moves["assumed"] == "right"
    monkeypatch.setattr(weights, "ALIKE", -1.0)
    assumed = proposed(adoptions, "shards", tmp_path / "d")
    lost = [name for name, row in assumed.items() if "not among" in row["why"]]
    assert len(lost) == 16 and "lm_head.weight" in lost
    how = "--checkpoint", adoptions.checkpoint("host"), "--out"
    packages = adoptions.packages("host")
    assert "0/kv_cache_0/2" in command("adopt", packages, *how, tmp_path / "e")
    out = tmp_path / "b"
    assert str(out) in command("adopt", packages, *how, out, code=2)


def test_a_mask_of_minus_infinity_is_no_fault(adoptions):
    folder = adoptions.folder("chunks")
    roles = json.loads((folder / "bundle.json").read_text())["shards"][0]["foreign"]
    assert roles["roles"]["causal_mask"] == "mask_inf"
    result = command("explain", folder, "--only", "ranges", "--json")
    assert result["verdict"] == "GREEN" and result["ranges"]["first_inf"] is None


def test_what_needs_hidden_states_says_so(adoptions):
    how = "--checkpoint", adoptions.checkpoint("host"), "--only", "parts"
    problem = command("explain", adoptions.folder("host"), *how, code=2)
    assert "caches and logits alone" in problem


def test_without_a_checkpoint_the_gates_of_states_and_rows_run(adoptions):
    found = gates_of(command("validate", adoptions.folder("chunks"), "--json"))
    assert (
        found["write_address"]["verdict"] == found["stale_rows"]["verdict"] == "GREEN"
    )
