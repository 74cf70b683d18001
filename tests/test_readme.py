"""What README and the guide tell people to type exists and is spelled right; links and notebooks
named there are there."""

import ast
import json
import re
import shlex
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
from circle import wide
from in_process import cli
from test_structure import names_imported
from tiny import ROOT

from workbench.bundle.names import STATES
from workbench.check import compare
from workbench.check.bug_gates import BUG_GATES
from workbench.check.golden import make_golden
from workbench.check.tasks import prompt_ids
from workbench.cli.app import app
from workbench.decode.tokenizer import encode_text, unknown_share
from workbench.models import FAMILIES
from workbench.models.checkpoint import Checkpoint

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TUTORIAL = ROOT / "docs" / "tutorial.md"


def blocks(kind: str, *pages: Path) -> list[str]:
    """The fenced blocks of some pages of a kind."""
    fence = re.compile(rf"^```{kind}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [text for page in pages for text in fence.findall(page.read_text())]


def commands(*pages: Path) -> list[str]:
    """Lines of fenced blocks that start with a program, comments cut off, `&&` split."""
    lines = "\n".join(blocks(r"\w*", *pages)).splitlines()
    parts = [part for line in lines for part in line.split("  #")[0].split(" && ")]
    parts = (part.strip() for part in parts if part.startswith(("workbench ", "make ")))
    return list(dict.fromkeys(parts))


def test_every_command_in_the_documents_parses():
    makefile = (ROOT / "Makefile").read_text()
    for line in commands(*PAGES):
        print(line)
        program, name, *arguments = shlex.split(line)
        if program == "make":
            assert re.search(rf"^{name}:", makefile, re.MULTILINE)
            continue
        # raises a CycloptsError for an option or value it does not know
        app.parse_args([name, *arguments])


# words of the documents' commands that need a model, a machine or a run that a test does not have
ELSEWHERE = (
    "smollm2",
    "/models/",
    "FOLDER",
    "RUN_",
    "HOST",
    "llama-apple",
    "build/adopted",  # of tests/adopt/test_adopted_fault.py
    "build/new",
)
QUICK = "doctor|export|validate|generate|plan|golden"


WHOLE = pytest.param(
    f"{QUICK}|explain|evaluate|sweep|log", marks=pytest.mark.exhaustive
)


@pytest.mark.slow("runs most commands of the documents")
@pytest.mark.parametrize("verbs", [wide(QUICK), WHOLE])
def test_the_tour_runs_as_written(verbs, tmp_path, monkeypatch):
    for name in ("data", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    lines = commands(*(page for page in PAGES if page != TUTORIAL))
    tour = [line for line in lines if re.match(f"workbench ({verbs}) ", line + " ")]
    tour = [line for line in tour if not any(word in line for word in ELSEWHERE)]
    if verbs == QUICK:
        tour = [line for line in tour if "validate units" not in line]
    assert {line.split()[1] for line in tour} == set(verbs.split("|"))
    for line in tour:
        arguments = shlex.split(line)[1:]
        if arguments[0] == "export" and Path(arguments[2]).exists():
            continue
        result = cli(*arguments, raises=True)
        assert result.exit_code == 0, f"{line}: {result.output}"
        if arguments[0] == "generate":
            assert "amber" in result.output


@pytest.mark.slow("exports and validates as the tutorial does")
@pytest.mark.wide
def test_the_tutorial_finds_its_fault_as_written(tmp_path, monkeypatch):
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)

    def written(verb) -> list[list[str]]:
        """The arguments of its commands with a verb."""
        lines = map(shlex.split, commands(TUTORIAL))
        return [words[1:] for words in lines if words[:2] == ["workbench", verb]]

    (export,), decodes = written("export"), written("generate")
    (snippet,) = blocks("python", TUTORIAL)
    assert cli(*export).exit_code == 0
    exec(snippet, {})
    assert len(decodes) == 2
    for arguments in decodes:
        assert "amber" in cli(*arguments).output
    sound, planted = written("validate")
    assert planted == [w.replace("build/sound", "build/sound-planted") for w in sound]
    result = cli(*planted)
    assert result.exit_code == 1
    # the README shows lines of both outputs
    (shown,) = (
        block for block in blocks("", ROOT / "README.md") if "not judged" in block
    )
    for output, lines in zip(
        (cli(*sound).output, result.output), re.split("(?<=\n)(?=export)", shown)
    ):
        printed = set(map(without_values, output.splitlines()))
        assert {*map(without_values, lines.splitlines())} <= printed
    red = re.findall(r"^RED +(\w+)", result.output, re.MULTILINE)
    assert red == ["host", "program", "budget"]


def without_values(line: str) -> str:
    """A line without its numbers, which differ between processors, and its spaces."""
    return " ".join(re.sub(r"\d[\d.e-]*", "#", line).split())


@pytest.mark.slow("exports and validates as the page does")
@pytest.mark.wide
def test_a_weight_fault_planted_by_hand_is_red_as_written(tmp_path, monkeypatch):
    for name in ("data", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    page = ROOT / "docs" / "guide.md"
    snippets = blocks("python", page)
    (snippet,) = (block for block in snippets if "faults.copies" in block)
    (export,) = (
        line
        for line in commands(page)
        if "workbench export data/tiny-llama build/sound" in line
    )
    assert cli(*shlex.split(export)[1:]).exit_code == 0
    names = {}
    exec(snippet, names)
    result = cli("validate", "build/one-weight", "--checkpoint", "data/tiny-llama")
    assert result.exit_code == 1
    (red,) = re.findall(r"^RED +(\w+) .*$", result.stdout, re.MULTILINE)
    assert red == "weights" and "layers.2.mlp.up_proj.weight" in result.stdout
    (shown,) = re.findall(r"^```\n(RED.*?)^```", page.read_text(), re.M | re.S)
    for line in shown.splitlines():
        assert without_values(line.rstrip("…")) in without_values(result.stdout)
    edits = re.findall(r"\| `(weight\.(?:scale|swap|shift).*?)` \|", page.read_text())
    assert len(edits) == 4
    for number, edit in enumerate(edits):
        copy = names["Copy"](Path("build/sound"), Path(f"build/edit-{number}"))
        weight = copy.weight("layers.2.mlp.up_proj.weight")
        before = weight.read()
        eval(edit, {"weight": weight, "copy": copy})
        assert (weight.read() != before).any()


def test_links_and_files_named_in_the_documents_lead_somewhere():
    folders = "workbench|tests|notebooks|data|experiments|docs"
    ignored = "bundles|golden|evaluations|smollm2-135m-instruct|gemma3-270m"
    written = re.compile(f"data/({ignored})|.*NN_")
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            assert target.startswith("http") or (page.parent / target).exists(), target
        for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
            assert written.match(name) or (ROOT / name).exists(), f"{page.name}: {name}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def test_links_to_sections_of_the_documents_lead_to_headings():
    seen = 0
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text()):
            if not target.startswith("http"):
                linked = page.parent / target if target else page
                assert anchor in anchors(linked), f"{page.name}: {target}#{anchor}"
                seen += 1
    assert seen > 50


def test_files_and_names_of_the_code_that_the_documents_mention_exist():
    """A file may be named by the end of its path; docs/lost.md names files that are no
    more."""
    folders = "workbench", "miltorch", "tests", "tools", "data", "docs", "plugins"
    files = {f"/{path}" for folder in folders for path in (ROOT / folder).rglob("*.py")}
    for page in PAGES:
        if page.name == "lost.md":
            continue
        text = page.read_text()
        for name in re.findall(r"`([\w/]+\.py)`", text):
            is_there = any(file.endswith(f"/{name}") for file in files)
            assert is_there or name == "modeling_NAME.py", f"{page.name}: {name}"
        for name in re.findall(r"`(workbench(?:\.[a-z_]\w*)+)", text, re.IGNORECASE):
            if "harness" not in name:  # needs an extra
                resolve_name(name)


NAMES_IN_FILE = re.compile(r"(`\w+`(?:(?:, | and )`\w+`)*) (?:in|of) `([\w/]+\.py)`")


def defined_names(source: str) -> set[str]:
    """The functions, classes, variables and attributes that a module defines or assigns."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def test_a_file_defines_what_the_documents_say_is_in_it():
    """`NAME` in `FILE`, where FILE may be the end of a path."""
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("tools/*.py")]
    files += [*ROOT.glob("workbench/**/*.py"), *ROOT.glob("miltorch/**/*.py")]
    seen = []
    for page in PAGES:
        if page.name == "lost.md":  # names code that is no more
            continue
        for names, path in NAMES_IN_FILE.findall(page.read_text()):
            matching = [file for file in files if file.as_posix().endswith(f"/{path}")]
            sources = (file.read_text() for file in matching)
            defined = set().union(*map(defined_names, sources))
            for name in re.findall(r"`(\w+)`", names):
                assert name in defined, f"{page.name}: `{name}` in `{path}`"
                seen.append(name)
    # several names before one file count too
    assert {"execution_columns", "measure_in_child", "MIN_STOPS"} <= {*seen}


def test_the_glossary_has_every_gate_and_every_state():
    page = (ROOT / "docs" / "glossary.md").read_text()
    rows = " ".join(re.findall(r"^\|(.*?)\|", page, re.MULTILINE))
    entries = set(re.findall(r"`(\w+)`", rows))
    assert not {*BUG_GATES, "max_kl", "budget", "device"} - entries
    assert {*STATES} <= entries
    kinds = set(re.findall(r"^\|[^|]*\| (\w+)", page, re.MULTILINE))
    assert {"rows", "ring", "tail", "matrix"} <= kinds
    assert "docs/glossary.md" in (ROOT / "README.md").read_text()
    assert "glossary.md" in (ROOT / "docs" / "architecture.md").read_text()


def test_the_readme_shows_lines_of_the_answer_that_make_run_ends_in():
    (shown,) = re.findall(r"^  ```\n(.*?)^  ```", PAGES[0].read_text(), re.M | re.S)
    report = (ROOT / "experiments/05_stateful_kv_cache/report.md").read_text()
    lines = [" ".join(line.rstrip("… ").split()) for line in shown.splitlines()]
    assert {"export GREEN", "quality WITHIN"} <= set(lines)
    for line in lines:
        assert line.lower() in report.lower(), line


def test_the_readme_says_how_long_make_run_takes_and_how_much_it_writes():
    rows = json.loads((ROOT / "experiments" / "commands.json").read_text())
    (measured,) = (row for row in rows if row["command"] == "make run")
    said = re.search(r"took about (\d+) minutes and ([\d.]+) GB", PAGES[0].read_text())
    assert int(said[1]) == round(measured["seconds"] / 60)
    assert float(said[2]) == round(measured["bytes"] / 1e9, 1)


def test_the_readme_names_every_family():
    page = PAGES[0].read_text()
    assert not [name for name in FAMILIES if f"`{name}`" not in page]


def test_the_readme_s_python_exports_validates_and_draws(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tiny-llama").symlink_to(ROOT / "data" / "tiny-llama")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(blocks("python", PAGES[0])[0], names)
    assert names["result"].verdict == "GREEN"
    assert Path("heatmap.png").stat().st_size > 0
    assert {"bundles", "golden"} <= {path.name for path in Path("data").iterdir()}


def test_the_worked_diff_of_a_preset_applies_to_the_files():
    (diff,) = blocks("diff", ROOT / "docs" / "extend.md")
    _, *files = re.split(r"^--- a/(.+)\n\+\+\+ b/.+\n", diff, flags=re.MULTILINE)
    for name, hunks in zip(files[::2], files[1::2], strict=True):
        text = (ROOT / name).read_text()
        _, *hunks = re.split(r"^@@ -.+ \+.+ @@.*\n", hunks, flags=re.MULTILINE)
        for hunk in hunks:
            lines = hunk.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] in " -")
            assert text.count(before) == 1, f"{name}: {hunk}"
            after = "".join(line[1:] for line in lines if line[0] in " +")
            text = text.replace(before, after)
        assert "int4-block64" in text
    assert len(files) == 2 * 6


def test_python_in_the_documents_imports_what_exists():
    pages = [*PAGES, ROOT / "miltorch" / "README.md", *ROOT.glob("plugins/*/README.md")]
    for name in names_imported("\n".join(blocks("python", *pages))):
        if re.match("workbench|miltorch", name) and "harness" not in name:
            resolve_name(name)  # harness needs an extra


@pytest.mark.slow("runs Hugging Face's layers twice")
def test_the_stream_hides_a_missing_attention_as_much_as_the_page_says():
    folder = ROOT / "data" / "tiny-llama"
    source = Checkpoint(folder)
    said = re.search(
        r"tiny-llama without the attention of layer (\d)\. Over a held-out prompt of (\d+) "
        r"tokens, the worst cosine is ([\d.]+) in the stream and ([\d.]+) in what the "
        r"layer adds",
        (ROOT / "docs" / "verdict.md").read_text(),
    )
    layer, count, *cosines = said.groups()
    ids = prompt_ids(folder, int(count))

    def without(name: str):
        tensor = source.tensor(name)
        is_attention = f"layers.{layer}.self_attn.o_proj" in name
        return tensor * 0 if is_attention else tensor

    golden = make_golden(source, ids)
    other = make_golden(source, ids, without, "without attention", feed=golden.trace)
    worst = []
    for tensor in ("hidden", "update"):
        name = f"{tensor}.{layer}"
        worst.append(f"{compare.cosine(golden[name], other[name]).min():.2f}")
    assert worst == cosines


def test_the_text_that_the_documents_evaluate_is_known_to_its_tokenizer():
    """README.md itself is not: nine in ten of its tokens are unknown."""
    text = (ROOT / "data/tasks/heldout.txt").read_text()
    folder = ROOT / "data" / "tiny-llama"
    assert unknown_share(folder, encode_text(folder, text)) == 0
    readme = (ROOT / "README.md").read_text()
    assert unknown_share(folder, encode_text(folder, readme)) > 0.8
    evaluated = [line for line in commands(*PAGES) if " evaluate build/llama" in line]
    assert evaluated and all("heldout.txt" in line for line in evaluated)
