"""The audit lists numbers in the prose that nothing accounts for."""

import pytest
from audit_prose import check_prose, find_numbers
from tiny import ROOT

PAGE = """# 3 ways

Run `head -n 20` with Python 3.12 on an M4 Max at T = 4, as notebook 34 does.

```
seconds 12
```

A cost of 0.07 is [measured](report.md) elsewhere.

A limit of 6 holds.

| preset | KL |
|---|---|
| fp16 | 0.004 |
"""
REGISTER = """# page\ttext\tsource
README.md\tA limit of 6\tlimits:FACTOR
README.md\ttable: preset\ttests/test_kl.py::test_kl
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "limits.py").write_text("FACTOR: float = 6.0\n")
    for folder in ("tools", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tools/prose_numbers.tsv").write_text(REGISTER)
    (tmp_path / "tests/test_kl.py").write_text("def test_kl():\n    pass\n")
    return tmp_path


def test_names_settings_code_citations_and_accounts_are_no_findings(project):
    assert check_prose(project) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("README.md", "# 3 ways", "It is 3.5 times as fast.", "3.5"),
        ("README.md", "A limit of 6 holds.", "A limit of 6 holds, 7 at most.", "7"),
        ("README.md", "A limit of 6", "A bound of 6", "not on the page"),
        ("README.md", "(report.md)", "(other.md)", "0.07"),
        ("README.md", "| preset |", "| model |", "0.004"),
        ("limits.py", "6.0", "8.0", "6"),
        ("tests/test_kl.py", "test_kl", "test_other", "tests/test_kl.py::test_kl"),
    ],
)
def test_a_number_without_its_account_is_named(project, file, old, new, named):
    path = project / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    printed = [finding[2] for finding in check_prose(project)]
    assert named in printed


def test_numbers_are_those_that_belong_to_no_name():
    line = "SmolLM2-135M has int8-channel at 94% of 1,024 tokens, 2.1e-6 and −14 in layer 3"
    assert find_numbers(line) == ["94", "1,024", "2.1e-6", "−14"]


def test_every_number_of_the_pages_is_accounted_for():
    assert check_prose(ROOT) == []
