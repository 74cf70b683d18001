"""Sliders over a grid's results in the log."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import ipywidgets as ui
import pandas as pd

from workbench import escape, log, plots, sweep
from workbench.bundle import Options
from workbench.decode.tokenizer import token_labels
from workbench.errors import InputError
from workbench.experiment import Experiment
from workbench.experiment.entries import current_cell
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import identity
from workbench.sweep.error_split import find_operation, measure_split, stored_split
from workbench.sweep.grid import Cell
from workbench.sweep.run import run_cell
from workbench.widgets import sentences
from workbench.widgets.controls import (
    OF_SETTING,
    STYLE,
    PageWidth,
    Selections,
    label_button,
    make_button,
    make_control,
    mark_stops,
)
from workbench.widgets.estimates import CellSeconds, Stage, plan_stages
from workbench.widgets.jobs import Job, JobQueue, count_measurements, describe_seconds
from workbench.widgets.results import FIRST_AXES, GridResults, Setting, mode_of
from workbench.widgets.views import Heatmap, Place, Speed, process_times

TENSORS = {
    "update": "update (what a layer adds)",
    "k": "k (rows of the KV cache)",
    "v": "v (rows of the KV cache)",
    "logits": "logits (the model's output)",
}
"""A tensor that is compared with Hugging Face's → its label in the list."""
METRICS = [(metric.label, name) for name, metric in plots.METRICS.items()]
SCALES = [("one for all settings", True), ("this setting's own", False)]
"""The colour scales of a heatmap: a label, and whether all settings share the scale."""
EXPLORER = "workbench-explorer"
"""The CSS class of the widget."""
RUN = "Run what is missing"
NOTHING_MISSING = "Nothing is missing"
RUN_MEASURES_THEM = f"<i>{RUN}</i> measures them."
SAVING = "saving the figure …"
STATUS_HEIGHT = "2.3em"
"""Of the line that is empty while nothing is measured or saved: what is below stays in its
place."""
PLACE_HEIGHT = "3.4em"
"""Of the values of the chosen cell, which take up to two lines: the picture below stays in
its place when a cell is chosen."""
HINT = "Click on a cell to see its values here and its layer's error split below the picture."
SPLITTING = "The error of every layer is being split. <i>Cancel</i> ends this."
RUN_TAKES_OVER = (
    f"<i>{RUN}</i> stops it, measures the missing settings, and then starts it again."
)
SPLIT_WAITS = "The error of every layer will be split after the running measurement."
SPLIT_WAITS_FOR = "The error of every layer will be split after {count} measurements."
NO_SPLIT = "The log has no error split of this bundle. A click on a cell measures it."
# what a slider decides, shown under the pointer; ipywidgets shows no such text on lists
SLIDER_TOOLTIPS = {
    "max_seq_len": "Tokens that the KV cache of the bundle can take",
    "T": "Tokens in one call",
}
# what a button does, shown under the pointer
RUN_TOOLTIP = (
    "Measures every setting of the sliders that the log lacks, the shown bundle's first. "
    "Finished measurements stay in the log."
)
NO_ESTIMATE = (
    "The time is estimated once this session has measured settings of the same kinds: "
    "the first one of a bundle, which exports and validates, and the others."
)
RUN_IS_BUSY = "The missing settings are being measured; Cancel ends this."
RUN_IS_COMPLETE = "The log has every setting of the sliders."
CANCEL_TOOLTIP = "Ends the running measurement and drops those that wait."
SEARCH_TOOLTIP = (
    "For the clicked cell: searches the bundle's program for the operation that this "
    "runtime computes wrongly, beyond the rounding of fp16 (workbench explain op)."
)
SAVE_TOOLTIP = "Writes the heatmap as svg, pdf and png, with its data as parquet."
_open: list["Explorer"] = []
"""Explorers whose pictures take memory, which `close` frees."""


@dataclass(frozen=True)
class Drawing:
    """What the heatmap draws."""

    rows: pd.DataFrame
    """Of the table `fidelity`, at least one."""
    options: Options
    """The options of the export whose rows are drawn."""
    metric: str
    """The selected metric, or the cosine where the rows lack the selected one."""
    limits: tuple[float, ...]
    """The least and the largest value of the metric at all settings in the log, where
    these share a colour scale (see `plots.find_limits`); else empty."""

    @property
    def T(self) -> int:
        """The T that stands for the setting's (see `GridResults.fidelity`)."""
        return int(self.rows["T"].max())

    def equals(self, other: "Drawing | None") -> bool:
        """Whether both give the same picture."""
        if other is None or not self.rows.equals(other.rows):
            return False
        shown = self.options, self.metric, self.limits
        return shown == (other.options, other.metric, other.limits)

    @property
    def runtimes(self) -> str:
        """What ran the bundle, as in the subtitles of notebooks."""
        names = self.rows["runtime"].dropna().unique()
        return ", ".join(f"{name} runtime" for name in names)


class Explorer(ui.VBox):
    """Error by layer and token, tokens per second and ms per layer at every setting of a
    grid.

    Results in the log are drawn at once, in the width of the page. The chosen cell and the
    cell under the pointer are described above the picture. A click chooses the cell and
    shows below the picture how its layer's error splits; the split is measured first
    where the log lacks it. *Run what is missing* measures the rest of the grid in child
    processes, beginning with the shown bundle.

    Cells and layers of the shown bundle are ranked by their error over the rounding
    budget, settings by their KL: that ratio contains the rounding of a setting's own
    weights. An Explorer is closed when its cell of a notebook runs again; outside of a
    notebook, when another one shows the same grid.

    The order of calls: after a job, and at the start, `refresh` reads the log and calls
    `draw`; a slider calls `draw_anew`, which calls `draw`; a click calls `draw`,
    then perhaps a job. `draw` ends with `describe`.

    Args:
        grid: a sweep (see `workbench.sweep.make_grid`). The controls begin at the first
            of its settings that has the most results in the log (see
            `GridResults.most_measured`).
        experiment: takes the figures that *Save figure* saves.
        root: the log's folder.
    """

    def __init__(
        self, grid: dict, experiment: Experiment, *, root: str | Path | None = None
    ):
        self.grid, self.experiment = sweep.make_grid(grid), experiment
        self.root = Path(root or log.default_root()).absolute()
        self.notebook_cell = current_cell()
        self.is_open = False  # until all widgets are there
        _close_replaced(self)
        self.results = GridResults(self.grid, self.root)
        source = self.results.cells["cell"].iloc[0].source
        # a finished bundle has no checkpoint, and its error is not split
        self.checkpoint = None if source.finished else Checkpoint(source.path)
        self.name = source.name if source.finished else self.checkpoint.name
        self.tokens = token_labels(source.tokenizer, self.grid.validate_ids)
        self.runs = pd.DataFrame()  # of the log's table `runs`, those with errors
        self.cell_seconds = CellSeconds()
        self.job_seconds: dict[str, float] = {}  # of the last "split" and "search"
        self.is_selecting = False  # while code, not the user, changes the controls
        self.missing_cells = 0  # number of the grid's cells that the log lacks
        self.missing_s: float | None = None  # seconds that they take, if known
        # of the last *Run*; some may be done
        self.cell_jobs: list[tuple[Job, list[Stage]]] = []
        # of error splits, with the options of their bundles; some may be done
        self.split_jobs: list[tuple[Job, Options]] = []
        self.chosen_place: Place | None = None
        self.search_results: dict[tuple, str] = {}  # `_search_key` → HTML
        self.drawing: Drawing | None = None  # None where nothing was measured
        self.queue = JobQueue(
            say=self._say,
            on_change=self._follow_queue,
            on_result=partial(self.guarded, self.refresh),
            on_error=self._show_error,
        )
        self.heatmap, self.speed = Heatmap(), Speed()
        self.heatmap.canvas.mpl_connect("button_press_event", self.click)
        self._make_widgets()
        rows = [self._row([*self.controls, self.metric_text, self.fixed_text])]
        rows.append(self._row(self.buttons))
        rows.append(self._row([self.status, self.saved_text]))
        rows[-1].layout.min_height = STATUS_HEIGHT
        above = [self.message, self.place_text]
        below = [self.split_text, self.search_text, self.ranks_text]
        of_setting = [*above, self.heatmap.canvas, *below, self.speed.canvas]
        for shown in (*of_setting, self.metric_text):
            shown.add_class(OF_SETTING)
        pictures = [*of_setting[:-1], self.costs_text, self.speed.canvas]
        hidden = [*self.selections.bars, self.selections.rule, self.page_width]
        children = [*rows, *pictures, *hidden, ui.HTML(STYLE)]
        super().__init__(children, layout={"overflow": "visible"})
        self.add_class(EXPLORER)
        self.is_open = True
        _open.append(self)
        self.guarded(self._begin)

    def _make_widgets(self) -> None:
        self.axes = {
            name: make_control(name, values, tooltip=SLIDER_TOOLTIPS.get(name))
            for name, values in self.results.axes().items()
        }
        labels = [(label, name) for name, label in TENSORS.items()]
        self.tensor = make_control("tensor", labels)
        self.metric = make_control("metric", METRICS)
        self.scale = make_control("colour scale", SCALES)
        self.controls = [*self.axes.values(), self.tensor, self.metric, self.scale]
        for widget in self.controls:
            widget.observe(self._follow, "value")
        # a control of one value decides nothing; its value stands in `fixed_text`
        for widget in self._fixed_controls():
            widget.layout.display = "none"
        self.selections = Selections(self.controls)
        self.page_width = PageWidth(EXPLORER, self._fit)
        # why the selected metric is not drawn
        self.metric_text = ui.HTML(layout={"margin": "0 1.5em 0 0"})
        self.fixed_text = ui.HTML(self._describe_fixed())
        self.run_button = make_button("", "play", self._run_missing, RUN_TOOLTIP)
        self.cancel_button = make_button(
            "Cancel", "stop", self.queue.cancel, CANCEL_TOOLTIP
        )
        self.cancel_button.disabled = True
        self.search_button = make_button(
            "Which operation?", "search", self.search, SEARCH_TOOLTIP
        )
        self.save_button = make_button(
            "Save figure", "download", self._save_visibly, SAVE_TOOLTIP
        )
        self.status = ui.HTML()  # what is measured
        self.saved_text = ui.HTML()  # where the shown figure was saved
        self.message = ui.HTML()  # the times, what was not measured, or an error
        self.ranks_text = ui.HTML()
        # the values of the chosen cell
        self.place_text = ui.HTML(layout={"min_height": PLACE_HEIGHT})
        self.split_text = ui.HTML()  # the error split of its layer
        self.search_text = ui.HTML()  # the result of `search`
        self.costs_text = ui.HTML()
        self.buttons = [
            self.run_button,
            self.cancel_button,
            self.search_button,
            self.save_button,
        ]

    def _fixed_controls(self) -> list[ui.Widget]:
        """The controls of axes that have one value in the grid."""
        return [widget for widget in self.axes.values() if len(widget.options) == 1]

    def _describe_fixed(self) -> str:
        """The checkpoint and what all settings have in common, as HTML."""
        controls = self._fixed_controls()
        facts = [f"{control.description} {control.value}" for control in controls]
        return escape.html(" · ".join([self.name, *facts]))

    @staticmethod
    def _row(widgets: list[ui.Widget]) -> ui.HBox:
        # boxes have scroll bars by default, also where nothing is cut
        return ui.HBox(widgets, layout={"flex_flow": "row wrap", "overflow": "visible"})

    def close(self) -> None:
        """Ends its measurement, removes it from the page and frees its figures."""
        # ipywidgets closes a widget when it is deleted, also one that `__init__` left
        # before it set anything
        if not getattr(self, "is_open", False):
            super().close()
            return
        self.is_open = False
        self.queue.cancel()
        if self in _open:
            _open.remove(self)
        self.selections.close()
        for canvas in (self.heatmap.canvas, self.speed.canvas):
            canvas.figure.clear()
        for widget in [*_widgets_within(self)]:
            for part in (widget.layout, getattr(widget, "style", None), widget):
                if part is not None:
                    part.close()
        self.children = ()
        self.heatmap = self.speed = None
        self.layout.close()
        super().close()

    def guarded(self, action: Callable[[], None]) -> bool:
        """Runs a callback. Jupyter would swallow its error, so the error is shown here,
        and the queued jobs are dropped, whose results would be drawn over it. Returns
        whether it succeeded."""
        if not self.is_open:
            return False
        try:
            action()
            return True
        except Exception as problem:
            self.queue.drop_waiting()
            self._show_error(problem)
            return False

    def _show_error(self, problem: Exception) -> None:
        if self.is_open:
            text = escape.html(f"{type(problem).__name__}: {problem}")
            self.message.value = f"<pre class='workbench-error'>{text}</pre>"

    def _say(self, text: str) -> None:
        if self.is_open:
            counted = [self._count_finished(), text] if text else [text]
            self.status.value = escape.html("; ".join(filter(None, counted)))

    def _count_finished(self) -> str:
        """The number of the cells of the last *Run* that are measured, in words; ""
        where none of them is running or waits."""
        jobs = [job for job, _ in self.cell_jobs]
        if not any(self.queue.has(job) for job in jobs):
            return ""
        return f"{sum(job.is_finished for job in jobs)} of {len(jobs)} measured"

    # what is shown

    def setting(self) -> Setting:
        """The values of the controls that decide what is measured."""
        return {name: widget.value for name, widget in self.axes.items()}

    def _begin(self) -> None:
        """Reads the log, moves the controls to the setting at which the most was
        measured, and draws."""
        self.results.refresh()
        self.is_selecting = True
        for name, value in self.results.most_measured().items():
            self.axes[name].value = value
        self.is_selecting = False
        self._show_results()

    def refresh(self) -> None:
        """Reads the log and draws."""
        self.results.refresh()
        self._show_results()

    def _show_results(self) -> None:
        """Draws what was read from the log, and marks the values of the controls of
        which it has nothing."""
        self._mark_stops()
        run_ids = self.results.tables["fidelity"]["run_id"].unique()
        self.runs = log.load("runs", self.root, {"run_id": run_ids})
        cells = self.results.missing(self.setting())
        self.missing_cells = len(cells)
        stages = [*chain.from_iterable(plan_stages(cells, self.bundles))]
        self.missing_s = self.cell_seconds.estimate(stages)
        # a cell that was measured since *Run* corrects the time left
        for job, stages in self.cell_jobs:
            job.seconds = self.cell_seconds.estimate(stages)
        self._enable()
        self.costs_text.value = self._costs()
        self.draw()

    def _mark_stops(self) -> None:
        self.is_selecting = True
        for name, marks in self.results.marks().items():
            mark_stops(self.axes[name], marks)
        self.is_selecting = False

    def _follow_queue(self) -> None:
        """Says what runs now, on the buttons and beside the heatmap."""
        self._enable()
        self.guarded(self.describe)

    def _enable(self) -> None:
        """Enables *Cancel* while something is measured, and *Run* while no cell of the
        grid is and the log lacks one; says on *Run* how long it will take."""
        if not self.is_open:
            return
        is_measuring = any(self.queue.has(job) for job, _ in self.cell_jobs)
        is_complete = self.missing_cells == 0
        self.cancel_button.disabled = not self.queue.is_busy
        self.run_button.disabled = is_measuring or is_complete
        if is_complete:
            words, tooltip = NOTHING_MISSING, RUN_IS_COMPLETE
        elif is_measuring:  # the time left stands in the status alone
            words, tooltip = RUN, RUN_IS_BUSY
        else:
            words, tooltip = f"{RUN} ({self._describe_missing()})", RUN_TOOLTIP
            if self.missing_s is None:
                tooltip += f" {NO_ESTIMATE}"
        label_button(self.run_button, words, tooltip)

    def _describe_missing(self) -> str:
        """The number of missing cells and the time that they take, if it is known."""
        count = count_measurements(self.missing_cells)
        if self.missing_s is None:
            return f"{count}, no estimate yet"
        return f"{count}, {describe_seconds(self.missing_s)}"

    def _follow(self, _: dict) -> None:
        """Draws what the user has selected."""
        if not self.is_selecting:
            self.guarded(self.draw_anew)

    def _fit(self, pixels: int) -> None:
        """Draws both pictures in the width of the page, if they have another one."""
        # no generator: both pictures are fitted
        pictures = self.heatmap, self.speed
        if any([picture.fit(pixels) for picture in pictures]):
            for picture in pictures:
                picture.mark_stale()
            self.guarded(self.draw)

    def draw_anew(self) -> None:
        """Draws at another setting. The page shows at once that the pictures are those
        of the last setting, and loses what it says about the cell under the pointer and
        about the saved figure."""
        for picture in (self.heatmap, self.speed):
            picture.mark_stale()
        self.heatmap.forget_pointer()
        self.saved_text.value = ""
        self.draw()

    def draw(self) -> None:
        """Draws both pictures at the controls' setting, and the texts that belong to
        them."""
        setting, tensor = self.setting(), self.tensor.value
        options = self.results.options(setting)
        times = self._draw_times(setting, options.max_seq_len)
        rows = self.results.fidelity(setting, tensor)
        # the rows whose values the colours include
        measured = self.results.measured(tensor) if self.scale.value else rows[:0]
        drawing = _find_drawing(rows, options, self.metric.value, measured)
        # a measurement changes what is drawn, too: neither the saved figure nor the cell
        # under the pointer is in the new picture
        if drawing is None or not drawing.equals(self.drawing):
            self.saved_text.value = ""
            self.heatmap.forget_pointer()
        self.drawing = drawing
        if self.drawing is None:
            ranks = ""
        else:
            self._draw_heatmap(self.drawing, tensor)
            ranks = sentences.describe_ranks(self.drawing.rows)
        validated_ts = self.results.validated_ts(setting)
        place = options.max_seq_len, setting["T"]
        self.message.value = _message(times, *place, self.drawing, validated_ts)
        is_replaced = self.drawing and self.drawing.metric != self.metric.value
        self.metric_text.value = (
            sentences.describe_no_rounding(tensor) if is_replaced else ""
        )
        self.save_button.disabled = self.drawing is None
        self.heatmap.canvas.layout.display = "none" if self.drawing is None else None
        self.ranks_text.value = ranks
        self.describe()
        self.selections.mark_drawn()

    @property
    def shown_rows(self) -> pd.DataFrame:
        """The rows of `fidelity` that are drawn; none where nothing was measured."""
        return self.drawing.rows if self.drawing else pd.DataFrame()

    def _draw_times(self, setting: Setting, S: int) -> str:
        """Draws the times over max_seq_len and T, and returns those of the setting in
        words, as HTML. Where the setting has none, hides the picture and returns ""."""
        rates, layers = (
            self.results.rows(table, setting, ignoring=("max_seq_len", "T"))
            for table in ("samples", "layers")
        )
        times = process_times(rates, layers)
        is_setting = (times["max_seq_len"] == S) & (times["T"] == setting["T"])
        if not is_setting.any():
            self.speed.hide()
            return ""
        self.speed.draw(times, S)
        summary = log.summarize(times[is_setting], "quantity")
        return sentences.describe_times(times[is_setting], summary)

    def _draw_heatmap(self, drawing: Drawing, tensor: str) -> None:
        options = {"tensor": tensor, "mode": mode_of(tensor)}
        options |= {"metric": drawing.metric, "limits": drawing.limits}
        options["tokens"] = self._find_tokens(drawing.rows)
        options["title"] = sentences.describe_heatmap(tensor, drawing.metric)
        validated_ts = self.results.validated_ts(self.setting())
        notes = [sentences.describe_scale(bool(drawing.limits))]
        notes.append(sentences.describe_gaps(tensor, validated_ts))
        options["note"] = "; ".join(filter(None, notes))
        subtitle = self._describe_conditions(drawing)
        self.heatmap.draw(drawing.rows, options, subtitle, self.chosen_place)

    def _describe_conditions(self, drawing: Drawing) -> str:
        """The checkpoint, the options of the shown bundle and its run, and what the layers
        were fed, as the subtitle of the heatmap, which names the rest."""
        shown = self.setting() | {"max_seq_len": drawing.options.max_seq_len}
        # the panels have T, and the drawing has the runtime
        others = "T", "runtime"
        facts = [f"{key} {value}" for key, value in shown.items() if key not in others]
        fed = sentences.FED[mode_of(self.tensor.value)]
        return " · ".join(filter(None, [self.name, *facts, drawing.runtimes, fed]))

    def _find_tokens(self, rows: pd.DataFrame) -> list[str] | None:
        """The texts of the tokens of a validation, one by position: those that its run
        logged, else those of the grid's prompt where its hash says that the run is on
        it. None where the log names no prompt, as for notebooks of earlier versions, and
        where the rows are on several prompts.

        Args:
            rows: of `fidelity`.
        """
        prompts = rows["prompt"].unique()
        if len(prompts) != 1 or pd.isna(prompts[0]):
            return None
        configs = self.runs.loc[self.runs["run_id"].isin(rows["run_id"]), "config"]
        for config in configs.dropna():
            tokens = json.loads(config).get(identity.TOKENS_KEY)
            if tokens and rows["position"].max() < len(tokens):
                return tokens
        if prompts[0] == identity.prompt_hash(self.grid.validate_ids):
            return self.tokens
        return None

    def _costs(self) -> str:
        """A table of the KL of each validated setting."""
        names = dict.fromkeys(["bundle", *FIRST_AXES, *self.axes])
        return sentences.costs_table(self.runs, [name for name in names if name != "T"])

    def describe(self) -> None:
        """Writes the chosen cell's values above the heatmap, and its layer's error split
        below it."""
        text = self._chosen_values()
        self.search_button.disabled = not text
        self.search_text.value = self.search_results.get(self._search_key(), "")
        self.place_text.value = f"<b>{escape.html(text)}</b>" if text else HINT
        self.split_text.value = self._describe_split() if text else ""

    def _describe_split(self) -> str:
        """The split of the chosen cell's layer as a table, or why there is none."""
        if self.checkpoint is None:
            return ""
        split = self._stored_split()
        if split is not None:
            return sentences.split_table(split, self.chosen_place.layer)
        job = self._find_split_job()
        if job is None:
            return NO_SPLIT
        if count := self.queue.count_before(job):
            return SPLIT_WAITS if count == 1 else SPLIT_WAITS_FOR.format(count=count)
        return (
            SPLITTING if self.run_button.disabled else f"{SPLITTING} {RUN_TAKES_OVER}"
        )

    def _chosen_values(self) -> str:
        """The values of the chosen cell in words; "" if no drawn cell is chosen."""
        if self.drawing is None:
            return ""
        return self.heatmap.describe(self.chosen_place)

    def _stored_split(self) -> pd.DataFrame | None:
        """The error split of the drawn bundle, if the log has one."""
        if self.checkpoint is None or self.drawing is None:
            return None
        return stored_split(self.checkpoint, self.drawing.options, self.grid, self.root)

    def _lacks_split(self) -> bool:
        """Whether the chosen cell is drawn, and its bundle's error split can be measured
        and is not in the log."""
        if self.checkpoint is None or not self._chosen_values():
            return False
        return self._stored_split() is None

    # what is measured

    def click(self, event) -> None:
        """Chooses the cell under the pointer, and measures its layer's error split if
        the log has none."""
        if event.inaxes not in self.heatmap.axes():
            return
        place = self.heatmap.place_at(event.xdata, event.ydata)
        if place is None:
            return
        self.chosen_place = place
        # its values now stand above the picture
        self.heatmap.forget_pointer()
        if self.guarded(self.draw) and self._lacks_split():
            self._split()

    def _split(self) -> None:
        """Has the error split of the drawn bundle measured, unless it already is."""
        if self._find_split_job():
            return
        self.split_jobs = [pair for pair in self.split_jobs if self.queue.has(pair[0])]
        job = self._split_job()
        self.split_jobs.append((job, self.drawing.options))
        self.queue.add_first(job)
        self.describe()

    def _find_split_job(self) -> Job | None:
        """The job, running or waiting, that splits the error of the drawn bundle."""
        for job, options in self.split_jobs:
            if options == self.drawing.options and self.queue.has(job):
                return job
        return None

    def _split_job(self) -> Job:
        """A job that measures the error split of the drawn bundle."""
        options = self.drawing.options
        arguments = self.checkpoint, options, self.grid, self.root

        def split() -> None:
            # a split that *Run* queues again may have ended before *Run* stopped it
            if stored_split(*arguments) is None:
                measure_split(*arguments, self.queue.cancelled)

        label = f"error split of {options.compress}, max_seq_len {options.max_seq_len}"
        return self._timed_job("split", label, split)

    def _timed_job(self, kind: str, label: str, work: Callable[[], None]) -> Job:
        """A job that is expected to take as long as the last one of its kind in this
        session."""

        def run() -> None:
            start = time.monotonic()
            work()
            self.job_seconds[kind] = time.monotonic() - start

        return Job(label, self.job_seconds.get(kind), run)

    def search(self) -> None:
        """Searches for the operation that computes the chosen cell wrongly."""
        # the setting and the chosen cell may change while the search runs
        key, (layer, position) = self._search_key(), self.chosen_place
        cell = self.results.cell(self.setting())

        def find() -> None:
            stop = self.queue.cancelled
            result = find_operation(cell, self.grid, self.root, layer, position, stop)
            self.search_results[key] = escape.html(result)

        name = sentences.layer_name(layer)
        label = f"the operation of {name}, position {position}"
        self.queue.add_first(self._timed_job("search", label, find))

    def _search_key(self) -> tuple:
        """The key of a result of `search`: the setting and the chosen place."""
        return tuple(self.setting().values()), self.chosen_place

    @property
    def bundles(self) -> Path:
        """The folder of exported bundles."""
        return log.project(self.root) / "data" / "bundles"

    def missing(self) -> list[Job]:
        """A job for each cell that the log lacks, those of the shown bundle first."""
        return [job for job, _ in self._plan_jobs()]

    def _plan_jobs(self) -> list[tuple[Job, list[Stage]]]:
        """The jobs of `missing` with the stages of their cells."""
        cells = self.results.missing(self.setting())
        jobs = []
        for cell, stages in zip(cells, plan_stages(cells, self.bundles)):
            options = cell.options
            label = f"{options.compress}, max_seq_len {options.max_seq_len}"
            seconds = self.cell_seconds.estimate(stages)
            jobs.append((Job(label, seconds, partial(self._measure, cell)), stages))
        return jobs

    def _run_missing(self) -> None:
        """Measures the missing cells. A running error split is stopped and starts again
        after them: a click on a cell, which began it, need not have asked for it."""
        self.cell_jobs = self._plan_jobs()
        jobs = [job for job, _ in self.cell_jobs]
        running = self.queue.running
        if any(job is running for job, _ in self.split_jobs):
            self.queue.run_instead(*jobs, running)
        else:
            self.queue.add_first(*jobs)
        self._follow_queue()

    def _measure(self, cell: Cell) -> None:
        with self.cell_seconds.timing(cell) as report:
            status, reason = run_cell(
                cell,
                grid=self.grid,
                bundles=self.bundles,
                root=self.root,
                stop=self.queue.cancelled,
                report=report,
            )
            if status == "failed":
                step = "see the reason; it is in the log too"
                raise InputError("sweep", reason, "a cell that runs", step)

    def _save_visibly(self) -> None:
        """Saves, and says in the page that it does before it begins."""
        self.saved_text.value = SAVING
        self.save_button.disabled = True
        is_saved = self.guarded(self.save)
        if self.is_open:
            self.save_button.disabled = self.drawing is None
            if not is_saved:
                self.saved_text.value = ""

    def save(self) -> None:
        """Saves the shown heatmap among the experiment's figures. Its name holds the
        setting, the tensor and the metric, and "own" where no other setting shares its
        colour scale."""
        drawing, options = self.drawing, self.heatmap.options
        shown = self.setting() | {"max_seq_len": drawing.options.max_seq_len}
        shown |= {"T": drawing.T, "tensor": self.tensor.value, "metric": drawing.metric}
        scale = [] if drawing.limits else ["own"]
        name = "-".join(["explorer", *map(str, shown.values()), *scale])
        subtitle = self._describe_conditions(drawing)
        Ts = " and ".join(map(str, sorted(drawing.rows["T"].unique())))
        self.experiment.figure(
            name,
            plots.heatmap,
            drawing.rows,
            alt=f"{options['title']}, by layer and token, T = {Ts}: {subtitle}.",
            subtitle=subtitle,
            **options,
        )
        folder = self.experiment.folder / "figures"
        text = f"saved {name} (svg, pdf, png, parquet) in {folder}"
        self.saved_text.value = escape.html(text)


def _widgets_within(box: ui.Widget) -> Iterator[ui.Widget]:
    """All widgets in a box, also those in its boxes."""
    widgets = [*getattr(box, "children", ())]
    # a canvas has a toolbar outside of its children, which refers to it
    if hasattr(box, "toolbar"):
        widgets.append(box.toolbar)
    for widget in widgets:
        yield widget
        yield from _widgets_within(widget)


def _find_drawing(
    rows: pd.DataFrame, options: Options, metric: str, measured: pd.DataFrame
) -> Drawing | None:
    """What the heatmap draws at a setting; None where it has no rows.

    Args:
        rows: of the max_seq_len of the setting, or of the nearest one that was measured.
        options: of the bundle at the setting.
        metric: the selected one.
        measured: the rows of the tensor at all settings, whose values the colours
            include.
    """
    if rows.empty:
        return None
    shown_S = int(rows["max_seq_len"].iloc[0])
    if rows["budget"].isna().all():
        metric = "cosine"  # an error is drawn over its budget
    limits = plots.find_limits(measured, metric)
    shown_options = options.model_copy(update={"max_seq_len": shown_S})
    return Drawing(rows, shown_options, metric, limits)


def _message(
    times: str, S: int, T: int, drawing: Drawing | None, validated_ts: list[int]
) -> str:
    """The times of a setting, and what was not measured there, as HTML.

    Args:
        times: "" where there are none.
        S, T: the setting's max_seq_len and T.
        drawing: the drawn errors; None where there are none.
        validated_ts: the T at which a validation measures errors.
    """
    if drawing is None:
        missing = f"Errors: not measured at this setting. {RUN_MEASURES_THEM}"
        return f"{times}<br>{missing}" if times else missing
    pairs = [("max_seq_len", S, drawing.options.max_seq_len), ("T", T, drawing.T)]
    replaced = [pair for pair in pairs if pair[1] != pair[2]]
    errors = ""
    if replaced:
        wanted = " and ".join(f"{name} = {value}" for name, value, _ in replaced)
        # the heatmap draws the smallest T of the grid too
        Ts = " and ".join(map(str, sorted(drawing.rows["T"].unique())))
        drawn = {"max_seq_len": drawing.options.max_seq_len, "T": Ts}
        shown = ", ".join(f"{name} = {drawn[name]}" for name, _, _ in replaced)
        errors = (
            f"Errors: not measured at {wanted}; the heatmap shows those at {shown}."
        )
        if T not in validated_ts:
            counts = ", ".join(map(str, validated_ts))
            errors += f" A validation measures errors at T = {counts} alone."
        if T in validated_ts or len(replaced) == 2:
            errors += f" {RUN_MEASURES_THEM}"
    times = times or f"Times: not measured at this setting. {RUN_MEASURES_THEM}"
    return "<br>".join(filter(None, [times, errors]))


def _close_replaced(explorer: Explorer) -> None:
    """Closes the Explorers that a new one replaces."""
    for other in [*_open]:
        if _replaces(explorer, other):
            other.close()


def _replaces(new: Explorer, earlier: Explorer) -> bool:
    """Whether the cell of an earlier Explorer runs again; outside of a notebook, whether
    both show the same grid and log."""
    if new.notebook_cell.id is None and earlier.notebook_cell.id is None:
        return new.grid == earlier.grid and new.root == earlier.root
    return new.notebook_cell.repeats(earlier.notebook_cell)
