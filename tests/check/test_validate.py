"""Validation: bug gates with a checkpoint, the stored ones without, and a bundle that no decoder
runs is still RED. The cost of compression is measured beside that of rounding alone, and only the
user's limit judges it. Another runtime lies within the distance that narrow sums make."""

import shutil
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from faults import find_fault
from faults.decoders import wrap_calls
from in_process import cli, invoke
from refusal import refused
from tiny import as_device, edited_weights, prompt

from workbench import Decoder
from workbench.check import gates, golden, states
from workbench.check.bug_gates import BUG_GATES, bug_gates
from workbench.check.compare import furthest, judged_rows
from workbench.check.cost import cost_table
from workbench.check.device import device_gate, device_reference
from workbench.check.fidelity import BUDGET_FACTOR, measure, measure_budget
from workbench.check.run import trace_bundle
from workbench.check.validate import Validation, validate
from workbench.explain import error
from workbench.models.checkpoint import Checkpoint

IDS = "1,69,142,4,100,7"


# --- bug gates ------------------------------------------------------------------------------------


def test_a_program_that_stops_with_an_error_is_red(llama_bundle, tiny_llama):
    def stop(**_):
        raise ValueError("planted")

    exact = Decoder(llama_bundle, "portable", "exact")
    exact.layer_shards[1].executable.body.steps[3].function = stop
    results = {g.name: g for g in bug_gates(llama_bundle, tiny_llama, decoder=exact)}
    assert results["program"].verdict == "RED"
    assert "planted" in results["program"].reason
    assert results["undo"].verdict == "not_run"


def test_gate_program_reads_the_inputs_of_a_host_that_was_changed(
    llama_bundle, tiny_llama
):
    decoder = Decoder(llama_bundle, "portable")
    find_fault("memory", "tokens of a chunk written in reverse").plant_in(decoder)
    results = {g.name: g for g in bug_gates(llama_bundle, tiny_llama, decoder=decoder)}
    assert results["program"].verdict == "RED"


@pytest.mark.parametrize("source", ["checkpoint", "golden", "nothing"])
def test_a_bundle_that_no_decoder_runs_is_red_with_the_reason(
    broken, llama_golden, tmp_path, source
):
    folder, checkpoint = broken("t_max of 60 over a range of 4")
    arguments = [f"--{source}", checkpoint.path]
    if source == "golden":
        arguments[1] = llama_golden.save(tmp_path / "g.safetensors")
    validation = invoke("validate", folder, *(arguments if source != "nothing" else ()))
    assert (validation["verdict"], validation["worst"]) == ("RED", None)
    named = {g["name"]: g for g in validation["gates"]}
    assert named.keys() == set(BUG_GATES)
    assert named["interface"]["verdict"] == "RED"
    assert named["program"]["verdict"] == named["undo"]["verdict"] == "not_run"
    assert "cannot be run" in named["program"]["reason"]


def test_a_checkpoint_leaves_a_verdict_that_a_golden_shows(
    bundle, tiny_llama, llama_golden
):
    path = llama_golden.save(bundle.root.parent / "g.safetensors")
    without_verdict = invoke("validate", bundle.root, "--golden", path)
    missing = {g["name"] for g in without_verdict["gates"] if g["verdict"] == "not_run"}
    assert missing == {"weights", "host", "program", "device", "budget"}
    checkpoint = "--checkpoint", tiny_llama.path
    validation = invoke("validate", bundle.root, *checkpoint, "--prompt-ids", IDS)
    assert validation["verdict"] == "GREEN"
    stored = {g.name: g.json() for g in gates.stored_verdict(bundle).gates}
    assert list(stored) == list(BUG_GATES)
    again = invoke("validate", bundle.root, "--golden", path, "--max-kl", "1e-9")
    assert [g for g in again["gates"] if g["name"] in stored] == [*stored.values()]
    (limit,) = (g for g in again["gates"] if g["name"] == "max_kl")
    assert (limit["verdict"], limit["threshold"]) == ("OVER", 1e-9)
    assert (again["verdict"], again["quality"]) == ("GREEN", "OVER")
    assert "the limit is the user's" in limit["reason"]
    assert again["cost"].keys() == {"kl", "same_top", "budget", "rounding"}
    assert again["cost"]["budget"] is again["cost"]["rounding"] is None
    assert again["cost"]["kl"]["mean"] == limit["value"]
    assert validation["cost"]["rounding"].keys() == {"kl"}


def test_a_golden_s_checkpoint_gives_every_verdict_that_is_not_stored(
    bundle, tiny_llama, llama_golden, monkeypatch
):
    decoder = Decoder(bundle, "portable")
    source = replace(llama_golden, source=tiny_llama)
    first = validate(decoder, source, (1,))
    assert {g.name for g in first.gates if g.verdict == "not_run"} == {"device"}
    monkeypatch.setattr("workbench.check.bug_gates.bug_gates", None)
    again = validate(decoder, source, (1,))
    assert [g.json() for g in again.gates] == [g.json() for g in first.gates]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt-ids", ",".join(["1"] * 40)], "max_seq_len"),
        (["--checkpoint", "foreign"], "was exported from"),
    ],
)
def test_bad_input_about_a_bundle_that_runs_stays_an_error(
    bundle, tiny_llama, exports, arguments, words
):
    other = exports.checkpoint("llama", vocab_size=256)
    arguments = [other if text == "foreign" else text for text in arguments]
    if "--checkpoint" not in arguments:
        arguments += ["--checkpoint", tiny_llama.path]
    with refused(words):
        invoke("validate", bundle.root, *arguments)


def test_a_golden_that_is_too_long_is_refused_before_a_gate_runs(
    llama_bundle, tiny_llama, monkeypatch
):
    monkeypatch.setattr("workbench.check.validate.load_or_run_gates", pytest.fail)
    too_long = golden.make_golden(tiny_llama, [1] * 40)
    with refused("golden: found 40 tokens"):
        validate(Decoder(llama_bundle), too_long)


def test_a_golden_of_another_checkpoint_is_refused(
    tiny_llama, llama_bundle, llama_golden
):
    other = replace(llama_golden, meta=llama_golden.meta | {"checkpoint": "0" * 64})
    decoder = Decoder(llama_bundle, "portable")
    for ask in (
        lambda: validate(decoder, other, (1,)),
        lambda: trace_bundle(decoder, other, (1, "isolated")),
        lambda: error.split_error(tiny_llama, llama_bundle, [], reference=other),
    ):
        with refused("golden's checkpoint: found content hash 000000000000"):
            ask()


# --- cost -----------------------------------------------------------------------------------------


def verdicts(cost, max_kl=gates.MAX_KL):
    return {g.name: g.verdict for g in cost.judge(max_kl)}


def scale_second_layer(decoder, factor):
    """Plants: what the second layer's shard returns is `factor` times too large."""

    def scaled(predict, inputs, state):
        outputs = predict(inputs, state).items()
        return {name: value * np.float32(factor) for name, value in outputs}

    wrap_calls(decoder.layer_shards[1], scaled)


def test_the_budget_of_compression_is_what_compression_costs(
    exports, tiny_llama, llama_golden
):
    bundle = exports.bundle(tiny_llama.path, max_seq_len=32, compress="int4-block32")
    budget = measure_budget(bundle, tiny_llama, llama_golden)
    compressed = measure(Decoder(bundle, "portable"), llama_golden, budget_trace=budget)
    assert (
        furthest(judged_rows(compressed.rows))["ratio"] < 1.5
    )  # quantization dominates
    assert compressed.kl.mean() == pytest.approx(compressed.budget_kl.mean(), rel=0.2)
    figures = compressed.json()
    kl = figures["kl"]
    assert (
        {"mean", "median", "p99", "max"} == kl.keys() == figures["budget"]["kl"].keys()
    )
    mean = kl["mean"]
    assert verdicts(compressed, 1.01 * mean) == {"max_kl": "WITHIN", "budget": "GREEN"}
    assert verdicts(compressed, 0.99 * mean) == {"max_kl": "OVER", "budget": "GREEN"}


def test_a_cost_has_a_column_for_compression_and_one_for_fp16_without_it(
    exports, tiny_llama, llama_golden
):
    """A reader of two columns took the stored weights for fp16, and int8 for free."""
    bundle = exports.bundle(tiny_llama.path, max_seq_len=32, compress="int4-block32")
    source = replace(llama_golden, source=tiny_llama)
    table = cost_table(validate(Decoder(bundle, "portable"), source, (1,)).cost.json())
    mean = table.set_index("KL (nats)").loc["mean"]
    assert [*mean.index] == ["bundle", "stored weights", "fp16 rounding alone"]
    assert mean["stored weights"] > 0.8 * mean["bundle"]
    assert mean["fp16 rounding alone"] < 1e-3 * mean["stored weights"]
    path = llama_golden.save(bundle.root.parent / "g.safetensors")
    lines = cli("validate", bundle.root, "--golden", path).stdout.splitlines()
    (line,) = (line for line in lines if "not measured" in line and "mean" in line)
    assert line.count("not measured") == 2


def test_an_error_that_rounding_does_not_explain_is_red(
    llama_bundle, tiny_llama, llama_golden
):
    decoder = Decoder(llama_bundle, "portable")
    budget = measure_budget(llama_bundle, tiny_llama, llama_golden)
    clean = measure(decoder, llama_golden, budget_trace=budget)
    assert verdicts(clean) == {"max_kl": "WITHIN", "budget": "GREEN"}
    scale_second_layer(decoder, 1.03)
    wrong = measure(decoder, llama_golden, budget_trace=budget)
    assert verdicts(wrong, max_kl=9)["budget"] == "RED"
    worst = furthest(judged_rows(wrong.rows))
    assert (worst["layer"], worst["tensor"]) == (1, "update")
    # two figures by one formula are printed side by side
    (gate,) = (gate for gate in wrong.judge() if gate.name == "budget")
    at_a_position = Validation([], wrong).worst["over_rounding"]
    assert gate.value < at_a_position
    assert gate.reason.startswith("RMS over positions of error ÷")
    assert f"single position is {at_a_position:.3g}, which is not judged" in gate.reason


def test_a_budget_is_fed_where_a_device_s_shards_are(exports, tiny_llama, llama_golden):
    """Errors add up over the layers of a shard, which a device does not show."""
    options = {"layers_per_shard": 4, "compress": "int4-block32", "max_seq_len": 32}
    decoder = as_device(
        exports.decoder(tiny_llama.path, precision="declared", **options)
    )
    cost = validate(decoder, replace(llama_golden, source=tiny_llama)).cost
    assert cost.json()["budget"]["worst"]["ratio"] < 1.5


def export_changed(exports, folder, change):
    """Calls `change(name, tensor)` for every tensor of a small random llama, which it changes in
    place. Returns the checkpoint and its fp16 bundle."""
    path = shutil.copytree(exports.checkpoint("llama"), folder / "checkpoint")
    with edited_weights(path) as tensors:
        for name, tensor in tensors.items():
            change(name, tensor)
    return Checkpoint(path), exports.bundle(path)


def test_a_layer_that_adds_nothing_is_faithful_when_it_adds_nothing(exports, tmp_path):
    """The second layer hands its input on, as layers do that were added to a trained model or
    pruned from it."""

    def silence(name, tensor):
        if "layers.1." in name and ("o_proj" in name or "down_proj" in name):
            tensor.zero_()

    checkpoint, bundle = export_changed(exports, tmp_path, silence)
    reference = golden.make_golden(checkpoint, prompt(97, 20))
    assert not reference["update.1"].any()
    decoder = Decoder(bundle, "portable")
    judged = validate(decoder, reference, (1, 4))
    assert gates.red_gates(judged.gates) == []
    # the golden has no checkpoint
    assert gates.missing_gates(judged.gates) == ["weights", "host", "program"]
    assert {g.verdict for g in states.state_gates(decoder)} == {"GREEN"}
    layers = error.split_error(checkpoint, bundle, prompt(97, 8))["isolated"].layers()
    parts = ["storage", "reauthoring", "precision", "total"]
    assert layers.set_index("layer").loc[1, parts].eq(0).all()
    scale_second_layer(decoder, 1.01)
    budget = measure_budget(bundle, checkpoint, reference)
    _, gate = measure(decoder, reference, (1, 4), budget).judge()
    assert gate.verdict == "RED" and "layer 1, update" in gate.reason


def test_values_that_are_all_nan_are_red_and_no_row_is_missing(exports, tmp_path):
    def enlarge(name, tensor):
        if "norm" in name:
            tensor.fill_(30000)

    checkpoint, bundle = export_changed(exports, tmp_path, enlarge)
    decoder = Decoder(bundle, "portable")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what overflows says so
        reference = golden.make_golden(checkpoint, prompt(97, 8))
        budget = measure_budget(bundle, checkpoint, reference)
        cost = measure(decoder, reference, (1, 2), budget)
        live = {gate.name: gate.verdict for gate in states.state_gates(decoder)}
    assert verdicts(cost) == {"max_kl": "OVER", "budget": "RED"}
    counts = cost.rows.groupby(["layer", "tensor", "mode"])["T"].count()
    assert counts.loc[:, ["k", "v"]].nunique() == 2  # of isolated and of chained passes
    assert live["state_life"] == live["stale_rows"] == "RED"
    assert cost.rows.index.is_unique


# --- ranking --------------------------------------------------------------------------------------


def export_with_sink(exports, folder):
    """A llama, and its bundle. Its first layer writes about 10,000 into one channel. Its second layer
    adds little, so that rounding beside such a value turns its update far."""

    def write(name, tensor):
        if "layers.0.mlp.down_proj" in name:
            tensor[5] *= 2e4
        if "layers.1." in name and ("o_proj" in name or "down_proj" in name):
            tensor *= 1e-2

    return export_changed(exports, folder, write)


@pytest.mark.parametrize("given", ["checkpoint", "golden"])
def test_the_worst_cell_is_the_faulty_one_and_not_a_small_update_in_a_large_stream(
    exports, tmp_path, given
):
    """Planted: K of layer 0 is 3% too large; the lowest cosine is elsewhere."""
    checkpoint, bundle = export_with_sink(exports, tmp_path)
    reference = golden.make_golden(checkpoint, prompt(97, 12))
    assert np.abs(reference["hidden.0"]).max() > 2000
    decoder = Decoder(bundle, "portable")

    def scaled(predict, inputs, state):
        outputs = predict(inputs, state)
        state.write("layers.0.k_state", state.read("layers.0.k_state") * 1.03)
        return outputs

    wrap_calls(decoder.layer_shards[0], scaled)
    budget = None
    if given == "checkpoint":
        budget = measure_budget(bundle, checkpoint, reference)
    result = Validation([], measure(decoder, reference, (4,), budget))
    cells = judged_rows(result.rows.assign(times=result.cost.over_rounding))
    lowest = cells.loc[cells["cosine"].idxmin()]
    assert (lowest["layer"], lowest["tensor"]) == (1, "update")
    assert lowest["times"] < BUDGET_FACTOR < result.worst["over_rounding"]
    assert result.worst["layer"] == 0
    assert result.json()["min_cosine"] == pytest.approx(lowest["cosine"])


# --- device ---------------------------------------------------------------------------------------


def open_device(bundle, precision="declared", plant=None):
    """A decoder that shows no more than one on Core ML does; `plant` plants a fault in it."""
    decoder = Decoder(bundle, "portable", precision)
    if plant:
        plant(decoder)
    return as_device(decoder)


@pytest.fixture(scope="module")
def reference(llama_bundle, llama_golden):
    return device_reference(llama_bundle, llama_golden)


@pytest.mark.parametrize(
    ("precision", "most"), [("declared", 0), ("exact", 1.5), ("narrow", 1)]
)
def test_every_arithmetic_up_to_narrow_sums_is_green(
    llama_bundle, llama_golden, reference, precision, most
):
    decoder = open_device(llama_bundle, precision)
    gate = device_gate(decoder, llama_golden, reference)
    assert gate.verdict == "GREEN" and gate.value <= most


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (find_fault("memory", "tokens of a chunk written in reverse").plant_in, ""),
        (partial(scale_second_layer, factor=1.01), "hidden of layer 1"),
    ],
    ids=["reversed_chunk", "scaled_layer"],
)
def test_a_device_that_computes_something_else_is_red(
    llama_bundle, llama_golden, reference, plant, reason
):
    decoder = open_device(llama_bundle, plant=plant)
    gate = device_gate(decoder, llama_golden, reference)
    assert gate.verdict == "RED" and gate.value > 3
    assert reason in gate.reason


def test_a_near_tied_choice_of_an_expert_is_left_out(exports):
    path = exports.checkpoint("zaya")
    source = golden.make_golden(Checkpoint(path), prompt(109, 12))
    bundle = exports.bundle(path)
    reference = device_reference(bundle, source)
    decoder = open_device(bundle, "narrow")
    assert device_gate(decoder, source, reference).verdict == "GREEN"


def test_a_reference_is_made_once_for_a_bundle_and_a_golden_s_values(
    llama_bundle, llama_golden, tmp_path, monkeypatch
):
    saved = golden.Golden.load(llama_golden.save(tmp_path / "g.safetensors"))
    assert device_reference(llama_bundle, saved, single_copy=True) is None
    first = device_reference(llama_bundle, saved)
    with monkeypatch.context() as patch:
        patch.setattr("workbench.check.device.trace_device", None)
        again = device_reference(llama_bundle, saved, single_copy=True)
    assert again.arrays().keys() == first.arrays().keys()
    layers = saved.trace.layers
    doubled = [replace(layers[0], x=2 * layers[0].x), *layers[1:]]
    scaled = replace(saved.trace, layers=doubled)
    for other in (replace(saved, ids=saved.ids[::-1]), replace(saved, trace=scaled)):
        other.save(saved.file)
        assert device_reference(llama_bundle, other, single_copy=True) is None
    (file,) = tmp_path.glob("*.reference.safetensors")
    file.write_bytes(b"nonsense")
    again = device_reference(llama_bundle, saved)
    assert again.arrays().keys() == first.arrays().keys()


def test_exchanged_weights_are_red_in_explain_and_validate_leads_to_it(
    broken, tiny_llama
):
    """A program that is right is no reason for `explain` to say GREEN; the split of its error
    names no tensor, and the conclusion of the whole does."""

    def exchange(copy):
        layer = "layers.2.self_attn"
        key, value = (copy.weight(f"{layer}.{name}_proj.weight") for name in "kv")
        key.swap(value)

    folder, _ = broken(exchange)
    command = folder, "--checkpoint", tiny_llama.path
    for name in (["validate"], ["explain", "parts"]):
        result = cli(*name, *command, "--prompt-ids", IDS)
        red = [line for line in result.stdout.splitlines() if line.startswith("RED ")]
        assert result.exit_code == 1 and [line.split()[1] for line in red] == [
            "weights"
        ]
        assert "layers.2.self_attn.k_proj" in red[0]
        *_, step = result.stdout.splitlines()
        leads = {"validate": f"workbench explain {folder}", "explain": "export again"}
        assert step.startswith("next") and leads[name[0]] in step
