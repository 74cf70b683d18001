"""Sliders over what the log holds (`Explorer`) and over what an export needs
(`planner`)."""

import html
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
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
from workbench.bundle import Bundle
from workbench.decode.transcript import token_labels
from workbench.errors import InputError
from workbench.experiment import Experiment, show
from workbench.export import options as export_options
from workbench.models.checkpoint import Checkpoint
from workbench.sweep.error_split import measure_split, stored_split
from workbench.sweep.grid import Cell, find
from workbench.sweep.results import RUNTIMES

FIRST = ("bundle", "max_seq_len", "T", "compress", "precision")
"""The first controls; other axes of the grid follow where they have several values."""
TENSORS = ("update", "k", "v", "logits")
METRICS = [("1 − cosine", "cosine"), ("relative error ÷ its limit", "error")]
PARTS = ["storage", "reauthoring", "quantization", "precision", "runtime", "total"]
WIDTH = 9.5  # inches


@dataclass
class Step:
    """A measurement that the log lacks: what it is, how many parts and about how many
    seconds it has, and the function that runs it."""

    label: str
    parts: int
    seconds: float
    run: Callable[[], None]


class Explorer:
    """Error by layer and token, tokens per second and ms per layer at every setting of a
    grid.

    What the log holds is drawn at once. The cell under the pointer is described below
    the picture; a click keeps it and shows how its layer's error splits, which is
    measured first where the log lacks it. *Run what is missing* measures the rest of the
    grid in child processes, the shown setting first.

    Args:
        grid: a sweep (see `workbench.sweep.make_grid`).
        experiment: takes the figures that *Save figure* saves.
        root: the log's folder.
        machine: the machine of the times (see `workbench.sweep.stored_tables`).
    """

    def __init__(
        self,
        grid: dict,
        experiment: Experiment | None = None,
        *,
        root: str | Path | None = None,
        machine: str | None = None,
    ):
        self.grid = sweep.make_grid(grid)
        self.experiment = experiment
        self.root = Path(root or log.default_root())
        self.machine = machine
        self.cells = list(sweep.cells(self.grid, self.root))
        self.checkpoint = None  # of finished bundles, whose error is not split
        if not self.grid.bundle:
            self.checkpoint = Checkpoint(find(self.grid.checkpoint, self.root))
            tokenizer = self.checkpoint.path
        else:
            bundle = find(self.grid.bundle[0], self.root)
            tokenizer = Bundle.unchecked(bundle).tokenizer
        self.tokens = token_labels(tokenizer, self.grid.validate_ids)
        self.errors: list[Exception] = []
        self.cell: tuple[int, int] | None = None  # layer, position
        self.queue: list[Step] = []
        self.thread: threading.Thread | None = None
        self.stopped = threading.Event()
        self.seconds = {"cell": 8.0, "split": 15.0}  # until one of its kind has run
        names = ["bundle"] if self.grid.bundle else [*self.grid.export]
        names = sorted([*names, *sweep.RUN_AXES], key=lambda n: [*FIRST, n].index(n))
        self.axes = {}
        for name in names:
            values = []
            for cell in self.cells:
                if (value := _value(cell, name)) not in values:
                    values.append(value)
            if name in FIRST or len(values) > 1:
                self.axes[name] = _control(name, values)
        self.tensor = _control("tensor", TENSORS)
        self.metric = _control("metric", METRICS)
        controls = [*self.axes.values(), self.tensor, self.metric]
        for control in controls:
            control.observe(lambda _: self.guarded(self.draw), "value")
        self.run = ui.Button(icon="play", layout=ui.Layout(width="auto"))
        self.cancel = ui.Button(description="Cancel", icon="stop")
        self.keep = ui.Button(description="Save figure", icon="download")
        self.run.on_click(lambda _: self.begin(self.missing()))
        self.cancel.on_click(lambda _: self.stopped.set())
        self.keep.on_click(lambda _: self.guarded(self.save))
        self.status, self.message, self.chosen, self.tables = (
            ui.HTML() for _ in range(4)
        )
        self.canvas = _canvas()
        self.canvas.header_visible = self.canvas.toolbar_visible = False
        self.canvas.resizable = False
        self.canvas.mpl_connect("button_press_event", self.click)
        wrap = ui.Layout(flex_flow="row wrap")
        buttons = [self.run, self.cancel, self.keep, self.status]
        rows = [ui.HBox(row, layout=wrap) for row in (controls, buttons)]
        self.box = ui.VBox([*rows, self.message, self.canvas, self.chosen, self.tables])
        self.box.add_class("workbench-explorer")
        self.guarded(self.refresh)

    def _ipython_display_(self) -> None:
        display(self.box)

    def check(self) -> None:
        """Raises the first error of any callback or measurement so far."""
        if self.errors:
            raise self.errors[0]

    def guarded(self, action: Callable[[], None]) -> None:
        """Runs a callback; an error is shown and kept for `check`."""
        try:
            action()
        except Exception as problem:  # it would be lost in a callback
            self.errors.append(problem)
            text = str(problem)
            if not isinstance(problem, InputError):
                text = traceback.format_exc(limit=2)
            self.message.value = (
                f"<pre class='workbench-error'>{html.escape(text)}</pre>"
            )

    def refresh(self) -> None:
        """Reads the log and draws."""
        self.stored = sweep.stored_tables(self.grid, self.root, self.machine)
        steps = self.missing()
        self.run.disabled = not steps
        self.run.description = "Nothing is missing"
        if steps:
            parts = sum(step.parts for step in steps)
            self.run.description = f"Run what is missing ({parts}, {_duration(steps)})"
        self.draw()

    def draw(self) -> None:
        """Draws the heatmap at the controls' setting, and the texts that belong to
        it."""
        T, length = self.axes["T"], self.axes.get("max_seq_len")
        rows = self._at("fidelity", "T", "depth", "fast", "max_seq_len")
        rows = rows[rows["tensor"] == self.tensor.value]
        isolated = rows[rows["mode"] == "isolated"]
        rows = rows if isolated.empty else isolated
        if (rows["T"] == T.value).any():  # packages of others run all T in one pass
            rows = rows[rows["T"].isin([T.options[0], T.value])]
        lengths = rows["max_seq_len"].unique()
        S = length.value if length else next(iter(lengths), 0)
        shown = min(lengths, key=lambda n: abs(n - S), default=S)
        self.shown = rows[rows["max_seq_len"] == shown]
        self.message.value = self._speed()
        figure = self.canvas.figure
        figure.clear()
        if self.shown.empty or shown != S:
            words = f"Not measured at max_seq_len {S}; showing {shown:.0f}. "
            if self.shown.empty:
                words = "Not measured at this setting. "
            step = f"<i>Run what is missing</i> measures it ({_duration(self.missing()[:1])})."
            self.message.value = words + step
        if len(self.shown):
            title = f"{self.tensor.label} against Hugging Face, T = {T.value}"
            size = {"title": title, "width": WIDTH, "figure": figure}
            plots.heatmap(self.shown, **self._options(), **size)
            self.layers = sorted(self.shown["layer"].unique())
            self.positions = sorted(self.shown["position"].unique())
            layer, position = self.cell or (None, None)
            for ax in figure.axes[:-1]:  # the last one is the colour bar
                ax.format_coord = lambda x, y: self._words(self._cell_at(x, y))
                if layer in self.layers:
                    at = self.positions.index(position), self.layers.index(layer)
                    frame = Rectangle(at, 1, 1, fill=False, edgecolor="#D55E00", lw=2)
                    ax.add_patch(frame)
        self.canvas.layout.display = "none" if self.shown.empty else None
        self.canvas.draw_idle()
        self._describe()

    def _options(self) -> dict:
        """The heatmap's keywords."""
        options = {"tensor": self.tensor.value, "metric": self.metric.value}
        options["mode"] = self.shown["mode"].iloc[0]
        if self.shown["position"].max() < len(self.tokens):
            options["tokens"] = self.tokens
        return options

    def _at(self, table: str, *free: str) -> pd.DataFrame:
        """The rows of a table at the controls' setting, whatever the axes `free` are;
        fidelity has rows of every T."""
        name, hashes = "values" if table == "fidelity" else "setting", set()
        chosen = {n: c.value for n, c in self.axes.items() if n not in free}
        for cell in self.cells:
            if all(_value(cell, n) == value for n, value in chosen.items()):
                hashes |= {cell.columns(auto)[name] for auto in RUNTIMES}
        rows = self.stored[table]
        return rows[rows[name].isin(hashes)]

    def _speed(self) -> str:
        """Tokens per second and ms per layer at the controls' setting in words."""
        rates, layers = self._at("samples"), self._at("layers")["layer_ms"]
        rates = rates[rates["phase"] == "tokens_per_s"]
        where = ", ".join(f"{name} {c.value}" for name, c in self.axes.items())
        if rates.empty or layers.empty:
            return f"{where}: no times yet"
        speed = (
            f"{rates['value'].median():.4g} tok/s, {layers.median():.3g} ms per layer"
        )
        return f"<b>{speed}</b> at {where}, on {rates['machine'].iloc[0]}"

    def _cell_at(self, x: float, y: float) -> tuple[int, int] | None:
        """Layer and position of the cell at a point of a heatmap."""
        if 0 <= y < len(self.layers) and 0 <= x < len(self.positions):
            return self.layers[int(y)], self.positions[int(x)]
        return None

    def _words(self, cell: tuple[int, int] | None) -> str:
        """Place and values of a cell at the selected T."""
        rows = self.shown[self.shown["T"] == self.axes["T"].value]
        layer, position = cell or (None, None)
        rows = rows[(rows["layer"] == layer) & (rows["position"] == position)]
        if rows.empty:
            return ""
        row = rows.iloc[0]
        words = f"layer {layer}, position {position}"
        if position < len(self.tokens):
            words += f" “{self.tokens[position]}”"
        words += f", T = {row['T']:.0f}: 1 − cosine {max(0, 1 - row['cosine']):.2g}"
        if pd.notna(row["budget"]) and row["budget"] > 0:
            share = row["error"] / row["budget"]
            words += f", relative error {row['error']:.2g}, "
            words += f"{share:.2g} × the rounding floor"
        return words

    def click(self, event) -> None:
        """Chooses the cell under the pointer, and measures its layer's error split if
        the log has none."""
        inside = event.inaxes and self.shown.size
        at = self._cell_at(event.xdata, event.ydata) if inside else None
        if at is None:
            return
        self.cell = at
        self.guarded(self.draw)
        if self.checkpoint and self._split() is None:
            about = self._bundle(), self.grid.validate_ids, self.grid.experiment
            where = self.root, self.stopped
            split = partial(measure_split, self.checkpoint, *about, *where)
            words = f"error split of layer {at[0]} and the others"
            self.begin([Step(words, 1, self.seconds["split"], split)])

    def _describe(self) -> None:
        """Writes the chosen cell's values and its layer's error split."""
        words = self._words(self.cell)
        hint = "Click on a cell to see its values and its layer's error split."
        self.chosen.value = f"<b>{html.escape(words)}</b>" if words else hint
        self.tables.value = ""
        if words and (parts := self._split()) is not None:
            row = parts.set_index("layer").loc[[self.cell[0]], PARTS].astype(float)
            row.index = [f"layer {self.cell[0]}: relative RMS that each step adds"]
            row = row.rename(columns={"reauthoring": "re-authoring"})
            self.tables.value = row.to_html(float_format="{:.2g}".format, na_rep="–")

    def _bundle(self):
        """The export options of the shown rows."""
        wanted = self._exported() | {"max_seq_len": self.shown["max_seq_len"].iloc[0]}
        every = (cell.options for cell in self.cells)
        return next(o for o in every if wanted.items() <= dict(o).items())

    def _exported(self) -> dict:
        """The export options that the controls select."""
        return {n: c.value for n, c in self.axes.items() if n in self.grid.export}

    def _split(self) -> pd.DataFrame | None:
        if self.checkpoint:
            return stored_split(self.checkpoint, self._bundle(), self.root)

    def missing(self) -> list[Step]:
        """The measurements that the log lacks, those of the shown setting first."""
        lacking = {}
        for cell in sweep.missing(self.grid, self.root):
            bundle = str(cell.source.path) if cell.source.finished else None
            lacking.setdefault((bundle, cell.options), []).append(cell)
        shown = self._exported().items()
        steps = []
        for bundle, options in sorted(
            lacking, key=lambda b: not shown <= dict(b[1]).items()
        ):
            part = {name: [getattr(options, name)] for name in self.grid.export}
            update = {"bundle": [bundle]} if bundle else {"export": part}
            count = len(lacking[bundle, options])
            label = f"{Path(bundle or options.compress).name}, max_seq_len {options.max_seq_len}"
            run = partial(self._measure, self.grid.model_copy(update=update))
            steps.append(Step(label, count, count * self.seconds["cell"], run))
        return steps

    def _measure(self, part: sweep.Grid) -> None:
        start = time.monotonic()
        how = {"root": self.root, "stop": self.stopped, "progress": False}
        counts = sweep.sweep(part, **how)
        if counts["failed"]:
            found = f"{counts['failed']} of {counts['cells']} cells failed"
            step = "see their reasons: workbench log --where \"status == 'failed'\""
            raise InputError("sweep", found, "cells that fit", step)
        if counts["done"]:
            self.seconds["cell"] = (time.monotonic() - start) / counts["done"]

    def begin(self, steps: list[Step]) -> None:
        """Puts steps first in the queue, and starts a thread if none works on it."""
        self.queue[:0] = steps
        if self.thread is None or not self.thread.is_alive():
            self.stopped.clear()
            self.thread = threading.Thread(target=self._work, daemon=True)
            self.thread.start()

    def _work(self) -> None:
        errors = len(self.errors)
        while self.queue and len(self.errors) == errors and not self.stopped.is_set():
            step = self.queue.pop(0)
            words = f"measuring {step.label}: {_duration([step])}"
            if self.queue:
                words += f", then {_duration(self.queue)} for the rest"
            self.status.value = words
            with suppress(process.Cancelled):
                self.guarded(step.run)
            if len(self.errors) == errors:
                _on_kernel_thread(partial(self.guarded, self.refresh))
        self.queue.clear()
        cancelled = "cancelled; what was finished is kept"
        self.status.value = cancelled if self.stopped.is_set() else ""

    def save(self) -> None:
        """Saves the shown heatmap among the experiment's figures; its name holds tensor,
        metric and setting."""
        if self.experiment is None or self.shown.empty:
            found = "no experiment" if self.experiment is None else "nothing measured"
            needed = "a heatmap of an experiment"
            raise InputError("Save figure", found, needed, "press Run what is missing")
        controls = [self.tensor, self.metric, *self.axes.values()]
        name = "-".join(["explorer", *(str(control.value) for control in controls)])
        about = ", ".join(f"{c.description} {c.label}" for c in controls)
        words = {"alt": f"By layer and token: {about}.", "about": about}
        shown = plots.heatmap, self.shown
        self.experiment.figure(name, *shown, **words, **self._options())
        folder = self.experiment.folder / "figures"
        self.status.value = f"saved {name} (svg, pdf, png, parquet) in {folder}"


def _on_kernel_thread(action: Callable[[], None]) -> None:
    """Calls `action` on the thread that draws the canvas: a drawing on another one may
    reach the page in part. Without a kernel it is called here."""
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel:
        kernel.io_loop.add_callback(action)
    else:
        action()


def _duration(steps: list[Step]) -> str:
    seconds = sum(step.seconds for step in steps)
    if seconds < 100:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min"


def _canvas():
    """A figure in the page with events in Python. matplotlib's backend stays what it
    was: ipympl replaces it when it is imported."""
    backend = matplotlib.get_backend(auto_select=False) or "agg"
    from ipympl.backend_nbagg import Canvas, FigureManager

    matplotlib.use(backend)
    canvas = Canvas(Figure(figsize=(WIDTH, 3), layout="constrained"))
    with warnings.catch_warnings():  # ipympl's own call of traitlets
        warnings.simplefilter("ignore", DeprecationWarning)
        FigureManager(canvas, 0)
    return canvas


def _value(cell: Cell, name: str):
    """The value of an axis in a cell."""
    if name == "bundle":
        return cell.source.path.name
    return cell.run[name] if name in sweep.RUN_AXES else getattr(cell.options, name)


def _control(name: str, values, start=None) -> ui.Widget:
    """A slider over numbers, or a list of other values."""
    slider = name in ("max_seq_len", "T", "memory_GiB")
    if slider:
        values = sorted(values)
    elif isinstance(values[0], dict):
        values = [(str(value), value) for value in values]
    options = {"options": values, "description": name}
    options["style"] = {"description_width": "initial"}
    if start is not None:
        options["value"] = start
    if slider:
        return ui.SelectionSlider(**options, continuous_update=False)
    return ui.Dropdown(**options, layout=ui.Layout(width="auto"))


def planner(checkpoint: str | Path) -> ui.Widget:
    """Memory and predicted speed of a checkpoint's exports, a row for each compression,
    under sliders for max_seq_len, T, chip and memory. Nothing in it is measured."""
    source = Checkpoint(find(str(checkpoint), log.default_root()))

    def table(max_seq_len: int, T: int, chip: str, memory_GiB: int) -> None:
        rows = []
        for compress in memory.PRESETS:
            options = export_options(
                max_seq_len=max_seq_len, tokens=f"1-{T}", compress=compress
            )
            budget = memory.budget(source, options, memory_GiB << 30)
            row = {
                "compress": compress,
                "weights, MiB": budget.weights / 2**20,
                "KV cache, MiB": budget.kv / 2**20,
                "all, MiB": budget.total / 2**20,
                "fits": "yes" if budget.json()["fits_mac"] else "no",
            }
            for tokens in sorted({1, T}):
                work = memory.work(source, options, tokens)
                ms = roofline.predict_ms(work, chip)
                row[f"tok/s at T = {tokens}"] = 1e3 * tokens / ms
            rows.append(row)
        misfit = roofline.misfits()["misfit"].abs().median()
        words = (
            f"{source.name} on a Mac, predicted by a roofline that misses published "
        )
        words += f"figures by {misfit:.0%} in the median; nothing here is measured."
        display(show(pd.DataFrame(rows)).set_caption(words))

    return ui.interactive(
        table,
        max_seq_len=_control("max_seq_len", [2**n for n in range(6, 16)], 512),
        T=_control("T", [1, 2, 3, 4, 8, 16, 32], 4),
        chip=_control("chip", sorted(roofline.chips()), "M4"),
        memory_GiB=_control("memory_GiB", [6, 8, 12, 16, 24, 32, 64, 128], 16),
    )
