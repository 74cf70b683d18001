"""Sliders over what the log holds (`Explorer`) and over what an export needs
(`planner`)."""

import html
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ipywidgets as ui
import matplotlib
import pandas as pd
from IPython import get_ipython
from IPython.display import display
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from workbench import log, plots, process, sweep
from workbench.ane import memory, roofline
from workbench.decode.transcript import token_labels
from workbench.errors import InputError
from workbench.experiment import Experiment, show
from workbench.export import options as export_options
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import identity
from workbench.sweep.error_split import find_operation, measure_split, stored_split
from workbench.sweep.grid import Cell, find
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


class Explorer(ui.VBox):
    """Error by layer and token, tokens per second and ms per layer at every setting of a
    grid.

    What the log holds is drawn at once. The cell under the pointer is described below
    the picture; a click keeps it and shows how its layer's error splits, which is
    measured first where the log lacks it. *Run what is missing* measures the rest of the
    grid in child processes, the shown bundle first.

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
        cells = list(sweep.cells(self.grid, self.root))
        # a column for each option and way to run it
        self.cells = pd.DataFrame(
            {"cell": cell, "bundle": cell.source.path.name}
            | vars(cell.options)
            | cell.run
            | {"hints": str(cell.run["hints"])}
            for cell in cells
        )
        source = cells[0].source
        self.checkpoint = None  # of finished bundles, whose error is not split
        if not source.finished:
            self.checkpoint = Checkpoint(source.path)
        self.tokens = token_labels(source.tokenizer, self.grid.validate_ids)
        self.chosen: Place | None = None
        self.queue, self.thread = [], None  # of Steps
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
            control.observe(lambda _: self.guarded(self.draw), "value")
        self.run = _button("", "play", lambda: self.begin(*self.missing()))
        self.cancel = _button("Cancel", "stop", self.stopped.set)
        self.which = _button("Which operation?", "search", self.search)
        self.keep = _button("Save figure", "download", lambda: self.guarded(self.save))
        self.status, self.message, self.words, self.answer = (
            ui.HTML() for _ in range(4)
        )
        self.canvas, self.speed = _canvas(), _canvas()
        self.canvas.mpl_connect("button_press_event", self.click)
        buttons = [self.run, self.cancel, self.which, self.keep, self.status]
        wrap = ui.Layout(flex_flow="row wrap")
        rows = [ui.HBox(row, layout=wrap) for row in (self.controls, buttons)]
        shown = [self.message, self.canvas, self.words, self.answer, self.speed]
        super().__init__([*rows, *shown])
        self.add_class("workbench-explorer")
        self.guarded(self.refresh)

    def guarded(self, action: Callable[[], None]) -> bool:
        """Runs a callback, where an error would be lost: it is shown, and ends the
        queue. Returns whether there was none."""
        try:
            action()
            return True
        except Exception as problem:
            self.queue.clear()
            text = html.escape(f"{type(problem).__name__}: {problem}")
            self.message.value = f"<pre class='workbench-error'>{text}</pre>"
            return False

    def refresh(self) -> None:
        """Reads the log and draws."""
        self.stored = sweep.stored_tables(self.grid, self.root)
        steps = self.missing()
        self.run.disabled = not steps
        missing = f"Run what is missing ({_duration(steps)})"
        self.run.description = missing if steps else "Nothing is missing"
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
        self.message.value = self._draw_speed(S, T)
        if nearest != S:
            words = "Not measured at this setting."
            if nearest:
                words = f"Not measured at max_seq_len {S}; showing {nearest:.0f}."
            words += " <i>Run what is missing</i> measures it."
            self.message.value = words
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
        self.describe()

    def _fitting(self, *free: str) -> list[Cell]:
        """The grid's cells at the controls' setting, whatever the axes `free` are."""
        cells = self.cells
        for name, control in self.axes.items():
            if name not in free:
                cells = cells[cells[name] == control.value]
        return cells["cell"].tolist()

    def _rows(self, table: str, *free: str) -> pd.DataFrame:
        """The rows of a table of `_fitting` cells, whatever runtime `auto` means;
        fidelity has rows of every T."""
        name = "values" if table == "fidelity" else "setting"
        cells = self._fitting(*free)
        hashes = {
            cell.columns(auto)[name] for cell in cells for auto in identity.RUNTIMES
        }
        rows = self.stored[table]
        return rows[rows[name].isin(hashes)]

    def _draw_speed(self, S: int, T: int) -> str:
        """Draws tokens per second and ms per layer over max_seq_len and T, one value
        for each process, and gives those of the setting in words."""
        rates, layers = (
            self._rows(table, "max_seq_len", "T") for table in ("samples", "layers")
        )
        rates = sweep.per_process(rates, "tokens_per_s").assign(what=SPEED)
        layers = sweep.per_process(layers, "layer_ms").assign(what=LAYER)
        times = pd.concat([rates, layers]).sort_values("T")
        own = times[(times["max_seq_len"] == S) & (times["T"] == T)]
        self.speed.layout.display = "none" if own.empty else None
        if own.empty:
            return "No times yet."
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
        words = f"<b>{words}</b> ({processes}) on {own['machine'].iloc[0]}"
        if why := own["disturbed"].dropna().unique().tolist():
            words += f"; disturbed: {html.escape(why[0])}"
        invalid = own["invalid"].dropna().unique()
        return "; invalid: ".join([words, *map(html.escape, invalid)])

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
            words += f"{row['error'] / row['budget']:.2g} × the rounding floor"
        return words

    def describe(self) -> bool:
        """Writes the chosen cell's values and its layer's error split below the
        heatmap; returns whether a split lacks that can be measured."""
        cell = self._cell(self.chosen)
        self.which.disabled = not cell
        if not cell:
            hint = "Click on a cell to see its values and its layer's error split."
            self.words.value = hint
            return False
        self.words.value = f"<b>{html.escape(cell)}</b>"
        if self.checkpoint is None:
            return False
        parts = stored_split(self.checkpoint, self.exported, self.grid, self.root)
        if parts is None:
            return True
        row = parts[parts["layer"] == self.chosen[0]]  # the logits' has none
        row = row[PARTS].astype(float)
        table = row.to_html(index=False, float_format="{:.2g}".format, na_rep="–")
        self.words.value += f"<br>relative RMS that each step adds:{table}"
        return False

    def click(self, event) -> None:
        """Chooses the cell under the pointer, and measures its layer's error split if
        the log has none."""
        place = None
        if event.inaxes in self.canvas.figure.axes[:-1]:
            place = self._place(event.xdata, event.ydata)
        if place is None:
            return
        self.chosen, self.answer.value = place, ""
        if self.guarded(self.draw) and self.describe():
            about = self.checkpoint, self.exported, self.grid, self.root, self.stopped
            split = partial(measure_split, *about)
            self.begin((f"error split of layer {place[0]}", SPLIT_S, split))

    def search(self) -> None:
        """Searches for the operation that is wrong in the chosen cell."""
        about = self._fitting()[0], self.grid, self.root, self.chosen, self.stopped

        def answer() -> None:
            self.answer.value = html.escape(find_operation(*about))

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
        if self.thread is None or not self.thread.is_alive():
            self.stopped.clear()
            self.thread = threading.Thread(target=self._work, daemon=True)
            self.thread.start()

    def _work(self) -> None:
        while self.queue:
            label, _, run = self.queue[0]
            self.status.value = f"measuring {label}, {_duration(self.queue)} to go"
            del self.queue[0]
            try:
                if self.guarded(run):
                    _on_kernel_thread(partial(self.guarded, self.refresh))
            except process.Cancelled:
                self.queue.clear()
                self.status.value = "cancelled; what was finished is kept"
                return
        self.status.value = ""

    def save(self) -> None:
        """Saves the shown heatmap among the experiment's figures; its name holds the
        setting, tensor and metric."""
        name = "-".join(["explorer", *(str(c.value) for c in self.controls)])
        about = ", ".join(f"{c.description} {c.label}" for c in self.controls)
        words = {"alt": f"By layer and token: {about}.", "about": about}
        drawn = plots.heatmap, self.shown
        self.experiment.figure(name, *drawn, **words, **self.options)
        folder = self.experiment.folder / "figures"
        self.status.value = f"saved {name} (svg, pdf, png, parquet) in {folder}"


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
    made = Canvas(Figure(figsize=(WIDTH, 3), layout="constrained"))
    FigureManager(made, 0)
    made.header_visible = made.toolbar_visible = made.resizable = False
    return made


def planner(checkpoint: str | Path) -> ui.Widget:
    """Memory and predicted speed of a checkpoint's exports, a row for each compression,
    under sliders for max_seq_len, T, chip and memory. Nothing in it is measured."""
    source = Checkpoint(find(checkpoint))
    caption = (
        f"{source.name} on a Mac, predicted by a roofline; nothing here is measured. "
        f"{roofline.describe_fit()}"
    )

    def table(S: int, T: int, chip: str, gib: int) -> None:
        rows = []
        for compress in memory.PRESETS:
            options = export_options(max_seq_len=S, tokens=f"1-{T}", compress=compress)
            sizes = memory.budget(source, options)
            row = {f"{name}, MiB": size / 2**20 for name, size in sizes.items()}
            row["fits"] = memory.fits(sizes["total"], gib << 30)["fits_mac"]
            speeds = roofline.by_chip(memory.work(source, options, T))
            row["tok/s"] = 1e3 * T / speeds.set_index("chip")["ms"][chip]
            rows.append({"compress": compress} | row)
        display(show(pd.DataFrame(rows)).set_caption(caption))

    controls = {
        "S": _control("tokens in the cache (max_seq_len)", [512, *LENGTHS]),
        "T": _control("tokens a call (T)", [4, *range(1, 33)]),
        "chip": _control("chip", sorted(roofline.chips()["chip"])),
        "gib": _control("memory of the Mac, GiB", [16, *range(4, 193, 4)]),
    }
    for control in controls.values():  # room for a slider beside its label
        control.layout.width = "32em"
    return ui.interactive(table, **controls)
