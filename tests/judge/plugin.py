"""A pytest plugin for coremltools' own tests: predictions on, run by the portable runtime, every
outcome written down.

coremltools' tests compare numbers only where they see macOS; here they see it. In fp16 they allow
0.5 + 5%, which lets a result that is half as large again pass: here 0.01 + 1%, or what a case asks
of float32, if that is more. What they expect to fail or skip because of Apple's own runtime
(`xfail`, `skip` with a radar's number) or an old PyTorch is run all the same: its reason is kept,
and counts only if the case does fail here.
"""

import gc
import json
import random
import re
from collections import defaultdict
from pathlib import Path

import pytest

from miltorch import shim
from tests.judge.outcomes import op

# reasons to skip a case that do not hold here
NOT_OURS = re.compile("rdar|outdated PyTorch")


def holds(mark) -> bool:
    """Whether a mark is no skip for a reason that does not hold here."""
    reason = mark.kwargs.get("reason", "")
    return not (mark.name.startswith("skip") and NOT_OURS.search(reason))


class Recorder:
    """Writes one JSON line per test: case, outcome, reason, and `expected`, coremltools' own
    reason for a failure; before them how many were selected."""

    def __init__(self, path: Path, sample: int):
        self.file, self.sample, self.result = path.open("w"), sample, {}

    def pytest_sessionstart(self):  # after --runxfail has put its own function in place
        pytest.xfail, skip = self._expected, pytest.skip
        pytest.skip = lambda reason="", **rest: (
            self._expected if NOT_OURS.search(reason) else skip
        )(reason, **rest)

    def _expected(self, reason="", **rest):
        self.result.setdefault("expected", reason or "no reason given")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        for node in {node for item in items for node in item.listchain()}:
            node.own_markers = [mark for mark in node.own_markers if holds(mark)]
        self.file.write(json.dumps({"selected": len(items)}) + "\n")
        cases = defaultdict(list)
        for item in random.Random(0).sample(items, len(items)):
            cases[op(item.nodeid)].append(item)
        count = self.sample or None  # of each op; None: all
        chosen = {item for group in cases.values() for item in group[:count]}
        items[:] = [item for item in items if item in chosen]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item):
        for mark in item.iter_markers("xfail"):
            self._expected(**mark.kwargs)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.result |= {
                "outcome": report.outcome,
                "reason": "" if report.outcome == "passed" else _reason(report),
            }

    def pytest_runtest_logfinish(self, nodeid):
        self.file.write(json.dumps({"case": nodeid} | self.result) + "\n")
        self.file.flush()  # what ran stays known if a later test ends the process
        self.result = {}
        gc.freeze()  # what cases leave behind grows, and every conversion would go through it

    def pytest_unconfigure(self):
        self.file.close()


def _reason(report) -> str:
    """The first line of the exception, or why the test was skipped."""
    if report.outcome == "skipped":
        return report.longrepr[2].removeprefix("Skipped: ")
    lines = str(report.longrepr).splitlines()
    return next(
        (line[1:].strip() for line in lines if line.startswith("E  ")), lines[-1]
    )[:300]


def pytest_addoption(parser):
    parser.addoption(
        "--outcomes", type=Path, required=True, help="file to append outcomes to"
    )
    parser.addoption(
        "--sample",
        type=int,
        default=0,
        help="run so many cases of each op, drawn with a fixed seed; 0: all",
    )


def pytest_configure(config):
    shim.install(mend_converter=True)
    from coremltools.converters.mil import testing_utils
    from coremltools.converters.mil.frontend.torch.test import (
        testing_utils as torch_testing,
    )

    testing_utils._IS_MACOS = True
    testing_utils.max = torch_testing.max = _tolerance
    config.pluginmanager.register(
        Recorder(config.getoption("outcomes"), config.getoption("sample"))
    )


def _tolerance(hundredfold: float, allowed: float) -> float:
    """Takes the place of the built-in in `max(100 * asked, 0.5)` and `max(100 * asked, 0.05)`, of
    fp16 cases."""
    return max(hundredfold / 100, 0.01)


def pytest_collection_finish(session):
    gc.freeze()  # every conversion collects garbage: a second each over all modules and tests, unless these are left out
