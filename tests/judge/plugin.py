"""A pytest plugin for coremltools' own tests: predictions on, run by the portable runtime, every outcome written down.

coremltools' tests compare numbers only where they see macOS; here they see it. What coremltools expects to fail on
Apple's own runtime (`xfail`) is run all the same: its reason is kept, and counts only if the case does fail here.
"""

import gc
import json
from pathlib import Path

import pytest

from workbench.runtime import shim


class Recorder:
    """Writes one JSON line per test: case, outcome, reason, and `expected`, coremltools' own reason for a failure."""

    def __init__(self, path: Path):
        self.file, self.result = path.open("w"), {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item):
        for mark in item.iter_markers("xfail"):
            self.result["expected"] = mark.kwargs.get("reason", "no reason given")
        pytest.xfail = lambda reason="": self.result.setdefault("expected", reason or "no reason given")

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.result |= {"outcome": report.outcome, "reason": "" if report.outcome == "passed" else _reason(report)}

    def pytest_runtest_logfinish(self, nodeid):
        self.file.write(json.dumps({"case": nodeid} | self.result) + "\n")
        self.file.flush()  # what ran stays known if a later test ends the process
        self.result = {}

    def pytest_unconfigure(self):
        self.file.close()


def _reason(report) -> str:
    """The first line of the exception, or why the test was skipped."""
    if report.outcome == "skipped":
        return report.longrepr[2].removeprefix("Skipped: ")
    lines = str(report.longrepr).splitlines()
    return next((line[1:].strip() for line in lines if line.startswith("E  ")), lines[-1])[:300]


def pytest_addoption(parser):
    parser.addoption("--outcomes", type=Path, required=True, help="file to write every case's outcome to")


def pytest_configure(config):
    shim.install()
    from coremltools.converters.mil import testing_utils

    testing_utils._IS_MACOS = True
    config.pluginmanager.register(Recorder(config.getoption("outcomes")))


def pytest_collection_finish(session):
    gc.freeze()  # every conversion collects garbage: a second each over all modules and tests, unless these are left out
