"""What a researcher moves: the Explorer over stored results, the Planner before an export, the
Compare of two runs.

In: the experiment log and checkpoints. Out: pictures that follow the controls at once. A callback
that fails says so in the widget and is kept: a notebook that ends in `widget.check()` cannot pass
with a broken one.
"""

from workbench.widgets.compare import Compare
from workbench.widgets.explorer import Explorer
from workbench.widgets.planner import Planner

__all__ = ["Compare", "Explorer", "Planner"]
