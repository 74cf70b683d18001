"""What README and the guide tell people to type exists and is spelled right; links and notebooks
named there are there."""

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
from pathlib import Path

import pytest
from in_process import cli

from workbench.check.validate import BUG_GATES
from workbench.cli.app import app
from workbench.models import FAMILIES

ROOT = Path(__file__).parents[1]
EXHAUSTIVE = pytest.mark.exhaustive
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


TUTORIAL = ROOT / "docs" / "tutorial.md"


def commands(pages=PAGES) -> list[str]:
    """Lines of fenced blocks that start with a program, comments cut off, `&&` split."""
    found = []
    for page in pages:
        for fence in re.findall(
            r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            for line in fence.splitlines():
                found += [
                    part.strip()
                    for part in line.split("  #")[0].split(" && ")
                    if part.startswith(("workbench ", "make "))
                ]
    return list(dict.fromkeys(found))


def test_every_command_in_the_documents_parses():
    makefile = (ROOT / "Makefile").read_text()
    for line in commands():
        print(line)
        program, name, *arguments = shlex.split(line)
        if program == "make":
            assert re.search(rf"^{name}:", makefile, re.MULTILINE)
            continue
        # raises a CycloptsError for an option or value it does not know
        app.parse_args([name, *arguments])


# of the documents' commands: what needs a model, a machine or a run of one's own
ELSEWHERE = ("/models/", "FOLDER", "RUN_", "HOST", "llama-apple", "build/new")
QUICK = "doctor|export|validate|generate|plan|golden"


@pytest.mark.parametrize(
    "verbs",
    [
        pytest.param(QUICK, marks=pytest.mark.wide),
        pytest.param(f"{QUICK}|explain|evaluate|sweep|log", marks=EXHAUSTIVE),
    ],
)
def test_the_tour_runs_as_written(verbs, tmp_path, monkeypatch):
    for name in ("data", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    lines = commands([page for page in PAGES if page != TUTORIAL])
    tour = [line for line in lines if re.match(f"workbench ({verbs}) ", line + " ")]
    tour = [line for line in tour if not any(word in line for word in ELSEWHERE)]
    if verbs == QUICK:
        tour = [line for line in tour if "--each-unit" not in line]
    assert {line.split()[1] for line in tour} == set(verbs.split("|"))
    for line in tour:
        arguments = shlex.split(line)[1:]
        if arguments[0] == "export" and Path(arguments[2]).exists():
            continue
        result = cli(*arguments, raises=True)
        assert result.exit_code == 0, f"{line}: {result.output}"
        if arguments[0] == "generate":
            assert "amber" in result.output


@pytest.mark.wide
def test_the_tutorial_finds_its_fault_as_written(tmp_path, monkeypatch):
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    export, *decodes = [
        c for c in commands([TUTORIAL]) if re.match("workbench (export|generate)", c)
    ]
    (snippet,) = python_blocks(TUTORIAL)
    assert cli(*shlex.split(export)[1:]).exit_code == 0
    exec(snippet, {})
    assert len(decodes) == 2
    for line in decodes:
        assert "amber" in cli(*shlex.split(line)[1:]).output
    sound, planted = [
        c for c in commands([TUTORIAL]) if c.startswith("workbench validate")
    ]
    assert planted == sound.replace("build/sound", "build/sound-planted")
    result = cli(*shlex.split(planted)[1:])
    assert result.exit_code == 1
    red = re.findall(r"^RED +(\w+)", result.output, re.MULTILINE)
    assert red == ["host", "program", "max_kl", "budget"]


def test_every_command_helps_with_an_example():
    for name in (name for name in app if not name.startswith("-")):
        assert cli(name, "--help").exit_code == 0
        told = inspect.getdoc(app[name].default_command)
        example = re.search(r"Example: (workbench [^\n]+)", told)
        assert example, f"workbench {name} --help shows no example"
        arguments = shlex.split(example[1])[1:]
        assert arguments[0] == name
        app.parse_args(arguments)


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), target


def test_files_named_in_the_documents_exist():
    for page in PAGES:
        for name in re.findall(
            r"`((?:workbench|tests|notebooks|data|experiments|docs)/[\w./-]+)`",
            page.read_text(),
        ):
            written = "data/bundles", "data/golden", "data/evaluations"
            if not name.startswith(written) and "NN_" not in name:
                assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_the_glossary_has_every_gate_and_every_kind_of_state():
    page = (ROOT / "docs" / "glossary.md").read_text()
    entries = set(
        re.findall(r"`(\w+)`", " ".join(re.findall(r"^\|(.*?)\|", page, re.MULTILINE)))
    )
    assert not {*BUG_GATES, "max_kl", "budget", "device"} - entries
    assert {"rows", "ring", "tail", "matrix"} <= entries
    assert "docs/glossary.md" in (ROOT / "README.md").read_text()
    assert "glossary.md" in (ROOT / "docs" / "architecture.md").read_text()


def test_the_readme_names_every_family():
    page = PAGES[0].read_text()
    assert not [name for name in FAMILIES if f"`{name}`" not in page]


def python_blocks(*pages: Path) -> list[str]:
    texts = "\n".join(page.read_text() for page in pages)
    return re.findall(r"^```python\n(.*?)^```", texts, re.MULTILINE | re.DOTALL)


def test_the_readme_s_python_exports_validates_and_draws(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tiny-llama").symlink_to(ROOT / "data" / "tiny-llama")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(python_blocks(PAGES[0])[0], names)
    assert names["result"].verdict == "GREEN"
    assert Path("heatmap.png").stat().st_size > 0
    assert {"bundles", "golden"} <= {path.name for path in Path("data").iterdir()}


def test_python_in_the_documents_imports_what_exists():
    own = ("workbench", "miltorch")
    pages = [*PAGES, ROOT / "miltorch" / "README.md", *ROOT.glob("plugins/*/README.md")]
    for node in [
        node for block in python_blocks(*pages) for node in ast.parse(block).body
    ]:
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.partition(".")[0] in own:
                    importlib.import_module(name.name)
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in own:
            if node.module == "workbench.harness":  # needs an extra
                assert importlib.util.find_spec(node.module)
                continue
            module = importlib.import_module(node.module)
            for name in node.names:
                where = f"{node.module}.{name.name}"
                assert hasattr(module, name.name) or importlib.util.find_spec(where)
