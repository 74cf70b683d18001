"""Sliders over what the log holds (`Explorer`) and over what an export needs
(`planner`)."""

import json
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import ipywidgets as ui
import matplotlib
import numpy as np
import pandas as pd
from IPython import get_ipython
from IPython.display import display
from matplotlib.patches import Rectangle

from workbench import escape, log, plots, process, sweep
from workbench.ane import memory, roofline
from workbench.ane.chips import chips
from workbench.ane.work import call_work
from workbench.bundle import PRESETS
from workbench.decode.transcript import token_labels
from workbench.errors import InputError
from workbench.experiment import Experiment, show
from workbench.exporter import make_options
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import identity
from workbench.sweep.error_split import find_operation, measure_split, stored_split
from workbench.sweep.grid import Cell, find, stored_cells
from workbench.sweep.run import run_cell

FIRST = ("bundle", "max_seq_len", "T", "compress", "precision")
"""The first controls; other axes of the grid follow where they have several values."""
TENSORS = ("update", "k", "v", "logits")
METRICS = [("1 − cosine", "cosine"), ("relative error ÷ its limit", "error")]
PARTS = ["storage", "quantization", "reauthoring", "precision", "runtime", "total"]
SPEED, LAYER = "tokens per second", "ms per layer"
SPLIT_S, SEARCH_S = 15, 90  # about the seconds that these take
WIDTH = 9.5  # inches of a canvas
LENGTHS = [1 << n for n in range(6, 16)]  # of caches that the planner offers

Place = tuple[int, int]
"""A layer, below 0 that of the logits, and a position."""
Step = tuple[str, float, Callable[[], None]]
"""A measurement: what it is, about how many seconds it takes, what runs it."""
RATIO = f"error ÷ {plots.BUDGET}"
"""By which cells and layers of one bundle are ranked."""
NOTHING = "Nothing is missing"
SPLIT = "relative RMS that each step adds"
_open: list["Explorer"] = []
"""Explorers whose pictures take memory, which `close` frees."""


class Explorer(ui.VBox):
    """Error by layer and token, tokens per second and ms per layer at every setting of a
    grid.

    What the log holds is drawn at once. The cell under the pointer is described below
    the picture; a click keeps it and shows how its layer's error splits, which is
    measured first where the log lacks it. *Run what is missing* measures the rest of the
    grid in child processes, the shown bundle first.

    Cells and layers of the shown bundle are ranked by their error over what rounding
    alone causes, settings by their KL: that ratio contains the rounding of a setting's
    own weights. Running a cell of a notebook again, or showing the same grid again
    outside of one, closes the Explorer that was there.

    Args:
        grid: a sweep (see `workbench.sweep.make_grid`); each control begins at the
            first value of its axis.
        experiment: takes the figures that *Save figure* saves.
        root: the log's folder.
    """

    def __init__(
        self, grid: dict, experiment: Experiment, *, root: str | Path | None = None
    ):
        self.grid, self.experiment = sweep.make_grid(grid), experiment
        self.root = Path(root or log.default_root()).absolute()
        self.cell = _notebook_cell()
        self.closed = True  # until all is there
        _close_replaced(self)
        self.cells = _table(sweep.cells(self.grid, self.root))
        self.stored_cells = _table(stored_cells(self.grid, self.root))
        source = self.cells["cell"].iloc[0].source
        self.checkpoint = None  # of finished bundles, whose error is not split
        if not source.finished:
            self.checkpoint = Checkpoint(source.path)
        self.tokens = token_labels(source.tokenizer, self.grid.validate_ids)
        self.name = source.name if source.finished else self.checkpoint.name
        self.chosen: Place | None = None
        self.answers: dict[tuple, str] = {}  # of a setting and a place
        self.queue, self.thread = [], None  # of Steps
        self.measures = False
        self.stopped = threading.Event()
        self.cell_s = 8.0  # seconds of a cell of the grid, until one has run
        self.axes = {}
        names = [*(self.grid.export or ["bundle"]), *sweep.RUN_AXES]
        for name in sorted(names, key=lambda n: [*FIRST, n].index(n)):
            values = self.cells[name].unique().tolist()
            if name in FIRST or len(values) > 1:
                self.axes[name] = _control(name, values)
        self.tensor = _control("tensor", TENSORS)
        self.metric = _control("metric", METRICS)
        self.controls = [*self.axes.values(), self.tensor, self.metric]
        for control in self.controls:
            control.observe(lambda _: self.guarded(self.draw_anew), "value")
        self.run = _button("", "play", lambda: self.begin(*self.missing()))
        self.cancel = _button("Cancel", "stop", self.stopped.set)
        self.cancel.disabled = True
        self.which = _button("Which operation?", "search", self.search)
        self.keep = _button("Save figure", "download", lambda: self.guarded(self.save))
        self.status, self.message, self.words, self.answer, self.ranks, self.costs = (
            ui.HTML() for _ in range(6)
        )
        self.canvas, self.speed = _canvas(), _canvas()
        self.canvas.mpl_connect("button_press_event", self.click)
        buttons = [self.run, self.cancel, self.which, self.keep, self.status]
        # boxes have scroll bars by default, also where nothing is cut
        wrap = {"flex_flow": "row wrap", "overflow": "visible"}
        rows = [ui.HBox(row, layout=wrap) for row in (self.controls, buttons)]
        shown = [self.message, self.canvas, self.ranks, self.words, self.answer]
        shown += [self.costs, self.speed]
        super().__init__([*rows, *shown], layout={"overflow": "visible"})
        self.add_class("workbench-explorer")
        self.closed = False
        _open.append(self)
        self.guarded(self.refresh)

    def close(self) -> None:
        """Ends what it measures, removes it from the page and frees its pictures."""
        if getattr(self, "closed", True):  # a widget closes when it is deleted
            super().close()
            return
        self.closed = True
        self.stopped.set()
        if self in _open:
            _open.remove(self)
        for canvas in (self.canvas, self.speed):
            canvas.figure.clear()
        widgets = [self]
        for widget in widgets:  # grows by the widgets in a box
            widgets += getattr(widget, "children", ())
            # a canvas has a toolbar outside of its children, which refers to it
            widgets += [widget.toolbar] if hasattr(widget, "toolbar") else []
        for widget in widgets[1:]:
            for part in (widget.layout, getattr(widget, "style", None), widget):
                if part is not None:
                    part.close()
        self.children = ()
        self.canvas = self.speed = None
        self.layout.close()
        super().close()

    def guarded(self, action: Callable[[], None]) -> bool:
        """Runs a callback, where an error would be lost: it is shown, and ends the
        queue. Returns whether there was none."""
        if self.closed:
            return False
        try:
            action()
            return True
        except Exception as problem:
            self.queue.clear()
            text = escape.html(f"{type(problem).__name__}: {problem}")
            self.message.value = f"<pre class='workbench-error'>{text}</pre>"
            return False

    def refresh(self) -> None:
        """Reads the log and draws."""
        self.stored = sweep.stored_tables(self.grid, self.root)
        steps = self.missing()
        missing = f"Run what is missing ({_duration(steps)})"
        self.run.description = missing if steps else NOTHING
        self._enable()
        self.costs.value = self._costs()
        self.draw()

    def _enable(self) -> None:
        """Enables *Cancel* while something is measured, and *Run* while nothing is and
        the log lacks a cell of the grid."""
        self.cancel.disabled = not self.measures
        self.run.disabled = self.measures or self.run.description == NOTHING

    def setting(self) -> tuple:
        """The values of the controls that decide what is measured."""
        return tuple(control.value for control in self.axes.values())

    def draw_anew(self) -> None:
        """Draws at another setting; what was said of the cell under the pointer goes."""
        self.canvas.send_json({"type": "message", "message": ""})
        self.draw()

    def draw(self) -> None:
        """Draws both pictures at the controls' setting, and the texts that belong to
        them."""
        T, tensor = self.axes["T"].value, self.tensor.value
        options = self._fitting(*sweep.RUN_AXES)[0].options
        S = options.max_seq_len
        mode = "chained" if tensor == "logits" else "isolated"
        rows = self._rows("fidelity", "T", "depth", "fast", "max_seq_len")
        rows = rows[rows["tensor"].eq(tensor) & rows["mode"].eq(mode)]
        if (rows["T"] == T).any():  # validated are the smallest and the largest
            rows = rows[rows["T"].isin([self.axes["T"].options[0], T])]
        lengths = rows["max_seq_len"].unique()
        nearest = min(lengths, key=lambda n: abs(n - S), default=None)
        self.shown = rows[rows["max_seq_len"] == nearest].sort_values("T")
        words = [self._draw_speed(S, T)]
        if nearest != S:
            lacking = "Not measured at this setting."
            if nearest:
                lacking = f"Not measured at max_seq_len {S}; showing {nearest:.0f}."
                lacking = f"Errors: {lacking}" if words[0] else lacking
            words.append(f"{lacking} <i>Run what is missing</i> measures it.")
        elif not words[0]:
            words.append("No times yet.")
        self.message.value = "<br>".join(word for word in words if word)
        self.keep.disabled = nearest is None
        self.canvas.layout.display = None if nearest else "none"
        if nearest:
            shown = {"max_seq_len": int(nearest)}
            self.exported = options.model_copy(update=shown)  # as the shown rows
            self.options = {"tensor": tensor, "mode": mode, "metric": self.metric.value}
            asked = identity.prompt(self.grid.validate_ids)
            if self.shown["prompt"].eq(asked).all():
                self.options["tokens"] = self.tokens
            self._draw_cells(f"{tensor} against Hugging Face, T = {T}")
        self.ranks.value = self._ranks()
        self.describe()

    def _fitting(self, *free: str) -> list[Cell]:
        """The grid's cells at the controls' setting, whatever the axes `free` are."""
        return self._at_setting(self.cells, free)

    def _at_setting(self, cells: pd.DataFrame, free: tuple[str, ...]) -> list[Cell]:
        for name, control in self.axes.items():
            if name not in free:
                cells = cells[cells[name] == control.value]
        return cells["cell"].tolist()

    def _rows(self, table: str, *free: str) -> pd.DataFrame:
        """The rows of a table of `_fitting` cells, whatever runtime `auto` means;
        fidelity has rows of every T."""
        name = "values" if table == "fidelity" else "setting"
        cells = self._at_setting(self.stored_cells, free)
        hashes = {cell.columns()[name] for cell in cells}
        rows = self.stored[table]
        return rows[rows[name].isin(hashes)]

    def _draw_speed(self, S: int, T: int) -> str:
        """Draws tokens per second and ms per layer over max_seq_len and T, one value
        for each process, and gives those of the setting in words; "" where there are
        none."""
        rates, layers = (
            self._rows(table, "max_seq_len", "T") for table in ("samples", "layers")
        )
        rates = sweep.per_process(rates, "tokens_per_s").assign(what=SPEED)
        layers = sweep.per_process(layers, "layer_ms").assign(what=LAYER)
        times = pd.concat([rates, layers]).sort_values("T")
        own = times[(times["max_seq_len"] == S) & (times["T"] == T)]
        self.speed.layout.display = "none" if own.empty else None
        if own.empty:
            return ""
        axes = {"x": "max_seq_len", "y": "value", "hue": "T", "col": "what"}
        plots.lines(times, **axes, xlog=2, ylabel="", figure=self.speed.figure)
        for ax in self.speed.figure.axes:
            ax.axvline(S, color="0.8", linewidth=5, zorder=0)
        self.speed.draw_idle()
        found = log.summarize(own, "what")
        medians = found["median"]
        words = f"{medians[SPEED]:.4g} {SPEED}, {medians[LAYER]:.3g} {LAYER}"
        count = found["n"].max()
        processes = f"median of {count} processes" if count > 1 else "one process"
        words = f"<b>{words}</b> ({processes}) on {escape.html(own['machine'].iloc[0])}"
        if why := own["disturbed"].dropna().unique().tolist():
            words += f"; disturbed: {escape.html(why[0])}"
        invalid = own["invalid"].dropna().unique()
        return "; invalid: ".join([words, *map(escape.html, invalid)])

    def _draw_cells(self, title: str) -> None:
        figure = self.canvas.figure
        plots.heatmap(self.shown, **self.options, title=title, figure=figure)
        self.layers, self.positions = (
            sorted(self.shown[name].unique()) for name in ("layer", "position")
        )
        for ax in figure.axes[:-1]:  # the last one is the colour bar
            ax.format_coord = lambda x, y: self._cell(self._place(x, y))
            if self._cell(self.chosen):
                layer, position = self.chosen
                at = self.positions.index(position), self.layers.index(layer)
                ax.add_patch(Rectangle(at, 1, 1, fill=False, edgecolor="#D55E00", lw=2))
        self.canvas.draw_idle()

    def _place(self, x: float, y: float) -> Place | None:
        """The cell at a point of a heatmap."""
        if 0 <= y < len(self.layers) and 0 <= x < len(self.positions):
            return self.layers[int(y)], self.positions[int(x)]
        return None

    def _cell(self, place: Place | None) -> str:
        """Place and values of a cell at the selected T, or the largest; "" of one that
        is not shown."""
        rows = self.shown.set_index(["layer", "position"])
        if place not in rows.index:
            return ""
        row, (layer, position) = rows.loc[[place]].iloc[-1], place
        words = f"layer {layer}, position {position}"
        if tokens := self.options.get("tokens"):
            words += f" “{tokens[position]}”"
        words += f", T = {row['T']:.0f}: 1 − cosine {max(0, 1 - row['cosine']):.2g}"
        if row["budget"] > 0:
            words += f", relative error {row['error']:.2g}, "
            words += f"{row['error'] / row['budget']:.2g} × the rounding floor, "
            words += f"{RATIO} {_ratio(row):.2g}, limit {plots.TOLERANCE_FACTOR:g}"
        return words

    def _ranks(self) -> str:
        """The cells and layers of the shown bundle with the largest errors over what
        rounding alone causes."""
        rows = self.shown
        rows = rows[rows["finite"].ne(False)].dropna(subset=["error", "budget"])
        if rows.empty:
            return ""
        ratios = rows.assign(ratio=_ratio(rows))
        cells = ratios.groupby(["layer", "position"])["ratio"].max().nlargest(3)
        words = [
            f"layer {layer}, position {position}: {ratio:.2g}"
            for (layer, position), ratio in cells.items()
        ]
        squares = (ratios["ratio"] ** 2).groupby([ratios["layer"], ratios["T"]]).mean()
        layers = (squares**0.5).groupby("layer").max().nlargest(3)
        by_layer = [f"layer {layer}: {ratio:.2g}" for layer, ratio in layers.items()]
        return (
            f"Largest {RATIO} (limit {plots.TOLERANCE_FACTOR:g}): {'; '.join(words)}. "
            f"RMS over positions: {'; '.join(by_layer)}."
        )

    def _costs(self) -> str:
        """A table of the mean and the 99% quantile of the KL at each validated setting,
        the lowest mean first."""
        fidelity = self.stored["fidelity"]
        runs = log.load("runs", self.root, {"run_id": fidelity["run_id"].unique()})
        if runs.empty:
            return ""
        configs = [json.loads(text) for text in runs["config"].fillna("{}")]
        costs = [(config.get("price") or {}).get("kl") or {} for config in configs]
        runs["99% KL"] = [cost.get("p99", np.nan) for cost in costs]
        runs = runs.rename(columns={"kl_mean": "mean KL"})
        runs = runs.dropna(subset=["mean KL"]).sort_values("mean KL", kind="stable")
        names = ["bundle", *FIRST[1:], *self.axes]
        names = [name for name in dict.fromkeys(names) if name in runs and name != "T"]
        varied = [name for name in names if runs[name].nunique(dropna=False) > 1]
        if runs.empty or not varied:
            return ""
        table = runs[[*varied, "mean KL", "99% KL"]].astype(object)
        shown = table.map(lambda x: f"{x:.3g}" if isinstance(x, float) else x)
        return "KL from Hugging Face's model in nats, by setting:" + shown.to_html(
            index=False, na_rep="–"
        )

    def describe(self) -> bool:
        """Writes the chosen cell's values and its layer's error split below the
        heatmap; returns whether a split lacks that can be measured."""
        cell = self._cell(self.chosen)
        self.which.disabled = not cell
        self.answer.value = self.answers.get((self.setting(), self.chosen), "")
        if not cell:
            hint = "Click on a cell to see its values and its layer's error split."
            self.words.value = hint
            return False
        self.words.value = f"<b>{escape.html(cell)}</b>"
        if self.checkpoint is None:
            return False
        parts = stored_split(self.checkpoint, self.exported, self.grid, self.root)
        if parts is None:
            return True
        row = parts[parts["layer"] == self.chosen[0]]  # the logits' has none
        row = row[PARTS].astype(float)
        table = row.to_html(index=False, float_format="{:.2g}".format, na_rep="–")
        whole = f"Layer {self.chosen[0]}, all positions together"
        self.words.value += f"<br>{whole}: {SPLIT}:{table}"
        return False

    def click(self, event) -> None:
        """Chooses the cell under the pointer, and measures its layer's error split if
        the log has none."""
        place = None
        if event.inaxes in self.canvas.figure.axes[:-1]:
            place = self._place(event.xdata, event.ydata)
        if place is None:
            return
        self.chosen = place
        if self.guarded(self.draw) and self.describe():
            about = self.checkpoint, self.exported, self.grid, self.root, self.stopped
            split = partial(measure_split, *about)
            self.begin((f"error split of layer {place[0]}", SPLIT_S, split))

    def search(self) -> None:
        """Searches for the operation that is wrong in the chosen cell."""
        layer, position = self.chosen
        layer = None if layer < 0 else layer
        about = self._fitting()[0], self.grid, self.root, layer, position, self.stopped
        place = self.setting(), self.chosen

        def answer() -> None:
            self.answers[place] = escape.html(find_operation(*about))

        words = "the operation of layer {}, position {}".format(*self.chosen)
        self.begin((words, SEARCH_S, answer))

    def missing(self) -> list[Step]:
        """A measurement for each cell that the log lacks, those of the shown bundle
        first."""
        shown = self._fitting(*sweep.RUN_AXES)[0].options
        cells = sweep.missing(self.cells["cell"], self.root)
        steps = []
        for cell in sorted(cells, key=lambda cell: cell.options != shown):
            options = cell.options
            label = f"{options.compress}, max_seq_len {options.max_seq_len}"
            steps.append((label, self.cell_s, partial(self._measure, cell)))
        return steps

    def _measure(self, cell: Cell) -> None:
        start = time.monotonic()
        where = {"bundles": log.project(self.root) / "data" / "bundles"}
        where |= {"root": self.root, "stop": self.stopped}
        status, reason = run_cell(cell, grid=self.grid, **where)
        if status == "failed":
            step = "see the reason; it is in the log too"
            raise InputError("sweep", reason, "a cell that runs", step)
        self.cell_s = time.monotonic() - start

    def begin(self, *steps: Step) -> None:
        """Puts steps first in the queue, and starts a thread if none works on it."""
        self.queue[:0] = steps
        if self.queue and not self.measures:
            self.measures = True
            self._enable()
            self.stopped.clear()
            self.thread = threading.Thread(target=self._work, daemon=True)
            self.thread.start()

    def _work(self) -> None:
        words = ""
        while self.queue and not words:
            step = self.queue[0]
            ended = threading.Event()
            clock = threading.Thread(target=self._count_down, args=(step, ended))
            clock.daemon = True
            self._say_what_is_left(step, 0)
            del self.queue[0]
            clock.start()
            try:
                if self.guarded(step[2]):
                    _on_kernel_thread(partial(self.guarded, self.refresh))
            except process.Cancelled:
                self.queue.clear()
                words = "cancelled; what was finished is kept"
            finally:
                ended.set()
                clock.join()
        _on_kernel_thread(partial(self._end, words))

    def _end(self, words: str) -> None:
        """Says how a thread ended, and starts another one for what came late."""
        self.measures = False
        if not self.closed:
            self.status.value = words
            self._enable()
            self.begin()

    def _count_down(self, step: Step, ended: threading.Event) -> None:
        """Says every second what is left, until the step has ended."""
        start = time.monotonic()
        while not ended.wait(1):
            self._say_what_is_left(step, time.monotonic() - start)

    def _say_what_is_left(self, step: Step, elapsed: float) -> None:
        label, seconds, run = step
        rest = [(label, max(0, seconds - elapsed), run)]
        rest += [later for later in self.queue if later is not step]
        left = _duration(rest) if elapsed < seconds else "longer than expected, "
        if elapsed >= seconds:
            left += f"{elapsed:.0f} s so far"
            if rest[1:]:
                left += f", then {_duration(rest[1:])}"
            self.status.value = f"measuring {escape.html(label)}, {left}"
        else:
            self.status.value = f"measuring {escape.html(label)}, {left} to go"

    def save(self) -> None:
        """Saves the shown heatmap among the experiment's figures; its name holds the
        setting, tensor and metric."""
        # the label of a slider is empty until the page has sent one
        shown = {
            control.description: (
                str(control.value),
                control.label or str(control.value),
            )
            for control in self.controls
        }
        length = str(self.exported.max_seq_len)  # of the shown rows
        shown["max_seq_len"] = length, length
        name = "-".join(["explorer", *(value for value, _ in shown.values())])
        settings = [f"{control} {label}" for control, (_, label) in shown.items()]
        about = " · ".join([self.name, *settings])
        words = {"alt": f"By layer and token: {about}.", "about": about}
        drawn = plots.heatmap, self.shown
        self.experiment.figure(name, *drawn, **words, **self.options)
        folder = self.experiment.folder / "figures"
        self.status.value = escape.html(
            f"saved {name} (svg, pdf, png, parquet) in {folder}"
        )


def _table(cells: Iterable[Cell]) -> pd.DataFrame:
    """Cells with a column for each option and way to run them."""
    return pd.DataFrame(
        {"cell": cell, "bundle": cell.source.path.name}
        | vars(cell.options)
        | cell.run
        | {"hints": str(cell.run["hints"])}
        for cell in cells
    )


def _ratio(rows):
    """The error of a row or of rows over what rounding alone causes, as in the gate
    `budget`."""
    return rows["error"] / np.hypot(rows["budget"], plots.HALF_ULP)


def _notebook_cell() -> tuple[str, int] | None:
    """The cell that runs, and the number of its run; None outside of a notebook."""
    shell = get_ipython()
    parent = getattr(shell, "parent_header", None) or {}
    name = parent.get("metadata", {}).get("cellId")
    return (name, shell.execution_count) if name else None


def _close_replaced(explorer: Explorer) -> None:
    """Closes the Explorers that an earlier run of the same cell made, and outside of a
    notebook those of the same grid and log."""
    for other in [*_open]:
        if explorer.cell is None:
            same = other.cell is None and other.root == explorer.root
            replaced = same and other.grid == explorer.grid
        else:
            replaced = other.cell is not None and other.cell[0] == explorer.cell[0]
            replaced &= other.cell != explorer.cell
        if replaced:
            other.close()


def _duration(steps: list[Step]) -> str:
    return f"about {sum(seconds for _, seconds, _ in steps):.0f} s"


def _control(label: str, values: list) -> ui.Widget:
    """A slider over numbers, or a list of other values; it begins at the first."""
    look = {"description": label, "style": {"description_width": "initial"}}
    if type(values[0]) is int:
        return ui.SelectionSlider(options=sorted(set(values)), value=values[0], **look)
    return ui.Dropdown(options=values, **look)


def _button(label: str, icon: str, action: Callable[[], None]) -> ui.Button:
    look = ui.Layout(width="auto")
    button = ui.Button(description=label, icon=icon, layout=look)
    button.on_click(lambda _: action())
    return button


def _on_kernel_thread(action: Callable[[], None]) -> None:
    """Calls `action` on the thread that draws the canvas: a drawing on another one may
    reach the page in part. Without a kernel it is called here."""
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel:
        kernel.io_loop.add_callback(action)
    else:
        action()


def _canvas():
    """A figure in the page, with events in Python. matplotlib's
    backend stays what it was: ipympl replaces it when it is imported."""
    backend = matplotlib.get_backend(auto_select=False) or "agg"
    from ipympl.backend_nbagg import Canvas, FigureManager

    matplotlib.use(backend)
    figure = plots.StyledFigure(figsize=(WIDTH, 3), layout="constrained")
    canvas = Canvas(figure)
    FigureManager(canvas, 0)
    canvas.header_visible = canvas.toolbar_visible = canvas.resizable = False
    return canvas


def planner(checkpoint: str | Path) -> ui.Widget:
    """Memory and predicted speed of a checkpoint's exports, a row for each compression,
    under sliders for max_seq_len, T, chip and memory. Nothing in it is measured."""
    source = Checkpoint(find(checkpoint))
    caption = (
        f"{source.name} on a Mac, predicted by a formula; nothing here is measured. "
        f"{roofline.describe_fit()}"
    )

    def table(S: int, T: int, chip: str, gib: int) -> None:
        rows, reasons = [], {}
        for compress in PRESETS:
            options = make_options(max_seq_len=S, tokens=f"1-{T}", compress=compress)
            sizes = memory.budget(source, options)
            row = {f"{name}, MiB": size / 2**20 for name, size in sizes.items()}
            row["fits"] = memory.fits(sizes["total"], gib << 30)["fits_mac"]
            speed = roofline.by_chip(call_work(source, options, T), [chip])
            for name, column in (
                ("", "ms"),
                (" at least", "high_ms"),
                (" at most", "low_ms"),
            ):
                row[f"tok/s{name}"] = 1e3 * T / speed[column].item()
            rows.append({"compress": compress} | row)
            for reason in speed["extrapolates"].item().values():
                reasons.setdefault(reason, []).append(compress)
        beyond = [f"{', '.join(names)}: {text}" for text, names in reasons.items()]
        words = " ".join([caption, *(f"Extrapolated: {text}." for text in beyond)])
        display(show(pd.DataFrame(rows)).set_caption(words))

    controls = {
        "S": _control("tokens in the cache (max_seq_len)", [512, *LENGTHS]),
        "T": _control("tokens a call (T)", [4, *range(1, 33)]),
        "chip": _control("chip", sorted(chips()["chip"])),
        "gib": _control("memory of the Mac, GiB", [16, *range(4, 193, 4)]),
    }
    for control in controls.values():  # room for a slider beside its label
        control.layout.width = "32em"
    return ui.interactive(table, **controls)
