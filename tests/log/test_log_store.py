"""What the log promises its writers and readers: whole files, whole columns, nothing guessed,
nothing lost."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import log
from workbench.errors import InputError
from workbench.log import schema as tables

LAYER = {"layer": 0, "layer_ms": 1.5}

WRITER = """
import sys
from workbench import log
rows = [{"layer": i, "layer_ms": i / 2, "n": 64} for i in range(64)]
for _ in range(int(sys.argv[2])):
    log.append("layers", rows, sys.argv[1])
"""


def writer(root: Path, files: int, before: str = "") -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", before + WRITER, str(root), str(files)]
    )


def finished(root: Path) -> list[Path]:
    return sorted((root / "layers").glob("[!.]*.parquet"))


def leftovers(root: Path) -> list[Path]:
    return [path for path in (root / "layers").iterdir() if path.name.startswith(".")]


# --- writers
# ------------------------------------------------------------------------------------------------


def test_writers_in_several_processes_lose_nothing(tmp_path):
    writers = [writer(tmp_path, 20) for _ in range(3)]
    assert [process.wait(60) for process in writers] == [0, 0, 0]
    frame = log.load("layers", tmp_path)
    assert frame["run_id"].nunique() == 60
    assert (frame.groupby("run_id").size() == 64).all()


def test_a_killed_writer_leaves_only_whole_files(tmp_path):
    for kill in range(1, 4):
        process, before = writer(tmp_path, 10**6), len(finished(tmp_path))
        while len(finished(tmp_path)) < before + 5:
            assert process.poll() is None
            time.sleep(0.001 * kill)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        frame = log.load("layers", tmp_path)
        assert frame["run_id"].nunique() == len(finished(tmp_path))
        assert (frame.groupby("run_id").size() == 64).all()


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_writer_killed_before_the_rename_adds_no_row(tmp_path, moment):
    log.append("layers", LAYER, tmp_path, "old")
    suicide = f"import os, signal\nos.{moment} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    assert writer(tmp_path, 1, before=suicide).wait(60) == -signal.SIGKILL
    assert leftovers(tmp_path)
    assert list(log.load("layers", tmp_path)["run_id"]) == ["old"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_keeps_the_old_files_and_leaves_no_new_one(
    tmp_path, monkeypatch, failing
):
    old = log.append("layers", LAYER, tmp_path).read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space left"):
        log.append("layers", LAYER, tmp_path)
    assert [path.read_bytes() for path in (tmp_path / "layers").iterdir()] == [old]


def test_a_run_is_written_once(tmp_path):
    path = log.append("layers", LAYER, tmp_path, "once")
    before = path.read_bytes()
    with pytest.raises(InputError, match="run once"):
        log.append("layers", {"layer": 9}, tmp_path, "once")
    assert path.read_bytes() == before


@pytest.mark.parametrize("run_id", ["", "../escape", ".hidden", "a/b", "a.b", 5])
def test_a_run_id_stays_inside_its_table(tmp_path, run_id):
    with pytest.raises(InputError, match="run id"):
        log.append("layers", LAYER, tmp_path, run_id)
    assert not list(tmp_path.rglob("*.parquet"))


def test_run_ids_are_unique_and_sort_by_time():
    first = [log.new_run_id() for _ in range(200)]
    assert len(set(first)) == 200
    assert [run_id[:16] for run_id in first] == sorted(run_id[:16] for run_id in first)


# --- what is loaded is kept, and never stale
# ----------------------------------------------------------------------------------------


def test_a_run_that_is_added_removed_or_replaced_is_seen_at_once(tmp_path):
    for i in range(3):
        log.append("layers", [LAYER, LAYER], tmp_path, f"run{i}")
    assert len(log.load("layers", tmp_path)) == 6
    log.append("layers", LAYER, tmp_path, "early")
    assert log.load("layers", tmp_path)["run_id"].tolist()[0] == "early"
    (tmp_path / "layers" / "run0.parquet").unlink()
    assert len(log.load("layers", tmp_path)) == 5
    log.append("layers", LAYER, tmp_path, "run0")
    assert len(log.load("layers", tmp_path)) == 6
    frame = log.load("layers", tmp_path)
    frame["layer"] = 9  # a frame is the caller's own
    assert set(log.load("layers", tmp_path)["layer"]) == {0}


def test_logs_of_two_machines_merge_by_copying(tmp_path):
    for machine in ("one", "two"):
        row = {"status": "ok", "machine": machine}
        log.append("runs", row, tmp_path / machine, f"run-{machine}")
    shutil.copytree(tmp_path / "one", tmp_path / "two", dirs_exist_ok=True)
    assert log.load("runs", tmp_path / "two")["machine"].tolist() == ["one", "two"]


# --- what is refused
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "rows", "named"),
    [
        ("speeds", LAYER, "speeds"),
        ("layers", LAYER | {"colour": 1}, "colour"),
        ("layers", [], "no rows"),
        ("layers", {"layer_ms": 1.0}, "layer"),
        ("layers", {"layer": 1.5}, "1.5"),
        ("layers", {"layer": "first"}, "first"),
        ("layers", [LAYER | {"run_id": "another"}], "another run"),
        ("runs", {"status": "fine"}, "fine"),
        ("runs", {"experiment": "30"}, "status"),
        ("runs", {"status": "ok", "placement_source": "guessed"}, "guessed"),
        ("runs", {"status": "ok", "checkpoint": 3}, "checkpoint"),
        ("runs", {"status": "ok", "config": [1]}, "not a JSON object"),
        ("runs", {"status": "ok", "config": "{"}, "config"),
        ("runs", {"status": "ok", "config": {"x": float("nan")}}, "config"),
        ("runs", {"status": "ok", "config": '{"x": NaN}'}, "NaN is not JSON"),
        ("runs", {"status": "ok", "T": 2**70}, "T: found"),
        ("runs", {"status": "ok", "experiment": "\ud800"}, "surrogates"),
        ("fidelity", {"tensor": "q", "mode": "isolated"}, "q"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_anything_is_written(
    tmp_path, table, rows, named
):
    with pytest.raises(InputError, match=named):
        log.append(table, rows, tmp_path)
    assert not list(tmp_path.iterdir())


def store(root: Path, table: pa.Table) -> None:
    (root / "layers").mkdir(parents=True, exist_ok=True)
    pq.write_table(table, root / "layers" / "foreign.parquet")


@pytest.mark.parametrize(
    ("version", "columns", "named"),
    [
        (b"4", ["run_id", "layer"], "version 4.*python tools/rewrite_log.py"),
        (b"6", ["run_id", "layer"], "version 6.*update the workbench"),
        (None, ["run_id", "layer"], "version none"),
        (b"5", ["run_id", "layer", "colour"], "colour"),
    ],
)
def test_a_file_this_code_cannot_read_faithfully_is_refused(
    tmp_path, version, columns, named
):
    table = pa.table({name: ["x"] for name in columns})
    store(
        tmp_path,
        table.replace_schema_metadata(version and {b"workbench.log.version": version}),
    )
    with pytest.raises(InputError, match=f"foreign.parquet.*{named}"):
        log.load("layers", tmp_path)


def test_a_torn_file_is_named_not_skipped(tmp_path):
    path = log.append("layers", LAYER, tmp_path, "torn")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="torn.parquet"):
        log.load("layers", tmp_path)


# --- what is read
# ------------------------------------------------------------------------------------------------


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {"tensor": st.sampled_from(["k", "update"]), "mode": st.just("isolated")},
            optional={
                "layer": st.none() | st.integers(0, 79),
                "shard": st.none() | st.text(st.characters(exclude_categories=["Cs"])),
                "cosine": st.none() | st.floats(allow_nan=False),
                "finite": st.none() | st.booleans(),
            },
        ),
        min_size=1,
        max_size=8,
    )
)
def test_round_trip_keeps_values_and_nulls(tmp_path_factory, rows):
    frame = log.load(
        "fidelity",
        log.append("fidelity", rows, tmp_path_factory.mktemp("log")).parents[1],
    )
    for row, (_, read) in zip(rows, frame.iterrows(), strict=True):
        for name in tables.SCHEMAS["fidelity"].names[1:]:
            value = row.get(name)
            assert pd.isna(read[name]) if value is None else read[name] == value, name


def test_a_loaded_frame_can_be_appended_again(tmp_path):
    rows = [
        {"layer": 1, "T": None, "layer_ms": np.float32(0.5)},
        {"layer": np.int64(2), "layer_ms": np.nan, "n": 3},
    ]
    first = log.load(
        "layers", log.append("layers", rows, tmp_path / "a", "run").parents[1]
    )
    second = log.load(
        "layers", log.append("layers", first, tmp_path / "b", "run").parents[1]
    )
    pd.testing.assert_frame_equal(first, second)


def test_nan_is_stored_as_not_measured(tmp_path):
    path = log.append(
        "layers",
        [{"layer": 1, "layer_ms": np.nan}, {"layer": 2, "layer_ms": np.inf}],
        tmp_path,
    )
    assert pq.read_table(path)["layer_ms"].to_pylist() == [None, np.inf]


@pytest.mark.parametrize("table", tables.SCHEMAS)
def test_an_absent_log_is_an_empty_one_with_every_column(tmp_path, table):
    frame = log.load(table, tmp_path)
    assert frame.empty and list(frame) == tables.SCHEMAS[table].names


def test_a_column_that_the_first_file_lacks_is_not_dropped(tmp_path):
    log.append("layers", LAYER, tmp_path, "a")  # which writes no column without a value
    log.append("layers", LAYER | {"n": 7, "T": 4}, tmp_path, "b")
    assert "n" not in pd.read_parquet(tmp_path / "layers"), (
        "the trap is gone: the explicit schema may be too"
    )
    frame = log.load("layers", tmp_path).set_index("run_id")
    assert frame.loc["b", ["n", "T"]].tolist() == [7, 4]
    assert frame.loc["a", ["n", "T"]].isna().all()


def test_other_readers_see_the_same_rows_through_the_published_schema(tmp_path):
    for _ in range(3):
        log.append("layers", LAYER, tmp_path)
    other = ds.dataset(
        tmp_path / "layers", schema=log.SCHEMAS["layers"], format="parquet"
    ).to_table()
    assert other.num_rows == len(log.load("layers", tmp_path)) == 3
    assert other["layer_ms"].to_pylist() == [1.5] * 3


def test_text_columns_are_pandas_strings_even_when_all_null(tmp_path):
    frame = log.load("layers", log.append("layers", LAYER, tmp_path).parents[1])
    assert isinstance(frame["shard"].dtype, pd.StringDtype) and isinstance(
        frame["run_id"].dtype, pd.StringDtype
    )
    assert (frame["layer"].dtype, frame["T"].dtype, frame["layer_ms"].dtype) == (
        "Int64",
        "Int64",
        "float64",
    )


def test_json_columns_take_objects_or_text(tmp_path):
    log.append(
        "runs", {"status": "ok", "config": {"b": [1], "a": None}}, tmp_path, "object"
    )
    log.append("runs", {"status": "ok", "config": '{"a": 1}'}, tmp_path, "text")
    assert list(log.load("runs", tmp_path)["config"]) == [
        '{"a": null, "b": [1]}',
        '{"a": 1}',
    ]


# --- filters
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    root = tmp_path_factory.mktemp("log")
    rows = [
        {"layer": i, "T": t, "shard": f"s{i}", "layer_ms": i}
        for i in range(3)
        for t in (None, 1, 4)
    ]
    log.append("layers", rows, root)
    return root


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        (None, 9),
        ({}, 9),
        ({"T": 4}, 3),
        ({"T": np.int64(4), "layer": [0, 2]}, 2),
        ({"T": None}, 3),
        ({"T": (1, None)}, 6),
        ({"shard": "s1"}, 3),
        ({"shard": "s9"}, 0),
        ("T == 4 and layer_ms > 0", 2),
        ("shard == 's1'", 3),
    ],
)
def test_filters_keep_what_they_say(grid, where, rows):
    assert len(log.load("layers", grid, where)) == rows


@pytest.mark.parametrize(
    "where",
    [
        {"depht": 1},
        {"T": "four"},
        {"shard": 1},
        "depht == 1",
        "T ==",
        "T + 1",
        "shard > 3",
        "import os",
        "T.foo",
        5,
    ],
)
def test_filters_that_mean_nothing_are_refused(grid, where):
    with pytest.raises(InputError, match="filter"):
        log.load("layers", grid, where)


# --- where it is
# ------------------------------------------------------------------------------------------------


def test_the_default_log_is_the_checkouts_from_any_folder_in_it(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "workbench"\n')
    notebooks = tmp_path / "notebooks" / "drafts"
    notebooks.mkdir(parents=True)
    (notebooks / "pyproject.toml").write_text('[project]\nname = "workbench-drafts"\n')
    monkeypatch.chdir(notebooks)
    assert (
        log.append("layers", LAYER).parent
        == tmp_path / "experiments" / "log" / "layers"
    )
    assert len(log.load("layers")) == 1


def test_outside_a_checkout_the_log_is_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert log.default_root() == tmp_path / "experiments" / "log"


# --- shipped runs
# ------------------------------------------------------------------------------------------------


def test_the_shipped_runs_of_a_log_are_read_beside_its_own_and_never_written(tmp_path):
    log.append("layers", LAYER | {"layer": 1}, tmp_path / "shipped", "b")
    before = sorted((tmp_path / "shipped").rglob("*"))
    log.append("layers", LAYER | {"layer": 2}, tmp_path, "c")
    log.append("layers", LAYER, tmp_path, "a")
    assert log.load("layers", tmp_path)["run_id"].tolist() == ["a", "b", "c"]
    assert log.load("layers", tmp_path, {"run_id": ["b", "c"]})["layer"].tolist() == [
        1,
        2,
    ]
    assert log.load("layers", tmp_path, {"layer": 1})["run_id"].tolist() == ["b"]
    assert log.load("layers", tmp_path, "layer > 0")["run_id"].tolist() == ["b", "c"]
    assert log.load("layers", tmp_path / "shipped")["run_id"].tolist() == ["b"]
    assert sorted((tmp_path / "shipped").rglob("*")) == before
    with pytest.raises(InputError, match="written already"):
        log.append("layers", LAYER, tmp_path, "b")


def test_a_run_that_is_shipped_and_ones_own_is_read_once(tmp_path):
    for root in (tmp_path, tmp_path / "shipped"):
        log.append("layers", [LAYER, LAYER | {"layer": 1}], root, "a")
    log.append("layers", LAYER, tmp_path / "shipped", "b")
    assert log.load("layers", tmp_path)["run_id"].tolist() == ["a", "a", "b"]
    assert log.load("layers", tmp_path, {"run_id": "a"})["layer"].tolist() == [0, 1]


def test_the_shipped_log_belongs_to_the_project_that_ships_it(tmp_path):
    root = tmp_path / "experiments" / "log"
    assert log.project(root / "shipped") == log.project(root) == tmp_path
