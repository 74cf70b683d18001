"""The tables that `make prove` writes name the commit and every preset that an export can have."""

import cases
import prove
from cases import Case, Record

from workbench.bundle import PRESETS


def record(text: str, red: tuple[str, ...] = ()) -> Record:
    return Record(Case.parse(text), cases.version(), [*red], None, 0.1, [])


def tables(*records: Record) -> str:
    return prove.write_tables({record.case: record for record in records})


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
        if all(prove.fits(case, word) for word in ("clean", "zaya", "fp16"))
    ]
    assert {case.recipe.source for case in chosen} == {"zaya"}
    assert len(chosen) == cases.clean.COUNT / len(cases.clean.FAMILIES)
