"""The base of all widgets: controls above a clickable picture, a message, and jobs in a
thread.

Subclasses draw the picture.
"""

import base64
import html
import io
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress

import anywidget
import ipywidgets as ui
import matplotlib.pyplot as plt
import traitlets
from matplotlib.axes import Axes

from workbench.errors import InputError
from workbench.sweep import process

DPI = 120  # pixels of the page per inch of a figure; its picture has twice as many
# pyplot and its style are global, and a finished job draws from its own thread
_ONE_FIGURE = threading.RLock()


class Picture(anywidget.AnyWidget):
    """A clickable PNG with a line of text below: that of the cell under the pointer,
    else `chosen`.

    `clicked` is [x, y] as fractions of its size, from the top left; `cells` has a `box`
    [left, top, right, bottom] in such fractions and the `texts` of its rows of cells;
    `width` is in pixels of the page."""

    _esm = """
    function render({ model, el }) {
      const image = document.createElement("img");
      image.className = "workbench-picture";
      image.style.maxWidth = "100%";
      const show = () => {
        URL.revokeObjectURL(image.src);
        image.src = URL.createObjectURL(new Blob([model.get("png")], { type: "image/png" }));
        image.alt = model.get("alt");
        image.width = model.get("width");
      };
      const line = document.createElement("div");
      line.className = "workbench-cell";
      line.style.minHeight = "1.5em";
      const text = (event) => {
        const { box, texts } = model.get("cells");
        if (!event || !texts) return model.get("chosen");
        const x = (event.offsetX / image.clientWidth - box[0]) / (box[2] - box[0]);
        const y = (event.offsetY / image.clientHeight - box[1]) / (box[3] - box[1]);
        const row = texts[Math.floor(y * texts.length)];
        return row?.[Math.floor(x * row.length)] ?? model.get("chosen");
      };
      const write = (event) => { line.textContent = text(event); };
      image.addEventListener("mousemove", write);
      image.addEventListener("mouseleave", () => write());
      model.on("change:chosen", () => write());
      image.addEventListener("click", (event) => {
        const x = event.offsetX / image.clientWidth;
        const y = event.offsetY / image.clientHeight;
        model.set("clicked", [x, y]);
        model.save_changes();
      });
      model.on("change:png", show);
      show();
      write();
      el.append(image, line);
      const still = () => el.closest(".jp-OutputArea")?.querySelectorAll(".workbench-still");
      const hide = () => still()?.forEach((picture) => { picture.style.display = "none"; });
      new ResizeObserver(hide).observe(el);  // once it is in the page
    }
    export default { render };
    """
    png = traitlets.Bytes(b"").tag(sync=True)
    alt = traitlets.Unicode("").tag(sync=True)
    width = traitlets.Int(0).tag(sync=True)
    cells = traitlets.Dict().tag(sync=True)
    chosen = traitlets.Unicode("").tag(sync=True)
    clicked = traitlets.List(default_value=[]).tag(sync=True)


class Panel:
    """Controls, by their descriptions, above a picture that is drawn again when a
    control changes.

    A control with a single value is shown as text. Errors in callbacks are shown and
    appended to `errors`."""

    def __init__(self, controls: list[ui.Widget], *below: ui.Widget):
        self.controls = {control.description: control for control in controls}
        self.errors = []
        self.figure = None
        self.drawing = True
        self.picture = Picture()
        self.message = ui.HTML()
        self.settled = ui.Label()
        for control in controls:
            control.layout.margin = "2px 14px 2px 0"
            self.follow(control, lambda _: self.draw())
            self.follow(control, lambda _: self._settle(), "options")
        self._settle()
        row = ui.HBox([*controls, self.settled], layout=ui.Layout(flex_flow="row wrap"))
        self.box = ui.VBox([row, self.message, self.picture, *below])
        self.box.add_class(f"workbench-{type(self).__name__.lower()}")

    def _settle(self) -> None:
        """Hides the controls with a single value; a text names these values."""
        settled = []
        for name, control in self.controls.items():
            control.layout.display = None
            if len(control.options) == 1:
                control.layout.display = "none"
                settled.append(f"{name}: {control.label}")
        self.settled.value = " · ".join(settled)

    def value(self, name: str):
        return self.controls[name].value

    def follow(self, control: ui.Widget, action: Callable, name: str = "value") -> None:
        """Calls `action` with every new value of a control, in `guarded`."""
        control.observe(
            lambda change: self.guarded(lambda: action(change["new"])), names=name
        )

    def guarded(self, action: Callable[[], None]) -> None:
        """Runs a callback; an error is shown and appended to `errors`."""
        try:
            action()
        except Exception as problem:  # `check` raises it
            self.errors.append(problem)
            text = traceback.format_exc(limit=2)
            if isinstance(problem, InputError):
                text = str(problem)
            tag = "<pre class='workbench-error' style='color:#b00'>"
            self.message.value = f"{tag}{html.escape(text)}</pre>"

    def check(self) -> None:
        """Raises the first error of any callback so far."""
        if self.errors:
            raise self.errors[0]

    def draw(self) -> None:
        if self.drawing:
            with _ONE_FIGURE:
                self.guarded(self._draw)

    def draw_once(self, change: Callable[[], None]) -> None:
        """Calls `change`, which sets controls, in `guarded`, and draws when all are
        set."""
        self.drawing = False
        self.guarded(change)
        self.drawing = True
        self.draw()

    def show(self, figure: plt.Figure, alt: str) -> None:
        """Puts a figure into the picture, with two dots per pixel of the page."""
        stream = io.BytesIO()
        quick = {"compress_level": 1}  # compression takes most of the time
        figure.savefig(stream, format="png", dpi=2 * DPI, pil_kwargs=quick)
        plt.close(figure)
        self.picture.width = round(figure.get_figwidth() * DPI)
        self.figure = figure
        self.picture.alt = alt
        self.picture.png = stream.getvalue()

    def _ipython_display_(self) -> None:
        """Displays the widget after a still picture of it, for pages without widgets
        such as those of nbconvert."""
        from IPython.display import HTML, display

        data = base64.b64encode(self.picture.png).decode()
        alt = html.escape(self.picture.alt)
        still = f'<img class="workbench-still" width="{self.picture.width}" '
        still += f'alt="{alt}" src="data:image/png;base64,{data}">'
        display(HTML(still), self.box)


def absent(ax: Axes, why: str) -> None:
    """Replaces axes by a text."""
    ax.set_axis_off()
    ax.text(
        0.5, 0.5, why, transform=ax.transAxes, ha="center", va="center", color="0.4"
    )


def slider(name: str, values: list, start=None) -> ui.SelectionSlider:
    """A slider over `values`."""
    return choice(name, values, start, ui.SelectionSlider, continuous_update=False)


def choice(
    name: str, values: list, start=None, kind: type = ui.Dropdown, **options
) -> ui.Widget:
    """One of `values`, which may be (label, value) pairs: `start`, or the first."""
    if start is not None:
        options["value"] = start
    if kind is ui.Dropdown:
        options |= {"layout": ui.Layout(width="auto")}
    return kind(
        options=values,
        description=name,
        style={"description_width": "initial"},
        **options,
    )


def button(
    icon: str, press: Callable[[], None], description: str = "", **options
) -> ui.Button:
    """A button that calls `press`."""
    layout = ui.Layout(width="auto")
    control = ui.Button(description=description, icon=icon, layout=layout, **options)
    control.on_click(lambda _: press())
    return control


class BackgroundJob:
    """A Run and a Cancel button for steps that run one after the other in a thread,
    with progress. Cancel kills the child process of a step (see
    `workbench.sweep.process.stopped_by`).

    Args:
        steps: returns the steps to run now, as (label, parts, function); a step of
            several parts calls `advance` after each part.
        panel: the panel whose `guarded` runs each step; an error ends the job.
        finish: called at the end, also of a cancelled job, unless a step failed.
    """

    def __init__(
        self, steps: Callable[[], list], panel: Panel, finish: Callable[[], None]
    ):
        self.steps = steps
        self.panel = panel
        self.finish = finish
        self.thread = None
        self.stopped = threading.Event()
        self.run = button("play", self.start)
        self.cancel = button("stop", self.stopped.set, "Cancel", disabled=True)
        self.progress = ui.IntProgress(
            layout=ui.Layout(width="12em", visibility="hidden")
        )
        self.label = ui.Label()
        self.box = ui.HBox([self.run, self.cancel, self.progress, self.label])
        self.refresh()

    def refresh(self) -> None:
        """Writes the number of steps on the Run button."""
        count = sum(parts for _, parts, _ in self.steps())
        self.run.disabled = not count
        self.run.description = "Nothing is missing"
        if count:
            self.run.description = f"Run what is missing ({count})"

    def start(self) -> None:
        self.stopped.clear()
        self.run.disabled = True
        self.cancel.disabled = False
        self.progress.layout.visibility = "visible"
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def advance(self, parts: int = 1) -> None:
        """Counts parts of a step that are finished."""
        self.progress.value = min(self.progress.value + parts, self.progress.max)
        self.label.value = f"{self.progress.value} of {self.progress.max}: {self.step}"

    def _work(self) -> None:
        steps = self.steps()
        errors = len(self.panel.errors)
        total = 0
        self.progress.value = 0
        self.progress.max = sum(parts for _, parts, _ in steps)
        for self.step, parts, step in steps:
            if self.stopped.is_set() or len(self.panel.errors) > errors:
                break
            self.advance(0)
            with suppress(process.Cancelled), process.stopped_by(self.stopped):
                self.panel.guarded(step)
            total += parts
            self.advance(total - self.progress.value)
        self.cancel.disabled = True
        self.progress.layout.visibility = "hidden"
        if len(self.panel.errors) == errors:
            self.finish()
        self.panel.guarded(self.refresh)
        # comes last: a message of the next action would otherwise be overwritten
        self.label.value = ""
        if self.stopped.is_set():
            self.label.value = "cancelled; what was finished is kept"
