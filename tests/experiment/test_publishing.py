"""A published run takes its log rows with it, and replaces the shipped one as a whole."""

import os
import shutil

import pytest
from experiment.toy import NAME, example, files_of, run_of
from refusal import refused

from workbench import files, log
from workbench.experiment import last_run, publish_run, publishing


def test_publishing_moves_the_run_and_its_rows_and_removes_unused_ones(project):
    old = example()
    old.conclude("Old.")
    publish_run(old.folder)
    new = example("/models/tiny-llama")
    new.conclude("New, of /home/someone/secret/tiny-llama.")
    shipped = publish_run(new.folder)
    assert shipped == project / "experiments" / NAME
    report = (shipped / "report.md").read_text()
    assert "New" in report and "/home/someone" not in report and "/models" not in report
    assert "--set CHECKPOINT=tiny-llama" in report
    run = run_of(shipped)
    rows = log.load("runs", project / "experiments" / "log" / log.SHIPPED)
    assert rows["run_id"].tolist() == [run["run_id"]]
    names = {path.name for path in shipped.parent.iterdir()}
    assert names == {"log", NAME, "README.md"}
    shutil.rmtree(project / "build")
    assert last_run("7") == shipped
    with refused("a run of your own"):
        publish_run(shipped)


def test_a_run_of_another_checkpoint_is_shipped_beside_the_first(project):
    first = example("/models/tiny-llama")
    first.conclude("First.")
    with refused("no shipped run"):
        publish_run(first.folder, beside=True)
    shipped = publish_run(first.folder)
    with refused("the shipped run is of tiny-llama too"):
        publish_run(first.folder, beside=True)
    second = example("/models/tiny-gemma3")
    second.conclude("Second.")
    both = [shipped, publish_run(second.folder, beside=True)]
    assert [folder.name for folder in both] == [NAME, f"{NAME}-tiny-gemma3"]
    assert [run_of(f)["run_id"] for f in both] == [first.run_id, second.run_id]
    rows = log.load("runs", project / "experiments" / "log" / log.SHIPPED)
    assert {*rows["run_id"]} == {first.run_id, second.run_id}
    page = (shipped.parent / "README.md").read_text()
    assert "First." in page and f"{NAME}-tiny-gemma3/report.md" in page
    shutil.rmtree(project / "build")
    assert last_run("7") == shipped


STEPS = [
    (publishing.shutil, "copytree"),
    (publishing.report, "write_report"),
    (publishing, "_ship_rows"),
    (publishing, "replace_folder"),
    (files, "_exchange"),
    (publishing, "_remove_unused_rows"),
    (publishing.overview, "write_overview"),
]


@pytest.mark.parametrize(
    "module, step", STEPS, ids=lambda part: getattr(part, "__name__", part)
)
def test_an_interrupted_publication_leaves_one_whole_run(
    project, monkeypatch, module, step
):
    old = example()
    old.conclude("Old.")
    shipped = publish_run(old.folder)
    new = example()
    new.conclude("New.")

    def stop(*_, **__):
        raise KeyboardInterrupt

    before = files_of(shipped)
    with monkeypatch.context() as patch:
        patch.setattr(module, step, stop)
        with pytest.raises(KeyboardInterrupt):
            publish_run(new.folder)
    run_ids = {run_of(run)["run_id"] for run in (old.folder, shipped)}
    assert files_of(shipped) == before or run_ids == {new.run_id}
    publish_run(new.folder)
    assert run_of(shipped)["run_id"] == new.run_id
    names = {path.name for path in shipped.parent.iterdir()}
    assert names == {"log", NAME, "README.md"}
    rows = log.load("runs", project / "experiments" / "log" / log.SHIPPED)
    assert rows["run_id"].tolist() == [new.run_id]


def test_a_folder_is_replaced_where_two_names_cannot_be_exchanged(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    target = tmp_path / "run"
    for content in ("old", "new"):
        new = tmp_path / "other"
        new.mkdir()
        (new / "a").write_text(content)
        files.replace_folder(new, target)
    assert (target / "a").read_text() == "new" and os.listdir(tmp_path) == ["run"]
    os.rename(target, tmp_path / ".run.earlier")  # as a killed process leaves it
    files.restore_folder(target)
    assert (target / "a").read_text() == "new" and os.listdir(tmp_path) == ["run"]
