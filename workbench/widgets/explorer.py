"""The Explorer: how far an exported model is from Hugging Face's, at every setting that the log holds."""

import html
import json
from pathlib import Path

import ipywidgets as ui
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from pydantic import BaseModel

from workbench import log, plots, report, sweep
from workbench.bundle import Options
from workbench.check import gates
from workbench.check.price import BUDGET_FACTOR
from workbench.errors import InputError
from workbench.explain import error
from workbench.models.checkpoint import Checkpoint
from workbench.report.study import token_texts
from workbench.sweep import runs
from workbench.widgets.panel import BackgroundJob, Panel, absent, button, choice, slider

METRICS = {
    "1 − cosine": "1-cosine",
    "relative error": "error",
    "largest error": "max_abs",
    "PSNR (dB)": "psnr_db",
}
WORST = 8


class Explorer(Panel):
    """Fidelity over layer × position with the worst cells beside it; a chosen cell's layer split into causes; speed.

    The sliders stop at the grid's settings. What the log holds is drawn at once; the Run button measures the rest of the
    grid, the shown setting first. A cell is chosen by clicking on it or on a line of the list.

    Args:
        grid: a sweep (see `workbench.sweep.make_grid`).
        root: the log's folder.
        machine: whose times are shown first (see `workbench.log.machine.machine_name`); default: that of
            `workbench.sweep.stored_tables`.
    """

    def __init__(self, grid: dict, root: str | Path | None = None, machine: str | None = None):
        self.tables, self.machine, self.cell, self.rows = None, None, None, None
        self.grid, self.root = sweep.make_grid(grid), Path(root) if root else log.default_root()
        project, path = log.project(self.root), Path(self.grid.checkpoint)
        self.bundles = project / "data" / "bundles"
        self.checkpoint = Checkpoint(path if path.exists() else project / path)
        self.tokens = token_texts(self.checkpoint, self.grid.validate_ids)
        self.cells = list(sweep.cells(self.grid))
        if machine is not None:
            sweep.stored_tables(
                self.grid, self.root, machine
            )  # refuses a machine that the log lacks
        self.options = {self._bundle_label(cell.options): cell.options for cell in self.cells}
        lengths = sorted({cell.options.max_seq_len for cell in self.cells})
        self.worst = ui.Select(rows=WORST + 1, layout=ui.Layout(width="420px"))
        self.worst.observe(lambda change: self.choose(change["new"]), names="value")
        self.split = ui.HTML()
        lists = ui.HBox([ui.VBox([ui.Label("worst cells"), self.worst]), self.split])
        run = [
            choice(axis, _values(getattr(self.grid.run, axis)))
            for axis in sweep.varied_axes(self.grid)
            if axis in sweep.RUN_AXES and axis not in ("T", "precision")
        ]
        super().__init__(
            [
                choice("bundle", list(self.options)),
                slider("max_seq_len", lengths, lengths[-1]),
                slider("T", sorted(self.grid.run.T)),
                choice("precision", self.grid.run.precision),
                *run,
                choice("machine", [runs.here()]),
                choice("tensor", ["update", "k", "v", "hidden", "logits"]),
                choice("metric", list(METRICS.items())),
            ],
            lists,
        )
        self.picture.observe(
            lambda change: self.guarded(lambda: self.click(*change["new"])), names="clicked"
        )
        self.refresh(machine)
        self.job = BackgroundJob(self.missing, self, lambda: self.refresh(runs.here()))
        save = button("download", lambda: self.guarded(self.save), "Save figure")
        first, *others = self.box.children
        self.box.children = (first, ui.HBox([self.job.box, save]), *others)

    def refresh(self, machine: str | None = None) -> None:
        """Reads the log again and draws; shows the times of `machine`, where there are some, else of the one shown before."""
        self.machine = None
        self.guarded(lambda: self._offer(machine))
        self.draw()

    def _offer(self, machine: str | None) -> None:
        """Lists the machines of which the log has times, or this one without any, and selects one."""
        control, names = (
            self.controls["machine"],
            sweep.offered_machines(self.grid, self.root) or [runs.here()],
        )
        preferred = (machine, control.value, runs.here(), names[0])
        control.options = names
        control.value = next(name for name in preferred if name in names)

    def _read(self) -> None:
        """Reads what the log holds of the selected machine, unless it is read already."""
        machine = self.value("machine")
        if self.machine != machine:
            offered = sweep.offered_machines(self.grid, self.root)
            self.tables = sweep.stored_tables(
                self.grid, self.root, machine if machine in offered else None
            )
            self.machine = machine

    @property
    def setting(self) -> Options:
        """Export options that the controls name."""
        return self.options[self.value("bundle")].model_copy(
            update={"max_seq_len": self.value("max_seq_len")}
        )

    def _bundle_label(self, options: Options) -> str:
        """The values in which bundles of the grid differ, without max_seq_len."""
        others = [
            str(getattr(options, name))
            for name, values in self.grid.export.items()
            if name not in ("max_seq_len", "compress") and len(values) > 1
        ]
        return ", ".join([options.compress, *others])

    def missing(self) -> list:
        """What the log lacks, as steps for a `BackgroundJob`: one per bundle and precision, one per bundle's error split."""
        done, steps = sweep.done_cells(self.root), []
        everything = dict.fromkeys(cell.options for cell in self.cells)
        for options in sorted(everything, key=self.setting.__ne__):
            name = f"{self._bundle_label(options)}, max_seq_len {options.max_seq_len}"
            for precision in self.grid.run.precision:
                part = self._part(options, precision)
                if any(cell.key(self.checkpoint.sha256) not in done for cell in sweep.cells(part)):
                    steps.append(
                        (
                            f"{name}, {precision}: speed and fidelity",
                            lambda part=part: self._measure(part),
                        )
                    )
            if self.grid.validate_ids and self._stored_split(options) is None:
                steps.append(
                    (f"{name}: error split", lambda options=options: self._measure_split(options))
                )
        return steps

    def _part(self, options: Options, precision: str) -> sweep.Grid:
        """The grid's part with one bundle and one precision; each part validates its bundle."""
        export = {name: [getattr(options, name)] for name in self.grid.export}
        run = self.grid.run.model_copy(update={"precision": [precision]})
        return self.grid.model_copy(update={"export": export, "run": run})

    def _measure(self, part: sweep.Grid) -> None:
        counts = sweep.sweep(part, root=self.root, progress=False)
        if counts["failed"]:
            raise InputError(
                "sweep",
                f"{counts['failed']} of {counts['cells']} cells failed",
                "cells that fit",
                "see their reasons: workbench log --where \"status == 'failed'\"",
            )

    def _measure_split(self, options: Options) -> None:
        """Splits the error over the grid's prompt (see `workbench.explain.error`) and logs it."""
        bundle = sweep.bundle_for(self.checkpoint, options, self.bundles)
        splits = error.split_error(self.checkpoint, bundle, self.grid.validate_ids)
        results = error.error_gates(splits)
        parts = {mode: gates.records(split.layers()) for mode, split in splits.items()}
        config = {"parts": parts, "gates": [g.json() for g in results]}
        row = {
            "command": "error",
            "runtime": "portable",
            "verdict": gates.verdict(results),
            "config": config,
        }
        runs.record_run(self.grid.experiment, runs.describe(bundle) | row, root=self.root)

    def _stored_split(self, options: Options) -> pd.DataFrame | None:
        """Parts of every layer's isolated update (see `workbench.explain.error.Split.layers`), with run_id; None: never
        measured."""
        where = {"checkpoint_hash": self.checkpoint.sha256, "status": "ok"} | runs.exported(options)
        logged = (
            log.load("runs", root=self.root, where=where)
            .dropna(subset="config")
            .sort_values("run_id")
        )
        for run_id, config in zip(logged["run_id"][::-1], logged["config"][::-1]):
            if parts := json.loads(config).get("parts"):
                return pd.DataFrame(parts["isolated"]).assign(run_id=run_id)
        return None

    def click(self, x: float, y: float) -> None:
        """Chooses the heatmap's cell at a place of the picture (fractions from the top left)."""
        wide, high = self.figure.get_size_inches() * self.figure.dpi
        column, row = self.figure.axes[0].transData.inverted().transform((x * wide, (1 - y) * high))
        layers, positions = self._axes()
        if 0 <= row < len(layers) and 0 <= column < len(positions):
            self.choose((layers[int(row)], positions[int(column)]))

    def _axes(self) -> tuple[list[int], list[int]]:
        """Layers and positions of the heatmap, in order."""
        return tuple(
            [] if self.rows is None else sorted(map(int, self.rows[name].unique()))
            for name in ("layer", "position")
        )

    def choose(self, cell: tuple[int, int] | None) -> None:
        """Marks a (layer, position) and shows how the error of its layer splits."""
        if cell not in (None, self.cell):
            self.cell = cell
            self.draw()

    def _draw(self) -> None:
        self._read()
        T, S, tensor, rows = (
            self.value("T"),
            self.value("max_seq_len"),
            self.value("tensor"),
            self._stored("fidelity"),
        )
        rows = rows[
            (rows["tensor"] == tensor) & (rows["max_seq_len"] == S) & (rows["mode"] == self._mode())
        ]
        rows = (
            rows.assign(T=T) if self._mode() == "chained" else rows[rows["T"] == T]
        )  # chained calls take every T in turn
        self.rows = rows[rows["run_id"] == rows["run_id"].max()] if len(rows) else None
        with plots.style():
            figure = plt.figure(figsize=(8, 5.6))
            grid = figure.add_gridspec(2, 2, height_ratios=[5, 4])
            self._heatmap(figure.add_subplot(grid[0, :]))
            self._list_worst()
            self._parts(figure.add_subplot(grid[1, 0]))
            self._speed(figure.add_subplot(grid[1, 1]))
        name = f"{self.checkpoint.path.name}, {self.value('bundle')}, max_seq_len {S}, T {T}"
        self.show(figure, f"{tensor} of {name}: fidelity by layer and position, error split, speed")
        ms = self._at_setting(self._stored("layers"))["layer_ms"]
        time = (
            f"{ms.median():.3f} ms per layer on {self.machine}"
            if len(ms)
            else "not measured: press Run"
        )
        self.message.value = html.escape(f"{name}: {time}")

    def _stored(self, table: str) -> pd.DataFrame:
        """Rows of the bundle and the way to run it that are shown, at every max_seq_len and T."""
        run = {axis: self._run_value(axis) for axis in sweep.RUN_AXES if axis != "T"}
        settings = [
            cell.columns(runtime)
            for cell in self.cells
            for runtime in runs.RUNTIMES
            if self._bundle_label(cell.options) == self.value("bundle")
            and run.items() <= cell.run.items()
        ]
        columns = [
            c
            for c in (runs.VALUES if table == "fidelity" else runs.TIMES)
            if c not in ("max_seq_len", "T")
        ]
        return runs.fitting(self.tables[table], settings, columns)

    def _at_setting(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows at the max_seq_len and T that are shown."""
        return rows[
            (rows["max_seq_len"] == self.value("max_seq_len")) & (rows["T"] == self.value("T"))
        ]

    def _run_value(self, axis: str):
        """The value of a run axis that is shown, as `Cell.run` has it."""
        value = self.value(axis) if axis in self.controls else getattr(self.grid.run, axis)[0]
        return value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value

    def _mode(self) -> str:
        """Logits exist only behind all layers."""
        return "chained" if self.value("tensor") == "logits" else "isolated"

    def _options(self) -> dict:
        """Keywords of the heatmap as it is shown."""
        tensor, metric = self.value("tensor"), self.value("metric")
        fits = self.tokens and self._axes()[1][-1] < len(self.tokens)
        return {
            "T": self.value("T"),
            "tensor": tensor,
            "metric": metric,
            "budget": BUDGET_FACTOR if metric == "error" else None,
            "mode": self._mode(),
            "tokens": self.tokens if fits else None,
        }

    def _heatmap(self, ax: Axes) -> None:
        if self.rows is None:
            return absent(ax, "fidelity not measured at this setting")
        plots.fidelity_heatmap(self.rows, **self._options(), ax=ax)
        layers, positions = self._axes()
        if self.cell and self.cell[0] in layers and self.cell[1] in positions:
            spot = positions.index(self.cell[1]), layers.index(self.cell[0])
            ax.add_patch(Rectangle(spot, 1, 1, fill=False, edgecolor="#D55E00", linewidth=2))

    def _list_worst(self) -> None:
        """The cells furthest from the golden; the first line selects none."""
        metric, lines = self.value("metric"), [("click on a cell, or choose one here", None)]
        if self.rows is not None:
            column = "cosine" if metric == "1-cosine" else metric
            ranked = self.rows.sort_values(
                column, ascending=column not in ("max_abs", "error"), na_position="first"
            )
            for r in ranked.head(WORST).itertuples():
                token = f" “{self.tokens[r.position]}”" if r.position < len(self.tokens) else ""
                text = f"layer {r.layer}, position {r.position}{token}: {column} {getattr(r, column):.6g}"
                lines.append((text, (int(r.layer), int(r.position))))
        if list(self.worst.options) != lines:
            self.worst.options = lines

    def _parts(self, ax: Axes) -> None:
        parts = self._stored_split(self.setting)
        if parts is None:
            self.split.value = ""
            return absent(ax, "error split not measured at this setting")
        layer = int(parts.loc[parts["total"].idxmax(), "layer"])
        if self.cell and self.cell[0] in set(parts["layer"]):
            layer = self.cell[0]
        plots.layer_parts(parts, layer=layer, ax=ax)
        column = parts[parts["layer"] == layer].drop(columns=["run_id", "layer"]).T
        column.columns = [f"layer {layer}, relative RMS"]
        self.split.value = column.astype(float).to_html(
            border=0, float_format="{:.3g}".format, na_rep="not measured"
        )

    def _speed(self, ax: Axes) -> None:
        rates = self._stored("samples").query("phase == 'tokens_per_s'")
        if rates.empty:
            return absent(ax, "speed not measured at this setting")
        plots.speed(rates, ax=ax)
        here = self._at_setting(rates)["value"]
        if len(here):
            ax.plot(
                self.value("max_seq_len"),
                here.median(),
                "o",
                ms=11,
                mfc="none",
                mec="black",
                zorder=5,
            )

    def save(self) -> list[Path]:
        """Logs the heatmap shown as an exhibit of the experiment and writes it as SVG, PDF and PNG with a sidecar."""
        if self.rows is None:
            raise InputError(
                "figure", "nothing measured at this setting", "a heatmap", "press Run first"
            )
        options, T, tensor, number = (
            self.setting,
            self.value("T"),
            self.value("tensor"),
            self.grid.experiment,
        )
        S, checkpoint = options.max_seq_len, self.checkpoint.path.name
        name = f"explorer-{tensor}-S{S}-T{T}-{options.compress}-{self.value('precision')}"
        alt = f"{tensor} of {checkpoint} against Hugging Face by layer and position: {self.value('bundle')}, max_seq_len {S}, T = {T}."
        exhibit = report.exhibit(
            name, self.rows.dropna(axis=1, how="all"), alt, "fidelity_heatmap", self._options()
        )
        row = {
            "command": "explorer",
            "checkpoint": checkpoint,
            "max_seq_len": S,
            "T": T,
            "compress": options.compress,
        }
        run_id = runs.record_run(number, row, root=self.root, exhibits=[exhibit])
        paths = report.write_exhibit(
            exhibit | {"run_id": run_id}, report.folder(number, checkpoint, self.root), number
        )
        self.message.value = f"saved {', '.join(p.name for p in paths)} in {paths[0].parent}"
        return paths


def _values(values: list) -> list:
    """The values of an axis as a dropdown takes them: (label, value)."""

    def hints(v: BaseModel) -> str:
        return ", ".join(f"{k} {x}" for k, x in v.model_dump(exclude_none=True).items()) or "none"

    return [(hints(v) if isinstance(v, BaseModel) else str(v), v) for v in values]
