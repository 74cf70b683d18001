"""The printed log: as wide as the terminal, nothing twice, and it says what it leaves out."""

from itertools import product

import pandas as pd
import pytest

from workbench import log
from workbench.sweep import summary
from workbench.sweep.table import table_lines

MACHINES = ["Apple M4 Max, Mac16,5, 64 GiB, 16 cores", "Apple M1, 8 GiB, 8 cores"]


@pytest.fixture
def rows(tmp_path) -> pd.DataFrame:
    for number in range(4):
        row = {
            "status": "ok",
            "verdict": "GREEN",
            "setting": f"s{number}",
            "checkpoint": "a-checkpoint-with-a-long-name",
            "family": "llama",
            "compress": ["fp16", "int8-channel"][number % 2],
            "max_seq_len": 128 * (1 + number),
            "T": 1 + number,
            "depth": number,
            "runtime": "portable",
            "machine": MACHINES[number // 2],
            "software": "25B78, coremltools 9.0",
            "layers_per_shard": 1 + number,
            "kv_write": ["mask", "slice"][number % 2],
            "tokens_per_s": 100.0 + number,
            "call_ms": 10.0,
        }
        log.append("runs", row, tmp_path, f"{number}-run{number}")
    return summary.summary(tmp_path)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_and_every_run_has_one_line(rows, width):
    lines = table_lines(rows, width)
    assert max(map(len, lines)) <= width
    for number in range(4):
        assert sum(line.startswith(f"run{number}") for line in lines) == 1


def test_what_is_equal_is_named_once_above_and_machines_by_a_letter(rows):
    lines = table_lines(rows, 200)
    header = next(i for i, line in enumerate(lines) if line.startswith(" "))
    above = " ".join(lines[:header])
    for text in ("checkpoint a-checkpoint-with-a-long-name", "runtime portable"):
        assert above.count(text) == 1
    for letter, machine in zip("ab", MACHINES):
        assert above.count(f"machine {letter}: {machine}") == 1
    assert "ms/call 10" in above and "export GREEN" in above
    titles = lines[header].split()
    assert not {"checkpoint", "runtime", "ms/call", "export"} & {*titles}
    assert {"compress", "T", "machine", "tok/s"} <= {*titles}
    place = titles.index("machine") + 1
    assert [line.split()[place] for line in lines[header + 1 :]][:4] == [*"aabb"]


def test_the_table_names_every_column_that_it_leaves_out_and_how_to_see_it(rows):
    wide = table_lines(rows, 200)
    titles = next(line for line in wide if line.startswith(" ")).split()
    assert not any("left out" in line for line in wide)
    narrow = table_lines(rows, 60)
    narrow_titles = next(line for line in narrow if line.startswith(" ")).split()
    place = next(i for i, line in enumerate(narrow) if line.startswith("left out"))
    below = " ".join(narrow[place:])
    assert {*titles} - {*narrow_titles}
    for title in {*titles} - {*narrow_titles}:
        assert title in below
    assert "`workbench log --rows`" in below


@pytest.fixture
def eight_forms(tmp_path) -> pd.DataFrame:
    """Rows whose first four varied settings are equal where their speeds differ."""
    forms = [(1, "mask"), (1, "slice"), (4, "mask"), (4, "slice")]
    for number, ((layers, kv_write), depth) in enumerate(product(forms, [0, 64])):
        row = {
            "status": "ok",
            "verdict": ["GREEN", "RED"][number % 2],
            "quality": ["WITHIN", "OVER"][number // 2 % 2],
            "setting": f"s{number}",
            "checkpoint": ["smollm2-135m-instruct", "tiny"][depth > 0],
            "compress": ["int8-channel", "fp16"][depth > 0],
            "max_seq_len": 128 * (1 + depth),
            "T": 1 + depth,
            "depth": depth,
            "layers_per_shard": layers,
            "kv_write": kv_write,
            "command": f"notebook {number}",
            "tokens_per_s": 20.0 + number,
            "call_ms": 50.0 - number,
            "kl_mean": 0.001 * number,
        }
        log.append("runs", row, tmp_path, f"{number}-run{number}")
    return summary.summary(tmp_path)


def test_a_line_below_the_table_says_what_its_short_titles_mean(eight_forms):
    *_, last = table_lines(eight_forms, 200)
    assert last == (
        "S: max_seq_len; layers: in a shard; mean KL: from Hugging Face's model, in nats"
    )
    without = table_lines(eight_forms.assign(kl_mean=float("nan")), 200)
    assert not any("nats" in line for line in without)


def test_a_machine_has_a_column_and_only_printed_columns_have_a_legend(rows):
    """Times of two machines in one table would otherwise read as those of settings."""
    rows = rows.assign(software=["wxyz"[number // 2] for number in range(4)])
    for width in (40, 60, 100, 200):
        lines = table_lines(rows, width)
        titles = next(line for line in lines if line.startswith(" ")).split()
        for name in ("machine", "software"):
            count = sum(line.startswith(f"{name} a:") for line in lines)
            assert count == (name in titles)
        assert "machine" in titles or width < 60


def test_rows_that_only_a_missing_column_tells_apart_are_announced(eight_forms):
    lines = table_lines(eight_forms, 60)
    assert "rows that look alike differ in: layers, kv_write" in lines


def test_runs_that_came_with_the_project_are_marked(eight_forms):
    first = eight_forms["run_id"][0]
    lines = table_lines(eight_forms, 200, shipped=[first])
    marked = [line.split()[0] for line in lines if "*" in line.split()[0]]
    assert marked == ["run0*", "*:"]


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_verdicts_speed_and_fidelity_are_never_left_out(eight_forms, width):
    """The help of `workbench log` promises them."""
    lines = table_lines(eight_forms, width)
    titles = next(line for line in lines if line.startswith(" "))
    for title in ("export", "quality", "tok/s", "mean KL"):
        assert title in titles


def test_settings_that_tell_rows_apart_stay_before_other_settings_and_figures(
    eight_forms,
):
    lines = table_lines(eight_forms, 80)
    (left_out,) = [i for i, line in enumerate(lines) if line.startswith("left out")]
    header = next(i for i, line in enumerate(lines) if line.startswith(" "))
    titles = lines[header].split()
    assert {"layers", "kv_write"} <= {*titles}
    assert "layers" not in " ".join(lines[left_out:]).partition(";")[0]
    places = titles.index("layers") + 1, titles.index("kv_write") + 1
    rows = [line.split() for line in lines[header + 1 : left_out]]
    settings = {(row[1], *(row[place] for place in places)) for row in rows}
    assert len(settings) == 8
