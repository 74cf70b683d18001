"""The Explorer: how far an exported model is from Hugging Face's, at every setting that the log holds."""

import html
from pathlib import Path

import ipywidgets as ui
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from pydantic import BaseModel

from workbench import log, plots, report, sweep
from workbench.bundle import Options
from workbench.check import tasks
from workbench.check.gates import LIMITS
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import runs
from workbench.widgets import error_split
from workbench.widgets.panel import BackgroundJob, Panel, absent, choice, slider

METRICS = {"1 − cosine": "1-cosine", "largest error": "max_abs", "PSNR (dB)": "psnr_db"}
WORST = 8


class Explorer(Panel):
    """Fidelity over layer × position with the worst cells beside it; a chosen cell's layer split into causes; speed.

    The sliders stop at the grid's settings. What the log holds is drawn at once; the Run button measures the rest of the
    grid, the shown setting first. A cell is chosen by clicking on it or on a line of the list.

    Args:
        grid: a sweep (see `workbench.sweep.make_grid`).
        root: the log's folder.
        machine: whose times are shown first (see `workbench.log.machine.machine_name`); default: that of `workbench.sweep.stored_tables`.
    """

    def __init__(self, grid: dict, root: str | Path | None = None, machine: str | None = None):
        self.stored, self.machine = None, None
        self.grid, self.root = sweep.make_grid(grid), Path(root) if root else log.default_root()
        project = log.project(self.root)
        self.bundles, named = project / "data" / "bundles", Path(self.grid.checkpoint)
        self.checkpoint = Checkpoint(named if named.exists() else project / named)
        self.tokens, self.cell, self.rows = _tokens(self.checkpoint, self.grid.validate_ids), None, None
        self.cells = list(sweep.cells(self.grid))
        if machine is not None:
            sweep.stored_tables(self.grid, self.root, machine)  # refuses a machine that the log lacks
        self.options = {_bundle_label(c.options, self.grid.export): c.options for c in self.cells}
        lengths = sorted({c.options.max_seq_len for c in self.cells})
        self.worst = ui.Select(rows=WORST + 1, layout=ui.Layout(width="420px"))
        self.worst.observe(lambda change: self.choose(change["new"]), names="value")
        self.saved = ui.Button(description="Save figure", icon="download", layout=ui.Layout(width="auto"))
        self.saved.on_click(lambda _: self.guarded(self.save))
        self.split = ui.HTML()
        lists = ui.HBox([ui.VBox([ui.Label("worst cells"), self.worst]), self.split])
        run = {axis: choice(axis, _values(getattr(self.grid.run, axis))) for axis in sweep.varied_axes(self.grid)
               if axis in sweep.RUN_AXES and axis not in ("T", "precision")}  # fmt: skip
        super().__init__({"bundle": choice("bundle", list(self.options)), "max_seq_len": slider("max_seq_len", lengths, max(lengths)),
                          "T": slider("T", sorted(self.grid.run.T)), "precision": choice("precision", self.grid.run.precision), **run,
                          "machine": choice("machine", [runs.here()]), "tensor": choice("tensor", ["update", "k", "v", "hidden", "logits"]),
                          "metric": choice("metric", list(METRICS.items()))}, lists)  # fmt: skip
        self.picture.observe(lambda change: self.guarded(lambda: self.click(*change["new"])), names="clicked")
        self.refresh(machine)
        self.job = BackgroundJob(self.missing, self, lambda: self.refresh(runs.here()))
        self.box.children = (*self.box.children[:1], ui.HBox([self.job.box, self.saved]), *self.box.children[1:])

    def refresh(self, machine: str | None = None) -> None:
        """Reads the log again and draws; shows the times of `machine`, where there are some, else of the one shown before."""
        self.machine = None
        self.guarded(lambda: self._offer(machine))
        self.draw()

    def _offer(self, machine: str | None) -> None:
        """Offers the machines that the log has times of: first this one, else the one that measured last."""
        control, offered = self.controls["machine"], sweep.offered_machines(self.grid, self.root)
        before = self.value("machine") if self.stored else None
        wanted = [name for name in (machine, before, runs.here(), *offered) if name in offered]
        control.options = offered or [runs.here()]
        control.value = wanted[0] if wanted else runs.here()

    def _read(self) -> None:
        """Reads what the log holds of the machine chosen, unless it is read already."""
        if self.machine != self.value("machine"):
            known = self.value("machine") in sweep.offered_machines(self.grid, self.root)
            self.stored = sweep.stored_tables(self.grid, self.root, self.value("machine") if known else None)
            self.machine = self.value("machine")

    @property
    def setting(self) -> Options:
        """Export options that the controls name."""
        return self.options[self.value("bundle")].model_copy(update={"max_seq_len": self.value("max_seq_len")})

    def missing(self) -> list:
        """What the log lacks, as steps for a `Job`: one per bundle and precision, one per bundle's error split."""
        done, steps = sweep.done_cells(self.root), {}
        for o in dict.fromkeys(cell.options for cell in self.cells):
            name = f"{_bundle_label(o, self.grid.export)}, max_seq_len {o.max_seq_len}"
            for precision in self.grid.run.precision:
                part = self._part(o, precision)
                if any(cell.key(self.checkpoint.sha256) not in done for cell in sweep.cells(part)):
                    steps[f"{name}, {precision}: speed and fidelity", o] = lambda part=part: self._measure(part)
            if self.grid.validate_ids and error_split.stored_split(self.checkpoint, o, self.root) is None:
                steps[f"{name}: error split", o] = lambda o=o: self._split(o)
        return [(label, step) for (label, o), step in sorted(steps.items(), key=lambda found: found[0][1] != self.setting)]

    def _part(self, options: Options, precision: str) -> sweep.Grid:
        """The grid's part with one bundle and one precision; each part judges its bundle."""
        export = {name: [getattr(options, name)] for name in self.grid.export}
        run = self.grid.run.model_copy(update={"precision": [precision]})
        return self.grid.model_copy(update={"export": export, "run": run})

    def _measure(self, part: sweep.Grid) -> None:
        counts = sweep.sweep(part, root=self.root, progress=False)
        if counts["failed"]:
            raise InputError("sweep", f"{counts['failed']} of {counts['cells']} cells failed", "cells that fit",
                             "see their reasons: workbench log --where \"status == 'failed'\"")  # fmt: skip

    def _split(self, options: Options) -> None:
        error_split.make_split(self.checkpoint, options, self.grid.validate_ids, self.grid.experiment, self.root, self.bundles)

    def click(self, x: float, y: float) -> None:
        """Chooses the heatmap's cell at a place of the picture (fractions from the top left)."""
        wide, high = self.figure.get_size_inches() * self.figure.dpi
        column, row = self.figure.axes[0].transData.inverted().transform((x * wide, (1 - y) * high))
        layers, positions = self._axes()
        if 0 <= row < len(layers) and 0 <= column < len(positions):
            self.choose((layers[int(row)], positions[int(column)]))

    def _axes(self) -> tuple[list[int], list[int]]:
        """Layers and positions of the heatmap, in order."""
        return tuple([] if self.rows is None else sorted(map(int, self.rows[name].unique())) for name in ("layer", "position"))

    def choose(self, cell: tuple[int, int] | None) -> None:
        """Marks a (layer, position) and shows how the error of its layer splits."""
        if cell is not None and cell != self.cell:
            self.cell = cell
            self.draw()

    def _draw(self) -> None:
        self._read()
        T, S, rows = self.value("T"), self.value("max_seq_len"), self._stored("fidelity")
        rows = rows[(rows["tensor"] == self.value("tensor")) & (rows["max_seq_len"] == S)]
        rows = rows[rows["mode"] == self._mode()]
        rows = rows.assign(T=T) if self._mode() == "chained" else rows[rows["T"] == T]  # chained calls take every T in turn
        self.rows = rows[rows["run_id"] == rows["run_id"].max()] if len(rows) else None
        with plots.style():
            figure = plt.figure(figsize=(8, 5.6))
            grid = figure.add_gridspec(2, 2, height_ratios=[5, 4])
            self._heatmap(figure.add_subplot(grid[0, :]))
            self._list_worst()
            self._parts(figure.add_subplot(grid[1, 0]))
            self._speed(figure.add_subplot(grid[1, 1]))
        name = f"{self.checkpoint.path.name}, {self.value('bundle')}, max_seq_len {S}, T {T}"
        self.show(figure, f"{self.value('tensor')} of {name}: fidelity by layer and position, error split, speed")
        layers = self._stored("layers")
        layers = layers[(layers["T"] == T) & (layers["max_seq_len"] == S)]
        ms = (f"{layers['layer_ms'].median():.3f} ms per layer on {self.value('machine')}" if len(layers) else
              "not measured: press Run")  # fmt: skip
        self.message.value = html.escape(f"{name}: {ms}")

    def _stored(self, table: str) -> pd.DataFrame:
        """Rows of the bundle and the way to run it that are shown, at every max_seq_len and T."""
        rows, chosen = self.stored[table], {axis: self._chosen(axis) for axis in sweep.RUN_AXES}
        settings = [cell.columns(runtime) for cell in self.cells for runtime in runs.RUNTIMES
                    if _bundle_label(cell.options, self.grid.export) == self.value("bundle")
                    and all(cell.run[axis] == chosen[axis] for axis in chosen if axis != "T")]  # fmt: skip
        columns = [c for c in (runs.VALUES if table == "fidelity" else runs.TIMES) if c not in ("max_seq_len", "T")]
        return runs.fitting(rows, settings, columns)

    def _chosen(self, axis: str):
        """The value of a run axis that is shown, as `Cell.run` has it."""
        values = getattr(self.grid.run, axis)
        value = self.value(axis) if axis in self.controls else values[0]
        return value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value

    def _mode(self) -> str:
        """Logits exist only behind all layers."""
        return "chained" if self.value("tensor") == "logits" else "isolated"

    def _options(self) -> dict:
        """Keywords of the heatmap as it is shown."""
        tensor, metric, limits = self.value("tensor"), self.value("metric"), LIMITS[self.setting.compress]
        least = {"update": limits.update_cosine, "logits": limits.logits_cosine, "k": limits.kv_cosine, "v": limits.kv_cosine}
        fits = self.tokens and self._axes()[1][-1] < len(self.tokens)
        return {"T": self.value("T"), "tensor": tensor, "metric": metric, "mode": self._mode(), "tokens": self.tokens if fits else None,
                "threshold": 1 - least[tensor] if tensor in least and metric == "1-cosine" else None}  # fmt: skip

    def _heatmap(self, ax: Axes) -> None:
        if self.rows is None:
            return absent(ax, "fidelity not measured at this setting")
        plots.fidelity_heatmap(self.rows, **self._options(), ax=ax)
        layers, positions = self._axes()
        if self.cell and self.cell[0] in layers and self.cell[1] in positions:
            spot = positions.index(self.cell[1]), layers.index(self.cell[0])
            ax.add_patch(Rectangle(spot, 1, 1, fill=False, edgecolor="#D55E00", linewidth=2))

    def _list_worst(self) -> None:
        """The cells furthest from the golden; the first line stands for none chosen."""
        metric, lines = self.value("metric"), [("click on a cell, or choose one here", None)]
        if self.rows is not None:
            column = "cosine" if metric == "1-cosine" else metric
            ranked = self.rows.sort_values(column, ascending=column != "max_abs", na_position="first")
            for r in ranked.head(WORST).itertuples():
                token = f" “{self.tokens[r.position]}”" if self.tokens and r.position < len(self.tokens) else ""
                said = f"layer {r.layer}, position {r.position}{token}: {column} {getattr(r, column):.6g}"
                lines.append((said, (int(r.layer), int(r.position))))
        if list(self.worst.options) != lines:
            self.worst.options = lines

    def _parts(self, ax: Axes) -> None:
        found = error_split.stored_split(self.checkpoint, self.setting, self.root)
        if found is None:
            self.split.value = ""
            return absent(ax, "error split not measured at this setting")
        clicked = self.cell and self.cell[0] in set(found["layer"])
        layer = self.cell[0] if clicked else int(found.loc[found["total"].idxmax(), "layer"])
        plots.layer_parts(found, layer=layer, ax=ax)
        shown = found[found["layer"] == layer].drop(columns=["run_id", "layer"]).T
        shown.columns = [f"layer {layer}, relative RMS"]
        self.split.value = shown.astype(float).to_html(border=0, float_format="{:.3g}".format, na_rep="not measured")

    def _speed(self, ax: Axes) -> None:
        rates = self._stored("samples")
        rates = rates[rates["phase"] == "tokens_per_s"]
        if rates.empty:
            return absent(ax, "speed not measured at this setting")
        plots.speed(rates, ax=ax)
        here = rates[(rates["max_seq_len"] == self.value("max_seq_len")) & (rates["T"] == self.value("T"))]
        if len(here):
            ax.plot(self.value("max_seq_len"), here["value"].median(), "o", ms=11, mfc="none", mec="black", zorder=5)

    def save(self) -> list[Path]:
        """Keeps the heatmap shown as an exhibit of the experiment: a log row, SVG, PDF, PNG and a sidecar."""
        if self.rows is None:
            raise InputError("figure", "nothing measured at this setting", "a heatmap", "press Run first")
        s, T, tensor = self.setting, self.value("T"), self.value("tensor")
        name = f"explorer-{tensor}-S{s.max_seq_len}-T{T}-{s.compress}-{self.value('precision')}"
        alt = f"{tensor} of {self.checkpoint.path.name} against Hugging Face by layer and position: {self.value('bundle')}, max_seq_len {s.max_seq_len}, T = {T}."
        shown = report.exhibit(name, self.rows.dropna(axis=1, how="all"), alt, "fidelity_heatmap", self._options())
        row = {"command": "explorer", "checkpoint": self.checkpoint.path.name, "max_seq_len": s.max_seq_len, "T": T,
               "compress": s.compress}  # fmt: skip
        run_id = runs.record_run(self.grid.experiment, row, root=self.root, exhibits=[shown])
        place = report.folder(self.grid.experiment, self.checkpoint.path.name, self.root)
        paths = report.write_exhibit(shown | {"run_id": run_id}, place, self.grid.experiment)
        self.message.value = f"saved {', '.join(p.name for p in paths)} in {paths[0].parent}"
        return paths


def _bundle_label(options, axes: dict) -> str:
    """What tells a bundle of the grid from the others, max_seq_len apart."""
    told = [str(getattr(options, name)) for name, values in axes.items() if name != "max_seq_len" and len(values) > 1]
    return ", ".join([options.compress, *(t for t in told if t != options.compress)])


def _values(values: list) -> list:
    """The values of an axis as a dropdown takes them: (label, value)."""
    hints = lambda v: ", ".join(f"{k} {x}" for k, x in v.model_dump(exclude_none=True).items()) or "none"  # noqa: E731
    return [(hints(v) if isinstance(v, BaseModel) else str(v), v) for v in values]


def _tokens(checkpoint: Checkpoint, ids: list[int]) -> list[str] | None:
    try:
        return tasks.checkpoint_tokenizer(checkpoint.path).convert_ids_to_tokens(ids) if ids else None
    except InputError:
        return [str(i) for i in ids]
