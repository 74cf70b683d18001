"""Sliders over what the log holds (`Explorer`) and over what an export needs
(`planner`)."""

from workbench.widgets.explorer import Explorer as Explorer
from workbench.widgets.planning import planner as planner
