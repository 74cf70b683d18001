"""One writer to a folder, nothing replaced, everything hashed once."""

import os
from contextlib import closing

import pytest

from workbench import InputError
from workbench.bundle import Writer, bundle


def test_a_second_export_to_the_same_target_is_refused_until_the_first_is_gone(
    tmp_path,
):
    with (
        closing(Writer(tmp_path / "b")),
        pytest.raises(InputError, match="another export.*one export to one target"),
    ):
        Writer(tmp_path / "b")
    Writer(tmp_path / "b").close()


def test_a_target_that_is_taken_is_refused_and_left_alone(tmp_path):
    for name, content, found in (
        ("bundle.json", "{}", "a finished bundle"),
        ("notes.txt", "mine", "something else"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text(content)
        with pytest.raises(InputError, match=found):
            Writer(folder)
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
    ("problem", "kept"),
    [
        (InputError("a", "b", "c", "d"), False),
        (OSError(), True),
        (KeyboardInterrupt(), True),
    ],
)
def test_a_refused_export_leaves_nothing_and_an_interrupted_one_its_work(
    tmp_path, problem, kept
):
    with pytest.raises(type(problem)), Writer(tmp_path / "b") as writer:
        (writer.root / "shard").write_text("done")
        raise problem
    assert (tmp_path / ".b.partial").exists() == kept


def test_a_refusal_keeps_what_an_earlier_export_of_the_same_had_finished(tmp_path):
    left = tmp_path / ".b.partial"
    left.mkdir()
    (left / "identity.json").write_text('{"checkpoint": "a"}')
    with pytest.raises(InputError), Writer(tmp_path / "b") as writer:
        writer.resume({"checkpoint": "a"})
        raise InputError("a", "b", "c", "d")
    assert (left / "identity.json").exists()


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


def test_a_new_bundle_is_hashed_as_it_is_made_and_later_changes_are_noticed(
    exports, tmp_path, monkeypatch
):
    from workbench import Bundle
    from workbench.export import export

    made = export(
        exports.checkpoint("llama", num_hidden_layers=1),
        tmp_path / "b",
        progress=False,
        max_seq_len=16,
    )
    with monkeypatch.context() as patched:
        patched.setattr(
            bundle, "sha256", lambda path: pytest.fail(f"{path} is hashed again")
        )
        Bundle.open(made.root)
    weights = next(made.root.rglob("weight.bin"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(InputError, match="differ"):
        Bundle.open(made.root)
