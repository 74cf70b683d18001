"""The committed checkpoints are real Hugging Face folders that answer as their ``evaluation.json``
says."""

import itertools
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import DATA
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from workbench.check.tasks import load_tasks

FOLDERS = sorted(path.parent for path in DATA.glob("tiny-*/evaluation.json"))
HELD_OUT, LATEST = (
    load_tasks(DATA / "tasks" / f"{name}.jsonl") for name in ("heldout", "latest")
)
STATES = {"tiny-lfm2": "conv_state", "tiny-qwen3_5": "matrix_state"}

every_folder = pytest.mark.parametrize(
    "folder", FOLDERS, ids=lambda folder: folder.name
)


@cache
def model(folder: Path):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@cache
def tokenizer(folder: Path):
    """Not AutoTokenizer: it takes every qwen2 folder's tokenizer for Qwen's own byte-level one,
    whatever the folder says."""
    return PreTrainedTokenizerFast.from_pretrained(folder)


@every_folder
def test_every_weight_is_a_finite_value_of_fp16_and_carries_information(folder):
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert tensor.dtype == torch.float16, name
        assert tensor.abs().max() < 1000, name  # also refuses NaN and infinity
        assert len(tensor.unique()) > 1, name


@every_folder
def test_the_tokenizer_returns_what_it_was_given(folder):
    text, coder = "set river amber ; 4 7 + 2 5 = 0 7 2 ; get river", tokenizer(folder)
    ids = coder(text).input_ids
    assert ids[0] == coder.bos_token_id and len(ids) == 1 + len(text.split())
    assert coder.decode(ids, skip_special_tokens=True) == text
    assert len(coder) == model(folder).config.vocab_size


@pytest.mark.slow("answers every held-out question")
@pytest.mark.matrix(1, wide=5)
@every_folder
def test_greedy_decoding_answers_as_many_held_out_questions_as_stated(folder):
    right, questions = 0, HELD_OUT + (LATEST if folder.name in STATES else [])
    coder = tokenizer(folder)
    for question in questions:
        prompt = coder(question["prompt"], return_tensors="pt")
        answer = question["answer"]
        count = len(answer.split())
        out = model(folder).generate(**prompt, do_sample=False, max_new_tokens=count)
        right += coder.decode(out[0, prompt.input_ids.shape[1] :]) == answer
    stated = json.loads((folder / "evaluation.json").read_text())
    assert len(questions) == stated["heldout_questions"]
    assert right == stated["heldout_right"] > 0.8 * len(questions)
    assert stated["accuracy_by_distance"]["recall"]["128"] > 0.9


def test_zaya_uses_every_expert_and_the_skip_class():
    zaya, folder = model(DATA / "tiny-zaya"), DATA / "tiny-zaya"
    used = set()

    def record(router, _, outputs):
        scores = outputs[0].softmax(-1) + router.balancing_biases
        used.update((router.layer_idx, choice) for choice in scores.argmax(-1).tolist())

    layers = zaya.model.layers
    hooks = [layer.mlp.gate.register_forward_hook(record) for layer in layers]
    for question in HELD_OUT[::4]:
        zaya(**tokenizer(folder)(question["prompt"], return_tensors="pt"))
    for hook in hooks:
        hook.remove()
    choices = range(zaya.config.num_experts + 1)
    assert used == {*itertools.product(range(len(layers)), choices)}


@pytest.mark.slow("decodes nine prompts token by token")
@pytest.mark.wide
@pytest.mark.parametrize("name, state", STATES.items())
def test_a_hybrid_knows_the_latest_value_by_its_recurrent_state(exports, name, state):
    """Its caches alone do not answer: the state is zeroed after every token."""
    decoder = exports.decoder(DATA / name, max_seq_len=512)
    coder = tokenizer(DATA / name)

    right = 0
    for question in LATEST[:9]:
        decoder.begin()
        for token in coder(question["prompt"]).input_ids:
            logits = decoder.decode_one_token(token)
            for shard_state, leaf in decoder.seqs.named_states:
                if leaf.endswith(state):
                    shard_state.write(leaf, 0 * shard_state.read(leaf))
        right += coder.decode(logits.argmax()) == question["answer"]
    assert right <= 1
