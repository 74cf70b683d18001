"""One writer to a folder, nothing replaced, everything hashed once."""

import os
from concurrent.futures import Future
from contextlib import closing

import pytest

from workbench import InputError
from workbench.bundle import Writer, store


def test_a_second_export_to_the_same_target_is_refused_until_the_first_is_gone(tmp_path):
    with closing(Writer(tmp_path / "b", Future())), pytest.raises(InputError, match="another export.*one export to one target"):
        Writer(tmp_path / "b", Future())
    Writer(tmp_path / "b", Future()).close()


def test_a_target_that_is_taken_is_refused_and_left_alone(tmp_path):
    for name, content, found in (("bundle.json", "{}", "a finished bundle"), ("notes.txt", "mine", "something else")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text(content)
        with pytest.raises(InputError, match=found):
            Writer(folder, Future())
        assert (folder / name).read_text() == content
    assert not list(tmp_path.glob(".*"))


def test_a_bundle_that_appears_while_another_is_made_is_not_replaced(exports, tmp_path, monkeypatch):
    from workbench.export import export

    real = os.rename

    def rename(a, b):
        os.makedirs(tmp_path / "b")
        (tmp_path / "b" / "bundle.json").write_text("good")
        return real(a, b)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(InputError):
        export(exports.checkpoint("llama"), tmp_path / "b", progress=False, max_seq_len=16)
    assert (tmp_path / "b" / "bundle.json").read_text() == "good"


def test_a_new_bundle_is_hashed_as_it_is_made_and_later_changes_are_noticed(exports, tmp_path, monkeypatch):
    from workbench import Bundle
    from workbench.export import export

    made = export(exports.checkpoint("llama", num_hidden_layers=1), tmp_path / "b", progress=False, max_seq_len=16)
    with monkeypatch.context() as patched:
        patched.setattr(store, "sha256", lambda path: pytest.fail(f"{path} is hashed again"))
        Bundle.open(made.root)
    weights = next(made.root.rglob("weight.bin"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(InputError, match="differ"):
        Bundle.open(made.root)
