"""`workbench plan`: every predicted time has an interval, faster exports are named, and
speculation has a gain where the formula knows one."""

import re

import pytest
from in_process import cli, invoke
from tiny import DATA

from workbench.ane import placement, rules
from workbench.ane.roofline import ASSUMED_RATES
from workbench.ane.rules import EFFECTS

TINY = DATA / "tiny-llama"
DRAFTS = "--draft-acceptance", "0.7", "--verify"


def test_every_time_has_an_interval_and_says_what_no_measured_row_is_like(llama_bundle):
    """The rows are published measurements (data/sources), to which the times are fitted."""
    of_checkpoint = invoke("plan", TINY, "--max-seq-len", 32)
    of_bundle = invoke("plan", llama_bundle.root)
    for plan in (of_checkpoint, of_bundle):
        assert {"M4 Max", "A17 Pro", "A19 Pro"} <= {
            row["chip"] for row in plan["chips"]
        }
        for row in plan["chips"]:
            assert row["low_ms"] < row["ms"] < row["high_ms"]
            # two query heads for each key head, which no measured model has
            assert "attention" in row["extrapolates"]
        by_chip = {row["chip"]: row["extrapolates"] for row in plan["chips"]}
        assert "chip" in by_chip["M1"] and "chip" not in by_chip["M4 Max"]
        # the cache of 32 positions is shorter than any that was measured
        assert "context" in by_chip["M4 Max"]
    output = cli("plan", TINY).output
    assert "extrapolated: " in output and "repeats no K and V" in output


def test_the_table_of_chips_fits_80_columns_and_assumed_rates_have_lines():
    plan, lines = invoke("plan", TINY), cli("plan", TINY).output.splitlines()
    start = lines.index("chips") + 1
    assert max(map(len, lines[start : start + 1 + len(plan["chips"])])) <= 80
    for name, words in ASSUMED_RATES.items():
        (line,) = (line for line in lines if line.endswith(f": {words}"))
        named = line.removeprefix("assumed: ").partition(":")[0].split(", ")
        assert named == [row["chip"] for row in plan["chips"] if name in row["assumed"]]


def test_a_faster_export_is_named_with_both_times():
    """Of a model this small a call costs more than its bytes."""
    plan = invoke("plan", TINY, "--chip", "M4 Max")
    (fewer,) = plan["advice"]
    assert (fewer["option"], fewer["value"]) == ("layers_per_shard", 4)
    assert fewer["ms"] < fewer["ms_now"] / 1.5
    better = invoke("plan", TINY, "--layers-per-shard", 4, "--chip", "M4 Max")
    assert better["advice"] == []
    assert better["chips"][0]["ms"] == pytest.approx(fewer["ms"])
    text = cli("plan", TINY).output
    assert "proposed exports" in text
    assert "layers_per_shard 4: " in text


def test_speculation_has_its_gain_and_where_it_pays():
    plan = invoke("plan", TINY, *DRAFTS, 4, "--draft-cost", 0.1)
    result = plan["speculation"]
    expected = (1 - 0.7**4) / (0.3 * (result["verify_cost"] + 3 * 0.1))
    assert result["gain"] == pytest.approx(expected)
    assert 0 < result["pays_from"] < 0.7
    assert "times plain decoding" in cli("plan", TINY, *DRAFTS, 4).output
    assert invoke("plan", TINY)["speculation"] is None


def test_experts_of_a_range_have_no_gain(exports):
    path = exports.checkpoint("zaya")
    result = invoke("plan", path, *DRAFTS, 4)["speculation"]
    assert result["gain"] is None and "D3" in result["reason"]
    fixed = invoke("plan", path, "--tokens", "1,4", *DRAFTS, 4)["speculation"]
    assert fixed["gain"] > 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--draft-acceptance", "0.7"], "--verify"),
        (["--verify", "4"], "--draft-acceptance"),
        (["--draft-acceptance", "1.5", "--verify", "4"], "1.5"),
        (["--draft-acceptance", "0.7", "--verify", "1"], "1"),
        ([*DRAFTS, "8"], "--tokens 1,8"),
    ],
)
def test_a_gain_needs_all_of_its_numbers(options, words):
    ended = cli("plan", TINY, *options)
    assert ended.exit_code == 2 and words in ended.output


@pytest.mark.parametrize("system, fits_mac", [("linux", None), ("darwin", True)])
def test_no_mac_fits_the_memory_of_another_system(monkeypatch, system, fits_mac):
    monkeypatch.setattr("sys.platform", system)
    plan = "plan", TINY, "--chip", "M1"
    assert invoke(*plan)["fits_mac"] is fits_mac
    text = cli(*plan).output
    assert "this machine's memory" in text
    assert re.search(
        "^fits in memory +yes, in this machine's memory$", text, re.MULTILINE
    )
    in_a_mac = "fits in a Mac +yes, in 70% of a Mac's memory"
    assert bool(re.search(in_a_mac, text)) == bool(fits_mac)
    assert ("give --memory" in text) != bool(fits_mac)
    assert invoke(*plan, "--memory", "16G")["fits_mac"] is True
    of_target = cli(*plan, "--memory", "16G").output
    assert "the target's memory 16,384.0 MiB" in of_target
    assert re.search(in_a_mac, of_target) and "True" not in of_target
    assert "this machine" not in of_target


def test_the_text_begins_with_what_to_do_and_abbreviates_nothing(llama_bundle):
    text = cli("plan", llama_bundle.root).output
    assert (
        text.index("proposed exports") < text.index("chips") < text.index("placement")
    )
    assert "D3  stays (medium confidence): a RangeDim" in text
    assert "Sources of the disputes: CT: " in text


def test_the_columns_and_the_effects_of_a_placement_have_legends(llama_bundle):
    lines = cli("plan", llama_bundle.root).output.splitlines()
    heading = next(
        n for n, line in enumerate(lines) if line.startswith(" ops  eligible")
    )
    legend = next(n for n, line in enumerate(lines) if line == placement.LEGEND)
    assert heading < legend
    (effects,) = [line for line in lines if line.startswith("rules, by id in ")]
    rule_lines = [re.match(r"[A-Z]+\d+ +(\w+) \(", line) for line in lines]
    printed = {match[1] for match in rule_lines if match}
    explained = {
        name for name, words in EFFECTS.items() if f"{name}: {words}" in effects
    }
    assert printed and printed == explained


def test_the_table_says_what_the_disputed_rules_would_change(llama_bundle):
    """A rule of the effect `stays` that the placement does not count is listed apart."""
    plan = invoke("plan", llama_bundle.root)
    lines = cli("plan", llama_bundle.root).output.splitlines()
    (heading,) = [line for line in lines if line.startswith(" ops  eligible")]
    assert "disputed" in heading.split() and len(heading) <= 80
    assert placement.DISPUTED_LEGEND in lines
    border = lines.index("disputed rules, counted in the column disputed alone")
    for shard in plan["shards"]:
        disputed = {rule["id"] for rule in shard["rules"] if rule["disputed"]}
        assert shard["ane_if_disputed_hold"] <= shard["ane"]
        for rule in shard["rules"]:
            row = next(
                n for n, line in enumerate(lines) if line[:4] == f"{rule['id']:4}"
            )
            assert (row > border) == (rule["id"] in disputed)
            if rule["effect"] == "stays" and rule["id"] in disputed:
                assert shard["ane_if_disputed_hold"] < shard["ops"]


def test_a_source_of_two_issues_is_named_once(llama_bundle):
    lines = cli("plan", llama_bundle.root).output.splitlines()
    (line,) = (line for line in lines if line.startswith("D7 "))
    assert line.count("coremltools documentation, source or issue") == 1


def test_every_rule_has_an_effect_that_the_legend_explains():
    assert {rule.effect for rule in rules.rules()} == {*EFFECTS}


def last_line(*arguments) -> str:
    return cli("plan", *arguments).stdout.splitlines()[-1]


def test_the_last_line_of_a_plan_is_what_follows_it(llama_bundle):
    step = last_line(TINY, "--max-seq-len", 32, "--compress", "fp16")
    options = "--max-seq-len 32 --compress fp16"
    assert step == f"{'next':20}workbench export {TINY} build/tiny-llama {options}"
    step = last_line(llama_bundle.root)
    bundle = f"workbench validate {llama_bundle.root} --checkpoint CHECKPOINT"
    assert step == f"{'next':20}{bundle}"
    assert last_line(TINY, "--memory", "1K").startswith("next    ")
    assert "plan a smaller export" in last_line(TINY, "--memory", "1K")
