"""Controls, buttons and canvases as the widgets of this project look."""

from collections.abc import Callable

import ipywidgets as ui
import matplotlib
from IPython import get_ipython

from workbench import plots

WIDTH = 9.5  # inches: width of a canvas


def make_control(label: str, values: list, initial: int | None = None) -> ui.Widget:
    """A slider over whole numbers, or a list of other values.

    Args:
        initial: the number at which a slider begins; default: the first one. A list
            begins at its first value.
    """
    appearance = {"description": label, "style": {"description_width": "initial"}}
    if type(values[0]) is int:  # not a truth value
        value = values[0] if initial is None else initial
        return ui.SelectionSlider(options=sorted(values), value=value, **appearance)
    return ui.Dropdown(options=values, **appearance)


def make_button(label: str, icon: str, action: Callable[[], None]) -> ui.Button:
    layout = ui.Layout(width="auto")
    widget = ui.Button(description=label, icon=icon, layout=layout)
    widget.on_click(lambda _: action())
    return widget


def make_canvas() -> ui.DOMWidget:
    """A canvas of ipympl with an empty figure: it shows the figure in the page, and its
    events reach Python. matplotlib's backend stays what it was, although the import of
    ipympl replaces it."""
    backend = matplotlib.get_backend(auto_select=False) or "agg"
    from ipympl.backend_nbagg import Canvas, FigureManager

    matplotlib.use(backend)
    figure = plots.StyledFigure(figsize=(WIDTH, 3), layout="constrained")
    canvas = Canvas(figure)
    FigureManager(canvas, 0)
    canvas.header_visible = canvas.toolbar_visible = canvas.resizable = False
    return canvas


def call_on_kernel_thread(action: Callable[[], None]) -> None:
    """Calls `action` on the thread that draws the canvases: a figure drawn on another
    thread may reach the page incomplete. Without a kernel it is called here."""
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel:
        kernel.io_loop.add_callback(action)
    else:
        action()
