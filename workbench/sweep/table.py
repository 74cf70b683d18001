"""The table that `workbench log` prints: rows of `summary` as lines as wide as the
terminal."""

import itertools
import shutil
import string
import textwrap
from collections.abc import Collection, Iterator

import pandas as pd

from workbench import log

WIDTH = 100
"""Columns of the table where the output is no terminal."""
MAX_CELL = 14
"""Characters of a cell of the table; longer texts are cut."""
FIRST_SETTINGS = 4
"""The number of varied settings that a narrow terminal shows before other figures,
beside those that tell the rows apart."""
FIRST_FIGURES = ("verdict", "quality", "tokens_per_s", "kl_mean")
"""Figures that a narrow terminal shows before every setting: they are what the table is
read for."""
ORIGINS = ("command", "experiment")
"""Columns of a run that say what asked for it."""
LETTERED = ("machine", "software")
"""Settings whose values are too long for a cell; the table has letters for them."""
FIGURES = {
    "verdict": "export",
    "quality": "quality",
    "n": "n",
    "tokens_per_s": "tok/s",
    "slowest": "slowest",
    "fastest": "fastest",
    "call_ms": "ms/call",
    "disturbed": "disturbed",
    "ane_ops_share": "ANE",
    "kl_mean": "mean KL",
    "kl_p99": "99% KL",
}
"""Columns of `summary` that are printed as figures, and their titles."""
MEANINGS = {
    "max_seq_len": "S: max_seq_len",
    "layers_per_shard": "layers: in a shard",
    "n": "n: processes that were measured",
    "disturbed": "disturbed: processes that other work on the machine slowed",
    "ane_ops_share": "ANE: share of the operations on the Neural Engine",
    "kl_mean": "mean KL: from Hugging Face's model, in nats",
    "kl_p99": "99% KL: the quantile, in nats",
}
"""What stands below the table for columns whose titles do not say it."""
TITLES = FIGURES | {"layers_per_shard": "layers", "max_seq_len": "S"}
"""Titles of columns that are not their names. They are short, so that the settings which
tell rows apart fit beside the figures into `WIDTH`."""
MARK = "*"
"""Stands behind the id of a run that came with the project."""


def table_lines(
    rows: pd.DataFrame, width: int | None = None, shipped: Collection[str] = ()
) -> list[str]:
    """Rows of `summary` as lines: first what is equal in all of them, then a table,
    then what the table leaves out. The table's first column is the short id by which
    every command knows a run.

    Machines and software have a letter in the table and their name above it.

    Args:
        width: columns of the terminal; default: those of this one, or `WIDTH`.
        shipped: ids of the runs that came with the project, which are marked.
    """
    if rows.empty:
        return []
    width = width or shutil.get_terminal_size((WIDTH, 0)).columns
    marks = [MARK if run_id in shipped else "" for run_id in rows["run_id"]]
    rows = _printed_rows(rows)
    varied = [name for name in log.SETTINGS if rows[name].nunique(dropna=False) > 1]
    common, figures = _split_figures(rows, varied)
    rows, legends = _with_letters(rows, [name for name in LETTERED if name in varied])
    telling = _telling_settings(rows, varied)
    leading = list(dict.fromkeys([*telling, *varied[:FIRST_SETTINGS]]))
    columns = _display_order(varied, leading, figures)
    cells = {name: _cells(name, rows[name]) for name in columns}
    ids = ["", *(f"{run}{mark}" for run, mark in zip(rows.index, marks))]
    free_width = width - max(map(len, ids))
    priority = _priority(leading, figures, columns)
    fitting = _choose_columns(cells, priority, free_width)
    printed = [cells[name] for name in columns if name in fitting]
    left_out = [name for name in columns if name not in fitting]
    notes = _notes(rows, left_out, width)
    if alike := [_title(name) for name in telling if name in left_out]:
        notes.insert(0, f"rows that look alike differ in: {', '.join(alike)}")
    if any(marks):
        notes.append(f"{MARK}: came with the project")
    legend = [line for name in legends if name in fitting for line in legends[name]]
    common_words = "; ".join(
        f"{name} {_cell_text(value)}" for name, value in common.items()
    )
    return [
        *_wrap([common_words, *legend], width),
        *_align([ids, *printed]),
        *_wrap([*notes, _explain(fitting)], width),
    ]


def _cells(name: str, values: pd.Series) -> list[str]:
    """A column of the table as texts, its title first."""
    return [_cut(_title(name)), *(_cut(_cell_text(value)) for value in values)]


def _printed_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows under their short ids. A run that failed or is invalid has this word in
    place of a verdict."""
    rows = rows.set_axis(rows["run_id"].str.split("-").str[-1])
    rows["verdict"] = rows["verdict"].fillna(rows["status"].replace("ok", None))
    # a single process is neither the slowest nor the fastest
    rows.loc[rows["n"] == 1, ["slowest", "fastest"]] = None
    return rows


def _with_letters(
    rows: pd.DataFrame, names: list[str]
) -> tuple[pd.DataFrame, dict[str, list[str]]]:
    """The rows with a letter for each value of these columns, and for each column a line
    for each letter, which says what it stands for."""
    legends = {}
    for name in names:
        letters = dict(zip(rows[name].dropna().unique(), _letters()))
        rows = rows.assign(**{name: rows[name].map(letters)})
        legends[name] = [
            f"{name} {letter}: {value}" for value, letter in letters.items()
        ]
    return rows, legends


def _telling_settings(rows: pd.DataFrame, varied: list[str]) -> list[str]:
    """The settings that tell the rows apart, which a narrow terminal shows right after
    `FIRST_FIGURES`: without them, two settings with different figures would read the
    same. The machine is always among them, because times of two machines are no
    comparison of settings.

    Args:
        varied: the settings that differ between rows.
    """
    # what asked for a run sets nothing, and its text is long
    telling = [name for name in varied if name not in ORIGINS]
    # the last settings go first, because rows are mostly told apart by the first ones
    for name in reversed(varied):
        others = [other for other in telling if other != name]
        if others and _count_distinct(rows[others]) == _count_distinct(rows[telling]):
            telling = others
    machine = ["machine"] if "machine" in varied else []
    return list(dict.fromkeys([*machine, *telling]))


def _count_distinct(settings: pd.DataFrame) -> int:
    """The number of rows that differ from each other."""
    return len(settings.drop_duplicates())


def _display_order(
    varied: list[str], leading: list[str], figures: list[str]
) -> list[str]:
    """The columns from left to right: machines and the leading settings, then figures,
    then other settings.

    Args:
        varied: the settings that differ between rows.
        leading: those that stand left of the figures.
        figures: the figures that have a column.
    """
    left = [name for name in varied if name in LETTERED or name in leading]
    return [*left, *figures, *(name for name in varied if name not in left)]


def _priority(leading: list[str], figures: list[str], columns: list[str]) -> list[str]:
    """The columns in the order in which a narrow terminal makes room for them."""
    names = [*FIRST_FIGURES, *leading, "n", *LETTERED, *figures, *columns]
    return list(dict.fromkeys(name for name in names if name in columns))


def _title(name: str) -> str:
    return TITLES.get(name, name)


def _explain(columns: Collection[str]) -> str:
    """The meanings of those columns whose titles do not say them, as one line."""
    return "; ".join(text for name, text in MEANINGS.items() if name in columns)


def _notes(rows: pd.DataFrame, left_out: list[str], width: int) -> list[str]:
    """What stands below the table: the reasons of failed and invalid runs, and the titles
    of the columns `left_out`, which did not fit."""
    notes = [f"{run}: {reason}" for run, reason in rows["reason"].dropna().items()]
    if disturbed := int(rows["disturbed"].fillna(0).sum()):
        notes.append(
            f"Other work on the machine disturbed {disturbed} "
            f"process{'' if disturbed == 1 else 'es'}: their times vary more. A row "
            "leaves such processes out where it has others; measure again on a quiet "
            "machine before you compare times"
        )
    if left_out:
        notes.append(
            f"left out, since the line has {width} columns: "
            f"{', '.join(map(_title, left_out))}; "
            "`workbench log --rows` prints every column, --json all of them as JSON"
        )
    return notes


def _split_figures(rows: pd.DataFrame, varied: list[str]) -> tuple[dict, list[str]]:
    """Divides settings and figures by whether they are equal in all rows. Returns the equal
    ones by their titles, which are printed once above the table, and the names of the
    figures that have a column.

    Args:
        varied: the settings that differ between rows.
    """
    common = rows[log.SETTINGS].iloc[0].drop(varied).dropna().to_dict()
    figures = [name for name in FIGURES if rows[name].notna().any()]
    # in a single row, every figure would be equal
    if len(rows) == 1:
        return common, figures
    equal = [name for name in figures if rows[name].nunique(dropna=False) == 1]
    common |= {FIGURES[name]: rows[name].iloc[0] for name in equal}
    if common.get("disturbed") == 0:
        del common["disturbed"]
    return common, [name for name in figures if name not in equal]


def _choose_columns(
    cells: dict[str, list[str]], priority: list[str], width: int
) -> set[str]:
    """The names of the columns that fit into `width` characters, where those that come
    first in `priority` take precedence."""
    names = set()
    for name in priority:
        needed = 2 + max(map(len, cells[name]))  # two spaces before it
        if needed <= width:
            names.add(name)
            width -= needed
    return names


def _align(columns: list[list[str]]) -> Iterator[str]:
    """The lines of a table, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in columns]
    for cells in zip(*columns):
        yield "  ".join(cell.rjust(w) for cell, w in zip(cells, widths)).rstrip()


def _wrap(texts: list[str], width: int) -> Iterator[str]:
    for text in texts:
        yield from textwrap.wrap(text, width)


def _cell_text(value: object) -> str:
    """A cell of the table; – where nothing was measured."""
    if pd.isna(value):
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CELL else text[: MAX_CELL - 1] + "…"


def _letters() -> Iterator[str]:
    """a, b, … z, aa, ab, …"""
    for count in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=count):
            yield "".join(letters)
