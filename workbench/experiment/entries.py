"""The entries of a running notebook, in the order of its cells, and the rules by which a
cell that runs again replaces what it gave before."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from IPython import get_ipython

from workbench.check.gates import Gate

GATE = "gate"


@dataclass(frozen=True)
class CellExecution:
    """An execution of a cell of the notebook; both are None where code runs outside of
    cells, or where the front end names no cell."""

    id: str | None = None
    """The cell's id, the same whenever the cell runs."""
    message_id: str | None = None
    """The id of the message by which the front end asked for this execution."""

    def is_same(self, other: "CellExecution") -> bool:
        """Whether both are one execution of one cell."""
        return self.id is not None and self == other

    def repeats(self, earlier: "CellExecution") -> bool:
        """Whether the cell of `earlier` runs again."""
        is_same_cell = self.id is not None and self.id == earlier.id
        return is_same_cell and self.message_id != earlier.message_id


def current_cell() -> CellExecution:
    """The cell that the kernel executes; JupyterLab sends its id with every
    execution."""
    kernel = getattr(get_ipython(), "kernel", None)
    message = kernel.get_parent("shell") if kernel else {}
    header = message.get("header", {})
    cell_id = message.get("metadata", {}).get("cellId")
    if header.get("msg_type") != "execute_request" or not cell_id:
        return CellExecution()
    return CellExecution(cell_id, header["msg_id"])


@dataclass(frozen=True)
class Entry:
    """A gate, a figure or a table that a cell gave."""

    kind: str
    """`GATE` or one of `artifacts.KINDS`."""
    name: str
    cell: CellExecution
    gate: Gate | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Kind and name."""
        return self.kind, self.name


class Entries:
    """The entries of a run, in the order in which the notebook's cells give them."""

    def __init__(self):
        self._entries: list[Entry] = []

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def artifact_keys(self) -> list[tuple[str, str]]:
        """Kind and name of each figure and table."""
        return [entry.key for entry in self if entry.kind != GATE]

    def add(self, entries: Sequence[Entry], cell: CellExecution) -> list[Entry]:
        """Adds entries of an execution of a cell, and removes those that they replace.
        They stand where the first replaced entry stood; without one, behind the last
        entry of the same execution; without that, at the end.

        Returns:
            The entries that were replaced.
        """
        keys = {entry.key for entry in entries}
        replaced = [e for e in self if _is_replaced(e, keys, cell)]
        of_execution = [e for e in self if cell.is_same(e.cell)]
        if replaced:
            place = self._entries.index(replaced[0])
        elif of_execution:
            place = self._entries.index(of_execution[-1]) + 1
        else:
            place = len(self._entries)
        before = [e for e in self._entries[:place] if e not in replaced]
        after = [e for e in self._entries[place:] if e not in replaced]
        self._entries = [*before, *entries, *after]
        return replaced


def _is_replaced(entry: Entry, keys: set[tuple[str, str]], cell: CellExecution) -> bool:
    """Whether entries with these keys, which an execution of a cell gives, replace an
    earlier entry:

    1. Its cell runs again: all that the cell gave before is replaced.
    2. It is a figure or table, and a new one has its name, in whichever cell: the files
       are written again.
    3. It is a gate that was given outside of cells, and so is a new one of its name.

    One execution may give several gates of one name, and so may two cells.
    """
    if cell.repeats(entry.cell):
        return True
    if entry.key not in keys:
        return False
    return entry.kind != GATE or (cell.id is None and entry.cell.id is None)
