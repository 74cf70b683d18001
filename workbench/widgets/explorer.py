"""The widget Explorer: the error of an exported model at every setting in the log."""

import html
from collections import defaultdict
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
from workbench.check.price import BUDGET_FACTOR
from workbench.errors import InputError
from workbench.plots.fidelity import View
from workbench.plots.figure import ring
from workbench.report.study import token_texts
from workbench.sweep import runs
from workbench.sweep.error_split import measure_split, stored_split
from workbench.sweep.grid import PORTABLE_AXES, Cell, may_be_portable
from workbench.widgets.cells import cell_text, cells_box
from workbench.widgets.panel import BackgroundJob, Panel, absent, button, choice, slider
from workbench.widgets.sources import bundles_of

METRICS = [
    ("1 − cosine", "1-cosine"),
    ("relative error", "error"),
    ("largest error", "max_abs"),
    ("PSNR (dB)", "psnr_db"),
]
VALUE = "value"
DIFFERENCE = "difference to T = {}"
WORST = 8


class Explorer(Panel):
    """Fidelity by layer and position, a list of the worst cells, the error parts of a
    chosen cell's layer, and speed.

    The sliders have the grid's settings. Logged results are drawn at once; of a
    max_seq_len that the log lacks, the nearest one is drawn and named in the message.
    The Run button measures the rest of the grid, the shown setting first. The line
    below the picture has the values of the cell under the pointer, else of the cell
    that was chosen by a click on it or in the list.

    Args:
        grid: a sweep (see `workbench.sweep.make_grid`).
        root: the log's folder.
        machine: the machine of the first shown times (see
            `workbench.log.machine.machine_name`); default: that of
            `workbench.sweep.stored_tables`.
    """

    def __init__(
        self, grid: dict, root: str | Path | None = None, machine: str | None = None
    ):
        self.machine = None
        self.cell = None
        self.grid = sweep.make_grid(grid)
        self.root = Path(root or log.default_root())
        self.source = bundles_of(self.grid, self.root)
        self.tokens = token_texts(self.source.tokenizer, self.grid.validate_ids)
        self.cells = list(sweep.cells(self.grid))
        if machine is not None:  # refuses one that the log lacks
            sweep.stored_tables(self.grid, self.root, machine)
        self.options = {self.source.label(cell): cell.options for cell in self.cells}
        lengths = sorted({cell.options.max_seq_len for cell in self.cells})
        run = self.grid.run
        varied = sweep.varied_axes(self.grid)
        self.first_T = min(run.T)
        self.axes = [axis for axis in sweep.RUN_AXES if axis in varied and axis != "T"]
        controls = [
            choice("bundle", list(self.options)),
            slider("max_seq_len", lengths, lengths[-1]),
            slider("T", sorted(run.T)),
            choice("precision", run.precision),
        ]
        for axis in self.axes:
            if axis != "precision":
                controls.append(choice(axis, _values(getattr(run, axis))))
        controls += [
            choice("machine", [runs.here()]),
            choice("tensor", ["update", "k", "v", "hidden", "logits"]),
            choice("metric", METRICS),
            choice("show", [VALUE, DIFFERENCE.format(self.first_T)][: len(run.T)]),
            choice("scale", ["fixed", "data"]),
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
        """Reads the log again and draws; shows the times of `machine` if there are any,
        else of the machine shown before."""
        self.machine = None
        self.draw_once(lambda: self._offer(machine))

    def _offer(self, machine: str | None) -> None:
        """Lists the machines with times in the log, or this machine if there are none,
        and selects one."""
        control = self.controls["machine"]
        here = runs.here()
        names = sweep.offered_machines(self.grid, self.root) or [here]
        shown = control.value
        control.options = names
        control.value = next(
            name for name in (machine, shown, here, *names) if name in names
        )

    def _read(self) -> None:
        """Loads the tables of the selected machine, unless they are loaded already."""
        machine = self.value("machine")
        if self.machine != machine:
            timed = machine in sweep.offered_machines(self.grid, self.root)
            self.tables = sweep.stored_tables(
                self.grid, self.root, machine if timed else None
            )
            self.machine = machine

    @property
    def setting(self) -> Options:
        """The export options that the controls select."""
        options = self.options[self.value("bundle")]
        if self.grid.bundle:
            return options
        return options.model_copy(update={"max_seq_len": self.value("max_seq_len")})

    def missing(self) -> list:
        """The measurements that the log lacks, as steps for a `BackgroundJob`: one per
        bundle and precision, one per bundle's error split."""
        done = sweep.done_cells(self.root)
        steps = []
        everything = {(cell.bundle, cell.options): cell for cell in self.cells}.values()
        for cell in sorted(everything, key=lambda cell: cell.options != self.setting):
            options = cell.options
            contents = self.source.contents(cell)
            name = f"{self.source.label(cell)}, max_seq_len {options.max_seq_len}"
            for precision in self.grid.run.precision:
                part = self._part(cell, precision)
                keys = set()
                if part.run.runtime:
                    keys = {cell.key(contents) for cell in sweep.cells(part)}
                if count := len(keys - done):
                    label = f"{name}, {precision}: speed and fidelity"
                    steps.append((label, count, partial(self._measure, part)))
            splits = self.source.checkpoint and self.grid.validate_ids
            if splits and self._stored_split(options) is None:
                grid = self.grid
                checkpoint = self.source.checkpoint
                about = options, grid.validate_ids, grid.experiment, self.root
                split = partial(measure_split, checkpoint, *about)
                steps.append((f"{name}: error split", 1, split))
        return steps

    def _part(self, cell: Cell, precision: str) -> sweep.Grid:
        """The grid's part with one bundle and one precision; each part validates its
        bundle."""
        run = self.grid.run
        runtimes = run.runtime
        if precision != run.precision[0]:
            runtimes = list(filter(may_be_portable, runtimes))
        run = run.model_copy(update={"precision": [precision], "runtime": runtimes})
        return self.grid.model_copy(update=self.source.part(cell) | {"run": run})

    def _measure(self, part: sweep.Grid) -> None:
        counts = sweep.sweep(
            part, root=self.root, progress=False, on_cell=self.job.advance
        )
        if counts["failed"]:
            raise InputError(
                "sweep",
                f"{counts['failed']} of {counts['cells']} cells failed",
                "cells that fit",
                "see their reasons: workbench log --where \"status == 'failed'\"",
            )

    def _stored_split(self, options: Options) -> pd.DataFrame | None:
        return stored_split(self.source.checkpoint, options, self.root)

    def click(self, x: float, y: float) -> None:
        """Chooses the heatmap's cell at a point of the picture (fractions from the top
        left)."""
        to_data = self.figure.transFigure - self.figure.axes[0].transData
        column, row = to_data.transform((x, 1 - y))
        if 0 <= row < len(self.layers) and 0 <= column < len(self.positions):
            self.choose((self.layers[int(row)], self.positions[int(column)]))

    def choose(self, cell: tuple[int, int] | None) -> None:
        """Marks a (layer, position) and shows the error parts of its layer."""
        if cell not in (None, self.cell):
            self.cell = cell
            self.draw()

    def _draw(self) -> None:
        self._read()
        self._select()
        self._list_worst()
        parts = {
            "fidelity": self._fidelity(),
            "split": self._split(),
            "speed": self._speed(),
        }
        self.shown = {part: figure for part, figure in parts.items() if figure}
        mosaic = [["fidelity"]]
        height = 3.2
        if below := [part for part in self.shown if part != "fidelity"]:
            mosaic = [["fidelity"] * len(below), below]
            height = 5.6
        with plots.style():
            figure, axes = plt.subplot_mosaic(mosaic, figsize=(8, height))
            if self.rows.empty:
                absent(axes["fidelity"], "nothing measured at this setting: press Run")
            for part, (plot, data, options) in self.shown.items():
                getattr(plots, plot)(data, **options, ax=axes[part])
            self._mark(axes)
        T, S, tensor = map(self.value, ("T", "max_seq_len", "tensor"))
        name = f"{self.source.name}, {self.value('bundle')}, max_seq_len {S}, T {T}"
        alt = f"{tensor} of {name}: {', '.join(self.shown)} by layer and position"
        with self.picture.hold_sync():  # sends the picture with the texts of its cells
            self.show(figure, alt)
            self._name_cells(axes["fidelity"])
        text = f"{name}: {self._time()}"
        if self.length != S and not self.grid.bundle:
            text += f". The heatmap is of max_seq_len {self.length}; press Run to measure {S}"
        self.message.value = html.escape(text)

    def _select(self) -> None:
        """Selects the rows of the heatmap: those of the nearest max_seq_len with any,
        and beside them those of the first T."""
        T, S, tensor = map(self.value, ("T", "max_seq_len", "tensor"))
        rows = self._stored("fidelity")
        mode = self._mode()
        where = ["run_id", "layer", "position"]
        rows = rows[(rows["tensor"] == tensor) & (rows["mode"] == mode)]
        # the chained pass of a bundle runs all T in turn
        every_T = mode == "chained" and not rows.duplicated(where).any()
        if every_T:
            rows = rows.assign(T=T)
        lengths = rows.loc[rows["T"] == T, "max_seq_len"].astype(int).unique()
        self.length = int(min(lengths, key=lambda length: abs(length - S), default=S))
        rows = rows[rows["max_seq_len"] == self.length]
        self.rows = runs.like_newest(rows[rows["T"] == T], "run_id")
        self.base = runs.like_newest(rows[rows["T"] == self.first_T], "run_id")
        self.layers = sorted(map(int, self.rows["layer"].unique()))
        self.positions = sorted(map(int, self.rows["position"].unique()))
        self.controls["show"].disabled = every_T or T == self.first_T

    def _time(self) -> str:
        """The time of a layer at the selected setting, or why there is none."""
        layers = self._at_setting(self._stored("layers"))
        ms = layers.loc[layers["invalid"].isna(), "layer_ms"]
        if len(ms):
            return f"{ms.median():.3f} ms per layer on {self.machine}"
        if len(layers):
            return f"invalid: {layers['invalid'].iloc[-1]}"
        return "no times yet: press Run"

    def _mark(self, axes: dict[str, Axes]) -> None:
        """Draws a frame around the chosen cell and a ring around the chosen setting."""
        layer, position = self.cell or (None, None)
        if layer in self.layers and position in self.positions:
            spot = self.positions.index(position), self.layers.index(layer)
            frame = Rectangle(spot, 1, 1, fill=False, edgecolor="#D55E00", linewidth=2)
            axes["fidelity"].add_patch(frame)
        if "speed" in axes:
            rates = self._at_setting(self.shown["speed"][1])
            rates = rates.loc[rates["invalid"].isna(), "value"]
            if len(rates):
                length = self.value("max_seq_len")
                ring(axes["speed"], length, rates.median(), zorder=5)

    def _name_cells(self, ax: Axes) -> None:
        """Sets the picture's text of every cell, and of the chosen one."""
        texts = defaultdict(str)
        for row in self.rows.to_dict("records"):
            texts[row["layer"], row["position"]] = cell_text(row, self.tokens)
        if self._differs():
            for cell, value in self._values(self.base).items():
                texts[cell] += f"; at T = {self.first_T}: {value:.4g}"
        grid = [[texts[y, x] for x in self.positions] for y in self.layers]
        box = cells_box(ax, len(self.positions), len(self.layers))
        self.picture.cells = {"box": box, "texts": grid}
        self.picture.chosen = texts[self.cell]

    def _values(self, rows: pd.DataFrame) -> pd.Series:
        """The metric by layer and position."""
        cells = rows.set_index(["layer", "position"])
        return View(metric=self.value("metric")).values(cells)

    def _differs(self) -> bool:
        """Whether the heatmap is of a difference."""
        return self.value("show") != VALUE and not self.controls["show"].disabled

    def _stored(self, table: str) -> pd.DataFrame:
        """Rows of the shown bundle and way to run it, at every max_seq_len and T."""
        settings = []
        for cell in filter(self._is_shown, self.cells):
            settings += map(cell.columns, runs.RUNTIMES)
        columns = runs.VALUES if table == "fidelity" else runs.TIMES
        columns = [c for c in columns if c not in ("max_seq_len", "T")]
        rows = runs.fitting(self.tables[table], settings, columns)
        if self.grid.bundle:
            return rows[rows["bundle"] == self.value("bundle")]
        return rows

    def _is_shown(self, cell: Cell) -> bool:
        """Whether a cell has the selected bundle and the selected values of its
        runtime's axes."""
        if self.source.label(cell) != self.value("bundle"):
            return False
        axes = set(self.axes)
        if not may_be_portable(cell.run["runtime"]):
            axes -= set(PORTABLE_AXES)
        return all(cell.run[axis] == self.value(axis) for axis in axes)

    def _at_setting(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows at the selected max_seq_len and T."""
        of_length = rows["max_seq_len"] == self.value("max_seq_len")
        return rows[of_length & (rows["T"] == self.value("T"))]

    def _mode(self) -> str:
        """The mode of the selected tensor: chained for logits, which follow all layers,
        and for adopted packages, else isolated."""
        rows = self.tables["fidelity"]
        modes = set(rows.loc[rows["tensor"] == self.value("tensor"), "mode"])
        if self.value("tensor") == "logits" or modes == {"chained"}:
            return "chained"
        return "isolated"

    def _fidelity(self) -> tuple | None:
        """The heatmap as (name of its plot, rows, options); None without rows."""
        self.controls["scale"].disabled = self._differs()
        if self.rows.empty:
            return None
        T, tensor, metric = map(self.value, ("T", "tensor", "metric"))
        if self._differs():
            values = self._values(self.rows)
            difference = values - self._values(self.base).reindex(values.index)
            cells = difference.reset_index(name="difference")
            cells["run_id"] = self.rows["run_id"].iloc[0]
            sides = f"T = {T} minus T = {self.first_T}"
            options = {"metric": metric, "sides": sides, "title": f"{tensor}, {sides}"}
            return "fidelity_difference", cells, options
        options = {
            "T": T,
            "tensor": tensor,
            "metric": metric,
            "budget": None,
            "mode": self._mode(),
            "tokens": None,
            "limits": self.value("scale"),
        }
        if metric == "error":
            options["budget"] = BUDGET_FACTOR
        if self.positions[-1] < len(self.tokens):
            options["tokens"] = self.tokens
        return "fidelity_heatmap", self.rows.dropna(axis=1, how="all"), options

    def _list_worst(self) -> None:
        """Lists the cells with the largest errors; the first line selects none."""
        lines = [("click on a cell, or choose one here", None)]
        column = self.value("metric").removeprefix("1-")
        rising = column not in ("max_abs", "error")
        ranked = self.rows.sort_values(column, ascending=rising, na_position="first")
        for row in ranked.head(WORST).to_dict("records"):
            cell = row["layer"], row["position"]
            lines.append((cell_text(row, self.tokens), cell))
        if list(self.worst.options) != lines:
            self.worst.options = lines

    def _split(self) -> tuple | None:
        """The error parts of the chosen cell's layer, or of the layer with the largest
        error, as a figure and as a table."""
        self.split.value = ""
        if self.source.checkpoint is None:
            return None
        options = self.setting.model_copy(update={"max_seq_len": self.length})
        parts = self._stored_split(options)
        if parts is None:
            return None
        by_layer = parts.set_index("layer").drop(columns="run_id").astype(float)
        layer = int(by_layer["total"].idxmax())
        if self.cell and self.cell[0] in by_layer.index:
            layer = self.cell[0]
        table = by_layer.loc[layer].to_frame(f"layer {layer}, relative RMS")
        number = "{:.3g}".format
        self.split.value = table.to_html(border=0, float_format=number, na_rep="–")
        return "layer_parts", parts, {"layer": layer}

    def _speed(self) -> tuple | None:
        rates = self._stored("samples").query("phase == 'tokens_per_s'")
        if rates.empty:
            return None
        columns = "run_id machine max_seq_len T value unit warmup invalid".split()
        return "speed", rates[columns], {}

    def save(self) -> list[Path]:
        """Logs the shown figures (heatmap, split, speed) as exhibits of the experiment
        in one run, and writes each as SVG, PDF and PNG with a sidecar."""
        if not self.shown:
            raise InputError(
                "figures",
                "nothing measured at this setting",
                "a heatmap",
                "press Run first",
            )
        number = self.grid.experiment
        checkpoint = self.source.name
        setting = {"max_seq_len": self.length, "T": self.value("T")}
        setting["compress"] = self.setting.compress
        name = "explorer-{tensor}-S{max_seq_len}-T{T}-{compress}-{precision}".format(
            tensor=self.value("tensor"), precision=self.value("precision"), **setting
        )
        exhibits = []
        for part, (plot, data, options) in self.shown.items():
            alt = (
                f"{part} of {checkpoint}, {self.value('tensor')} against Hugging Face: "
                f"{self.value('bundle')}, max_seq_len {self.length}, T = {setting['T']}."
            )
            stem = name if part == "fidelity" else f"{name}-{part}"
            exhibits.append(report.exhibit(stem, data, alt, plot, options))
        row = {"command": "explorer", "checkpoint": checkpoint} | setting
        run_id = runs.record_run(number, row, root=self.root, exhibits=exhibits)
        place = report.folder(number, checkpoint, self.root)
        own = log.load("runs", self.root, {"run_id": run_id})
        paths = []
        for exhibit in exhibits:
            exhibit["run_id"] = run_id
            paths += report.write_exhibit(exhibit, place, number, own)
        names = ", ".join(p.name for p in paths if p.suffix == ".png")
        self.message.value = f"saved {names} (and svg, pdf, json) in {paths[0].parent}"
        return paths


def _values(values: list) -> list:
    """The values of an axis for a dropdown: (label, value as in `Cell.run`)."""
    if not isinstance(values[0], BaseModel):
        return [(str(value), value) for value in values]
    pairs = []
    for value in values:
        plain = value.model_dump(exclude_none=True)
        label = ", ".join(f"{name} {setting}" for name, setting in plain.items())
        pairs.append((label or "none", plain))
    return pairs
