"""A run while its notebook goes on: the entries that each cell gives, and the conclusion
that makes the run a finished one."""

import os
import shutil
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from IPython import get_ipython
from IPython.display import SVG, publish_display_data
from pandas.io.formats.style import Styler

from workbench import log, plots
from workbench.check.gates import NOT_RUN, Gate, describe_quality, quality, verdict
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.experiment import folders, report, tables
from workbench.experiment.parameters import portable_values, recorded_parameters
from workbench.files import locked, write_whole
from workbench.sweep import identity

GATE = "gate"
RUNTIME_COLUMNS = ("runtime", "precision", "compute_units")
"""Columns of a decoder that are options of a run."""


@dataclass(frozen=True)
class CellExecution:
    """An execution of a cell of the notebook."""

    id: str | None
    """The cell's id; None where code runs outside of cells, or where the front end names
    none."""
    execution: object
    """The same object for all calls during one execution, and for no other."""


@dataclass(frozen=True)
class Entry:
    """A gate, a figure or a table that a cell gave."""

    kind: str
    name: str
    cell: CellExecution
    gate: Gate | None = None

    def is_replaced_by(self, kind: str, names: set[str], cell: CellExecution) -> bool:
        """Whether entries `names` of a kind, which an execution of a cell gives, replace
        this entry."""
        same_name = self.kind == kind and self.name in names
        # its files are written again
        if same_name and kind != GATE:
            return True
        # one execution may give several; those of other cells stay
        if self.cell.execution is cell.execution or self.cell.id != cell.id:
            return False
        # an earlier execution of the same cell gave it; outside of cells its name decides
        return cell.id is not None or same_name


_executions: dict[str, object] = {}
"""The id of the message by which a front end asked for an execution → its object."""


def current_cell() -> CellExecution:
    """The cell that the kernel executes; JupyterLab sends its id with every
    execution."""
    kernel = getattr(get_ipython(), "kernel", None)
    message = kernel.get_parent("shell") if kernel else {}
    header = message.get("header", {})
    cell_id = message.get("metadata", {}).get("cellId")
    if header.get("msg_type") != "execute_request" or not cell_id:
        return CellExecution(None, object())
    # the entries of one execution have one object, found by its message
    return CellExecution(cell_id, _executions.setdefault(header["msg_id"], object()))


def _copy_parts(source: Path, target: Path) -> None:
    """Copies the figures and tables of a run's folder."""
    for kind in folders.KINDS:
        if (source / kind).is_dir():
            shutil.copytree(source / kind, target / kind)


class Experiment:
    """One run of a numbered notebook.

    Args:
        name: of the notebook and of the folder, such as ``05_stateful_kv_cache``.
        namespace: `globals()` of the notebook, which has its parameters.

    Until the run is concluded, its `folder` is an unfinished one. Then the run takes the
    place of the finished one of the same checkpoint (see `folders.run_folder`), which is
    whole until then. When a cell runs again, its new entries replace its earlier ones, in
    their place.
    """

    def __init__(self, name: str, namespace: Mapping):
        self.name = name
        parameters = recorded_parameters(name, namespace)
        self.parameters = parameters.values
        self.fixed_parameters = parameters.fixed
        self.source = folders.source_of(namespace)
        self.portable_parameters = portable_values(parameters, self.source)
        self.finished = folders.experiments() / name / self.source.label
        self.run_id: str | None = None  # of the last conclusion
        folders.remove_abandoned()
        self.unfinished = folders.make_unfinished(name)
        # locked until this object is gone, so that no other process removes the folder
        lock = ExitStack()
        lock.enter_context(locked(self.unfinished))
        weakref.finalize(self, _remove_unfinished, self.unfinished, lock, os.getpid())
        self._entries: list[Entry] = []

    @property
    def folder(self) -> Path:
        """The folder in which the run's files are now."""
        return self.unfinished if self.run_id is None else self.finished

    @property
    def gates(self) -> list[Gate]:
        """The gates that cells gave, in the order of the cells."""
        return [entry.gate for entry in self._entries if entry.kind == GATE]

    def figure(
        self,
        name: str,
        draw,
        data: pd.DataFrame,
        *,
        alt: str,
        about: str = "",
        **options,
    ) -> SVG:
        """Saves the data, draws the figure from the saved file, and shows it.

        Args:
            draw: a function of `workbench.plots`; `options` are its keywords.
            alt: a description for readers who cannot see the figure.
            about: checkpoint, options and machine of the data.
        """
        if draw.__name__ not in plots.__all__:
            raise ValueError(f"{draw.__name__} is no function of workbench.plots")
        drawing = {"plot": draw.__name__, "about": about, "options": options}
        stem = self._write_part("figures", name, data, alt, **drawing)
        picture = SVG(filename=str(report.redraw(stem)), metadata={"alt": alt})
        self._add_part("figures", name)
        return picture

    def table(self, name: str, data: pd.DataFrame, caption: str) -> Styler:
        """Saves a table as Parquet and LaTeX, and shows it below its caption, in which
        backticks mark code."""
        stem = self._write_part("tables", name, data, caption)
        label = f"tab:{self.name[:2]}-{name}"
        text = tables.latex_table(data, caption, label)
        write_whole(folders.beside(stem, ".tex"), text.encode())
        self._add_part("tables", name)
        return tables.show_with_caption(data, caption)

    def _write_part(
        self, kind: str, name: str, data: pd.DataFrame, alt: str, **drawing
    ) -> Path:
        """Writes the data and the description of a figure or table; returns the path
        without an ending."""
        stem = self.unfinished / kind / name
        stem.parent.mkdir(parents=True, exist_ok=True)
        folders.remove_part(self.unfinished, kind, name)
        data.to_parquet(folders.beside(stem, ".parquet"))
        part = {"kind": kind, "name": name, "place": len(self._entries), "alt": alt}
        part |= drawing | {"run_ids": folders.run_ids_of(data)}
        folders.write_json(folders.beside(stem, ".json"), part)
        return stem

    def _add_part(self, kind: str, name: str) -> None:
        """Puts a figure or table in its place. A new one joins a run that is concluded
        at once, such as one that the Explorer saves; one that a cell makes again waits
        for the next conclusion, since the words are of the earlier one."""
        cell = current_cell()
        is_new = all((e.kind, e.name) != (kind, name) for e in self._entries)
        self._replace([Entry(kind, name, cell)], kind, cell)
        if self.run_id is not None and (is_new or cell.id is None):
            self._join(kind, name)

    def add_gates(self, results: Iterable[Gate]) -> Styler:
        """Adds gates to the verdict and shows them, RED first."""
        results = list(results)
        cell = current_cell()
        entries = [Entry(GATE, gate.name, cell, gate) for gate in results]
        self._replace(entries, GATE, cell)
        return tables.show(tables.gate_table(results))

    def _replace(self, entries: list[Entry], kind: str, cell: CellExecution) -> None:
        """Adds entries, and removes those that they replace.

        1. The cell ran before: they stand where its first entry stood, and all of its
           earlier entries are removed.
        2. The same execution gives more: they stand behind its last entry.
        3. Code outside of cells gives a name again: they stand in its place.
        4. Otherwise they stand at the end.
        """
        names = {entry.name for entry in entries}
        earlier = [e for e in self._entries if e.is_replaced_by(kind, names, cell)]
        written = {(entry.kind, entry.name) for entry in entries}
        for entry in earlier:
            if entry.kind != GATE and (entry.kind, entry.name) not in written:
                folders.remove_part(self.unfinished, entry.kind, entry.name)
        execution = [e for e in self._entries if e.cell.execution is cell.execution]
        if earlier:
            place = self._entries.index(earlier[0])
        elif execution and cell.id is not None:
            place = self._entries.index(execution[-1]) + 1
        else:
            place = len(self._entries)
        before = [e for e in self._entries[:place] if e not in earlier]
        after = [e for e in self._entries[place:] if e not in earlier]
        self._entries = before + entries + after

    def conclude(
        self, answer: str, decoder: Decoder | None = None, **log_tables
    ) -> None:
        """Logs the run, writes the report, puts the run in the place of the finished one,
        and prints both verdicts, the answer and the report's path.

        Args:
            answer: to the notebook's question, in lines of text.
            decoder: whose bundle and settings the row describes.
            log_tables: `fidelity`, `samples` and `layers` of the run.
        """
        row = self._log_row(answer)
        options = {}
        if decoder:
            columns = identity.run_columns(decoder)
            row |= columns
            manifest = decoder.bundle.manifest
            options = identity.export_columns(manifest.options)
            options |= {name: columns[name] for name in RUNTIME_COLUMNS}
        run_id = log.record(row, **log_tables)
        run = self._run_json(run_id, row, options)
        new_run = folders.make_unfinished(self.name)
        with locked(new_run):
            _copy_parts(self.unfinished, new_run)
            self._finish(new_run, run, self._order())
        self.run_id = run_id
        path = self.finished / folders.REPORT
        relative_path = path.relative_to(log.project()).as_posix()
        verdicts = self._describe_verdicts()
        self._announce(f"{verdicts}\n\n{answer}\n\nreport: {relative_path}")

    def _log_row(self, answer: str) -> dict:
        """The columns of the table `runs` that depend on no decoder; the verdicts of a
        run without gates are null."""
        number = self.name[:2]
        return {
            "command": f"notebook {number}",
            "experiment": number,
            "verdict": verdict(self.gates) if self.gates else None,
            "quality": quality(self.gates) if self.gates else None,
            "config": {
                "parameters": self.portable_parameters,
                "conclusion": answer,
                "gates": [gate.json() for gate in self.gates],
            },
        }

    def _describe_verdicts(self) -> str:
        """Both verdicts on one line."""
        if not self.gates:
            return "no gates"
        export = verdict(self.gates)
        word = "not run" if export == NOT_RUN else export
        return f"export {word}, quality {describe_quality(self.gates)}"

    def _run_json(self, run_id: str, row: Mapping, options: Mapping) -> dict:
        """The contents of a concluded run's run.json.

        Args:
            row: of the table `runs`, with verdict, quality and config.
            options: of the export and the runtime; null ones are left out.
        """
        parts = folders.read_parts(self.unfinished)
        return {
            "run_id": run_id,
            "experiment": self.name,
            "verdict": row["verdict"],
            "quality": row["quality"],
            "run_ids": sorted({run_id}.union(*(part["run_ids"] for part in parts))),
            **row["config"],
            "fixed_parameters": self.fixed_parameters,
            "checkpoint": {
                "name": self.source.name,
                "sha256": self.source.sha256,
                "label": self.source.label,
            },
            "options": {n: v for n, v in options.items() if v is not None},
            "environment": log.environment(),
        }

    def _order(self) -> list[tuple[str, str]]:
        """Kind and name of figures and tables in the order of the cells."""
        return [(e.kind, e.name) for e in self._entries if e.kind != GATE]

    def _finish(
        self, new_run: Path, run: Mapping, order: list[tuple[str, str]]
    ) -> None:
        """Completes a folder of figures and tables to a run, and puts it in the place of
        the finished one."""
        folders.stamp(new_run, run["run_id"], order)
        folders.write_json(new_run / folders.RUN, run)
        report.write_report(new_run)
        folders.finish(new_run, self.finished)

    def _join(self, kind: str, name: str) -> None:
        """Adds one figure or table to the concluded run."""
        run = {}
        if (self.finished / folders.RUN).is_file():
            run = folders.read_run(self.finished)
        if run.get("run_id") != self.run_id:
            actual = f"run {run['run_id']}" if run else "no run"
            step = "run all cells of the notebook again"
            needed = f"run {self.run_id} of this notebook"
            raise InputError(str(self.finished), actual, needed, step)
        new_run = folders.make_unfinished(self.name)
        try:
            with locked(new_run):
                _copy_parts(self.finished, new_run)
                # the run is the same, and its executed notebook and page stay
                for file in (folders.NOTEBOOK, folders.PAGE):
                    if (self.finished / file).is_file():
                        shutil.copy(self.finished / file, new_run / file)
                folders.remove_part(new_run, kind, name)
                folders.copy_part(self.unfinished, new_run, kind, name)
                parts = folders.read_parts(new_run)
                run_ids = set(run["run_ids"]).union(*(p["run_ids"] for p in parts))
                run["run_ids"] = sorted(run_ids)
                order = [(part["kind"], part["name"]) for part in parts]
                self._finish(new_run, run, order)
        finally:
            shutil.rmtree(new_run, ignore_errors=True)

    def _announce(self, text: str) -> None:
        """Prints a conclusion. In a kernel it is an output that names the run, so that
        the executed notebook and the run's folder find each other."""
        if get_ipython() is None:
            print(text)
            return
        folder = self.finished.relative_to(log.project()).as_posix()
        run = {"run_id": self.run_id, "folder": folder}
        publish_display_data({"text/plain": text}, {report.OUTPUT: run})


def _remove_unfinished(folder: Path, lock: ExitStack, process: int) -> None:
    """Removes an unfinished run with its notebook; a fork of the kernel leaves it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()
