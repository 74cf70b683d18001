"""The action that validates a bundle in a pull request: its lines as a runner runs them. No
stored verdict counts, an export that was not run fails, and summary and page are there when the
check fails."""

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml
from bs4 import BeautifulSoup
from in_process import invoke

from workbench import Bundle
from workbench.check import gates
from workbench.check.bug_gates import BUG_GATES
from workbench.files import sha256

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
STEPS = {step.get("name", step.get("uses")): step for step in ACTION["runs"]["steps"]}
EXPRESSION = re.compile(r"\$\{\{ *([\w.-]+) *\}\}")


@dataclass
class Step:
    """What a step of the action left: its exit code, the summary, what it printed, and the files of
    the artifact by name."""

    code: int
    summary: str
    log: str
    artifact: dict[str, str]

    @property
    def page(self) -> str:
        """The text of the page."""
        return BeautifulSoup(self.artifact["page.html"], "html.parser").text

    @property
    def words(self) -> list[str]:
        """The verdicts on export and quality that the page shows."""
        page = BeautifulSoup(self.artifact["page.html"], "html.parser")
        return [card.b.text for card in page(class_="verdict")]


@pytest.fixture
def programs(forking_python, tmp_path) -> Path:
    """A folder with what the step calls, as it is in the folder of an environment. Both start as
    forks, whose imports are done: starting them is not what the action adds."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, words in {"python": "", "workbench": "-m workbench.cli"}.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{forking_python}" {words} "$@"\n')
        program.chmod(0o755)
    return folder


@pytest.fixture
def run_step(programs, tmp_path):
    """Runs the step Validate with these inputs, beside the defaults of the others."""

    def run(**inputs) -> Step:
        contexts = {"github.action_path": ROOT, "runner.temp": tmp_path / "runner"}
        for name, described in ACTION["inputs"].items():
            value = inputs.pop(name.replace("-", "_"), described["default"])
            contexts[f"inputs.{name}"] = value
        assert not inputs
        step = STEPS["Validate"]
        variables = {
            name: EXPRESSION.sub(lambda match: str(contexts[match[1]]), value)
            for name, value in step["env"].items()
        }
        variables["BIN"] = str(programs)
        workspace = tmp_path / "workspace"
        workspace.mkdir(exist_ok=True)
        summary = tmp_path / "summary.md"
        summary.write_bytes(b"")
        variables |= {
            "GITHUB_WORKSPACE": str(workspace),
            "GITHUB_STEP_SUMMARY": str(summary),
        }
        script = tmp_path / "script.sh"
        script.write_text(step["run"])
        ended = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", script],
            cwd=workspace,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=500,
        )
        pages = Path(variables["PAGES"])
        artifact = {path.name: path.read_text() for path in pages.iterdir()}
        log = ended.stdout + ended.stderr
        return Step(ended.returncode, summary.read_text(), log, artifact)

    return run


@pytest.fixture
def pull_request(exports, tmp_path):
    """The folder of a checkpoint, and that of its bundle in the checkout of a pull request."""
    import shutil

    checkpoint = exports.checkpoint("llama")
    exported = exports.bundle(checkpoint, max_seq_len=20).root
    root = shutil.copytree(exported, tmp_path / "workspace" / "bundle")
    return checkpoint, root


def damage(root: Path, is_forged: bool) -> None:
    """Sets weights of a bundle to zero, with their hashes in the manifest. A forged one
    has the verdict of a sound bundle, and a note of this checkout that it counts."""
    blob = next(root.rglob("weight.bin"))
    contents = np.fromfile(blob, np.uint8)
    contents[-64:] = 0
    contents.tofile(blob)
    manifest = json.loads((root / "bundle.json").read_text())
    for shard in manifest["shards"]:
        for entry in shard["files"]:
            entry["sha256"] = sha256(root / entry["path"])
    (root / "bundle.json").write_text(json.dumps(manifest))
    if is_forged:
        stated = [gates.holds(name, True, "trust me") for name in BUG_GATES]
        gates.save_verdict(Bundle.open(root), stated)


@pytest.mark.slow("commands in processes of their own, as on a runner")
def test_a_sound_bundle_passes_and_one_over_the_limits_as_fail_on_says(
    run_step, pull_request
):
    checkpoint, bundle = pull_request
    sound = run_step(bundle=bundle, checkpoint=checkpoint)
    assert sound.code == 0, sound.log
    assert sound.words == ["GREEN", "WITHIN"]
    assert "**Export GREEN, quality WITHIN**" in sound.summary
    assert sound.artifact["page.md"] == sound.summary
    over = run_step(bundle=bundle, checkpoint=checkpoint, max_kl="1e-12")
    assert over.code == 0 and "::warning::" in over.log, over.log
    assert over.words == ["GREEN", "OVER"]
    assert "**Export GREEN, quality OVER**" in over.summary
    limits = {"max_kl": "1e-12", "fail_on": "quality"}
    failed = run_step(bundle=bundle, checkpoint=checkpoint, **limits)
    assert failed.code == 4 and "::warning::" not in failed.log
    assert "**Export GREEN, quality OVER**" in failed.summary
    assert failed.words == ["GREEN", "OVER"]


@pytest.mark.slow("commands in processes of their own, as on a runner")
@pytest.mark.parametrize(
    "is_forged", [pytest.param(False, marks=pytest.mark.wide), True]
)
def test_a_faulty_bundle_fails_whatever_its_verdict_states(
    run_step, pull_request, is_forged
):
    checkpoint, bundle = pull_request
    damage(bundle, is_forged)
    if is_forged:  # it would count without --fresh
        assert invoke("validate", bundle)["verdict"] == "GREEN"
    failed = run_step(bundle=bundle, checkpoint=checkpoint)
    assert failed.code == 1, failed.log
    assert failed.words == ["RED", "not judged"] and "trust me" not in failed.page
    assert "**Export RED, quality not judged**" in failed.summary


@pytest.mark.wide
@pytest.mark.slow("commands in processes of their own, as on a runner")
def test_an_export_that_was_not_run_fails(run_step, pull_request, tmp_path):
    checkpoint, bundle = pull_request
    damage(bundle, is_forged=True)
    alone = run_step(bundle=bundle)
    assert alone.code == 1, alone.log
    assert "The export was not run" in alone.summary
    assert alone.words == ["not run", "not run"] and "trust me" not in alone.page
    golden = tmp_path / "workspace" / "golden"
    invoke("golden", checkpoint, "--out", golden, "--prompt-ids", "1,2,3")
    beside = run_step(bundle=bundle, golden=golden)
    assert beside.code == 1 and "The export was not run" in beside.summary
    assert beside.words[0] == "not run" and "trust me" not in beside.page


@pytest.mark.slow("commands in processes of their own, as on a runner")
def test_bad_input_is_named_in_summary_and_artifact(run_step, pull_request, tmp_path):
    checkpoint, bundle = pull_request
    missing = run_step(
        bundle="none ` $(touch pwned)\n::error::x", checkpoint=checkpoint
    )
    assert missing.code == 2 and "nothing there" in missing.summary
    assert missing.summary.startswith(
        "**workbench validate stopped with exit code 2 and gave no verdict. Its messages "
        "follow; the artifact workbench-page has them as messages.txt."
    )
    assert "nothing there" in missing.artifact["messages.txt"]
    assert missing.artifact["end.md"] == missing.summary
    assert not [*tmp_path.rglob("pwned")] and "\n::error::" not in missing.summary
    stopped, *_ = missing.log.splitlines()
    assert re.fullmatch("::stop-commands::[0-9a-f]{32}", stopped)
    word = run_step(bundle=bundle, checkpoint=checkpoint, fail_on="never")
    assert word.code == 2 and "fail-on is neither" in word.summary


def test_a_checkpoint_of_the_pull_request_is_refused(run_step, pull_request, tmp_path):
    checkpoint, bundle = pull_request
    inside = tmp_path / "workspace" / "model"
    inside.mkdir()
    link = tmp_path / "link"
    link.symlink_to(inside)
    for path in (inside, link):
        refused = run_step(bundle=bundle, checkpoint=path)
        assert refused.code == 2
        assert "lies in the checkout of the pull request" in refused.summary


def test_no_input_stands_in_a_script_and_the_page_is_kept_when_the_check_fails():
    for step in STEPS.values():
        assert "${{" not in step.get("run", "")
    upload = [s for s in STEPS.values() if "upload-artifact" in s.get("uses", "")]
    assert [step["if"] for step in upload] == ["always()"]
    assert upload[0]["with"]["path"] == STEPS["Validate"]["env"]["PAGES"]
    assert STEPS["Validate"]["shell"] == "bash"


def test_the_workflow_runs_the_project_s_two_commands_with_the_right_to_read():
    # YAML reads the key `on` as true
    assert (
        "pull_request" in WORKFLOW[True] and "pull_request_target" not in WORKFLOW[True]
    )
    assert WORKFLOW["permissions"] == {"contents": "read"}
    (job,) = WORKFLOW["jobs"].values()
    assert [s["run"] for s in job["steps"] if "run" in s] == ["make run", "make test"]
    page = (ROOT / "docs" / "pull_requests.md").read_text()
    example = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    assert [*example[True]] == ["pull_request"]
    assert example["permissions"] == {"contents": "read"}
    (job,) = example["jobs"].values()
    (used,) = [step for step in job["steps"] if "/workbench@" in step.get("uses", "")]
    assert used["with"].keys() <= ACTION["inputs"].keys()
