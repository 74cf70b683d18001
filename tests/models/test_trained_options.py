"""Every export option gives the trained checkpoints the tokens that Hugging Face gives them, in
exact arithmetic.

Two bundles a checkpoint between them turn every option away from its default.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.check import tasks as answers

DATA = Path(__file__).parents[2] / "data"
NEW = 12
SLICES = {"kv_write": "slice", "layout": "bc1t", "layers_per_shard": 4, "tokens": "1-2"}
FIXED = {"tokens": "4", "batch": 2}
OPTIONS = {
    "llama": [SLICES, FIXED | {"layers_per_shard": 2}],
    "qwen2": [SLICES, FIXED | {"layers_per_shard": 2}],
    "gemma3": [SLICES, FIXED | {"sliding": "ring", "layers_per_shard": 3}],
    "zaya": [SLICES, FIXED | {"moe": "routed"}],
    "lfm2": [SLICES, FIXED | {"layers_per_shard": 2}],
    "qwen3_5": [SLICES, FIXED | {"layers_per_shard": 3}],
}


def greedy(decoder, prompts: list[list[int]]) -> list[list[int]]:
    """`NEW` tokens behind each prompt of a batch."""
    decoder.begin()
    made = [decoder.prefill(prompts).reshape(len(prompts), -1).argmax(-1)]
    while len(made) < NEW:
        made.append(
            decoder.decode_one_token(made[-1].tolist())
            .reshape(len(prompts), -1)
            .argmax(-1)
        )
    return np.stack(made, axis=1).tolist()


@pytest.mark.matrix(1, wide=5)
@pytest.mark.parametrize(
    "name, options",
    [(name, chosen) for name, both in OPTIONS.items() for chosen in both],
)
def test_options_change_no_token_of_a_trained_checkpoint(exports, name, options):
    folder = DATA / f"tiny-{name}"
    coder = answers.load_tokenizer(folder)
    tasks = answers.load_tasks(DATA / "tasks" / "heldout.jsonl")
    prompts = [
        coder.encode(task["prompt"])[: 40 - 8 * i]
        for i, task in enumerate(tasks[: options.get("batch", 1)])
    ]
    model = exports.hf(folder)
    with torch.inference_mode():
        wanted = [
            model.generate(
                torch.tensor([ids]),
                min_new_tokens=NEW,
                max_new_tokens=NEW,
                do_sample=False,
            )[0, len(ids) :].tolist()
            for ids in prompts
        ]
    assert greedy(exports.decoder(folder, max_seq_len=64, **options), prompts) == wanted
