"""A bundle that costs too much gets the smallest preset that keeps the limits: judged by Hugging
Face's model with the weights that an export would store."""

import shlex
import shutil
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest
from circle import wide
from in_process import cli, invoke

from workbench import Bundle, export, recommend
from workbench.check import gates
from workbench.check.golden import stored_weights
from workbench.experiment import validation
from workbench.exporter import make_options, read_plan
from workbench.exporter.calibrate import draw_windows
from workbench.exporter.weights import all_weights
from workbench.models.checkpoint import Checkpoint
from workbench.progress import plain_stage_lines
from workbench.recommend import EXCEEDED, KEPT, NOT_MEASURED, ON_LIMIT, candidates

pytestmark = pytest.mark.usefixtures("shared_conversions")


def results(cost: float, limit: float, *more: gates.Gate) -> list[gates.Gate]:
    sound = gates.holds("program", True, "")
    return [sound, *more, gates.quality_at_most("max_kl", cost, limit, "")]


@pytest.fixture(scope="module")
def in_a_folder_alone(tmp_path_factory):
    """Copies a bundle to a folder with no other one: finished bundles beside a bundle are
    candidates too, and other tests export to the folder that they share."""

    def copy(bundle: Bundle) -> Bundle:
        folder = tmp_path_factory.mktemp("alone") / bundle.root.name
        return Bundle.open(shutil.copytree(bundle.root, folder))

    return copy


def preset_weights(source, preset: str, **options):
    options = make_options(compress=preset, **options)
    plan = read_plan(source, options)
    sources = all_weights(source, plan, options)
    return candidates.PresetWeights(source, sources), sources


@pytest.mark.parametrize(
    ("family", "preset"),
    [
        ("llama", "int8-channel"),
        wide("llama", "int8-tensor"),
        wide("llama", "int4-block32"),
        ("llama", "fp16"),
        pytest.param(
            "gemma3_text", "lut6-g16", marks=pytest.mark.slow("compiles k-means")
        ),
        ("gemma3_text", "fp16"),
        ("zaya", "int8-channel"),
        wide("lfm2", "int8-channel"),
    ],
)
def test_weights_of_a_preset_are_those_that_an_export_stores(exports, family, preset):
    source = Checkpoint(exports.checkpoint(family))
    bundle = exports.bundle(source.path, compress=preset)
    expected = stored_weights(source, bundle)
    weights, sources = preset_weights(source, preset, max_seq_len=32)
    tensors = {name for shard in bundle.manifest.shards for name in shard.weights}
    assert len(tensors) > 5
    for name in tensors:
        assert np.array_equal(weights(name).float(), expected(name)), name


def test_bytes_of_a_preset_are_those_of_its_bundle(
    tiny_llama, exports, in_a_folder_alone
):
    presets = "int8-tensor", "int8-channel", "int4-block32", "fp16"
    bundles = {
        name: exports.bundle(tiny_llama.path, max_seq_len=32, compress=name)
        for name in presets
    }
    source = in_a_folder_alone(bundles["int8-tensor"])
    predicted = candidates.list_candidates(tiny_llama, source)
    sizes = [candidate.bytes for candidate in predicted]
    assert sizes == sorted(sizes)
    by_name = {candidate.compress: candidate for candidate in predicted}
    for name in presets[1:]:
        assert by_name[name].bytes == pytest.approx(bundles[name].bytes, rel=0.03)
    assert by_name["lut4-g8"].weights is None and by_name["lut4-g8"].export_seconds > 0
    assert "--compress lut4-g8" in by_name["lut4-g8"].command
    assert "--calibrate" in by_name["lut4-g8"].command
    assert "--max-seq-len 32" in by_name["fp16"].command


def test_a_command_names_a_folder_as_a_shell_reads_it(tmp_path, tiny_llama):
    folder = shutil.copytree(tiny_llama.path, tmp_path / "a model; $(x)")
    command = candidates.export_command(Checkpoint(folder), make_options())
    assert shlex.split(command)[:3] == ["workbench", "export", str(folder)]


@pytest.fixture(scope="module")
def recommend_for(tiny_llama, exports, in_a_folder_alone):
    """A function that recommends a preset in place of int8-tensor for a limit of KL, as if that
    bundle's KL were 20; each limit is tried once."""
    bundle = exports.bundle(tiny_llama.path, max_seq_len=32, compress="int8-tensor")
    bundle = in_a_folder_alone(bundle)

    @cache
    def recommend_for(limit: float) -> recommend.Recommendation | None:
        return recommend.recommend(tiny_llama, bundle, results(20.0, limit))

    return recommend_for


LOOSE_LIMIT = 10.0  # every measured preset keeps it


def test_a_bundle_within_its_limit_gets_no_recommendation(recommend_for):
    assert recommend_for(30.0) is None


def test_the_smallest_preset_that_is_measured_and_keeps_a_loose_limit_is_named(
    recommend_for,
):
    advice = recommend_for(LOOSE_LIMIT)
    first, *others = advice.trials
    assert (first.candidate.compress, first.outcome) == ("lut4-g8", NOT_MEASURED)
    assert advice.chosen is others[-1] and len(others) == 1
    assert advice.chosen.candidate.compress == "int4-block32"
    kl = advice.chosen.figures.kl
    assert 0 < kl.low < kl.value < kl.high
    document = advice.json()["recommendation"]
    assert document["compress"] == "int4-block32" and document["kl"] == kl.value
    assert document["interval"] == [kl.low, kl.high]
    (sentence, *_) = recommend.describe_recommendation(advice)
    assert f"int4-block32: KL {kl} on {advice.judged_on}, " in sentence
    assert "MiB instead of" in sentence


def test_a_recommendation_names_the_text_for_which_its_interval_holds(
    recommend_for, tmp_path
):
    """A preset whose whole interval kept the limit on one text was over it on another."""
    advice = recommend_for(LOOSE_LIMIT)
    assert advice.judged_on.endswith("tokens of the workbench's default text")
    sentence = recommend.describe_recommendation(advice)[0]
    assert f"on {advice.judged_on}, " in sentence
    assert "The interval holds for this text alone" in sentence
    # a notebook reads the table of a report
    advice.table().to_parquet(tmp_path / "presets.parquet")
    stored = pd.read_parquet(tmp_path / "presets.parquet")
    verdict = recommend.describe_verdict(results(20.0, LOOSE_LIMIT), stored)
    assert sentence in verdict
    stored.attrs = {}  # of a report of before
    verdict = recommend.describe_verdict(results(20.0, LOOSE_LIMIT), stored)
    assert any("] on one text, " in line for line in verdict)


def test_a_limit_inside_the_interval_of_a_preset_names_the_next_larger_one(
    recommend_for,
):
    smaller = recommend_for(LOOSE_LIMIT).chosen
    kl = smaller.figures.kl
    advice = recommend_for((kl.low + kl.high) / 2)
    outcomes = {t.candidate.compress: t.outcome for t in advice.trials}
    assert outcomes["int4-block32"] == ON_LIMIT
    assert advice.chosen and advice.chosen.candidate.bytes > smaller.candidate.bytes


def test_all_presets_are_tried_for_a_limit_that_none_keeps(recommend_for):
    advice = recommend_for(0.0)
    assert advice.chosen is None and advice.trials[-1].candidate.compress == "fp16"
    assert {t.outcome for t in advice.trials} == {NOT_MEASURED, EXCEEDED}
    document = advice.json()
    assert document["recommendation"] is None
    assert len(document["tried"]["presets"]) == len(advice.trials)
    assert (
        "No preset that was measured keeps the limits"
        in recommend.describe_recommendation(advice)[0]
    )


def test_the_kl_of_fp16_is_said_to_be_of_storage_alone(recommend_for):
    """Hugging Face's model computes in float32: with the weights of fp16 it lacks about
    all that an export in fp16 costs."""
    advice = recommend_for(0.0)
    lines = recommend.describe_recommendation(advice)
    (line,) = (text for text in lines if "fp16: KL" in text)
    assert f"KL {advice.trials[-1].figures.kl} (of storage alone" in line
    assert "without the rounding of fp16 arithmetic" in line
    others = [text for text in lines[:-1] if "KL" in text and text != line]
    assert others and not any("storage alone" in text for text in others)
    assert "Their KL is of storage alone" in lines[-1]


def test_nothing_is_tried_without_a_checkpoint_or_for_a_faulty_export(
    tiny_llama, llama_bundle
):
    over = results(0.2, 0.05)
    assert recommend.recommend(None, llama_bundle, over) is None
    red = results(0.2, 0.05, gates.holds("host", False, ""))
    unanswered = results(0.01, 0.05, gates.quality_at_least("answers", 0.5, 0.7, ""))
    assert recommend.recommend(tiny_llama, llama_bundle, unanswered) is None
    assert recommend.recommend(tiny_llama, llama_bundle, red) is None
    table = recommend.as_table(None)
    assert list(table) == recommend.COLUMNS and table.empty
    words = recommend.describe_verdict(red, table)
    assert "1 of 2 gates on it are RED (host)" in words[0]
    assert words[1].startswith("Quality not judged")
    assert words[0].endswith("workbench explain names the cause.")
    red = results(0.2, 0.05, gates.holds("weights", False, "k_proj is not …"))
    assert "explain" not in recommend.describe_verdict(red, table)[0]


def test_a_finished_bundle_of_fitted_values_is_measured(tiny_llama, tmp_path, exports):
    source = exports.bundle(tiny_llama.path, max_seq_len=32, compress="int8-tensor")
    bundle = Bundle.open(shutil.copytree(source.root, tmp_path / "own"))
    ids = np.random.default_rng(0).integers(3, 200, 400)
    text = draw_windows(ids, "random", window=64, windows=4)
    folder = tmp_path / "fitted"
    export(
        tiny_llama.path, folder, calibration=text, compress="lut4-g8", max_seq_len=32
    )
    listed = candidates.list_candidates(tiny_llama, bundle)
    (fitted,) = (c for c in listed if c.compress == "lut4-g8")
    assert fitted.finished.root == folder.resolve()
    assert fitted.bytes == fitted.finished.bytes
    advice = recommend.recommend(tiny_llama, bundle, results(200.0, 100.0))
    assert advice.chosen.candidate.compress == "lut4-g8"


def test_a_mixed_bundle_that_costs_too_much_gets_a_recommendation(tiny_llama, tmp_path):
    """The options of such a bundle name no preset; its manifest has one for each matrix."""
    names = [name for name in tiny_llama.matrices if "layers." in name]
    formats = dict.fromkeys(names, "int8-channel") | {tiny_llama.head: "fp16"}
    ids = np.random.default_rng(0).integers(3, 200, 400)
    text = draw_windows(ids, "random", window=64, windows=4)
    options = {"compress": "mixed", "formats": formats, "calibration": text}
    bundle = export(tiny_llama.path, tmp_path / "mixed", max_seq_len=32, **options)
    sizes = {
        c.compress: c.bytes for c in candidates.list_candidates(tiny_llama, bundle)
    }
    assert sizes["int8-channel"] < bundle.bytes < sizes["fp16"]
    assert "mixed" not in sizes
    advice = recommend.recommend(tiny_llama, bundle, results(200.0, 100.0))
    assert advice.chosen.candidate.compress == "int4-block32"


def test_validate_prints_one_recommendation(tiny_llama, exports, in_a_folder_alone):
    bundle = exports.bundle(tiny_llama.path, max_seq_len=32, compress="int8-tensor")
    bundle = in_a_folder_alone(bundle)
    command = "validate", bundle.root, "--checkpoint", tiny_llama.path
    command += "--prompt-ids", "1,69,142,4"
    with plain_stage_lines():
        result = cli(*command, "--max-kl", "0")
    assert (
        result.exit_code == 4
        and "No preset that was measured keeps the limits" in result.stdout
    )
    assert "not measured" in result.stdout and "Presets were judged" in result.stdout
    # several trials of up to a minute each would stand on one line
    last = ": presets that keep the limits: fp16, "
    (line,) = (line for line in result.stderr.splitlines() if last in line)
    number, count = line.partition(last)[2].split(" of at most ")
    assert int(number) == int(count) > 2
    document = invoke(*command)
    assert document["recommendation"] is None and document["tried"] is None


def test_estimates_stand_on_either_side_of_a_limit_or_on_it():
    estimate = recommend.Estimate(0.05, 0.04, 0.06)
    assert estimate.at_most(0.06) == KEPT and estimate.at_most(0.039) == EXCEEDED
    assert estimate.at_most(0.05) == ON_LIMIT
    assert estimate.at_least(0.04) == KEPT and estimate.at_least(0.07) == EXCEEDED
    assert estimate.at_least(0.05) == ON_LIMIT
    figures = recommend.Figures(estimate, replace(estimate, value=0.9, low=0.8, high=1))
    assert recommend.Limits(0.06, 0.95, None).outcome(figures) == ON_LIMIT
    assert recommend.Limits(0.01, 0.95, None).outcome(figures) == EXCEEDED
    assert recommend.Limits(0.06, 0.8, 0.75).outcome(figures) == KEPT


def test_gates_that_did_not_run_are_told_from_checks_of_quality_that_did_not():
    rest = [gates.not_run("device", "needs a Mac"), gates.not_run("stop", "no end")]
    rest.append(gates.not_run("answers", ""))
    presets = pd.DataFrame(columns=recommend.COLUMNS)
    export, cost, checks = recommend.describe_verdict(
        results(0.01, 0.05, *rest), presets
    )
    assert export.startswith("Export GREEN: ")
    assert export.endswith(" are GREEN; gate not run: device (needs a Mac).")
    assert cost.startswith("Quality WITHIN: ")
    assert checks == "Checks of quality not run: stop (no end), answers."
    both = [*rest, gates.not_run("text_budget", "")]
    export, *_ = recommend.describe_verdict(results(0.01, 0.05, *both), presets)
    assert export.endswith("; gates not run: device (needs a Mac), text_budget.")
    unmeasured = [gates.holds("program", True, ""), gates.not_run("max_kl", "")]
    _, checks = recommend.describe_verdict(unmeasured, presets)
    assert checks == "Check of quality not run: max_kl."


def test_a_check_that_is_over_is_named_beside_a_kept_limit_of_kl():
    few = gates.quality_at_least(
        "answers", 0.5, 0.7, "7 of 14 known answers, the golden 10"
    )
    presets = pd.DataFrame(columns=recommend.COLUMNS)
    sentences = recommend.describe_verdict(results(0.01, 0.05, few), presets)
    assert not any("WITHIN" in sentence for sentence in sentences)
    assert sentences[-1].startswith(
        "Quality OVER: answers is 0.5, less than your limit"
    )
    fault = gates.holds("host", False, "")
    sentences = recommend.describe_verdict(results(0.01, 0.05, few, fault), presets)
    assert not any("OVER" in sentence for sentence in sentences)


def test_pages_name_the_figure_of_every_check_of_quality():
    assert {*validation.QUALITY_FIGURES} == {*gates.QUALITY_CHECKS}
