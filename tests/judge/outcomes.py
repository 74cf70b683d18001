"""Outcomes of coremltools' cases → counts by op and the reasons of all that did not pass, as
Markdown."""

import re

import pandas as pd

KINDS = ("passed", "failed", "explained", "skipped")
# why a case does not pass, where that is known: pattern of its id and its failure → reason
EXPLAINED = {
    r"a single \.mlmodel file": "converts to a neuralNetwork, which the portable runtime does not run: it runs ML Programs",
    r"iOS15/test_image_resizing\.py::TestCropResize::test_builder_to_backend_smoke": "normalized boxes outside the documented "
    "interval [0, 1]: Core ML samples the whole image then, which nothing documents",
    r"::TestScatter::test_ios17_invalid_indices.*validate_indices=False": "indices out of range that nothing validates: MIL "
    "leaves the result open; here one past the end is refused, a negative one counts from the end as on iOS 18",
    r"::TestScatter::.*mode=div.*AssertionError": "quotients over 65504, in fp16",
    r"running_mean and running_var must either both": "PyTorch 2.13 refuses the module before it is converted",
    r"::test_pad_constant.*0-dimensional": "the case itself calls float() on an array, which NumPy 2.4 refuses",
    r"::test_stack_dynamic_range_dim.*DID NOT RAISE": "Core ML refuses on loading what does not fit the default shapes; here "
    "only the shapes that are given must fit",
    r"'torchvision' is not defined": "needs torchvision, which is no dependency",
}


def verdict(case: str, result: dict) -> tuple[str, str]:
    """(one of KINDS, reason)."""
    if result["outcome"] == "passed":
        return "passed", ""
    if result["outcome"] == "skipped":
        reason = re.sub("^(got empty parameter set) .*", r"\1", result["reason"])
        return "skipped", "no reason given" if reason == "Skipped" else reason
    for pattern, reason in EXPLAINED.items():
        if re.search(pattern, f"{case} {result['reason']}"):
            return "explained", reason
    if "expected" in result:
        return (
            "explained",
            f"coremltools expects this to fail on Core ML too: {result['expected']}",
        )
    return "failed", result["reason"]


def op(case: str) -> str:
    """The op (or feature) a case is about: the class it stands in, else its function."""
    name = case.split("::")[1].split("[")[0]
    return name.removeprefix("Test") if name.startswith("Test") else name


def judged(outcomes: dict) -> pd.DataFrame:
    """One row for each case: `op`, `kind`, `reason`."""
    rows = [(op(case), *verdict(case, result)) for case, result in outcomes.items()]
    return pd.DataFrame(rows, columns=["op", "kind", "reason"])


def table(suite: str, cases: pd.DataFrame, selected: int) -> str:
    """The report as Markdown: totals, every op in one paragraph, every case that did not pass with
    its reason."""
    total = {kind: (cases["kind"] == kind).sum() for kind in KINDS}
    ran = max(len(cases) - total["skipped"], 1)
    named = []
    for name, kinds in cases.groupby("op")["kind"]:
        passed, whole = (kinds == "passed").sum(), len(kinds)
        named.append(f"{name} {passed}" + (f"/{whole}" if passed < whole else ""))
    lines = [
        f"## `python -m tests.judge {suite}`",
        "",
        f"{total['passed']} of {ran} cases that ran passed ({total['passed'] / ran:.2%}); "
        f"{total['failed']} failed; {total['explained']} did not for a known reason, "
        f"{total['skipped']} were skipped by their authors; of {selected} selected.",
        "",
        f"Passed, by op (of how many, where not all): {', '.join(named)}.",
        "",
        "| | cases | reason |",
        "|---|---|---|",
    ]
    others = cases[cases["kind"] != "passed"]
    for (kind, reason), rows in others.groupby(["kind", "reason"]):
        counts = [f"{name} {len(part)}" for name, part in rows.groupby("op")]
        lines.append(f"| {kind} | {', '.join(counts)} | {reason.replace('|', '/')} |")
    return "\n".join(lines) + "\n"
