"""Packages of five styles become bundles, run and are proved; a planted fault is RED with its
cause named."""

import json
import os
import shutil
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import tiny
from adoptions import FAULTS, SOUND, config_of, relabelled
from circle import wide
from in_process import cli, invoke
from refusal import refused
from tiny import prompt, without

import miltorch
from miltorch.shim import Proxy
from workbench import Bundle, Decoder
from workbench.adopt import weights
from workbench.adopt.assumptions import list_assumptions
from workbench.adopt.roles import INPUTS
from workbench.check import compare
from workbench.explain import operation
from workbench.models.checkpoint import Checkpoint
from workbench.runtime.standin import StandInModel

pytestmark = pytest.mark.slow("converts the packages of a style, up to eight programs")
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
# enough for a second call of the function that rotates a window of 8 rows
LONGER_IDS = "--prompt-ids", ",".join(map(str, prompt(97, 16)))


def gates_of(result: dict) -> dict[str, dict]:
    return {gate["name"]: gate for gate in result["gates"]}


def ask(name, folder, adoptions, style, *more) -> dict:
    """The JSON of a command about a bundle and the checkpoint of a style."""
    return invoke(name, folder, "--checkpoint", adoptions.checkpoint(style), *more)


def validate(adoptions, style) -> dict:
    return ask("validate", adoptions.folder(style), adoptions, style)


@pytest.mark.matrix(1, wide=4)
@pytest.mark.parametrize("style", sorted(SOUND))
def test_a_sound_style_is_green_as_proposed(adoptions, style):
    result = validate(adoptions, style)
    gates = gates_of(result)
    assert result["verdict"] == "GREEN"
    assert gates["program"]["value"] ** 2 / 2 < ONE_MINUS_COSINE
    count = len(Bundle.open(adoptions.folder(style)).manifest.foreign.parts)
    packages = "1 package;" if count == 1 else f"{count} packages;"
    assert f"agree in {packages}" in gates["interface"]["reason"]
    assert "were recognised by their values" in gates["weights"]["reason"]
    assert (result["logits"] is None) == (style in ARGMAX_INSIDE)
    assert (gates["max_kl"]["verdict"] == "not_run") == (style in ARGMAX_INSIDE)


@pytest.mark.parametrize(
    "style", ["rotating", *map(wide, sorted(SOUND.keys() - {"rotating"}))]
)
def test_explain_finds_no_fault_in_a_sound_style(adoptions, style):
    result = ask("explain", adoptions.folder(style), adoptions, style, *LONGER_IDS)
    gates = gates_of(result)
    assert result["verdict"] == "GREEN"
    assert gates["one_token_calls"]["verdict"] == "GREEN"
    several = gates["multi_token_calls"]
    if several["verdict"] == "not_run":
        assert several["reason"] == "no function takes several tokens"
    else:
        assert several["value"] < 0.01 * several["threshold"]


@pytest.mark.matrix(1, wide=3)
@pytest.mark.parametrize("style", sorted(FAULTS))
def test_a_fault_is_red_and_its_cause_named(adoptions, style):
    gates = gates_of(validate(adoptions, style))
    assert gates["program"]["verdict"] == "RED"
    folder, checkpoint = adoptions.folder(style), adoptions.checkpoint(style)
    cause = invoke("explain", "variant", folder, "--checkpoint", checkpoint)
    assert cause["verdict"] == "RED"
    assert cause["fits"] == CAUSES[style]
    (red,) = (gate for gate in cause["gates"] if gate["verdict"] == "RED")
    if style == "future":
        assert "layer 1" in gates["program"]["reason"]
        assert red["name"] == "multi_token_calls"
    else:
        assert red["name"] == "one_token_calls" and CAUSES[style] in red["reason"]
        errors = [row["relative_rms"] for row in cause["variants"]]
        assert errors[1] > 10 * errors[0]


def test_explain_exits_1_for_a_function_that_is_wrong_in_calls_of_several_tokens(
    adoptions, tmp_path
):
    """Its line names the function, the calls, the first wrong row, the error and the limit. Without
    the function the bundle is GREEN, as the line says."""
    options = "--checkpoint", adoptions.checkpoint("future")
    ended = cli("explain", adoptions.folder("future"), *options, *LONGER_IDS)
    word, line, *_ = ended.stdout.splitlines()
    assert (ended.exit_code, word.split()) == (1, ["export", "RED"])
    assert line.split()[:2] == ["RED", "multi_token_calls"]
    for words in (
        "function prefill_rotate is wrong in calls of T = 5: first K of layer 1 at "
        "position 10, relative RMS 0.",
        "limit 0.001",
        "not causal",
        "remove it from functions in bundle.json",
    ):
        assert words in line
    remaining = (
        FUNCTIONS,
        lambda functions: [f for f in functions if f["name"] != "prefill_rotate"],
    )
    folder = changed(adoptions, "future", tmp_path, remaining)
    for command in (("validate",), ("explain", "variant")):
        assert invoke(*command, folder, *options)["verdict"] == "GREEN"


def test_a_prompt_that_is_too_short_for_a_function_leaves_its_calls_unjudged(adoptions):
    result = ask("explain", adoptions.folder("future"), adoptions, "future", *IDS)
    gate = gates_of(result)["multi_token_calls"]
    assert gate["verdict"] == "not_run"
    assert "function prefill_rotate did not run on 9 tokens" in gate["reason"]


@pytest.mark.parametrize(
    "style", ["chunks", *map(wide, sorted(SOUND.keys() - {"chunks"}))]
)
def test_token_by_token_and_in_batches_the_caches_are_equal(adoptions, style):
    decoder = adoptions.decoder(style)
    ids, caches = prompt(97, 20), []
    for T in (1, min(decoder.options.t_max, 9)):
        decoder.begin()
        decoder.prefill(ids, tile=T)
        caches.append(decoder.snapshot().states)
    one, many = caches
    errors = [compare.relative_rms(one[name], many[name]) for name in one]
    assert max(errors) < SAME_CACHES


@pytest.mark.parametrize("style", ["shards", *map(wide, ["rotating", "newest"])])
def test_a_sequence_goes_back_by_a_snapshot_and_by_trim(adoptions, style):
    decoder = adoptions.decoder(style)
    ids = prompt(97, 18, 1)
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


@pytest.mark.wide
def test_rows_that_a_call_has_moved_in_part_are_refused(adoptions, monkeypatch):
    decoder = adoptions.decoder("newest")
    decoder.prefill(PROMPT)
    (layers,) = decoder.layer_shards
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop = mock.Mock(side_effect=KeyboardInterrupt)
        patch.setattr(layers.parts[-1].models[None], "predict", stop)
        decoder.decode_one_token(5)
    with refused("interrupted call"):
        decoder.decode_one_token(5)
    decoder.begin()
    decoder.decode_one_token(5)


@pytest.mark.shim
@pytest.mark.parametrize(
    "style", ["chunks", *map(wide, ["recipe", "rotating", "host"])]
)
@pytest.mark.parametrize("runtime", ["portable", "stand-in"])
def test_decoding_gives_the_tokens_and_logits_of_hugging_face(
    adoptions, style, runtime, tmp_path
):
    """No logits where the argmax is inside."""
    folder, file = adoptions.folder(style), tmp_path / "logits.npy"
    options = *IDS, "--max-new", 6, "--runtime", runtime
    if style not in ARGMAX_INSIDE:
        options += "--logits", file
    tokens = invoke("generate", folder, *options)["tokens"]
    logits = adoptions.stored_logits(style, [*PROMPT, *tokens])
    expected = logits[len(PROMPT) - 1 :]
    assert tokens == expected[:-1].argmax(-1).tolist()
    if style not in ARGMAX_INSIDE:
        assert compare.relative_rms(np.load(file), expected) < 0.01


@pytest.mark.shim
def test_times_of_loading_count_every_function_that_was_called(adoptions):
    """The stand-in loads a function when it is first called, as Core ML does."""
    decoder = Decoder(Bundle.open(adoptions.folder("chunks")), "stand-in")
    (model,) = decoder.layer_shards
    assert model.loading_ms["first_predict"] is None
    decoder.prefill(PROMPT)
    for stage, total in model.loading_ms.items():
        times = [package.loading_ms[stage] for package in model.package_models]
        measured = [ms for ms in times if ms is not None]
        assert total == (sum(measured) if measured else None), stage
    assert model.loading_ms["first_predict"]


@pytest.mark.shim
def test_a_wrong_operation_is_found_and_none_in_a_sound_one(
    adoptions, monkeypatch, calls_here
):
    class Rolled(Proxy):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            for step in self.executable.body.steps:
                if step.op.kind == "softmax":
                    sound = step.function
                    step.function = lambda sound=sound, **x: sound(**x).roll(1, -1)

    bundle = Bundle.open(adoptions.folder("shards"))
    assert operation.find(bundle, PROMPT, runtime="stand-in").verdict == "none"
    monkeypatch.setattr(StandInModel, "proxy_class", Rolled)
    finding = operation.find(bundle, PROMPT, runtime="stand-in")
    assert [op.kind for op in finding.ops] == ["softmax"]
    assert finding.verdict == "operation"


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
    invoke("adopt", adoptions.packages("host"), *source, "--out", out)
    gates = gates_of(invoke("validate", out, *source))
    assert gates["program"]["value"] < 1e-3


def changed(adoptions, style, tmp_path, *changes):
    """The bundle of a style with other values in the shard of its layers."""
    of_shard = [(f"shards/0/{path}", value) for path, value in changes]
    source, target = Bundle.open(adoptions.folder(style)), tmp_path / "changed"
    return tiny.edited_copy(source, target, *of_shard).root


ROLES, FUNCTIONS = "foreign/roles", "foreign/functions"
KEYS, VALUES = (f"states/layers.0.{leaf}_state/tensor" for leaf in "kv")
MISTAKES = [  # where, what, and the name by which it is refused
    ("foreign/extra", 1, "extra"),
    (f"{ROLES}/current_pos", "now", "current_pos"),
    (ROLES, without("current_pos"), "current_pos"),
    (f"{ROLES}/more", "start", "more"),
    (f"{FUNCTIONS}/0/name", "infr", "infr"),
    (f"{FUNCTIONS}/0/t_min", 9, "t_min"),
    (f"{FUNCTIONS}/1", lambda of: of | {"t_min": 7, "t_max": 7}, "position_ids"),
    (KEYS, "0/cache/0", "cache"),
    (KEYS, "0/model_model_kv_cache_0/4", "kv_cache_0/4"),
    (KEYS, "k_state", "k_state"),
    ("foreign/parts/0/package", "no.mlpackage", "no.ml"),
    ("foreign/parts/0/package", "../no.mlpackage", "stay inside"),
    (ROLES, lambda of: of | dict.fromkeys(("logits1", "logits2"), "top"), "top_value"),
]


@pytest.mark.parametrize("path, value, name", MISTAKES)
def test_a_description_that_does_not_fit_is_refused_by_name(
    adoptions, tmp_path, path, value, name
):
    with refused(name):
        folder = changed(adoptions, "chunks", tmp_path, (path, value))
        invoke("generate", folder, *IDS, "--max-new", 1)


WRONG = [
    ("host", (KEYS, "0/kv_cache_0/1"), (VALUES, "0/kv_cache_0/0")),
    ("newest", ("foreign/moves", {})),
    ("shards", (f"{ROLES}/attn_mask", "zeros")),
]


@pytest.mark.matrix(1, wide=2)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_description_is_red(adoptions, tmp_path, wrong):
    style, *changes = wrong
    folder = changed(adoptions, style, tmp_path, *changes)
    gates = gates_of(ask("validate", folder, adoptions, style))
    assert gates["program"]["verdict"] == "RED"
    # nor does it take snapshots of the right one
    decoders = Decoder(folder, "portable", "exact"), adoptions.decoder(style)
    assert len({decoder.identity for decoder in decoders}) == 2


def proposed(adoptions, style, out) -> dict[str, dict]:
    packages = adoptions.packages(style)
    result = ask("adopt", packages, adoptions, style, "--out", out)
    return {row["subject"]: row for row in result["assumed"]}


def hub_cached(packages, folder):
    """The packages as the Hub's cache has them, every file a link into `blobs`."""
    model = folder / "models--org--name"
    snapshot = shutil.copytree(packages, model / "snapshots" / "0")
    (model / "blobs").mkdir()
    for number, file in enumerate(p for p in snapshot.rglob("*") if p.is_file()):
        blob = file.rename(model / "blobs" / str(number))
        file.symlink_to(os.path.relpath(blob, file.parent))
    return snapshot


def test_adopt_takes_what_the_manifest_of_a_package_names_and_nothing_else(
    adoptions, tmp_path
):
    packages = shutil.copytree(adoptions.packages("host"), tmp_path / "packages")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("a secret")
    for package in packages.glob("*.mlpackage"):
        (package / "Data" / "notes.txt").symlink_to(tmp_path / "private" / "key")
        (package / "Data" / "extra").symlink_to(tmp_path / "private")
        (package / "loop").symlink_to("..")
    source = "--checkpoint", adoptions.checkpoint("host"), "--out"
    invoke("adopt", packages, *source, tmp_path / "b")
    copied = [path for path in (tmp_path / "b").rglob("*") if path.is_file()]
    assert not any("secret" in path.read_bytes()[:8].decode("latin") for path in copied)
    assert not {"key", "notes.txt", "extra", "loop"} & {path.name for path in copied}
    weights = next(packages.rglob("weights"))
    (weights / "more").symlink_to(tmp_path / "private" / "key")
    with refused("a symlink"):
        invoke("adopt", packages, *source, tmp_path / "c")
    (weights / "more").unlink()
    (weights / "more").symlink_to("..")
    with refused("a link to a folder"):
        invoke("adopt", packages, *source, tmp_path / "c")


def test_adopt_says_what_it_assumed_and_replaces_nothing(
    adoptions, tmp_path, monkeypatch
):
    assumed = proposed(adoptions, "host", tmp_path / "b")
    assert assumed["layers.1.k_state"]["assumed"] == "0/kv_cache_0/2"
    assert "0.01" in assumed["layers.1.k_state"]["why"]
    assert "the packages' only function" in assumed and "function None" not in assumed
    newest = proposed(adoptions, "newest", tmp_path / "c")
    assert newest["caches of 32 rows"]["assumed"] == "right"
    monkeypatch.setattr(weights, "ALIKE", -1.0)
    assumed = proposed(adoptions, "shards", tmp_path / "d")
    lost = [name for name, row in assumed.items() if "not among" in row["why"]]
    assert len(lost) == 16 and "lm_head.weight" in lost
    source = "--checkpoint", adoptions.checkpoint("host"), "--out"
    packages = adoptions.packages("host")
    cached = hub_cached(packages, tmp_path)
    printed = cli("adopt", cached, *source, tmp_path / "e").stdout
    assert "0/kv_cache_0/2" in printed
    step = f"workbench validate {tmp_path / 'e'} --checkpoint {source[1]}"
    assert printed.splitlines()[-1].split(maxsplit=1) == ["next", step]
    out = tmp_path / "b"
    with refused(str(out)):
        invoke("adopt", packages, *source, out)
    with refused("a name for each"):
        invoke("adopt", packages, cached, *source, tmp_path / "f")
    with mock.patch.dict(INPUTS, {"": "zeros"}, clear=True), refused("INPUTS in adopt"):
        invoke("adopt", packages, *source, tmp_path / "f")
    read, flat = miltorch.read, {"state": miltorch.Type("FLOAT16", (1, 32))}
    monkeypatch.setattr(miltorch, "read", lambda *of: replace(read(*of), states=flat))
    with refused("caches of axes"):
        invoke("adopt", packages, *source, tmp_path / "f")
    monkeypatch.undo()
    with mock.patch.object(compare, "relative_rms", return_value=np.nan):
        assert (
            "relative RMS 1e+09 from"
            in cli("adopt", packages, *source, tmp_path / "f").output
        )


def test_a_mask_of_minus_infinity_is_no_fault(adoptions):
    folder = adoptions.folder("chunks")
    roles = json.loads((folder / "bundle.json").read_text())["shards"][0]["foreign"]
    assert roles["roles"]["causal_mask"] == "mask_inf"
    bundle, source = Bundle.open(folder), Checkpoint(adoptions.checkpoint("chunks"))
    reasons = {
        a.subject: a.reason for a in list_assumptions(bundle.manifest, source, 0)
    }
    assert "meta.yaml" in reasons["causal_mask"]
    assert reasons["input_ids"] == "its name and shape"
    result = invoke("explain", "ranges", folder)
    assert result["verdict"] == "GREEN" and result["ranges"]["first_inf"] is None


def test_what_needs_hidden_states_or_a_checkpoint_says_so(adoptions):
    checkpoint = "--checkpoint", adoptions.checkpoint("host")
    with refused("only caches and logits"):
        invoke("explain", "parts", adoptions.folder("host"), *checkpoint)
    gates = gates_of(invoke("validate", adoptions.folder("chunks")))
    for name in ("write_address", "stale_rows"):
        assert gates[name]["verdict"] == "GREEN"
