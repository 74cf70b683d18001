"""coremltools' own tests through the shim: `python -m tests.judge SUITE [--out DIR] [--sample N]
[pytest options]`.

Writes every case's outcome to DIR/SUITE.jsonl, and to DIR/SUITE.md counts by op and the reasons of
all that did not pass. Exits 1 if a case failed for a reason that is not known.
"""

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from .outcomes import judged, table

ROOT = Path(__file__).parents[2]
OPS = "converters/mil/mil/ops/tests"
TORCH = "converters/mil/frontend/torch/test"
SUITES = {
    "core": [
        f"{OPS}/iOS18",
        f"{OPS}/coreml_dialect",
        f"{TORCH}/test_torch_stateful_model.py",
    ],
    "ops": [OPS],
    "torch": [f"{TORCH}/test_torch_ops.py"],
}


PYTEST = """-m pytest -q -p tests.judge.plugin -p no:cacheprovider --runxfail --disable-warnings
--tb=short --show-capture=no""".split()


def run(suite: str, out: Path, options: list[str]) -> tuple[dict, int]:
    """Runs a suite in a process of its own; every case's outcome, by its id, and how many cases
    were selected."""
    home = Path(find_spec("coremltools").origin).parent
    outcomes = out / f"{suite}.jsonl"
    places = "-c", os.devnull, "--rootdir", home, "--outcomes", outcomes
    paths = [home / path for path in SUITES[suite]]
    command = [sys.executable, *PYTEST, *map(str, places), *options, *map(str, paths)]
    environment = os.environ | {
        "PYMIL_TEST_TARGETS": "mlprogram",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    code = subprocess.run(command, env=environment, stdout=sys.stderr).returncode
    selected, *lines = map(json.loads, outcomes.read_text().splitlines())
    outcomes_by_case = {line.pop("case"): line for line in lines}
    if code not in (0, 1):  # 1: some tests failed
        reason = f"pytest ended with code {code}"
        outcomes_by_case["process::whole"] = {"outcome": "failed", "reason": reason}
    return outcomes_by_case, selected["selected"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.judge", description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--out", type=Path, default=ROOT / "build/judge")
    chosen, options = parser.parse_known_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    outcomes, selected = run(chosen.suite, chosen.out.resolve(), options)
    cases = judged(outcomes)
    text = table(chosen.suite, cases, selected)
    (chosen.out / f"{chosen.suite}.md").write_text(text)
    print(text)
    kinds = set(cases["kind"])
    return 1 if "failed" in kinds or "passed" not in kinds else 0


if __name__ == "__main__":
    sys.exit(main())
