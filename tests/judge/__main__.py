"""coremltools' own tests through the shim: `python -m tests.judge SUITE [--out DIR] [--sample N]
[pytest options]`.

Appends every case's outcome to DIR/SUITE.jsonl, leaving out those that passed before (so that a run
goes on where the last one ended; `make judge` begins anew), and writes DIR/SUITE.md: counts by op,
reasons for all that did not pass. Exits 1 if a case failed for a reason that is not known.
"""

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from .outcomes import summarize, table

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
    "slice": [
        f"{OPS}/coreml_dialect",
        f"{OPS}/iOS18/test_states.py",
        f"{OPS}/iOS18/test_transformers.py",
    ],
}


def run(suite: str, out: Path, options: list[str]) -> tuple[dict, int]:
    """Runs a suite in a process of its own; every case's outcome, by its id, and how many cases
    were selected."""
    home = Path(find_spec("coremltools").origin).parent
    outcomes = out / f"{suite}.jsonl"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        os.devnull,
        "--rootdir",
        str(home),
        "-p",
        "tests.judge.plugin",
        "-p",
        "no:cacheprovider",
        "--runxfail",
        "--disable-warnings",
        "--tb=short",
        "--show-capture=no",
        "--outcomes",
        str(outcomes),
        *options,
        *(str(home / path) for path in SUITES[suite]),
    ]
    environment = os.environ | {
        "PYMIL_TEST_TARGETS": "mlprogram",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    code = subprocess.run(
        command, env=environment, stdout=sys.stderr, check=False
    ).returncode
    lines = [json.loads(line) for line in outcomes.read_text().splitlines()]
    found = {line.pop("case"): line for line in lines if "case" in line}
    if code not in (0, 1, 5):  # 1: some tests failed, 5: none was left to run
        found["process::whole"] = {
            "outcome": "failed",
            "reason": f"pytest ended with code {code}",
        }
    return found, next(
        line["selected"] for line in reversed(lines) if "selected" in line
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.judge", description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--out", type=Path, default=ROOT / "build/judge")
    chosen, options = parser.parse_known_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    found, selected = run(chosen.suite, chosen.out.resolve(), options)
    summary = summarize(found)
    text = table(chosen.suite, summary, selected)
    (chosen.out / f"{chosen.suite}.md").write_text(text)
    print(text)
    return 1 if summary["total"]["failed"] or not summary["total"]["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
