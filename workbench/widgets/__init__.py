"""Interactive widgets: the Explorer of stored results, the Planner of an export, the
Compare of two runs.

Their pictures come from the experiment log and from checkpoints, and follow the
controls at once. An error in a callback is shown in the widget and stored, and
`widget.check()` at the end of a notebook raises it."""

from workbench.widgets.compare import Compare
from workbench.widgets.explorer import Explorer
from workbench.widgets.planner import Planner

__all__ = ["Compare", "Explorer", "Planner"]
