"""Sliders over what the log holds (`Explorer`) and over what an export needs
(`planner`).

`explorer` has the widget and its state, `results` reads the log at a setting, `views`
draws, `sentences` writes texts and tables, and `jobs` measures what is missing, for as
long as `estimates` says; `planning` is the planner. Both use the controls and canvases of
`controls`."""

from workbench.widgets.explorer import Explorer as Explorer
from workbench.widgets.planning import planner as planner
