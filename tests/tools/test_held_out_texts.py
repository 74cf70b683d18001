"""The texts that `tools/bits.py` measures on: paragraphs of a page alone, and no file where a
source is missing."""

import held_out_texts
import pytest

PAGE = """<html><body><div class="title">Not this</div>
<div class="para">One  <em>line</em>
of text.<div class="note">A note.</div></div>
<div class="section"><div class="para">Two.</div><div class="para"> </div></div></body></html>"""


def test_the_text_of_a_page_is_that_of_its_paragraphs(tmp_path):
    (tmp_path / "page.html").write_text(PAGE)
    text = held_out_texts.read_paragraphs(tmp_path / "page.html")
    assert text == "One line of text.A note.\n\nTwo."


def test_no_file_is_written_where_a_source_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(held_out_texts, "HANDBOOK", tmp_path / "missing")
    monkeypatch.setattr("sys.argv", ["held_out_texts.py", str(tmp_path / "texts")])
    with pytest.raises(SystemExit) as ended:
        held_out_texts.main()
    assert ended.value.code == 2
    assert "prose: found 0 characters; needs 120000" in capsys.readouterr().err
    assert not (tmp_path / "texts").exists()
