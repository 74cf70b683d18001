"""Sentences about times: right for two clusters of processes, drift, an odd call, and
any number of rounds; each simulated machine says what is true of it."""

import numpy as np
import pandas as pd
import pytest

from workbench import log
from workbench.sweep import conclude

COMMAND = "workbench run 34 --set ROUNDS=5"
CALLS = 240


def simulate_rounds(
    count: int, ms: dict, seed: int = 0, slowdown=lambda number: 1.0, odd_call=None
) -> pd.DataFrame:
    """Simulates `count` rounds. In each round every setting has one process, in a random order. The
    mean time of a process differs from its setting's by 1%, and the times of its `CALLS` calls from
    that mean by 3%.

    Args:
        ms: max_seq_len, the setting → mean time of a call in ms.
        slowdown: number of a process, counted over all rounds → factor of its times.
        odd_call: factor of the time of the middle call of each process; None: 1.
    """
    rng, parts = np.random.default_rng(seed), []
    for _ in range(count):
        for key in rng.permutation(list(ms)):
            number = len(parts)
            mean = ms[key] * slowdown(number) * (1 + 0.01 * rng.standard_normal())
            calls = mean * (1 + 0.03 * rng.standard_normal(CALLS))
            if odd_call:
                calls[CALLS // 2] *= odd_call
            columns = {"run_id": f"{number:04}", "S": int(key)}
            parts.append(pd.DataFrame(columns | {"value": calls}, index=range(CALLS)))
    samples = pd.concat(parts).assign(phase="call", warmup=False)
    return log.by_process(samples, ["S"]).assign(disturbed=None)


def describe(rows: pd.DataFrame) -> str:
    """The sentences on an axis, with the list of what is not decided."""
    statement = conclude.describe_axis({"ms per call": rows}, "S")
    listed = conclude.describe_undecided([statement])
    assert statement.is_decided is not bool(listed)
    return f"{statement.text} {listed}"


def describe_fastest(rows: pd.DataFrame) -> conclude.Statement:
    """Of settings whose bundles have one size, where the first has the lowest KL."""
    names = rows["name"].unique()
    kl = 0.01 * (1 + np.arange(len(names)))
    costs = pd.DataFrame({"name": names, "bundle_bytes": 2**20, "kl_mean": kl})
    return conclude.describe_fastest(rows, costs)


GROWING = {"128": 3.5, "512": 4.0, "1024": 4.4}
EQUAL = {"128": 4.0, "512": 4.0, "1024": 4.0}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("ms", [GROWING, EQUAL])
def test_fewer_than_three_rounds_give_no_order(count, ms):
    text = describe(simulate_rounds(count, ms))
    assert "more than" not in text and "fewer than" not in text
    assert f"Not told apart ({count} interleaved round" in text
    assert text.endswith("S 512 against 128, 1024 against 512, 1024 against 128.")
    assert all(f"{key}: " in text for key in (128, 512, 1024))


@pytest.mark.parametrize("count", [3, 5])
def test_a_growth_that_is_there_is_said_of_every_value(count):
    for seed in range(10):
        text = describe(simulate_rounds(count, GROWING, seed))
        for pair in ("512 has more than 128", "1024 has more than 512"):
            assert pair in text
        assert "1024 has more than 128" in text and "Not told apart" not in text


@pytest.mark.parametrize("count", [3, 5])
def test_no_growth_is_imagined(count):
    """Of 60 comparisons of equal settings few are decided by chance."""
    texts = [describe(simulate_rounds(count, EQUAL, seed)) for seed in range(20)]
    assert sum(text.count(" than ") for text in texts) <= 3


def test_a_middle_value_that_differs_is_not_hidden_by_equal_ends():
    text = describe(simulate_rounds(3, {"128": 4.0, "512": 4.6, "1024": 4.0}, seed=1))
    assert "512 has more than 128" in text and "1024 has fewer than 512" in text
    assert "1024 against 128" in text


@pytest.mark.parametrize("count", [2, 3, 5])
def test_nothing_is_concluded_from_two_clusters_of_processes(count):
    """A process is fast or slow by half, whatever its setting."""
    claims = far_apart = 0
    for seed in range(20):
        clusters = np.random.default_rng(1000 + seed).choice([1.0, 1.53], 20)
        rows = simulate_rounds(count, EQUAL, seed, slowdown=clusters.__getitem__)
        text = describe(rows)
        claims += text.count(" than ")
        far_apart += "times apart" in text
    assert claims <= (0 if count == 2 else 3) and far_apart >= 15


def test_a_machine_that_slows_down_meanwhile_hides_no_difference_and_makes_none():
    def drift(number):
        return 1 + 0.15 * number / 9

    claims = 0
    for seed in range(20):
        text = describe(
            simulate_rounds(3, {"128": 3.5, "1024": 4.4}, seed, slowdown=drift)
        )
        assert "1024 has more than 128" in text
        claims += " than " in describe(
            simulate_rounds(3, {"128": 4.0, "1024": 4.0}, seed, slowdown=drift)
        )
    assert claims <= 2


def test_one_odd_call_in_240_changes_no_sentence():
    """The same calls but one, which takes forty times as long."""
    for ms in (GROWING, {"128": 4.4, "512": 4.0, "1024": 3.5}):
        plain, odd = (
            describe(simulate_rounds(3, ms, 2, odd_call=k)) for k in (None, 40)
        )
        directions = [
            [word for word in text.split() if word in ("more", "fewer")]
            for text in (plain, odd)
        ]
        assert directions[0] == directions[1] and len(directions[0]) == 3


def test_disturbed_processes_are_named_and_nothing_is_concluded_from_them():
    rows = simulate_rounds(3, GROWING)
    rows.loc[rows["S"] == 512, "disturbed"] = "load 8.0 on 2 cores before it"
    text = describe(rows)
    assert "1024 has more than 128" in text
    assert text.endswith(
        " Not told apart (every process of one of the two was disturbed): S 512 against 128, "
        "1024 against 512."
    )
    only = conclude.describe_axis({"ms": rows[rows["S"] < 1024]}, "S")
    assert conclude.describe_undecided([only]) == (
        "Not told apart (every process of S 512 was disturbed: load 8.0 on 2 cores before "
        "it): S 512 against 128."
    )
    rows["disturbed"] = "load 8.0"
    text = describe(rows)
    assert text.count("every process of one of the two was disturbed") == 1
    assert "512 has" not in text and "than 512" not in text


def test_a_difference_is_that_of_paired_rounds():
    first = pd.Series([1.0, 2.0, 4.0], index=["1", "3", "5"])
    second = pd.Series([1.2, 2.4, 4.8], index=["2", "4", "6"])
    change = log.compare_settings(first, second)
    assert change.ratio == pytest.approx(1.2) and change.is_decided
    afterwards = second.set_axis(["6", "7", "8"])
    assert not log.compare_settings(first, afterwards).is_decided
    assert log.compare_settings(first, afterwards).rounds == 1


def processes_of(**medians: tuple) -> pd.DataFrame:
    """The processes of several settings, which run one after the other in every round.

    Args:
        medians: name of a setting → the median of its process in each round. The letter of the name
            is the setting's value of the column `option`, the digit that of the column `rest`: `a1`
            and `b1` differ in `option` alone.
    """
    rows = []
    for round_, values in enumerate(zip(*medians.values())):
        for place, (name, value) in enumerate(zip(medians, values)):
            row = {"run_id": f"{round_}{place}", "name": name, "value": value}
            rows.append(row | {"disturbed": None, "option": name[0], "rest": name[1:]})
    return pd.DataFrame(rows)


def test_the_fastest_is_named_only_where_every_round_says_so():
    rows = processes_of(a1=(400, 410, 405), b1=(300, 305, 310), a2=(398, 412, 404))
    statement = describe_fastest(rows)
    assert statement.text == (
        "Nothing is concluded on which of these two is faster: the second is slower in 2 of "
        "3 rounds, and an order needs all. Since tok/s do not decide, take the first for its "
        "lower mean KL (0.01 nats beside 0.03 nats). The other is slower in every round."
    )
    (open_order,) = statement.undecided
    assert open_order.words == "the fastest against a2"
    statement = describe_fastest(rows[rows["name"] != "a2"])
    assert statement.is_decided
    assert statement.text.startswith(
        "It is the fastest in every round. The closest is b1"
    )
    statement = describe_fastest(rows[rows["run_id"] < "2"])
    assert "fastest" not in statement.text and not statement.is_decided
    assert "2 interleaved rounds of 3" in statement.text


def test_two_settings_that_times_do_not_tell_apart_are_told_apart_by_their_costs():
    rows = processes_of(a1=(400, 410, 405), a2=(398, 412, 404))
    costs = pd.DataFrame({"name": ["a1", "a2"], "bundle_bytes": [2**20, 2**21]})
    text = conclude.describe_fastest(rows, costs.assign(kl_mean=[0.02, 0.01])).text
    assert text.endswith(
        "take the first for its smaller bundle (1.0 MiB beside 2.0 MiB), or the second for "
        "its lower mean KL (0.01 nats beside 0.02 nats)."
    )
    text = conclude.describe_fastest(rows, costs.assign(kl_mean=[0.01, 0.02])).text
    assert "take the first for its smaller bundle (1.0 MiB beside 2.0 MiB) and" in text
    assert "the second for" not in text
    equal = costs.assign(bundle_bytes=5, kl_mean=0.01)
    assert "take" not in conclude.describe_fastest(rows, equal).text


def test_rounds_that_agree_are_not_said_to_disagree():
    """In every round the first setting has more, by ratios that differ much."""
    rows = processes_of(a1=(29.2, 28.1, 28.2), b1=(21.8, 26.3, 25.7))
    same_words = "all 3 rounds agree, but the 95% interval of the ratio, 0.633 to 1.17,"
    assert f"is faster: {same_words} includes 1." in describe_fastest(rows).text
    for statement, words in (
        (conclude.describe_axis({"tok/s": rows}, "option"), "option b against a"),
        (
            conclude.describe_options(rows, ["option", "rest"]),
            "option b against a in 1 of 1 pairs",
        ),
    ):
        text = conclude.describe_undecided([statement])
        assert text == f"Not told apart ({same_words} includes 1): {words}."


def test_pairs_with_several_intervals_share_a_reason_without_numbers():
    rows = processes_of(
        a1=(29.2, 28.1, 28.2), b1=(21.8, 26.3, 25.7), c1=(22.0, 26.1, 25.6)
    )
    statement = describe_fastest(rows)
    assert "Also not told apart from the first: c1 (25.6 tok/s)." in statement.text
    assert conclude.describe_undecided([statement]) == (
        "Not told apart (all 3 rounds agree, but the 95% interval of the ratio includes 1): "
        "the fastest against b1, c1."
    )


def test_one_list_has_all_that_is_not_decided_and_counts_each_reason():
    rows = processes_of(
        a1=(29.2, 28.1, 28.2), b1=(21.8, 26.3, 25.7), a2=(28.9, 28.2, 28.0)
    )
    by_option = conclude.describe_options(rows, ["option", "rest"])
    by_name = conclude.describe_axis({"1": rows, "2": rows, "3": rows}, "name")
    assert by_option.text == "" and "ot told apart" not in by_name.text
    assert conclude.describe_undecided([by_option, by_name]) == (
        "Not told apart: option b against a in 1 of 1 pairs; rest 2 against 1 in 1 of 1 "
        "pairs; all 9 orders by name. The reasons: all 3 rounds agree, but the 95% interval "
        "of the ratio includes 1 (7 orders); 3 rounds do not agree (4 orders)."
    )
    assert conclude.describe_undecided([conclude.Statement("a")]) == ""


def test_a_small_difference_that_every_round_shows_is_called_small():
    rows = processes_of(a1=(402, 401, 400), b1=(400, 399, 398))
    text = describe_fastest(rows).text
    assert (
        "all 3 rounds agree, but the ratio, 0.995, differs from 1 by at most 2%" in text
    )


def test_rounds_against_the_order_of_the_medians_are_no_disagreement():
    """The first setting has further processes, which are faster than its first ones."""
    first = (400, 401, 402, 450, 450, 450, 450)
    rows = processes_of(a1=first, b1=(440, 441, 442, 0, 0, 0, 0))
    text = describe_fastest(rows[rows["value"] > 0]).text
    assert "is faster: the rounds contradict the order of the medians." in text


def test_the_first_sentence_says_where_the_order_is_not_decided():
    rows = processes_of(a1=(400, 410, 405), b1=(300, 305, 310), a2=(398, 412, 404))
    assert conclude.describe_most(rows) == (
        "a1 has the highest median (405 tok/s), undecided against a2 (404 tok/s)."
    )
    told_apart = rows[rows["name"] != "a2"]
    assert conclude.describe_most(told_apart) == "a1 is the fastest: 405 tok/s."
    text = conclude.describe_most(rows[rows["run_id"] < "1"])
    assert text.endswith("undecided against a2 (398 tok/s) and 1 other.")


def test_rounds_are_counted_where_a_setting_of_lower_median_is_undecided():
    """The setting with the second highest median is slower in every round."""
    rows = processes_of(
        a1=(17, 22, 21, 23, 24), a2=(16, 20.5, 19, 21, 22), b1=(17.1, 18, 19, 19.5, 20)
    )
    assert conclude.describe_most(rows).endswith("undecided against b1 (19.0 tok/s).")
    text = describe_fastest(rows).text
    assert "the second is slower in 4 of 5 rounds, and an order needs all" in text
    assert text.endswith("The other is slower in every round.")


def test_a_setting_is_named_by_what_tells_it_from_the_others():
    """T is equal in all settings, layers_per_shard in two of them."""
    named = {
        "a1": "compress int8, layers_per_shard 4, T 1",
        "b1": "compress fp16, layers_per_shard 4, T 1",
        "c1": "compress fp16, layers_per_shard 1, T 1",
    }
    rows = processes_of(a1=(40, 41, 40.5), b1=(39.8, 41.2, 40), c1=(40, 41.1, 40.4))
    rows["name"] = rows["name"].map(named)
    assert conclude.describe_most(rows) == (
        "compress int8, layers_per_shard 4 has the highest median (40.5 tok/s), undecided "
        "against compress fp16, layers_per_shard 1 (40.4 tok/s) and 1 other."
    )
    text = describe_fastest(rows).text
    assert "from the first: compress fp16, layers_per_shard 4 (40.0 tok/s, " in text
    alone = rows[rows["name"] == named["a1"]]
    assert conclude.describe_most(alone) == f"{named['a1']} is the fastest: 40.5 tok/s."
    assert "no other setting" in describe_fastest(alone).text


def test_several_measures_have_a_line_each_and_name_what_is_not_decided():
    equal, growing = simulate_rounds(3, EQUAL, seed=1), simulate_rounds(3, GROWING)
    statement = conclude.describe_axis({"ms": equal, "s": growing}, "S")
    first, second = statement.text.splitlines()
    assert first.endswith(" ms.") and " s. " in second
    assert conclude.describe_undecided([statement]) == (
        "Not told apart (3 rounds do not agree): S 512 against 128 in ms, 1024 against 512 "
        "in ms, 1024 against 128 in ms."
    )
    measures = {"ms": equal, "s": growing, "min": equal}
    (open_orders,) = conclude.describe_axis(measures, "S").undecided
    assert open_orders.words == "6 of 9 orders by S"


def paths_of(all_rows: dict, used_rows: dict, count: int = 3) -> pd.DataFrame:
    """Calls by either path in alternating rounds, at each max_seq_len.

    Args:
        all_rows, used_rows: max_seq_len → ms of a call.
    """
    rng, rows = np.random.default_rng(0), []
    for number in range(count):
        for place, (path, ms) in enumerate(
            {"reading all": all_rows, "reading some": used_rows}.items()
        ):
            for length, mean in ms.items():
                value = mean * (1 + 0.002 * rng.standard_normal())
                rows.append((f"{number}{place}{length}", path, length, value, None))
    columns = ["run_id", "path", "max_seq_len", "value", "disturbed"]
    return pd.DataFrame(rows, columns=columns)


def test_it_is_said_which_path_takes_longer_and_how_much_at_every_length():
    calls = paths_of({128: 40.0, 1024: 60.0}, {128: 40.0, 1024: 40.0})
    statement = conclude.describe_paths(calls, "path", "max_seq_len")
    assert statement.text.startswith(
        "Reading all takes longer than reading some at max_seq_len 1024. The first takes, over "
        "the second, 0.998 times (95% interval 0.99"
    )
    assert " at 128, 1.5 times (95% interval 1.4" in statement.text
    (open_order,) = statement.undecided
    assert open_order.words == "reading all against reading some at max_seq_len 128"
    faster = paths_of({128: 30.0}, {128: 40.0})
    statement = conclude.describe_paths(faster, "path", "max_seq_len")
    assert "Reading all takes less time than reading some" in statement.text
    assert statement.is_decided
    # one round has no interval, and decides nothing
    statement = conclude.describe_paths(
        paths_of({128: 30.0}, {128: 40.0}, 1), "path", "max_seq_len"
    )
    assert statement.text == (
        "Whether reading all or reading some takes longer is decided at no max_seq_len. The "
        "first takes, over the second, 0.75 times at 128."
    )


def test_the_command_is_named_only_where_an_order_is_open():
    decided = conclude.Statement("a")
    undecided = conclude.Statement("b", (conclude.OpenOrders("c", ()),))
    assert conclude.describe_next_step([decided, decided], COMMAND) == ""
    text = conclude.describe_next_step([decided, undecided, undecided], COMMAND)
    assert text.count(COMMAND) == 1


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(0.1104, 0.1096, "11.0%"), (0.1104, 0.112, "11.0% to 11.2%")],
)
def test_a_range_whose_ends_print_equal_is_one_number(low, high, words):
    assert conclude.describe_range(low, high, ".1%") == words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (29.0, "29.0"),
        (30.66, "30.7"),
        (0.9547, "0.955"),
        (404.6, "405"),
        (99.97, "100"),
    ],
)
def test_values_of_one_sentence_have_one_precision(value, text):
    assert conclude.format_value(value) == text


def test_a_rounded_column_has_three_significant_digits_and_the_others_all():
    table = pd.DataFrame({"ms": [1.23456, 1234.56, np.nan], "kl": [0.12345, 1, 2]})
    rounded = conclude.round_columns(table, ["ms"])
    assert rounded["ms"].dropna().tolist() == [1.23, 1230.0]
    assert rounded["ms"].isna().tolist() == [False, False, True]
    assert rounded["kl"].equals(table["kl"]) and table["ms"][0] == 1.23456


def test_an_option_is_judged_by_pairs_that_differ_in_nothing_else():
    rows = processes_of(
        a1=(400, 410, 405), b1=(300, 305, 310), a2=(200, 210, 204), b2=(201, 207, 206)
    )
    statement = conclude.describe_options(rows, ["option", "rest"])
    assert statement.text == (
        "Of pairs of settings that differ in one option alone: option b is slower than a in "
        "1 of 2; rest 2 is slower than 1 in 2 of 2."
    )
    assert conclude.describe_undecided([statement]) == (
        "Not told apart (3 rounds do not agree): option b against a in 1 of 2 pairs."
    )
    assert not statement.is_decided


@pytest.mark.parametrize("null", [None, float("nan")])
def test_a_value_that_is_not_set_is_compared_like_any_other(null):
    rows = processes_of(a1=(400, 410, 405), b1=(300, 305, 310))
    rows["option"] = rows["option"].replace({"b": null}).astype(object)
    statement = conclude.describe_options(rows, ["option", "rest"])
    assert statement == conclude.Statement(
        "Of pairs of settings that differ in one option alone: option not set is slower than "
        "a in 1 of 1."
    )
    text = conclude.describe_axis({"tok/s": rows}, "option").text
    assert "not set: " in text
