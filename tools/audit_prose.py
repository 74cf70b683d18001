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
TABLE = "table: "
"""Begins an account of a whole table, before the text of its first heading."""
LONGEST_EXCERPT = 90
"""Characters of a line that a finding shows."""

# --- parts of a page that are no prose

FENCED_CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
TABLE_OF_A_TOOL = re.compile(
    r"<!-- (benchmarks|commands) -->.*?<!-- /\1 -->", re.DOTALL
)
# `code`, the target of a [link](target), and <HTML>
INLINE_CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|<[^>]*>")

# --- numbers, and what accounts for them in the text itself

# "94", "1,024", "−14", "2.1e-6"; or superscripts, as in 10⁹
NUMBER = re.compile(r"(?<![\w.])[−-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?|[⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
SOURCE_FILES = (
    r"\.csv|report\.md|RESULTS\.md|faults\.md|data/README\.md|public/README\.md"
)
# a link to a web page or to one of these files, or "rule K10"
CITATION = re.compile(rf"\]\((?:https?:|[^)]*(?:{SOURCE_FILES}))|\brules? [A-Z]\d+")
NAME_PATTERNS = (
    # dtypes and formats: fp16, int8, LUT4, MXFP4
    r"\b(?:fp|float|int|bf|lut|LUT|MXFP)\d+\b",
    # presets: int8-channel
    r"\bint\d+-\w+",
    # settings: T = 4, S ≤ 512
    r"\b[TSWBK] [=≤>] \d+",
    # sizes in a shape that has a letter, between its brackets: [1, C, 1, T]
    r"(?<=\[)[^\]]*\b[TCBS]\b[^\]]*(?=\])",
    # convolutions: 1×1
    r"\b1 ?× ?1\b",
    # layers and positions: layers 3 and 4, position 0, counted from 0
    r"\blayers? \d+(?: and \d+)?\b",
    r"\bposition 0\b|\bfrom 0\b",
    # notebooks: notebook 34, experiments 05, 30 and 31, chapter 2
    r"\b(?:[Nn]otebooks?|[Ee]xperiments?|[Cc]hapter) \d+(?:(?:, | and )\d+)*",
    # notebooks at the start of a line: "05, 30 and 31 end", "| 05, "
    r"^\d\d(?:, \d+)* and \d+(?= end)|^\| \d\d, ",
    # versions: Python 3.11 to 3.13, macOS 15 to 26, iOS 18, coremltools 9.0
    r"\bPython \d[\d.]*(?: to \d[\d.]*)?",
    r"\b(?:macOS|iOS|coremltools) \d[\d.]*(?: to \d+)?",
    # chips: M4, M4 Max, M1 to M5
    r"\bM\d(?: Max)?(?: to M\d)?\b",
    # models and algorithms: SmolLM2-135M, Gemma 3 270M, SHA-256, UTF-8
    r"\b(?:SmolLM2|Qwen2?|Gemma|LFM|Llama|ZAYA1?|Mamba|SHA|UTF)[ -]?\d[\w.-]*(?: \d+M)?",
    r"\bSmolLM2\b",
    # sizes of models: 8B
    r"\b\d+[BM]\b",
    # commits: commit 038f8a64, (the table at 2efa6e1)
    r"\bcommit \S+|\bat \w*\d\w*\b(?=\))",
    # the number of an item of a list; headings
    r"^ *\d+\. |^#+ .*$",
)
"""Numbers that belong to a name. Where several patterns fit at one place, the first one
decides."""
NAME = re.compile("|".join(NAME_PATTERNS))


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


def find_numbers(line: str) -> list[str]:
    """The numbers of a line of prose that belong to no name."""
    without_code = INLINE_CODE.sub(" ", line)
    without_names = NAME.sub(" ", without_code)
    return NUMBER.findall(without_names)


def prose_lines(text: str) -> list[str]:
    """The lines of a page outside code and the tables that tools write."""
    without_tables = TABLE_OF_A_TOOL.sub("", text)
    return FENCED_CODE.sub("", without_tables).splitlines()


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
        page: its path in the project.
        accounts: those of the page.
    """
    findings = []
    used_accounts = set()
    table_key = ""  # that of the table around the line; "" outside tables
    for line in prose_lines(text):
        if not line.startswith("|"):
            table_key = ""
        elif not table_key:
            table_key = key_of_table(line)
        line_accounts = [
            account for account in accounts if is_about(account, line, table_key)
        ]
        used_accounts.update(line_accounts)
        unknown = unknown_numbers(line, line_accounts)
        if unknown:
            needed = "a test, a source or a table"
            findings.append(Finding(page, shorten(line), ", ".join(unknown), needed))
    for account in accounts:
        if account not in used_accounts:
            findings.append(Finding(page, account.text, "not on the page", REGISTER))
    return findings


def key_of_table(header_row: str) -> str:
    """The text of the account of a whole table, from its row of headings."""
    first_heading = header_row.strip("| ").split(" | ")[0]
    return TABLE + first_heading


def is_about(account: Account, line: str, table_key: str) -> bool:
    """Whether an account is of the table that a line is in, or of a piece of the line."""
    return account.text == table_key or account.text in line


def unknown_numbers(line: str, accounts: list[Account]) -> list[str]:
    """The numbers of a line that neither a citation nor an account explains.

    Args:
        accounts: those that are about the line.
    """
    if CITATION.search(line):
        return []
    rest = line
    for account in accounts:
        if account.text.startswith(TABLE):
            return []
        rest = rest.replace(account.text, " ")
    return find_numbers(rest)


def shorten(line: str) -> str:
    """The line, cut to `LONGEST_EXCERPT` characters."""
    return line if len(line) < LONGEST_EXCERPT else f"{line[: LONGEST_EXCERPT - 3]}..."


def check_source(project: Path, account: Account) -> list[Finding]:
    """Checks that the test or the constant of an account exists, and that the constant has the
    value in the account's text."""
    if account.source.startswith("stated: "):
        return []
    if "::" in account.source:
        return check_test(project, account)
    return check_constant(project, account)


def check_test(project: Path, account: Account) -> list[Finding]:
    """Checks that the test FILE::TEST of an account exists."""
    file, _, name = account.source.partition("::")
    path = project / file
    definition = rf"^def {name}\("
    if path.exists() and re.search(definition, path.read_text(), re.MULTILINE):
        return []
    return [Finding(account.page, account.text, account.source, "no such test")]


def check_constant(project: Path, account: Account) -> list[Finding]:
    """Checks that the constant MODULE:NAME of an account exists, and that the account's text
    has its value; a minus sign may be left out."""
    module, _, name = account.source.partition(":")
    path = project / f"{module.replace('.', '/')}.py"
    value = read_constant(path, name)
    if value is None:
        problem = "no such constant"
        return [Finding(account.page, account.text, account.source, problem)]
    printed = []
    for text in NUMBER.findall(account.text):
        printed.append(text.replace(",", "").replace("−", "-"))
    printed_values = {parse_number(text) for text in printed}
    if printed_values.isdisjoint({value, abs(value)}):
        return [Finding(account.page, account.text, ", ".join(printed), f"{value:g}")]
    return []


def read_constant(path: Path, name: str) -> float | None:
    """The number that a module assigns to a name, at its top or in a class; None if it assigns
    none."""
    if not path.exists():
        return None
    for node in ast.walk(ast.parse(path.read_text())):
        if name in assigned_names(node):
            return evaluate(node.value)
    return None


def assigned_names(node: ast.AST) -> list[str]:
    """The names that a statement assigns a value to: a = b = 1, or a: int = 1."""
    targets = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def evaluate(expression: ast.expr | None) -> float | None:
    """The number that an expression such as 2.0**-11 computes without any name; None for
    another expression."""
    try:
        value = eval(ast.unparse(expression), {"__builtins__": {}})
    except Exception:  # the expression may be anything that a module can assign
        return None
    return float(value) if isinstance(value, (int, float)) else None


def parse_number(text: str) -> float:
    """The value of a printed number; NaN for superscripts, which are no value alone."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def main() -> None:
    project = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parents[1]
    findings = check_prose(project)
    for finding in findings:
        # unlike str(finding): few of these findings have a computed number
        place, label = finding.place, finding.label
        print(f"{place}: {label}: {finding.actual}; needs {finding.needed}")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
