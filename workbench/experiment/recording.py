"""A run while its notebook goes on: the entries that each cell gives, and the conclusion
that makes the run a finished one."""

import os
import shutil
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import pandas as pd
from IPython import get_ipython
from IPython.display import SVG, publish_display_data
from pandas.io.formats.style import Styler

from workbench import escape, log, plots
from workbench.check.gates import NOT_RUN, Gate, describe_quality, quality, verdict
from workbench.check.golden import Golden
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.experiment import artifacts, folders, report, sources, tables
from workbench.experiment.artifacts import FIGURES, TABLES, Artifact
from workbench.experiment.entries import (
    GATE,
    CellExecution,
    Entries,
    Entry,
    current_cell,
)
from workbench.experiment.latex import latex_table
from workbench.experiment.page import HEADING_MARK
from workbench.experiment.parameters import (
    check_lengths,
    portable_values,
    recorded_parameters,
)
from workbench.files import locked, write_whole
from workbench.sweep import identity

RUNTIME_COLUMNS = ("runtime", "precision", "compute_units")
"""Columns of a decoder that are options of a run."""


class Experiment:
    """One run of a numbered notebook.

    Args:
        name: of the notebook and of the folder, such as ``05_stateful_kv_cache``.
        namespace: `globals()` of the notebook, which has its parameters.

    Until the run is concluded, its `folder` is an unfinished one. The conclusion replaces
    the finished run of the same checkpoint (see `folders.run_folder`), which is whole until
    then. When a cell runs again, its new entries replace its earlier ones, in their place.
    """

    def __init__(self, name: str, namespace: Mapping):
        self.name = name
        parameters = recorded_parameters(name, namespace)
        check_lengths(name[:2], parameters.values)
        self.parameters = parameters.values
        self.fixed_parameters = parameters.fixed
        self.source = sources.source_of(namespace)
        self.portable_parameters = portable_values(parameters, self.source)
        self.finished = folders.runs_root() / name / self.source.label
        self.run_id: str | None = None  # of the last conclusion
        folders.remove_abandoned()
        self.unfinished = folders.make_staging_folder(name)
        # locked until this object is gone, so that no other process removes the folder
        lock = ExitStack()
        lock.enter_context(locked(self.unfinished))
        weakref.finalize(self, _remove_unfinished, self.unfinished, lock, os.getpid())
        self._entries = Entries()

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
        subtitle: str = "",
        section: str | None = None,
        **options,
    ) -> SVG:
        """Saves the data, draws the figure from the saved file, and shows it.

        Args:
            draw: a function of `workbench.plots`; `options` are its keywords.
            alt: a description for readers who cannot see the figure.
            subtitle: checkpoint, options and machine of the data.
            section: the heading under which the report has it (see `report.run_page`);
                default: with the figures and tables that have no section.
        """
        if draw.__name__ not in plots.__all__:
            raise ValueError(f"{draw.__name__} is no function of workbench.plots")
        drawing = {"plot": draw.__name__, "subtitle": subtitle, "options": options}
        drawing["section"] = section
        self._write_artifact(FIGURES, name, data, alt, **drawing)
        svg = report.redraw_figure(self.unfinished, name)
        picture = SVG(filename=str(svg), metadata={"alt": alt})
        self._add_artifact(FIGURES, name)
        return picture

    def table(
        self,
        name: str,
        data: pd.DataFrame,
        caption: str,
        *,
        in_report: bool = True,
        section: str | None = None,
    ) -> Styler:
        """Saves a table as Parquet and LaTeX, and shows it below its caption, in which
        backticks mark code.

        Args:
            in_report: whether the report has it; a table of raw values need not be there.
            section: as in `figure`.
        """
        fields = {"in_report": in_report, "section": section}
        self._write_artifact(TABLES, name, data, caption, **fields)
        label = f"tab:{self.name[:2]}-{name}"
        text = latex_table(data, caption, label)
        path = artifacts.artifact_path(self.unfinished, TABLES, name, ".tex")
        write_whole(path, text.encode())
        self._add_artifact(TABLES, name)
        return tables.show_with_caption(data, caption)

    def _write_artifact(
        self, kind: str, name: str, data: pd.DataFrame, alt: str, **fields
    ) -> None:
        """Writes the data and the description of a figure or table.

        Args:
            fields: of its `Artifact`: `section`, and of a figure `plot`, `subtitle` and
                `options`, of a table `in_report`.
        """
        (self.unfinished / kind).mkdir(parents=True, exist_ok=True)
        artifacts.remove_artifact(self.unfinished, kind, name)
        data.to_parquet(
            artifacts.artifact_path(self.unfinished, kind, name, ".parquet")
        )
        artifact = Artifact(
            kind=kind,
            name=name,
            # An artifact that is added to a concluded run comes last in its report.
            # Otherwise the conclusion writes the place (`stamp_run_id_and_order`).
            place=len(self._entries),
            alt=alt,
            run_ids=artifacts.run_ids_of(data),
            **fields,
        )
        artifacts.write_description(self.unfinished, artifact)

    def _add_artifact(self, kind: str, name: str) -> None:
        """Adds a figure or table, whose files are written, to the entries.

        After the run was concluded, the finished run gets new artifacts at once, such as
        a figure that the Explorer saves. An artifact that a cell makes again replaces
        the one in the finished run only when the run is concluded again, because the
        answer in the report describes the earlier one.
        """
        cell = current_cell()
        is_new = (kind, name) not in self._entries.artifact_keys()
        self._add_entries([Entry(kind, name, cell)], cell)
        if self.run_id is not None and (is_new or cell.id is None):
            self._add_to_finished(kind, name)

    def add_gates(self, results: Iterable[Gate]) -> Styler:
        """Adds gates to the verdict and shows them, RED first."""
        results = list(results)
        cell = current_cell()
        entries = [Entry(GATE, gate.name, cell, gate) for gate in results]
        self._add_entries(entries, cell)
        return tables.show(tables.gate_table(results))

    def _add_entries(self, entries: Sequence[Entry], cell: CellExecution) -> None:
        """Adds entries, and removes the files of figures and tables that they replace,
        other than those that were just written."""
        replaced = self._entries.add(entries, cell)
        written = {entry.key for entry in entries}
        for entry in replaced:
            if entry.kind != GATE and entry.key not in written:
                artifacts.remove_artifact(self.unfinished, entry.kind, entry.name)

    def conclude(
        self,
        answer: str,
        decoder: Decoder | None = None,
        *,
        golden: Golden | None = None,
        picture: str | None = None,
        **log_tables,
    ) -> None:
        """Logs the run, writes the report, puts the run in the place of the finished one,
        and shows both verdicts, the answer and the report's path.

        Args:
            answer: to the notebook's question, in lines of text; a line that begins with
                `page.HEADING_MARK` is a heading.
            decoder: whose bundle and settings the row describes.
            golden: with which `fidelity` compares; its prompt and the texts of its
                tokens are logged with the run.
            picture: the name of the figure that shows the answer, for the page of all
                experiments; default: the first figure.
            log_tables: `fidelity`, `samples` and `layers` of the run.

        Raises:
            ValueError: no figure has the name `picture`.
        """
        if picture and (FIGURES, picture) not in self._entries.artifact_keys():
            raise ValueError(f"{picture!r} is no figure of this run")
        row = self._log_row(answer)
        options = {}
        if golden:
            row["prompt"] = identity.prompt_hash(golden.ids.tolist())
            row["config"][identity.TOKENS_KEY] = golden.tokens
        if decoder:
            columns = identity.run_columns(decoder)
            row |= columns
            manifest = decoder.bundle.manifest
            options = identity.export_columns(manifest.options)
            options |= {name: columns[name] for name in RUNTIME_COLUMNS}
        run_id = log.record(row, **log_tables)
        run = self._run_json(run_id, row, options)
        if picture:
            run["picture"] = picture
        staging = folders.make_staging_folder(self.name)
        with locked(staging):
            artifacts.copy_artifacts(self.unfinished, staging)
            self._write_finished(staging, run, self._entries.artifact_keys())
        self.run_id = run_id
        path = self.finished / folders.REPORT
        relative_path = path.relative_to(log.project()).as_posix()
        verdicts = self._describe_verdicts()
        self._announce(verdicts, answer, relative_path)

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
        """Both verdicts on one line, in the words of the report."""
        if not self.gates:
            return "no gates"
        export = verdict(self.gates)
        if not report.judges_export(self.gates):
            return report.describe_own_gates(export)
        word = "not run" if export == NOT_RUN else export
        return f"export {word}, quality {describe_quality(self.gates)}"

    def _run_json(self, run_id: str, row: Mapping, options: Mapping) -> dict:
        """The contents of a concluded run's run.json.

        Args:
            row: of the table `runs`, with verdict, quality and config.
            options: of the export and the runtime; null ones are left out.
        """
        run_ids = {run_id}
        for artifact in artifacts.read_artifacts(self.unfinished):
            run_ids.update(artifact.run_ids)
        return {
            "run_id": run_id,
            "experiment": self.name,
            "verdict": row["verdict"],
            "quality": row["quality"],
            "run_ids": sorted(run_ids),
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

    def _write_finished(
        self, staging: Path, run: Mapping, keys: list[tuple[str, str]]
    ) -> None:
        """Writes run.json and the report beside the artifacts in `staging`, and replaces
        the finished run by this folder.

        Args:
            keys: kind and name of each artifact, in the order of the report.
        """
        artifacts.stamp_run_id_and_order(staging, run["run_id"], keys)
        folders.write_json(staging / folders.RUN, run)
        report.write_report(staging)
        folders.replace_finished(staging, self.finished)

    def _add_to_finished(self, kind: str, name: str) -> None:
        """Adds one figure or table to the concluded run."""
        run = {}
        if (self.finished / folders.RUN).is_file():
            run = folders.read_run(self.finished)
        if run.get("run_id") != self.run_id:
            actual = f"run {run['run_id']}" if run else "no run"
            step = "run all cells of the notebook again"
            needed = f"run {self.run_id} of this notebook"
            raise InputError(str(self.finished), actual, needed, step)
        staging = folders.make_staging_folder(self.name)
        try:
            with locked(staging):
                artifacts.copy_artifacts(self.finished, staging)
                # the run is the same: its executed notebook and page are kept
                for file in (folders.NOTEBOOK, folders.HTML_REPORT):
                    if (self.finished / file).is_file():
                        shutil.copy(self.finished / file, staging / file)
                artifacts.remove_artifact(staging, kind, name)
                artifacts.copy_artifact(self.unfinished, staging, kind, name)
                all_artifacts = artifacts.read_artifacts(staging)
                run_ids = set(run["run_ids"])
                for artifact in all_artifacts:
                    run_ids.update(artifact.run_ids)
                run["run_ids"] = sorted(run_ids)
                keys = [artifact.key for artifact in all_artifacts]
                self._write_finished(staging, run, keys)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _announce(self, verdicts: str, answer: str, report_path: str) -> None:
        """Shows a conclusion: as text in a terminal, as HTML in a notebook, whose plain
        text would be broken within words. In a kernel, the metadata of the output name the
        run, from which `report.run_of_notebook` finds the run of an executed notebook."""
        text = f"{verdicts}\n\n{answer}\n\nreport: {report_path}"
        if get_ipython() is None:
            print(text)
            return
        folder = self.finished.relative_to(log.project()).as_posix()
        run = {"run_id": self.run_id, "folder": folder}
        page = _html_conclusion(verdicts, answer, report_path)
        contents = {"text/plain": text, "text/html": page}
        publish_display_data(contents, {report.RUN_KEY: run})


def _html_conclusion(verdicts: str, answer: str, report_path: str) -> str:
    """A conclusion in HTML: the verdicts, the first line of the answer, and its other
    lines as a list, one for each heading."""
    first, *others = [line for line in answer.splitlines() if line.strip()] or [""]
    parts = [f"<p><b>{escape.html(verdicts)}</b></p>"]
    parts.append(f"<p>{escape.html_sentence(first)}</p>")
    for is_heading, lines in groupby(
        others, lambda line: line.startswith(HEADING_MARK)
    ):
        if is_heading:
            titles = (line.removeprefix(HEADING_MARK) for line in lines)
            parts += [f"<p><b>{escape.html(title)}</b></p>" for title in titles]
        else:
            items = "".join(f"<li>{escape.html_sentence(line)}</li>" for line in lines)
            parts.append(f"<ul>{items}</ul>")
    parts.append(f"<p>report: <code>{escape.html(report_path)}</code></p>")
    style = "max-width: 52em; overflow-wrap: break-word; word-break: normal"
    return f'<div style="{style}">{"".join(parts)}</div>'


def _remove_unfinished(folder: Path, lock: ExitStack, process: int) -> None:
    """Removes an unfinished run when its `Experiment` is gone. A process that was forked
    from the kernel does nothing.

    Args:
        process: the id of the process that made the folder.
    """
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()
