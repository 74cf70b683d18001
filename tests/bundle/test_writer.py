"""A folder has one writer at a time; an export replaces nothing and leaves nothing behind when it
fails."""

import pytest
from refusal import refused

from workbench import InputError
from workbench.bundle import new_bundle


def test_a_second_export_to_the_same_target_is_refused(tmp_path):
    with (
        new_bundle(tmp_path / "b") as folder,
        refused("another export.*one export to one target"),
        new_bundle(tmp_path / "b"),
    ):
        pass
    assert not folder.exists() and (tmp_path / "b").is_dir()


def manifest(target):
    target.mkdir()
    (target / "bundle.json").write_text("{}")


def link(target):
    target.symlink_to(target.with_name("gone"))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (manifest, "a finished bundle"),
        (lambda target: target.mkdir(), "a folder that is no bundle"),
        (link, "a link"),
    ],
)
def test_a_target_that_is_taken_is_refused_and_left_alone(tmp_path, place, message):
    place(tmp_path / "b")
    before = sorted(tmp_path.rglob("*"))
    with refused(message), new_bundle(tmp_path / "b"):
        pass
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "problem", [InputError("a", "b", "c", "d"), OSError(), KeyboardInterrupt()], ids=str
)
def test_an_export_that_ends_early_leaves_nothing(tmp_path, problem):
    with pytest.raises(type(problem)), new_bundle(tmp_path / "b") as folder:
        (folder / "shard").write_text("done")
        raise problem
    assert not list(tmp_path.iterdir())


def test_a_bundle_that_appears_while_another_is_made_is_not_replaced(tmp_path):
    with pytest.raises(OSError), new_bundle(tmp_path / "b"):
        manifest(tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert (tmp_path / "b" / "bundle.json").read_text() == "{}"
