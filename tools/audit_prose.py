"""Lists numbers in the prose of README.md and docs/*.md that nothing accounts for.

    python tools/audit_prose.py [PROJECT]

A number is accounted for if

- it belongs to a name: a dtype, version, chip, model, notebook or rule, a setting such as T = 4;
- its paragraph, list item or row of a table links to a source, a report or a table of results, or
  names a rule of `data/sources/ane_rules.csv`;
- or `prose_numbers.tsv` has a line for it: the page, a piece of its text, and what accounts for the
  numbers in that piece: a test (FILE::TEST), which computes them; `MODULE:NAME`, a constant whose
  value the piece must have; or `stated: REASON`, for a number that is no result. The piece
  `table: HEADING` stands for a whole table, named by its first heading.

Code and two tables of the README are left out, since tools write them from measurements:
`audit_benchmarks.py` checks that of the benchmarks, tests/tools/test_commands.py that of the
commands."""

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from finding import Finding

REGISTER = "tools/prose_numbers.tsv"
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"<!-- (benchmarks|commands) -->.*?<!-- /\1 -->", re.DOTALL)
SOURCES = r"\.csv|report\.md|RESULTS\.md|faults\.md|data/README\.md|public/README\.md"
CITED = re.compile(rf"\]\((?:https?:|[^)]*(?:{SOURCES}))|\brules? [A-Z]\d+")
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|<[^>]*>")
NUMBER = re.compile(r"(?<![\w.])[−-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?|[⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
NAMES = re.compile(
    "|".join(
        [
            # formats of numbers and tables
            r"\b(?:fp|float|int|bf|lut|LUT|MXFP)\d+\b|\bint\d+-\w+",
            # settings and shapes
            r"\b[TSWBK] [=≤>] \d+|(?<=\[)[^\]]*\b[TCBS]\b[^\]]*(?=\])|\b1 ?× ?1\b",
            r"\blayers? \d+(?: and \d+)?\b|\bposition 0\b|\bfrom 0\b",
            # notebooks and chapters
            r"\b(?:[Nn]otebooks?|[Ee]xperiments?|[Cc]hapter) \d+(?:(?:, | and )\d+)*",
            r"^\d\d(?:, \d+)* and \d+(?= end)|^\| \d\d, ",
            # systems, chips, models and algorithms
            r"\bPython \d[\d.]*(?: to \d[\d.]*)?",
            r"\b(?:macOS|iOS|coremltools) \d[\d.]*(?: to \d+)?|\bM\d(?: Max)?(?: to M\d)?\b",
            r"\b(?:SmolLM2|Qwen2?|Gemma|LFM|Llama|ZAYA1?|Mamba|SHA|UTF)[ -]?\d[\w.-]*(?: \d+M)?",
            r"\bSmolLM2\b|\b\d+[BM]\b",
            # commits ("commit 038f8a64", "table at 2efa6e1)"), the numbers of a list, headings
            r"\bcommit \S+|\bat \w*\d\w*\b(?=\))|^ *\d+\. |^#+ .*$",
        ]
    )
)
TABLE = "table: "
"""Begins an account of a whole table, before the text of its first heading."""


@dataclass(frozen=True)
class Account:
    """A line of the register: the page, a piece of its text, and the source of its
    numbers."""

    page: str
    text: str
    source: str


def read_register(path: Path) -> list[Account]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [Account(*line.split("\t")) for line in lines if line and line[0] != "#"]


def numbers(line: str) -> list[str]:
    """The numbers of a line of prose that belong to no name."""
    return NUMBER.findall(NAMES.sub(" ", CODE.sub(" ", line)))


def prose(text: str) -> list[str]:
    """The lines of a page outside code and the tables that tools write."""
    return FENCE.sub("", BLOCK.sub("", text)).splitlines()


def check_prose(project: Path) -> list[Finding]:
    """Lists every number without an account, and every wrong line of the register."""
    register = read_register(project / REGISTER)
    pages = [project / "README.md", *sorted((project / "docs").glob("*.md"))]
    findings = []
    for path in pages:
        if path.exists():
            page = path.relative_to(project).as_posix()
            accounts = [account for account in register if account.page == page]
            findings += check_page(page, path.read_text(), accounts)
    for account in register:
        findings += check_source(project, account)
    return findings


def check_page(page: str, text: str, accounts: list[Account]) -> list[Finding]:
    """Lists the numbers of a page without an account, and the accounts whose text the page
    lacks.

    Args:
        accounts: those of the page.
    """
    findings, used, heading = [], set(), ""
    for line in prose(text):
        is_row = line.startswith("|")
        if not is_row:
            heading = ""
        elif not heading:
            heading = TABLE + line.strip("| ").split(" | ")[0]
        rest = line
        for account in accounts:
            if is_row and account.text == heading:
                used.add(account)
                rest = ""
            elif account.text in line:
                used.add(account)
                rest = rest.replace(account.text, " ")
        unknown = [] if CITED.search(line) else numbers(rest)
        if unknown:
            excerpt = line if len(line) < 90 else f"{line[:87]}..."
            needed = "a test, a source or a table"
            findings.append(Finding(page, excerpt, ", ".join(unknown), needed))
    for account in accounts:
        if account not in used:
            findings.append(Finding(page, account.text, "not on the page", REGISTER))
    return findings


def check_source(project: Path, account: Account) -> list[Finding]:
    """Checks that the test or the constant of an account exists, and that the constant has the
    value in the account's text."""
    place, label, source = account.page, account.text, account.source
    if source.startswith("stated: "):
        return []
    if "::" in source:
        file, _, name = source.partition("::")
        path = project / file
        definition = rf"^def {name}\("
        if path.exists() and re.search(definition, path.read_text(), re.MULTILINE):
            return []
        return [Finding(place, label, source, "no such test")]
    module, _, name = source.partition(":")
    value = constant(project / f"{module.replace('.', '/')}.py", name)
    if value is None:
        return [Finding(place, label, source, "no such constant")]
    printed = [
        text.replace(",", "").replace("−", "-") for text in NUMBER.findall(account.text)
    ]
    if not {value, abs(value)} & set(map(_number, printed)):
        return [Finding(place, label, ", ".join(printed), f"{value:g}")]
    return []


def constant(path: Path, name: str) -> float | None:
    """The number that a module assigns to a name, at its top or in a class; None if it assigns
    none."""
    if not path.exists():
        return None
    for node in ast.walk(ast.parse(path.read_text())):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(
            isinstance(target, ast.Name) and target.id == name for target in targets
        ):
            try:
                value = eval(ast.unparse(node.value), {"__builtins__": {}})
            except Exception:
                return None
            return float(value) if isinstance(value, (int, float)) else None
    return None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def main() -> None:
    project = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parents[1]
    findings = check_prose(project)
    for finding in findings:
        place, label = finding.place, finding.label
        print(f"{place}: {label}: {finding.published}; needs {finding.computed}")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
