"""The tables that `make prove` writes name the commit and every preset that an export can have."""

import cases
import prove
import pytest
from cases import Case, Record

from workbench.bundle import PRESETS


def record(text: str, red: tuple[str, ...] = ()) -> Record:
    return Record(Case.parse(text), cases.version(), [*red], None, 0.1, [])


def tables(*records: Record) -> str:
    return prove.format_tables({record.case: record for record in records})


def test_the_columns_of_sound_bundles_are_the_presets():
    (head,) = [
        line
        for line in tables(record("trained/tiny-llama/fp16")).splitlines()
        if line.startswith("| RED on sound bundles")
    ]
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    assert columns[1:] == sorted(PRESETS)


def test_a_red_sound_bundle_counts_under_its_preset():
    text = tables(
        record("trained/tiny-llama/fp16"),
        record("trained/tiny-zaya/fp16", red=("program",)),
    )
    (row,) = [line for line in text.splitlines() if "trained checkpoints" in line]
    assert "1 of 2" in row and row.count("of") == 1


def test_the_tables_name_the_commit(monkeypatch):
    answers = {"rev-parse": "1234abcd\n", "status": ""}

    def run(command, **options):
        words = [word for word in answers if word in command]
        return type("Result", (), {"stdout": answers[words[0]]})

    monkeypatch.setattr(prove.subprocess, "run", run)
    assert "of commit 1234abcd.\n" in tables(record("trained/tiny-llama/fp16"))
    answers["status"] = " M docs/guide.md\n M workbench/check/gates.py\n"
    assert "commit 1234abcd, with uncommitted changes." in tables()
    answers["rev-parse"] = ""
    assert "a checkout without a history" in tables()


def test_the_name_of_a_family_finds_its_random_draws():
    chosen = [
        case
        for case in cases.sound_cases()
        if all(prove.matches(case, word) for word in ("clean", "zaya", "fp16"))
    ]
    assert {case.recipe.source for case in chosen} == {"zaya"}
    assert len(chosen) == cases.clean.COUNT / len(cases.clean.FAMILIES)


@pytest.fixture
def tables_file(tmp_path, monkeypatch):
    """The file of the tables, which exists; no case runs, and none has run before."""
    file = tmp_path / "faults.md"
    file.write_text("tables of a whole run")
    monkeypatch.setattr(prove, "TABLES", file)
    monkeypatch.setattr(prove, "STORE", tmp_path / "cases.jsonl")
    monkeypatch.setattr(prove, "run_cases", lambda chosen, jobs: None)
    return file


def run_main(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(prove.sys, "argv", ["prove", *words])
    return prove.main()


def test_words_that_no_case_has_are_an_error(tables_file, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit_:
        run_main(monkeypatch, "at_T_above_1")
    assert exit_.value.code == 2
    assert "at_T_above_1" in capsys.readouterr().err
    assert tables_file.read_text() == "tables of a whole run"


def test_only_a_run_of_every_case_writes_the_tables(tables_file, monkeypatch):
    assert run_main(monkeypatch, "at_t_above_1", "fp16") == 1  # nothing ran
    assert tables_file.read_text() == "tables of a whole run"
    run_main(monkeypatch)
    assert tables_file.read_text().startswith("# Planted faults")
