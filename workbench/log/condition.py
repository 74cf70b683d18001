"""Conditions on rows that a user writes, such as ``T == 4 and depth > 0``.

pandas evaluates a query with Python's attributes and calls, so that a query can run any
code. A condition is therefore parsed here first, and only comparisons of columns and
values reach pandas."""

import ast
from collections.abc import Collection

import pandas as pd

from workbench.errors import InputError, nearest_names, propose

MAX_LENGTH = 2000
"""Characters of a condition; the parser's memory grows with its depth."""
MAX_LISTED = 12
"""Columns that a refusal lists; a table of more is named by the command that prints it."""
ALL_COLUMNS = "workbench log --json prints all columns, and with --rows those of a run"
_OPERATORS = (
    *(ast.And, ast.Or, ast.Not, ast.USub),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
)
_NODES = (
    *(ast.Expression, ast.BoolOp, ast.UnaryOp, ast.Compare),
    *(ast.Name, ast.Load, ast.Constant, ast.List, ast.Tuple),
    *_OPERATORS,
)
_VALUES = (str, int, float, bool)


def rows_that_fit(rows: pd.DataFrame, condition: str) -> pd.DataFrame:
    """The rows of a table for which a condition over its columns holds.

    Raises:
        InputError: the condition has other parts than columns, values, comparisons,
            ``in``, ``and``, ``or``, ``not`` and parentheses; or it compares what cannot
            be compared.
    """
    check_condition(condition, rows.columns)
    try:
        return rows.query(condition, parser="pandas", engine="python")
    except Exception as error:  # pandas raises many types for an invalid query
        raise _refusal(condition, str(error), rows.columns) from error


def check_condition(condition: str, columns: Collection[str]) -> None:
    """Raises an InputError unless a condition compares columns and values alone."""
    if len(condition) > MAX_LENGTH:
        raise _refusal(condition[:40], f"{len(condition)} characters", columns)
    try:
        tree = ast.parse(condition.strip(), mode="eval")
    # ValueError: a null character; the others: too deep
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", None) or str(error) or "too many parentheses"
        raise _refusal(condition, reason, columns) from None
    for node in ast.walk(tree):
        reason = None
        if not isinstance(node, _NODES):
            reason = f"{_words(node)} is not allowed"
        elif isinstance(node, ast.Name) and node.id not in columns:
            raise _unknown_column(condition, node.id, columns)
        elif isinstance(node, ast.Constant) and not isinstance(node.value, _VALUES):
            reason = f"{node.value!r} is no number, text or truth value"
        if reason:
            raise _refusal(condition, reason, columns)
    if not isinstance(tree.body, ast.BoolOp | ast.Compare | ast.UnaryOp | ast.Name):
        raise _refusal(condition, "no comparison", columns)


def _words(node: ast.AST) -> str:
    """A part of Python that a condition must not have, in a user's words."""
    names = {
        ast.Attribute: "an attribute",
        ast.Call: "a call",
        ast.Subscript: "an index",
        ast.BinOp: "arithmetic (write and, or in place of &, |)",
    }
    return names.get(type(node), type(node).__name__)


def unknown_column_error(
    subject: str, actual: str, name: str, columns: Collection[str]
) -> InputError:
    """The refusal of a name that is no column: the most similar columns, then how to see
    all.

    Args:
        actual: the name, with what is wrong with it.
    """
    step = propose(nearest_names(name, columns), describe_columns(columns))
    return InputError(subject, actual, "the name of a column", step)


def describe_columns(columns: Collection[str]) -> str:
    """The columns of a table in words, or where to read them if they are many."""
    if len(columns) > MAX_LISTED:
        return ALL_COLUMNS
    return f"the columns are {', '.join(columns)}"


def _unknown_column(condition: str, name: str, columns: Collection[str]) -> InputError:
    """The refusal of a condition with a name that is no column."""
    actual = f"{condition!r} ({name} is no column)"
    return unknown_column_error("log filter", actual, name, columns)


def _refusal(condition: str, reason: str, columns: Collection[str]) -> InputError:
    needed = (
        "comparisons (==, !=, <, <=, >, >=, in, not in) of columns with numbers, "
        "'texts', True, False or [lists], joined by and, or, not and parentheses; "
        + describe_columns(columns)
    )
    step = "write for example: T == 4 and compress in ['fp16', 'int8-channel']"
    return InputError("log filter", f"{condition!r} ({reason})", needed, step)
