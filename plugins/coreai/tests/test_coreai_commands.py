"""Commands on a Core AI bundle: each works, or refuses in one message that names the next step.

What reads no program is tested on a Core ML bundle that is labelled as one of Core AI.
"""

import json
import shutil

import numpy as np
import pytest
from in_process import invoke

from workbench import Bundle, Decoder, InputError
from workbench.ane import memory
from workbench.bundle.names import KV_WRITE_MASK
from workbench.check import states

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = "1,42,90,7,9,3,5,8,77,20"
CHECKPOINT = "--checkpoint", "data/tiny-llama"


def labelled(bundle: Bundle, folder, target: str) -> Bundle:
    """A copy of a Core ML bundle whose manifest names Core AI programs."""
    path = shutil.copytree(bundle.root, folder / target) / "bundle.json"
    manifest = json.loads(path.read_text())
    manifest["options"] |= {"target": target}
    path.write_text(json.dumps(manifest))
    return Bundle.open(path.parent)


@pytest.mark.parametrize(
    "command, message",
    [
        (
            ("explain", *CHECKPOINT, "--only", "parts"),
            "fp16 programs.*coreai.*export it",
        ),
        (
            ("explain", *CHECKPOINT, "--only", "weights"),
            "--target coreai.*export.* without --target",
        ),
        (
            ("explain", *CHECKPOINT, "--only", "variant"),
            "fp16 programs.*coreai.*export it for",
        ),
        (("validate", "--runtime", "portable"), "portable.*run on coreai"),
    ],
)
def test_what_core_ai_cannot_answer_is_refused_with_the_next_step(
    command, message, llama_bundle, tmp_path
):
    bundle = labelled(llama_bundle, tmp_path, "coreai")
    with pytest.raises(InputError, match=message):
        invoke(command[0], bundle.root, *command[1:])


def test_memory_counts_states_and_buffers_of_fp32_programs_twice(
    llama_bundle, tmp_path
):
    half, whole = (
        labelled(llama_bundle, tmp_path, target) for target in ("coreai", "coreai-fp32")
    )
    budgets = [memory.budget(bundle) for bundle in (llama_bundle, half, whole)]
    assert budgets[0] == budgets[1]
    assert (budgets[2].kv, budgets[2].buffers) == (
        2 * budgets[1].kv,
        2 * budgets[1].buffers,
    )
    assert budgets[2].weights == budgets[1].weights  # as they are stored
    result = invoke("plan", whole.root, "--memory", "16G")
    assert (
        result["bytes"]["kv"] == budgets[2].kv
        and result["fits"]
        and result["chips"] == result["shards"] == []
    )
    assert invoke("plan", llama_bundle.root)["chips"]


def test_the_checklist_is_gone_through_on_apples_interpreter(apple, monkeypatch):
    result = invoke("validate", apple.root)
    verdicts = {gate["name"]: gate["verdict"] for gate in result["gates"]}
    assert set(verdicts.values()) == {"GREEN"}
    decoder, predict = Decoder(apple), type(Decoder(apple).layers[0]).predict

    def shifted(model, inputs, state=None, hook=None):
        """Every call writes one row too far."""
        mask = np.roll(inputs[KV_WRITE_MASK], 1, axis=2)
        return predict(model, inputs | {KV_WRITE_MASK: mask}, state, hook)

    monkeypatch.setattr(type(decoder.layers[0]), "predict", shifted)
    gates = {gate.name: gate.verdict for gate in states.state_gates(decoder)}
    assert gates["write_address"] == "RED"


def test_error_and_explain_take_fp32_programs(apple, exports):
    checkpoint = "--checkpoint", exports.checkpoint("llama")
    result = invoke(
        "explain", apple.root, *checkpoint, "--prompt-ids", IDS, "--only", "parts"
    )
    assert result["verdict"] == "GREEN"
    for layer in result["parts"]:
        assert (
            0 < layer["reauthoring"] < 1e-5
            and layer["precision"] is layer["runtime"] is None
        )
    assert (
        invoke("explain", apple.root, *checkpoint, "--only", "variant")["fits"]
        == "as configured"
    )
