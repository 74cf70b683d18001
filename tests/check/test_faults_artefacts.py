"""A fault that the checkpoint itself has: what no comparison with it can show."""

import json
import shutil
from types import SimpleNamespace

from workbench.check import tasks as answers
from workbench.check.validate import bug_gates
from workbench.models.checkpoint import Checkpoint


def test_a_wrong_rope_that_golden_and_bundle_share_shows_only_in_the_answers(
    tiny_llama, tmp_path, exports
):
    folder = shutil.copytree(tiny_llama.path, tmp_path / "wrong-rope")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 3.0
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(folder)
    tasks = answers.load_tasks(tiny_llama.path.parent / "tasks" / "heldout.jsonl")[::6]
    bundle = exports.bundle(folder, max_seq_len=128)
    assert {g.verdict for g in bug_gates(bundle, checkpoint)} == {"GREEN"}
    sound = answers.golden_answers(tiny_llama, tasks)
    assert sum(answers.golden_answers(checkpoint, tasks)) < sum(sound) / 2


def test_a_model_that_knows_no_answer_is_not_judged_by_its_answers(
    tiny_llama, monkeypatch
):
    tasks = answers.load_tasks(tiny_llama.path.parent / "tasks" / "heldout.jsonl")[:3]
    monkeypatch.setattr(
        answers, "golden_answers", lambda _, tasks: [False] * len(tasks)
    )
    decoder = SimpleNamespace(options=SimpleNamespace(max_seq_len=128))
    gate = answers.answers_gate(decoder, tiny_llama, tasks)
    assert gate.verdict == "not_run" and "none of the 3 questions" in gate.reason
