"""The Explorer: how far an exported model is from Hugging Face's, at every setting that the log holds."""

import html
import json
from functools import partial
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
from workbench.plots.figure import ring
from workbench.report.study import token_texts
from workbench.sweep import runs
from workbench.sweep.cell import find
from workbench.sweep.grid import PORTABLE_AXES, may_be_portable
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
        self.machine, self.cell = None, None
        self.grid, self.root = sweep.make_grid(grid), Path(root) if root else log.default_root()
        self.bundles = log.project(self.root) / "data" / "bundles"
        self.checkpoint = Checkpoint(find(self.grid.checkpoint, self.root))
        self.tokens = token_texts(self.checkpoint, self.grid.validate_ids)
        self.cells = list(sweep.cells(self.grid))
        if machine is not None:
            sweep.stored_tables(self.grid, self.root, machine)  # refuses one that the log lacks
        self.options = {self._bundle_label(cell.options): cell.options for cell in self.cells}
        lengths = sorted({cell.options.max_seq_len for cell in self.cells})
        run, varied = self.grid.run, sweep.varied_axes(self.grid)
        self.axes = [axis for axis in sweep.RUN_AXES if axis in varied and axis != "T"]
        controls = [
            choice("bundle", list(self.options)),
            slider("max_seq_len", lengths, lengths[-1]),
            slider("T", sorted(run.T)),
            choice("precision", run.precision),
            *(
                choice(axis, _values(getattr(run, axis)))
                for axis in self.axes
                if axis != "precision"
            ),
            choice("machine", [runs.here()]),
            choice("tensor", ["update", "k", "v", "hidden", "logits"]),
            choice("metric", list(METRICS.items())),
        ]
        self.worst = ui.Select(rows=WORST + 1, layout=ui.Layout(width="420px"))
        self.split = ui.HTML()
        lists = ui.HBox([ui.VBox([ui.Label("worst cells"), self.worst]), self.split])
        super().__init__(controls, lists)
        self.follow(self.worst, self.choose)
        self.follow(self.picture, lambda place: self.click(*place), "clicked")
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
        control, here = self.controls["machine"], runs.here()
        names, shown = sweep.offered_machines(self.grid, self.root) or [here], control.value
        control.options = names
        control.value = next(name for name in (machine, shown, here, *names) if name in names)

    def _read(self) -> None:
        """Reads what the log holds of the selected machine, unless it is read already."""
        machine = self.value("machine")
        if self.machine != machine:
            timed = machine in sweep.offered_machines(self.grid, self.root)
            self.tables = sweep.stored_tables(self.grid, self.root, machine if timed else None)
            self.machine = machine

    @property
    def setting(self) -> Options:
        """Export options that the controls name."""
        length = {"max_seq_len": self.value("max_seq_len")}
        return self.options[self.value("bundle")].model_copy(update=length)

    def _bundle_label(self, options: Options) -> str:
        """The values in which bundles of the grid differ, without max_seq_len."""
        varied = [name for name, values in self.grid.export.items() if len(values) > 1]
        names = [name for name in varied if name not in ("max_seq_len", "compress")]
        return ", ".join(str(getattr(options, name)) for name in ("compress", *names))

    def missing(self) -> list:
        """What the log lacks, as steps for a `BackgroundJob`: one per bundle and precision, one per bundle's error split."""
        done, steps = sweep.done_cells(self.root), {}
        everything = dict.fromkeys(cell.options for cell in self.cells)
        for options in sorted(everything, key=self.setting.__ne__):
            name = f"{self._bundle_label(options)}, max_seq_len {options.max_seq_len}"
            for precision in self.grid.run.precision:
                part = self._part(options, precision)
                if part.run.runtime and any(
                    cell.key(self.checkpoint.sha256) not in done for cell in sweep.cells(part)
                ):
                    steps[f"{name}, {precision}: speed and fidelity"] = partial(self._measure, part)
            if self.grid.validate_ids and self._stored_split(options) is None:
                steps[f"{name}: error split"] = partial(self._measure_split, options)
        return list(steps.items())

    def _part(self, options: Options, precision: str) -> sweep.Grid:
        """The grid's part with one bundle and one precision; each part validates its bundle."""
        export = {name: [getattr(options, name)] for name in self.grid.export}
        run = self.grid.run
        first = precision == run.precision[0]
        runtimes = [name for name in run.runtime if first or may_be_portable(name)]
        run = run.model_copy(update={"precision": [precision], "runtime": runtimes})
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
        row = runs.describe(bundle) | {
            "command": "error",
            "runtime": "portable",
            "verdict": gates.verdict(results),
            "config": {"parts": parts, "gates": [g.json() for g in results]},
        }
        runs.record_run(self.grid.experiment, row, root=self.root)

    def _stored_split(self, options: Options) -> pd.DataFrame | None:
        """Parts of every layer's isolated update (see `workbench.explain.error.Split.layers`), with run_id; None: never
        measured."""
        where = {"checkpoint_hash": self.checkpoint.sha256, "status": "ok"} | runs.exported(options)
        logged = log.load("runs", root=self.root, where=where).dropna(subset="config")
        for run in logged.sort_values("run_id", ascending=False).itertuples():
            if parts := json.loads(run.config).get("parts"):
                return pd.DataFrame(parts["isolated"]).assign(run_id=run.run_id)
        return None

    def click(self, x: float, y: float) -> None:
        """Chooses the heatmap's cell at a place of the picture (fractions from the top left)."""
        wide, high = self.figure.get_size_inches() * self.figure.dpi
        column, row = self.figure.axes[0].transData.inverted().transform((x * wide, (1 - y) * high))
        if 0 <= row < len(self.layers) and 0 <= column < len(self.positions):
            self.choose((self.layers[int(row)], self.positions[int(column)]))

    def choose(self, cell: tuple[int, int] | None) -> None:
        """Marks a (layer, position) and shows how the error of its layer splits."""
        if cell not in (None, self.cell):
            self.cell = cell
            self.draw()

    def _draw(self) -> None:
        self._read()
        T, S, tensor = (self.value(name) for name in ("T", "max_seq_len", "tensor"))
        rows = self._stored("fidelity")
        rows = rows[
            (rows["tensor"] == tensor) & (rows["max_seq_len"] == S) & (rows["mode"] == self._mode())
        ]
        # chained calls take every T in turn
        rows = rows.assign(T=T) if self._mode() == "chained" else rows[rows["T"] == T]
        self.rows = runs.like_newest(rows, "run_id")
        self.layers, self.positions = (
            sorted(map(int, self.rows[name].unique())) for name in ("layer", "position")
        )
        with plots.style():
            figure = plt.figure(figsize=(8, 5.6))
            grid = figure.add_gridspec(2, 2, height_ratios=[5, 4])
            self._heatmap(figure.add_subplot(grid[0, :]))
            self._list_worst()
            self._parts(figure.add_subplot(grid[1, 0]))
            self._speed(figure.add_subplot(grid[1, 1]))
        name = f"{self.checkpoint.name}, {self.value('bundle')}, max_seq_len {S}, T {T}"
        self.show(figure, f"{tensor} of {name}: fidelity by layer and position, error split, speed")
        layers, time = self._at_setting(self._stored("layers")), "not measured: press Run"
        ms = layers.loc[layers["invalid"].isna(), "layer_ms"]
        if len(layers):
            time = f"invalid: {layers['invalid'].iloc[-1]}"
        if len(ms):
            time = f"{ms.median():.3f} ms per layer on {self.machine}"
        self.message.value = html.escape(f"{name}: {time}")

    def _stored(self, table: str) -> pd.DataFrame:
        """Rows of the bundle and the way to run it that are shown, at every max_seq_len and T."""
        run = {axis: self.value(axis) for axis in self.axes}
        settings = [
            cell.columns(runtime)
            for cell in self.cells
            for runtime in runs.RUNTIMES
            if self._bundle_label(cell.options) == self.value("bundle")
            and all(
                cell.run[axis] == value
                for axis, value in run.items()
                if axis not in PORTABLE_AXES or may_be_portable(cell.run["runtime"])
            )
        ]
        columns = runs.VALUES if table == "fidelity" else runs.TIMES
        columns = [c for c in columns if c not in ("max_seq_len", "T")]
        return runs.fitting(self.tables[table], settings, columns)

    def _at_setting(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows at the max_seq_len and T that are shown."""
        return rows[
            (rows["max_seq_len"] == self.value("max_seq_len")) & (rows["T"] == self.value("T"))
        ]

    def _mode(self) -> str:
        """Logits exist only behind all layers."""
        return "chained" if self.value("tensor") == "logits" else "isolated"

    def _options(self) -> dict:
        """Keywords of the heatmap as it is shown."""
        tensor, metric = self.value("tensor"), self.value("metric")
        return {
            "T": self.value("T"),
            "tensor": tensor,
            "metric": metric,
            "budget": BUDGET_FACTOR if metric == "error" else None,
            "mode": self._mode(),
            "tokens": self.tokens if self.positions[-1] < len(self.tokens) else None,
        }

    def _heatmap(self, ax: Axes) -> None:
        if self.rows.empty:
            return absent(ax, "fidelity not measured at this setting")
        plots.fidelity_heatmap(self.rows, **self._options(), ax=ax)
        layer, position = self.cell or (None, None)
        if layer in self.layers and position in self.positions:
            spot = self.positions.index(position), self.layers.index(layer)
            ax.add_patch(Rectangle(spot, 1, 1, fill=False, edgecolor="#D55E00", linewidth=2))

    def _list_worst(self) -> None:
        """The cells furthest from the golden; the first line selects none."""
        metric, lines = self.value("metric"), [("click on a cell, or choose one here", None)]
        column = "cosine" if metric == "1-cosine" else metric
        rising = column not in ("max_abs", "error")
        ranked = self.rows.sort_values(column, ascending=rising, na_position="first")
        for row in ranked.head(WORST).to_dict("records"):
            layer, position = int(row["layer"]), int(row["position"])
            token = f" “{self.tokens[position]}”" if position < len(self.tokens) else ""
            text = f"layer {layer}, position {position}{token}: {column} {row[column]:.6g}"
            lines.append((text, (layer, position)))
        if list(self.worst.options) != lines:
            self.worst.options = lines

    def _parts(self, ax: Axes) -> None:
        parts, self.split.value = self._stored_split(self.setting), ""
        if parts is None:
            return absent(ax, "error split not measured at this setting")
        layer = int(parts.loc[parts["total"].idxmax(), "layer"])
        if self.cell and self.cell[0] in set(parts["layer"]):
            layer = self.cell[0]
        plots.layer_parts(parts, layer=layer, ax=ax)
        column = parts.set_index("layer").drop(columns="run_id").loc[layer].astype(float)
        self.split.value = column.to_frame(f"layer {layer}, relative RMS").to_html(
            border=0, float_format="{:.3g}".format, na_rep="not measured"
        )

    def _speed(self, ax: Axes) -> None:
        rates = self._stored("samples").query("phase == 'tokens_per_s'")
        if rates.empty:
            return absent(ax, "speed not measured at this setting")
        plots.speed(rates, ax=ax)
        shown = self._at_setting(rates[rates["invalid"].isna()])["value"]
        if len(shown):
            ring(ax, self.value("max_seq_len"), shown.median(), zorder=5)

    def save(self) -> list[Path]:
        """Logs the heatmap shown as an exhibit of the experiment and writes it as SVG, PDF and PNG with a sidecar."""
        if self.rows.empty:
            raise InputError(
                "figure", "nothing measured at this setting", "a heatmap", "press Run first"
            )
        shown, number, checkpoint = self._options(), self.grid.experiment, self.checkpoint.name
        setting = {"max_seq_len": self.setting.max_seq_len, "T": shown["T"]}
        setting["compress"] = self.setting.compress
        name = "explorer-{tensor}-S{max_seq_len}-T{T}-{compress}-".format(**shown | setting)
        alt = (
            f"{shown['tensor']} of {checkpoint} against Hugging Face by layer and position: "
            f"{self.value('bundle')}, max_seq_len {setting['max_seq_len']}, T = {shown['T']}."
        )
        exhibit = report.exhibit(
            name + self.value("precision"),
            self.rows.dropna(axis=1, how="all"),
            alt,
            "fidelity_heatmap",
            shown,
        )
        row = {"command": "explorer", "checkpoint": checkpoint} | setting
        exhibit["run_id"] = runs.record_run(number, row, root=self.root, exhibits=[exhibit])
        place = report.folder(number, checkpoint, self.root)
        own = log.load("runs", root=self.root, where={"run_id": exhibit["run_id"]})
        paths = report.write_exhibit(exhibit, place, number, own)
        self.message.value = f"saved {', '.join(p.name for p in paths)} in {paths[0].parent}"
        return paths


def _values(values: list) -> list:
    """The values of an axis as a dropdown takes them: (label, value as `Cell.run` has it)."""
    if not isinstance(values[0], BaseModel):
        return [(str(value), value) for value in values]
    plain = [value.model_dump(exclude_none=True) for value in values]
    return [(", ".join(f"{k} {v}" for k, v in p.items()) or "none", p) for p in plain]
