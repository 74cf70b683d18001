"""Writes HTML pages that need no other file: figures inline, tables, verdict,
provenance.

A page is of one run, beside its `report.md`. A site is a folder with an index of all
experiments, a page of each, and a page of all machines."""

import html
import re
from pathlib import Path

import jinja2
import pandas as pd

from workbench import log
from workbench.log.machine import with_machines
from workbench.report import writeup
from workbench.report.machines import all_machines

PAGE = jinja2.Template(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{ title }}</title>
<style>
body { font: 15px/1.5 sans-serif; color: #222; max-width: 72rem; }
body { margin: 2rem auto; padding: 0 1rem; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; }
th, td { text-align: left; vertical-align: top; }
svg { max-width: 100%; height: auto; }
.verdict { font-weight: bold; padding: .1rem .6rem; border: 2px solid; }
.GREEN { color: #00703c; } .RED { color: #b00020; } .not_run { color: #555; }
</style>
</head>
<body>
{% if links %}<nav>{% for target, text in links %}<a href="{{ target }}">{{ text }}</a> {% endfor %}
</nav>{% endif %}
{% if verdict %}<p><span class="verdict {{ verdict }}">{{ verdict }}</span></p>{% endif %}
{{ body | safe }}
</body>
</html>
""",
    autoescape=True,
)
SITE_LINKS = (("index.html", "All experiments"), ("machines.html", "All machines"))
ALWAYS = {"verdict", "kl_mean", "tokens_per_s", "cold_s", "warm_s", "placement"}
ABOUT = (
    "run_id",
    "time",
    "command",
    "status",
    "commit",
    "machine",
    "software",
    "checkpoint_hash",
)


def write_page(
    report: Path,
    number: str,
    root: Path | str | None = None,
    run: str | None = None,
    path: Path | None = None,
    links: tuple = (),
) -> Path:
    """Writes the page of `report`, the `report.md` of the same run.

    Args:
        path: the page (default: `report.html` beside the report).
        links: (target, text) of the pages that it belongs to.
    """
    from markdown_it import MarkdownIt

    runs, _ = writeup.behind(number, root, run)
    text = MarkdownIt("commonmark").enable("table").render(report.read_text())
    body = _inline(text.replace("<table>", '<div class="wide"><table>'), report.parent)
    body = body.replace("</table>", "</table></div>")
    about = with_machines(runs).sort_values("run_id")[list(ABOUT)]
    about["time"] = about["time"].dt.strftime("%Y-%m-%d %H:%M:%S")
    body += "<h2>Provenance</h2>" + _table(about)
    path = path or report.with_suffix(".html")
    title = f"Experiment {number}: {writeup.experiment(number).question}"
    _write(path, title, body, verdict=_newest(runs)["verdict"], links=links)
    return path


def write_site(place: Path, root: Path | str | None = None) -> Path:
    """Writes an index of all experiments that the log holds, the newest run of each as
    a page, and a page of all machines into the folder `place`; returns the index."""
    place.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, experiment in writeup.EXPERIMENTS.items():
        runs, _ = writeup.behind(number, root)
        if runs.empty:
            rows.append({"experiment": number, "question": experiment.question})
            continue
        report = writeup.write_report(number, root, place=place / number)
        page = place / f"{number}.html"
        write_page(report, number, root, path=page, links=SITE_LINKS)
        newest = _newest(runs)
        about = {
            "experiment": f'<a href="{page.name}">{number}</a>',
            "question": experiment.question,
            "checkpoint": writeup.subject([newest]),
            "time": f"{newest['time']:%Y-%m-%d %H:%M}",
        }
        rows.append(newest | about)
    names = ["question", "verdict", "checkpoint", "machine", "time", "run_id"]
    index = pd.DataFrame(rows).reindex(columns=["experiment", *names])
    index[names] = index[names].map(lambda v: html.escape(str(v)), na_action="ignore")
    body = "<h1>All experiments</h1><p>The newest run of each.</p>"
    body += _table(index, escape=False)
    _write(place / "index.html", "All experiments", body)
    _write(place / "machines.html", "All machines", _machines(root))
    return place / "index.html"


def _machines(root: Path | str | None) -> str:
    """A table per machine, since times of two are not compared, then the published
    speeds."""
    rows = all_machines(root)
    text = "One row per setting, fastest first; failed runs are included. – is not measured."
    body = f"<h1>All machines</h1><p>{text}</p>"
    tables = rows.groupby(["origin", "machine"], sort=False, dropna=False)
    for (origin, machine), own in tables:
        heading = str(machine)
        shown = [c for c in own if c in ALWAYS or own[c].notna().any()]
        own = own[shown].drop(columns=["origin", "machine"])
        if origin != "measured":
            heading += f": {origin}"
            unknown = dict.fromkeys(["verdict", "kl_mean"], "unknown")
            own = own.astype({"kl_mean": object}).fillna(unknown)
        body += f"<h2>{html.escape(heading)}</h2>{_table(own)}"
    return body


def _newest(runs: pd.DataFrame) -> dict:
    """The newest run with a verdict, or without one the newest."""
    runs = with_machines(runs).sort_values("run_id")
    validated = runs.dropna(subset="verdict")
    if len(validated):
        runs = validated
    return log.plain(runs.tail(1)).to_dict("records")[0]


def _write(
    path: Path, title: str, body: str, verdict: str = "", links: tuple = SITE_LINKS
) -> None:
    path.write_text(PAGE.render(title=title, body=body, verdict=verdict, links=links))


def _table(frame: pd.DataFrame, escape: bool = True) -> str:
    shown = frame.astype(object).where(frame.notna(), "–")
    text = shown.to_html(
        index=False, border=0, escape=escape, float_format="{:.4g}".format
    )
    return f'<div class="wide">{text}</div>'


def _inline(text: str, folder: Path) -> str:
    """HTML with its figures inline; links to files beside it are replaced by their
    text."""

    def figure(match: re.Match) -> str:
        path = folder / match[1]
        svg = path.read_text()
        svg = svg[svg.index("<svg") :]
        # ids are prefixed, since several figures are in one document
        svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{path.stem}-", svg)
        return svg.replace("<svg", f'<svg role="img" aria-label="{match[2]}"', 1)

    text = re.sub(r'<img src="([^"]+\.svg)" alt="([^"]*)"[^>]*>', figure, text)
    return re.sub(r'<a href="(?!https?:)[^"]*">(.*?)</a>', r"\1", text)
