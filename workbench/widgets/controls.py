"""Controls, buttons and canvases as the widgets of this project look."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as ui
import matplotlib
from IPython import get_ipython

from workbench import escape, plots

WIDTH = 8.0
"""Inches: the width of a canvas in a page that does not tell its own (see `PageWidth`)."""
LEAST_WIDTH, LARGEST_WIDTH = 4.0, 9.5
"""Inches: the widths that a canvas has in narrow and in wide pages."""
WIDTH_STEP = 0.1
"""Inches: the width of a canvas is a multiple, so that few changes of a page redraw it."""
CANVAS_MARGIN = 8  # CSS pixels beside a canvas
STALE = "workbench-stale"
"""The CSS class of a canvas whose picture in the page is not the setting's."""
OF_SETTING = "workbench-of-setting"
"""The CSS class of pictures and texts that belong to the setting that was drawn last."""
MAX_TOLD = 100
"""`Selections` tells the page the place of a value among this many."""
STYLE = f"""<style>
.{STALE} {{ position: relative; }}
.{STALE} > * {{ opacity: 0.25; }}
.{STALE}::after {{
    content: "drawing …"; position: absolute; top: 0.5em; right: 1em; font-weight: bold;
}}
.workbench-explorer .widget-hslider {{ width: auto; min-width: 28em; }}
.workbench-explorer :is(.widget-hslider, .widget-dropdown) {{ margin-right: 1.5em; }}
.workbench-explorer .widget-readout {{
    min-width: 10em; max-width: none; text-align: left; white-space: nowrap;
}}
.workbench-explorer table {{ border-collapse: collapse; margin: 0.3em 0; }}
.workbench-explorer :is(th, td) {{
    border: 0; padding: 0.15em 0.9em 0.15em 0; text-align: left; line-height: 1.5;
}}
.workbench-explorer .number {{ font-variant-numeric: tabular-nums; text-align: right; }}
.workbench-explorer thead {{ border-bottom: 1px solid currentColor; }}
/* what is said of the cell under the pointer stands above the picture */
.workbench-explorer .jupyter-matplotlib-footer {{
    order: -1; height: auto; min-height: 2lh; line-height: 1.5; text-align: left;
    white-space: normal;
}}
</style>"""
"""CSS of the Explorer: of its tables, of a slider whose stops have marks (see
`mark_stops`), and of pictures that are being drawn."""


def make_control(
    label: str, values: list, initial: int | None = None, tooltip: str | None = None
) -> ui.Widget:
    """A slider over whole numbers, or a list of other values.

    Args:
        tooltip: what a slider decides, shown under the pointer.
        initial: the number at which a slider begins; default: the first one. A list
            begins at its first value.
    """
    appearance = {"description": label, "style": {"description_width": "initial"}}
    if type(values[0]) is int:  # not a truth value
        value = values[0] if initial is None else initial
        appearance |= {"value": value, "tooltip": tooltip}
        return ui.SelectionSlider(options=sorted(values), **appearance)
    return ui.Dropdown(options=values, **appearance)


class Selections:
    """Dims, in the page and without the kernel, what belongs to another setting than that
    of the controls. While the kernel is busy it hears of a new value late.

    The place of a control's value among its values is linked, in the page, to the length
    of a hidden bar, and so becomes a part of the page's style. `rule` holds CSS that
    compares the lengths with those of the values that were drawn.
    """

    def __init__(self, controls: Sequence[ui.Widget]):
        self.controls = controls
        self.bars = []
        for number, control in enumerate(controls):
            layout = ui.Layout(display="none")
            bar = ui.IntProgress(value=control.index, max=MAX_TOLD, layout=layout)
            bar.add_class(_bar_class(number))
            self.bars.append(bar)
        # a link lives as long as there is a reference to it
        self.links = [
            ui.jsdlink((control, "index"), (bar, "value"))
            for control, bar in zip(controls, self.bars)
        ]
        self.rule = ui.HTML()

    def mark_drawn(self) -> None:
        """Says that everything belongs to the controls' values from now on."""
        others = [
            f'.{_bar_class(number)} .progress-bar:not([style*=" {control.index}%"])'
            for number, control in enumerate(self.controls)
            if control.index <= MAX_TOLD
        ]
        # an error is about no setting
        dimmed = f".{OF_SETTING}:not(:has(.workbench-error)) > *"
        self.rule.value = (
            f"<style>.workbench-explorer:has({', '.join(others)}) {dimmed} "
            "{ opacity: 0.25; }</style>"
        )

    def close(self) -> None:
        """Removes the links from the page. The Explorer closes the bars."""
        for link in self.links:
            link.close()


def _bar_class(number: int) -> str:
    return f"workbench-selection-{number}"


def mark_stops(control: ui.Widget, marks: Mapping[Any, str]) -> None:
    """Writes a mark behind values of a control, as in ``2 (not measured)``, and removes
    the marks of all others. The value stays.

    Args:
        marks: value → its mark.
    """
    # options are values, or pairs of a label and a value
    values = [o[1] if isinstance(o, tuple) else o for o in control.options]
    options = [
        (f"{value} ({marks[value]})" if value in marks else str(value), value)
        for value in values
    ]
    if [*control.options] != options:
        value = control.value
        with control.hold_sync():
            control.options = options  # selects the first one
            control.value = value


def make_button(
    label: str, icon: str, action: Callable[[], None], tooltip: str
) -> ui.Button:
    layout = ui.Layout(width="auto")
    widget = ui.Button(description=label, icon=icon, tooltip=tooltip, layout=layout)
    widget.on_click(lambda _: action())
    return widget


def label_button(button: ui.Button, label: str, tooltip: str) -> None:
    """Labels a button, which never becomes narrower: the buttons beside it stay where
    they are."""
    button.description, button.tooltip = label, tooltip
    # most letters are narrower than the digit of this unit; the rest is the icon and
    # the padding
    width = round(0.85 * len(label)) + 6
    if width > int((button.layout.min_width or "0ch").removesuffix("ch")):
        button.layout.min_width = f"{width}ch"


def make_canvas() -> ui.DOMWidget:
    """A canvas of ipympl with an empty figure: it shows the figure in the page, and its
    events reach Python. matplotlib's backend stays what it was, although the import of
    ipympl replaces it."""
    backend = matplotlib.get_backend(auto_select=False) or "agg"
    from ipympl.backend_nbagg import Canvas, FigureManager

    matplotlib.use(backend)
    figure = plots.StyledFigure(figsize=(WIDTH, 3), layout="constrained")

    class Picture(Canvas):
        def send_binary(self, data: bytes) -> None:
            super().send_binary(data)
            self.remove_class(STALE)  # the page has what it shows now

    canvas = Picture(figure)
    FigureManager(canvas, 0)
    canvas.header_visible = canvas.toolbar_visible = canvas.resizable = False
    return canvas


class PageWidth(ui.HBox):
    """Tells Python how wide the page shows a box, in CSS pixels, when that changes.

    ipywidgets has no widget that knows its width: a script of the page writes it into a
    hidden field for numbers, whose value reaches the kernel. A page that runs no scripts
    of a widget leaves the field at 0.

    Args:
        box_class: the CSS class of the box, which holds this widget.
        on_change: is called with the width.
    """

    SCRIPT = """
    let tries = 0;
    const begin = () => {
        const box = this.closest('.BOX');
        const field = box && box.querySelector('.workbench-page-width input');
        if (!field) { if (tries++ < 100) setTimeout(begin, 100); return; }
        let waiting;
        new ResizeObserver(() => {
            clearTimeout(waiting);
            waiting = setTimeout(() => {
                const width = Math.floor(box.clientWidth);
                if (width && field.value != width) {
                    field.value = width;
                    field.dispatchEvent(new Event('change', {bubbles: true}));
                }
            }, 200);
        }).observe(box);
    };
    begin();"""

    def __init__(self, box_class: str, on_change: Callable[[int], None]):
        self.field = ui.IntText(0)
        self.field.add_class("workbench-page-width")
        self.field.observe(lambda change: on_change(change["new"]), "value")
        script = escape.html(self.SCRIPT.replace("BOX", box_class))
        # a picture that cannot be loaded runs the script, once it is in the page
        starter = ui.HTML(f'<img src="data:," alt="" onerror="{script}">')
        super().__init__([self.field, starter], layout={"display": "none"})


def fit_canvas(canvas: ui.DOMWidget, pixels: int) -> bool:
    """Gives the figure of a canvas the width of a page, within `LEAST_WIDTH` and
    `LARGEST_WIDTH`; returns whether it changed. The caller draws the figure again.

    Args:
        pixels: the width of the page in CSS pixels.
    """
    figure = canvas.figure
    inches = (pixels - CANVAS_MARGIN) / (figure.dpi / canvas.device_pixel_ratio)
    inches = min(max(inches, LEAST_WIDTH), LARGEST_WIDTH)
    inches = int(inches / WIDTH_STEP + 1e-6) * WIDTH_STEP
    if abs(inches - figure.get_figwidth()) < WIDTH_STEP / 2:
        return False
    figure.set_figwidth(inches)
    return True


def call_on_kernel_thread(action: Callable[[], None]) -> None:
    """Calls `action` on the thread that draws the canvases: a figure drawn on another
    thread may reach the page incomplete. Without a kernel it is called here."""
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel:
        kernel.io_loop.add_callback(action)
    else:
        action()
