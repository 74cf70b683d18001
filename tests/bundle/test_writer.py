"""One writer to a folder, nothing replaced, nothing left behind."""

import os

import pytest

from workbench import InputError
from workbench.bundle import Writer


def test_a_second_export_to_the_same_target_is_refused_until_the_first_is_gone(
    tmp_path,
):
    with (
        Writer(tmp_path / "b") as first,
        pytest.raises(InputError, match="another export.*one export to one target"),
        Writer(tmp_path / "b"),
    ):
        pass
    with Writer(tmp_path / "b") as second:
        assert second.root == first.root


def test_a_target_that_is_taken_is_refused_and_left_alone(tmp_path):
    for name, content, found in (
        ("bundle.json", "{}", "a finished bundle"),
        ("notes.txt", "mine", "something else"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text(content)
        with pytest.raises(InputError, match=found), Writer(folder):
            pass
        assert (folder / name).read_text() == content
    assert not list(tmp_path.glob(".*"))


def test_a_link_that_leads_nowhere_is_refused_before_anything_is_made(
    exports, tmp_path
):
    from workbench.export import export

    (tmp_path / "b").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match="something else there"):
        export(
            exports.checkpoint("llama"), tmp_path / "b", progress=False, max_seq_len=16
        )
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize(
    "problem", [InputError("a", "b", "c", "d"), OSError(), KeyboardInterrupt()], ids=str
)
def test_an_export_that_ends_early_leaves_nothing(tmp_path, problem):
    with pytest.raises(type(problem)), Writer(tmp_path / "b") as writer:
        (writer.root / "shard").write_text("done")
        raise problem
    assert not list(tmp_path.iterdir())


def test_what_a_killed_export_has_left_is_removed_first(tmp_path):
    left = tmp_path / ".b.partial"
    (left / "layers.mlpackage").mkdir(parents=True)
    (left / "embedding.safetensors").write_text("half")
    with Writer(tmp_path / "b") as writer:
        assert writer.root == left and not list(left.iterdir())


def test_a_bundle_that_appears_while_another_is_made_is_not_replaced(
    exports, tmp_path, monkeypatch
):
    from workbench.export import export

    real = os.rename

    def rename(a, b):
        os.makedirs(tmp_path / "b")
        (tmp_path / "b" / "bundle.json").write_text("good")
        return real(a, b)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(InputError):
        export(
            exports.checkpoint("llama"), tmp_path / "b", progress=False, max_seq_len=16
        )
    assert (tmp_path / "b" / "bundle.json").read_text() == "good"
