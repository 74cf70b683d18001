"""What the log promises its writers and readers: whole files, whole columns, nothing guessed,
nothing lost."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from refusal import refused
from tiny import ROOT

from workbench import log
from workbench.log import cache, parquet

LAYER = {"layer": 0, "layer_ms": 1.5}
WRITER = """
import os, signal, sys
from workbench import log
if len(sys.argv) > 3:
    setattr(os, sys.argv[3], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
rows = [{"layer": i, "layer_ms": i / 2, "n": 64} for i in range(64)]
for _ in range(int(sys.argv[2])):
    log.append("layers", rows, sys.argv[1])
"""


# --- writers


@pytest.mark.usefixtures("forked")
def test_writers_in_several_processes_lose_nothing_and_a_killed_one_adds_no_row(
    tmp_path,
):
    """Two are killed, before their file is on the disk and before it has its name."""
    command = [sys.executable, "-c", WRITER, tmp_path, "20"]
    moments = [], [], ["fsync"], ["replace"]
    writers = [subprocess.Popen([*command, *moment]) for moment in moments]
    ends = [process.wait(60) for process in writers]
    assert ends == [0, 0, -signal.SIGKILL, -signal.SIGKILL]
    assert len(list((tmp_path / "layers").iterdir())) == 42
    rows = log.load("layers", tmp_path).groupby("run_id").size()
    assert len(rows) == 40 and (rows == 64).all()


def test_a_run_is_written_once_and_its_id_stays_inside_its_table(tmp_path):
    path = log.append("layers", LAYER, tmp_path, "once")
    before = path.read_bytes()
    with refused("run once"):
        log.append("layers", {"layer": 9}, tmp_path, "once")
    assert path.read_bytes() == before
    for run_id in ("", "../escape", ".hidden"):
        with refused("run id"):
            log.append("layers", LAYER, tmp_path, run_id)
    assert [*tmp_path.rglob("*.parquet")] == [path]


@pytest.mark.parametrize(
    ("table", "rows", "named"),
    [
        ("speeds", LAYER, "speeds"),
        ("layers", LAYER | {"colour": 1}, "colour"),
        ("layers", [], "no rows"),
        ("layers", {"layer_ms": 1.0}, "no value in column layer"),
        ("layers", {"layer": 1.5}, "1.5"),
        ("layers", [LAYER | {"run_id": "another"}], "another run"),
        ("runs", {"status": "fine"}, "fine"),
        ("runs", {"status": "ok", "config": [1]}, "not a JSON object"),
        ("runs", {"status": "ok", "config": {"x": float("nan")}}, "JSON"),
        ("runs", {"status": "ok", "T": 2**70}, "too large"),
        ("runs", {"status": "ok", "experiment": "\ud800"}, "surrogates"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_anything_is_written(
    tmp_path, table, rows, named
):
    with refused(named):
        log.append(table, rows, tmp_path)
    assert not list(tmp_path.iterdir())


# --- readers


def test_a_run_that_is_added_removed_or_replaced_is_seen_at_once(tmp_path):
    def count() -> int:
        frame = log.load("layers", tmp_path)
        frame["layer"] = 9  # a frame is the caller's own
        return len(frame)

    for i in range(3):
        log.append("layers", [LAYER, LAYER], tmp_path, f"run{i}")
    assert count() == 6
    (tmp_path / "layers" / "run0.parquet").unlink()
    assert count() == 4
    log.append("layers", LAYER, tmp_path, "run0")
    assert count() == 5
    assert set(log.load("layers", tmp_path)["layer"]) == {0}


@pytest.fixture
def files_read(monkeypatch) -> list[str]:
    """The names of the log's files that are read from now on."""
    names, read_file = [], parquet.read_file

    def reads(table, file):
        names.append(Path(file.path).stem)
        return read_file(table, file)

    monkeypatch.setattr(parquet, "read_file", reads)
    return names


def test_a_run_is_read_once_however_often_the_log_grows(tmp_path, files_read):
    for name in ("b", "c"):
        log.append("runs", {"status": "ok"}, tmp_path, name)
        log.load("runs", tmp_path)
    log.append("runs", {"status": "ok"}, tmp_path, "a")
    log.append("runs", {"status": "ok"}, tmp_path / "shipped", "bb")
    assert log.load("runs", tmp_path)["run_id"].tolist() == ["a", "b", "bb", "c"]
    assert sorted(files_read) == ["a", "b", "bb", "c"]


def test_the_next_process_reads_only_the_runs_that_are_new_to_it(
    tmp_path, files_read, monkeypatch
):
    """Whatever happened to the file with the rows of the first one."""
    monkeypatch.setattr(cache, "MIN_UNSAVED", 3)
    row = {"status": "ok", "config": {"key": "value"}, "tokens_per_s": 1.5}
    for name in ("a", "b", "c"):
        log.append("runs", row, tmp_path, name)
    first = log.load("runs", tmp_path)
    for name in ("a", "b"):
        (tmp_path / "runs" / f"{name}.parquet").unlink()
    for name in ("b", "d"):
        log.append("runs", row | {"T": 4}, tmp_path, name)
    files_read.clear()
    cache._caches.clear()
    second = log.load("runs", tmp_path)
    assert sorted(files_read) == ["b", "d"]
    assert log.plain(second)[["run_id", "T"]].values.tolist() == [
        ["b", 4],
        ["c", None],
        ["d", 4],
    ]
    stored = tmp_path / "runs" / cache.FILE_NAME
    for damage in (stored.read_bytes()[:-9], b"", None):
        stored.unlink() if damage is None else stored.write_bytes(damage)
        cache._caches.clear()
        pd.testing.assert_frame_equal(log.load("runs", tmp_path), second)
    assert list(pd.read_parquet(tmp_path / "runs")) == list(first)


def test_runs_that_come_one_at_a_time_are_stored_for_the_next_process(
    tmp_path, files_read, monkeypatch
):
    monkeypatch.setattr(cache, "MIN_UNSAVED", 3)
    for name in ("a", "b", "c", "d"):
        log.append("runs", {"status": "ok"}, tmp_path, name)
        log.load("runs", tmp_path)
    files_read.clear()
    cache._caches.clear()
    assert log.load("runs", tmp_path)["run_id"].tolist() == ["a", "b", "c", "d"]
    assert files_read == ["d"]


def test_a_copy_of_the_folder_keeps_the_rows_of_unchanged_files(
    tmp_path, files_read, monkeypatch
):
    """The times and inodes of a copy are others."""
    monkeypatch.setattr(cache, "MIN_UNSAVED", 3)
    for name in ("a", "b", "c"):
        log.append("runs", {"status": "ok", "T": 1}, tmp_path / "one", name)
    first = log.load("runs", tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two", copy_function=shutil.copyfile)
    files_read.clear()
    cache._caches.clear()
    pd.testing.assert_frame_equal(log.load("runs", tmp_path / "two"), first)
    assert files_read == []
    # the statuses of the copy's files were stored: the next process need not hash them
    cache._caches.clear()
    monkeypatch.setattr(cache.CachedFile, "has_bytes_of", pytest.fail)
    pd.testing.assert_frame_equal(log.load("runs", tmp_path / "two"), first)


def test_a_replaced_file_of_the_same_size_is_read(tmp_path, files_read, monkeypatch):
    monkeypatch.setattr(cache, "MIN_UNSAVED", 3)
    for name in ("a", "b", "c"):
        path = log.append("runs", {"status": "ok", "T": 1}, tmp_path, name)
    log.load("runs", tmp_path)
    size = path.stat().st_size
    path.unlink()
    path = log.append("runs", {"status": "ok", "T": 4}, tmp_path, "c")
    assert path.stat().st_size == size
    files_read.clear()
    cache._caches.clear()
    assert log.load("runs", tmp_path)["T"].tolist() == [1, 1, 4]
    assert files_read == ["c"]


def test_a_file_under_another_run_s_name_is_refused(tmp_path):
    path = log.append("runs", {"status": "ok"}, tmp_path, "a")
    shutil.copy(path, path.with_name("copy.parquet"))
    with refused("copy.parquet.*rows of another run"):
        log.load("runs", tmp_path)


@pytest.mark.parametrize(
    ("version", "columns", "named"),
    [
        (
            b"4",
            ["run_id", "layer"],
            "foreign.parquet.*version 4.*python tools/rewrite_log.py",
        ),
        (b"6", ["run_id", "layer"], "version 6.*update the workbench"),
        (None, ["run_id", "layer"], "foreign.parquet.*version 0"),
        (b"5", ["run_id", "layer", "colour"], "colour"),
        ("torn", [], "foreign.parquet.*a whole Parquet file"),
        ("pages", [], "foreign.parquet.*a whole Parquet file.*move it out"),
    ],
)
def test_a_file_this_code_cannot_read_faithfully_is_refused(
    tmp_path, version, columns, named
):
    path = log.append("layers", LAYER, tmp_path, "foreign")
    whole = path.read_bytes()
    if version == "torn":
        path.write_bytes(whole[:-20])
    elif version == "pages":
        path.write_bytes(whole[:4] + b"\xff" * 20 + whole[24:])
    else:
        table = pa.table({name: ["x"] for name in columns})
        metadata = version and {b"workbench.log.version": version}
        pq.write_table(table.replace_schema_metadata(metadata), path)
    with refused(named):
        log.load("layers", tmp_path)


TIMED = {"fast": True, "runtime": "portable", "checkpoint_hash": "c", "setting": "s"}


@pytest.mark.parametrize(("version", "more"), [(b"3", TIMED), (b"4", {})])
def test_an_old_log_is_read_once_its_command_rewrote_it(tmp_path, version, more):
    run = {"status": "ok", "t_max": 2, "t": "range", "thermal_before": "cool"} | more
    for table, row in {"layers": {"layer": 0}, "runs": run}.items():
        file = pa.Table.from_pylist([row | {"run_id": "a"}])
        file = file.replace_schema_metadata({b"workbench.log.version": version})
        (tmp_path / table).mkdir()
        pq.write_table(file, tmp_path / table / "a.parquet")
    command = [sys.executable, ROOT / "tools/rewrite_log.py", tmp_path]
    subprocess.run(command, check=True)
    assert log.load("layers", tmp_path)["layer"].tolist() == [0]
    (row,) = log.load("runs", tmp_path).to_dict("records")
    assert row["tokens"] == "1-2" and '"thermal_before": "cool"' in row["config"]


CELL = {"tensor": "k", "mode": "isolated"}
EXTREMES = [
    CELL,
    CELL | {"layer": 79, "shard": "", "cosine": float("inf"), "finite": False},
    CELL | {"layer": 0, "shard": "é\x00\n'␀😀", "cosine": -5e-324, "finite": True},
]


@pytest.mark.parametrize("rows", [EXTREMES[:1], EXTREMES])
def test_round_trip_keeps_values_and_nulls(tmp_path, rows):
    log.append("fidelity", rows, tmp_path, "run")
    frame = log.load("fidelity", tmp_path)
    for row, (_, read) in zip(rows, frame.iterrows(), strict=True):
        for name in log.SCHEMAS["fidelity"].names[1:]:
            value = row.get(name)
            assert pd.isna(read[name]) if value is None else read[name] == value, name
    log.append("fidelity", frame, tmp_path / "again", "run")
    pd.testing.assert_frame_equal(log.load("fidelity", tmp_path / "again"), frame)


def test_an_absent_log_is_an_empty_one_with_every_column(tmp_path):
    for table, schema in log.SCHEMAS.items():
        frame = log.load(table, tmp_path)
        assert frame.empty and list(frame) == schema.names


def shipped_files() -> list[Path]:
    return sorted((ROOT / "experiments" / "log" / "shipped").rglob("*.parquet"))


def test_readers_that_take_one_file_s_schema_find_every_column(tmp_path):
    """A notebook's row, which lacks all times, is the first file of the folder."""
    log.append("runs", {"status": "ok"}, tmp_path, "a")
    log.append("runs", {"status": "ok", "tokens_per_s": 5.0, "T": 4}, tmp_path, "b")
    for rows in (
        pd.read_parquet(tmp_path / "runs"),
        pyarrow.dataset.dataset(tmp_path / "runs").to_table().to_pandas(),
    ):
        assert list(rows) == log.SCHEMAS["runs"].names
        assert rows.loc[1, ["tokens_per_s", "T"]].tolist() == [5.0, 4]


def test_every_shipped_file_has_all_columns_of_its_table():
    """Otherwise: python tools/rewrite_log.py"""
    for path in shipped_files():
        schema = pq.read_schema(path)
        assert schema.equals(log.SCHEMAS[path.parent.name]), path
    assert shipped_files()


def test_a_file_that_lacks_columns_gets_them_without_a_changed_value(tmp_path):
    older = pa.table({"run_id": ["a", "a"], "layer": [0, 1], "layer_ms": [0.1, None]})
    older = older.replace_schema_metadata({b"workbench.log.version": b"5"})
    (tmp_path / "layers").mkdir()
    pq.write_table(older, tmp_path / "layers" / "a.parquet")
    before = log.load("layers", tmp_path)
    command = [sys.executable, ROOT / "tools/rewrite_log.py", tmp_path]
    subprocess.run(command, check=True)
    pd.testing.assert_frame_equal(log.load("layers", tmp_path), before)
    rows = pd.read_parquet(tmp_path / "layers")
    assert list(rows) == log.SCHEMAS["layers"].names
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.parquet")}
    subprocess.run(command, check=True)
    assert {path: path.read_bytes() for path in files} == files


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    root = tmp_path_factory.mktemp("log")
    rows = []
    for i in range(3):
        rows += [LAYER | {"layer": i, "T": t, "shard": f"s{i}"} for t in (None, 1, 4)]
    log.append("layers", rows, root)
    return root


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ({}, 9),
        ({"T": np.int64(4), "layer": [0, 2]}, 2),
        ({"T": None}, 3),
        ({"T": (1, None)}, 6),
        ({"shard": "s9"}, 0),
        ({"shard": []}, 0),
        ("T == 4 and layer > 0", 2),
        ("shard == 's1'", 3),
    ],
)
def test_filters_keep_what_they_say(filled, where, rows):
    assert len(log.load("layers", filled, where)) == rows


WRONG = [{"depht": 1}, {"T": "four"}, "depht == 1", "1", "T + 1", "import os"]


@pytest.mark.parametrize("where", WRONG)
def test_filters_that_mean_nothing_are_refused(filled, where):
    with refused("filter"):
        log.load("layers", filled, where)


# --- where it is


def test_the_default_log_is_the_checkouts_from_any_folder_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "experiments" / "log"
    assert log.default_root() == root
    notebooks = tmp_path / "notebooks" / "drafts"
    notebooks.mkdir(parents=True)
    for folder, name in ((tmp_path, "workbench"), (notebooks, "workbench-drafts")):
        (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')
    monkeypatch.chdir(notebooks)
    assert log.append("layers", LAYER).parent == root / "layers"


def test_the_shipped_runs_of_a_log_are_read_beside_its_own_and_never_written(tmp_path):
    shipped = tmp_path / "shipped"
    log.append("layers", LAYER | {"layer": 1}, shipped, "b")
    before = sorted(shipped.rglob("*"))
    log.append("layers", LAYER | {"layer": 2}, tmp_path, "c")
    log.append("layers", LAYER, tmp_path, "a")

    def ids(where=None, root=tmp_path):
        return log.load("layers", root, where)["run_id"].tolist()

    assert ids() == ["a", "b", "c"] and ids(root=shipped) == ["b"]
    assert ids({"run_id": ["c", "b"]}) == ids("layer > 0") == ["b", "c"]
    assert ids({"layer": 1}) == ["b"]
    with refused("written already"):
        log.append("layers", LAYER, tmp_path, "b")
    assert sorted(shipped.rglob("*")) == before
    # a run that is shipped and one's own is read once
    shutil.copy(tmp_path / "layers" / "a.parquet", shipped / "layers")
    assert ids() == ["a", "b", "c"]
