"""Changes of code that tests must notice: each is one expression, and the rest stays."""

import importlib.util
from pathlib import Path

PATH = Path(__file__).parents[2] / "tools" / "mutate.py"
SPEC = importlib.util.spec_from_file_location("mutate", PATH)
mutate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(mutate)


def test_every_kind_of_expression_is_changed_and_nothing_else():
    source = "def f(x):\n    if not x and x < 3:\n        return x + 0.5, True, 'é'\n"
    found = list(mutate.changes(source))
    pairs = {(before, after) for _, before, after, _ in found}
    assert pairs == {
        *(("not x and x < 3", "not x or x < 3"), ("not x", "x"), ("x < 3", "x >= 3")),
        *(("3", "4"), ("x + 0.5", "x - 0.5"), ("0.5", "1.0"), ("True", "False")),
    }
    for line, before, after, whole in found:
        assert source.splitlines()[line - 1].count(before) == 1
        assert len(whole) - len(source) == len(f"({after})") - len(before)


def test_the_tests_of_a_module_mirror_it():
    sweep = Path("workbench/sweep")
    own, room = Path("tests/sweep/test_cell.py"), Path("tests/sweep")
    assert mutate.mirrored(sweep / "cell.py") == [own, room]
    assert mutate.mirrored(sweep / "hardly.py") == [room]
