"""Outcomes of coremltools' cases → counts by op and the reasons of all that did not pass, as Markdown."""

import re
from collections import Counter, defaultdict

# why a case does not pass, where that is known: pattern of its id and its failure → reason
EXPLAINED = {
    r"a single \.mlmodel file": "converts to a neuralNetwork, which the portable runtime does not run: it runs ML Programs",
    r"iOS15/test_image_resizing\.py::TestCropResize::test_builder_to_backend_smoke": "normalized boxes outside the documented "
    "interval [0, 1]: Core ML samples the whole image then, which nothing documents",
}


def verdict(case: str, result: dict) -> tuple[str, str]:
    """(passed | failed | explained | skipped, reason)."""
    if result["outcome"] == "passed":
        return "passed", ""
    if result["outcome"] == "skipped":
        return "skipped", result["reason"]
    for pattern, reason in EXPLAINED.items():
        if re.search(pattern, f"{case} {result['reason']}"):
            return "explained", reason
    if "expected" in result:
        return "explained", f"coremltools expects this to fail on Core ML too: {result['expected']}"
    return "failed", result["reason"]


def op(case: str) -> str:
    """The op (or feature) a case is about: the class it stands in, else its function."""
    name = case.split("::")[1].split("[")[0]
    return name.removeprefix("Test") if name.startswith("Test") else name


def summarize(outcomes: dict) -> dict:
    """Counts in total and by op, and the cases behind every reason."""
    total, ops, reasons = Counter(), defaultdict(Counter), defaultdict(list)
    for case, result in outcomes.items():
        kind, reason = verdict(case, result)
        total[kind] += 1
        ops[op(case)][kind] += 1
        if reason:
            reasons[kind, op(case), reason].append(case)
    return {"total": total, "ops": ops, "reasons": reasons}


def table(suite: str, summary: dict) -> str:
    """The report as Markdown."""
    kinds = ("passed", "failed", "explained", "skipped")
    total = summary["total"]
    ran = total["passed"] + total["failed"] + total["explained"]
    lines = [f"# coremltools' `{suite}` tests on the portable runtime", "",
             f"{total['passed']} of {ran} cases that ran passed ({total['passed'] / max(ran, 1):.2%}); "
             f"{total['failed']} failed, {total['explained']} failed for a known reason, {total['skipped']} skipped.", "",
             "| op | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]  # fmt: skip
    lines += [f"| {name} | " + " | ".join(str(c[k]) for k in kinds) + " |" for name, c in sorted(summary["ops"].items())]
    lines += ["", "| | op | cases | reason |", "|---|---|---|---|"]
    lines += [
        f"| {kind} | {name} | {len(cases)} | {reason.replace('|', '/')} |"
        for (kind, name, reason), cases in sorted(summary["reasons"].items())
    ]
    return "\n".join(lines) + "\n"
