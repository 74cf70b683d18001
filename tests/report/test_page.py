"""A run as one HTML page, and all runs as a site: complete, without another file, drawn from the
log."""

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from browser.lab import FLAGS, chromium
from typer.testing import CliRunner

from workbench import InputError, log, report
from workbench.cli.app import app
from workbench.report.machines import all_machines
from workbench.sweep import runs

ROOT = Path(__file__).parents[2]
PARTS = pd.DataFrame({"part": ["attention", "rest & <more>"], "ms": [1.5, 0.5]})
MAC = {
    "chip": "Apple M4 Max",
    "model": "Mac16,5",
    "memory_bytes": 64 << 30,
    "cores": 16,
}
SETTING = {
    "checkpoint": "tiny",
    "compress": "fp16",
    "max_seq_len": 64,
    "T": 1,
    "bundle_hash": "b",
}


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project whose log has a notebook's run, sweeps on two machines, and one that failed."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    exhibits = [
        report.exhibit("parts", PARTS, "time by part", "parts_bar"),
        report.exhibit("again", PARTS, "time by part, again", "parts_bar"),
        report.exhibit("parts", PARTS, "time by part, in numbers"),
    ]
    config = {
        "conclusion": "It took **two**.",
        "gates": [],
        "price": {"kl": {"mean": 0.012}},
    }
    row = SETTING | {"command": "notebook 29", "verdict": "GREEN", "config": config}
    runs.record_run("29", row | {"checkpoint": "c"}, exhibits=exhibits)
    for machine, rate in ((MAC, 50.0), ({}, 900.0)):
        samples = [
            {
                "phase": phase,
                "value": value,
                "unit": unit,
                "warmup": False,
                "T": 1,
                "depth": 0,
            }
            for phase, value, unit in [
                *(
                    ("tokens_per_s", rate, "tok/s"),
                    ("load", 30.0, "ms"),
                    ("load", 20.0, "ms"),
                ),
                *([("compile", 4000.0, "ms")] if machine else []),
            ]
        ]
        own = (
            machine | {"ane_ops_share": 0.9, "placement_source": "measured"}
            if machine
            else {}
        )
        runs.record_run("34", SETTING | own | {"command": "sweep"}, samples=samples)
    failed = (
        SETTING | MAC | {"command": "sweep", "status": "failed", "reason": "killed <9>"}
    )
    runs.record_run("34", failed)
    return tmp_path


def html(*arguments) -> Path:
    result = CliRunner().invoke(app, ["report", *arguments, "--json"])
    assert result.exit_code == 0, result.exception
    return Path(json.loads(result.stdout)["html"])


def test_the_page_holds_all_that_the_report_does(project):
    path = html("29", "--html")
    text, markdown = path.read_text(), path.with_suffix(".md").read_text()
    assert path.parent == project / "experiments" / "29_zaya_probe" / "c"
    assert markdown.count("![") == text.count("<svg") == 2 and "<img" not in text
    assert 'aria-label="time by part, again"' in text
    assert "It took <strong>two</strong>." in text and "rest &amp; &lt;more&gt;" in text
    assert 'class="verdict GREEN"' in text
    (run,) = log.load("runs", where={"experiment": "29"}).to_dict("records")
    assert (
        text.count(run["run_id"]) > markdown.count(run["run_id"])
        and run["commit"] in text
    )
    assert not re.search(r'(?:src|href)="(?!#)', re.sub(r'<use [^>]*href="#', "", text))


def test_figures_of_one_page_do_not_share_names(project):
    text = html("29", "--html").read_text()
    names = [
        re.sub(r"[#(\")]", "", name) for name in re.findall(r'\bid="([^"]+)"', text)
    ]
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))
    assert len(names) == len(set(names)) and used <= set(names)


def test_all_machines_are_there_with_failed_and_published_rows(project):
    rows = all_machines()
    mac = rows[
        rows["machine"].str.startswith("Apple M4 Max, Mac16,5")
        & (rows["status"] == "ok")
    ]
    (row,) = mac.to_dict("records")
    assert (row["tokens_per_s"], row["cold_s"], row["warm_s"]) == (50.0, 4.0, 0.05)
    assert row["placement"] == "measured: 90% ANE" and row["n"] == 1
    (here,) = rows[rows["tokens_per_s"] == 900.0].to_dict("records")
    assert (
        here["machine"] != row["machine"]
        and pd.isna(here["cold_s"])
        and here["warm_s"] == 0.05
    )
    assert rows.loc[rows["status"] == "failed", "reason"].tolist() == ["killed <9>"]
    published = rows[rows["origin"] == "published, fidelity unknown"]
    assert {"ZAYA1-8B", "Llama 1B"} <= set(published["checkpoint"])
    assert published["verdict"].isna().all() and published["kl_mean"].isna().all()
    assert (
        published.set_index("checkpoint")
        .loc["Llama 1B", "others"]
        .startswith("35.55 ms per step")
    )


def test_verdict_and_kl_are_of_the_bundle_on_any_machine(project):
    same = all_machines().query("checkpoint == 'tiny'")
    assert set(same["verdict"]) == {"GREEN"} and set(same["kl_mean"]) == {0.012}


def test_the_site_leads_to_every_experiment_and_all_machines(project):
    index = html("--all")
    assert index == project / "build" / "report" / "index.html"
    pages = {p.name for p in index.parent.glob("*.html")}
    assert pages == {"index.html", "machines.html", "29.html", "34.html"}
    links = set(re.findall(r'<a href="([^"]+)"', index.read_text()))
    assert links == pages
    machines = (index.parent / "machines.html").read_text()
    assert machines.count("<h2>") >= 2 and "killed &lt;9&gt;" in machines
    assert "fidelity unknown" in machines
    assert not (project / "experiments" / "29_zaya_probe").exists()


@pytest.mark.parametrize(
    "arguments", [[], ["29", "--all"], ["--all", "--publish"], ["--all", "--run", "x"]]
)
def test_what_the_command_cannot_mean_is_refused(project, arguments):
    result = CliRunner().invoke(app, ["report", *arguments])
    assert isinstance(result.exception, InputError)


@pytest.mark.skipif(chromium() is None, reason="no Chromium here")
def test_a_browser_without_network_shows_every_part(project):
    from playwright.sync_api import sync_playwright

    page_file, index = html("29", "--html"), html("--all")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=FLAGS)
        page, requests, errors = browser.new_context(offline=True).new_page(), [], []
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: errors.append(error))
        page.goto(page_file.as_uri())
        boxes = [svg.bounding_box() for svg in page.query_selector_all("svg")]
        assert len(boxes) == 2 and all(
            box["width"] > 100 < box["height"] * 2 for box in boxes
        )
        page.goto(index.as_uri())
        page.click("text=All machines")
        assert (
            page.inner_text("h1") == "All machines" and "Apple M4 Max" in page.content()
        )
        assert not errors and all(url.startswith("file://") for url in requests)
        browser.close()
