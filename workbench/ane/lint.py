"""The rules of the Neural Engine that a program breaks."""

from workbench.ane import rules  # noqa: F401  (its rules join RULES)
from workbench.ane.rule import RULES, Finding, LintGraph


def lint(graph: LintGraph) -> list[Finding]:
    """Every rule that a graph breaks."""
    found = ((r, tuple(dict.fromkeys(x if isinstance(x, str) else x.name for x in r.find(graph)))) for r in RULES.values())
    return [Finding(r, names) for r, names in found if names]
