"""Trains the small checkpoints of this folder from scratch: ``python data/train.py
llama|qwen2|gemma3|zaya``.

From a family's name and fixed seeds it makes ``data/tiny-<family>``, an ordinary Hugging Face folder
(config, fp16 weights, tokenizer) with an ``evaluation.json``. With ``--evaluate`` it trains nothing
and writes the evaluation of the folder's weights again. The module does not import the workbench:
the models are transformers' classes, and the text comes from ``corpus``.
"""

import argparse
import json
import math
import random
from pathlib import Path

import corpus
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).parent
TOKEN_ID = {word: i for i, word in enumerate(corpus.VOCABULARY)}
COMMON = dict(
    vocab_size=len(TOKEN_ID),
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
    initializer_range=0.06,
    tie_word_embeddings=True,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
# family → arguments of its configuration class in transformers, beside COMMON
FAMILIES = {
    "llama": dict(
        model_type="llama",
        intermediate_size=256,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=5e5,
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=256,
        ),
    ),
    "qwen2": dict(
        model_type="qwen2",
        intermediate_size=256,
        rope_parameters=dict(rope_type="default", rope_theta=1e6),
    ),
    "gemma3": dict(
        model_type="gemma3_text",
        intermediate_size=256,
        query_pre_attn_scalar=32,
        sliding_window=64,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        rope_parameters=dict(
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
            full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
        ),
    ),
    "zaya": dict(
        model_type="zaya",
        moe_intermediate_size=128,
        num_experts=4,
        router_hidden_size=32,
    ),
    "lfm2": dict(
        model_type="lfm2",
        intermediate_size=384,  # a third is cut off, see block_auto_adjust_ff_dim
        block_multiple_of=32,
        layer_types=["conv", "conv", "full_attention", "conv"],
    ),
    "qwen3_5": dict(
        model_type="qwen3_5_text",
        intermediate_size=256,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    ),
}
# their texts define keys again: the answer is the latest value
HYBRIDS = ("lfm2", "qwen3_5")
STEPS, TOKENS_PER_STEP, WARM_UP = 1500, 4096, 500
# up to this share of the steps, texts this long
CURRICULUM = ((0.35, 64), (0.5, 128), (0.7, 256), (1.0, 512))
SKIP_SHARE = 0.1  # of the tokens that ZAYA's routers should send to no expert


def new_model(family: str) -> PreTrainedModel:
    """A randomly initialised fp32 model whose attention can tell positions apart from the first
    step on.

    A head that looks one token back needs something constant in its queries and keys: biases where
    the family has them, an offset that all embeddings share where it does not.  Without either,
    recall is not learned in this budget.
    """
    config = AutoConfig.for_model(**COMMON, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    )
    with torch.no_grad():
        model.get_input_embeddings().weight += 0.06 * torch.randn(config.hidden_size)
        for name, tensor in model.named_parameters():
            if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")):
                tensor.normal_(std=0.5)
            # transformers starts at 0, where keys have no effect
            if name.endswith("temp"):
                tensor.fill_(1.0)
            # transformers starts so small that the residual path drowns them
            if "conv_qk" in name:
                tensor.normal_(std=0.3)
            # transformers starts where a matrix forgets within a token
            if name.endswith("A_log"):
                tensor.zero_()
            # half-lives from 7 tokens to 700, see softplus
            if name.endswith("dt_bias"):
                tensor.copy_(torch.logspace(-3, -1, len(tensor)).expm1().log())
        for name, tensor in model.named_buffers():
            # transformers starts with the skip class shut out
            if name.endswith("balancing_biases"):
                tensor.zero_()
    return model


def batch(
    rng: random.Random, step: int, again: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and answer flags of one step, both ``[TOKENS_PER_STEP / length, length]``;
    ``again`` as in ``corpus``."""
    length = next(length for share, length in CURRICULUM if step < share * STEPS)
    texts = [
        corpus.repetition(rng, length)
        if rng.random() > step / WARM_UP
        else corpus.document(rng, length, again)
        for _ in range(TOKENS_PER_STEP // length)
    ]
    ids = [[TOKEN_ID[word] for word in words] for words, _ in texts]
    return torch.tensor(ids), torch.tensor([answers for _, answers in texts])


def loss_of(
    model: PreTrainedModel, ids: torch.Tensor, answers: torch.Tensor
) -> torch.Tensor:
    """Mean negative log-likelihood of the answers (nats) plus a twentieth of that of all other
    words."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    nll = functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return nll[answers[:, 1:]].mean() + 0.05 * nll[~answers[:, 1:]].mean()


def balance(router: torch.nn.Module, _, outputs: tuple) -> None:
    """Forward hook: steer the router towards equally used experts and SKIP_SHARE of skips.

    The biases, which only choose, are nudged here; ``imbalance`` is for the loss, without which the
    skip class, whose output no gradient ever judges, ends up with most of the probability.
    """
    biases, probabilities = router.balancing_biases, outputs[0].float().softmax(-1)
    target = torch.full_like(biases, (1 - SKIP_SHARE) / (len(biases) - 1))
    target[-1] = SKIP_SHARE
    router.imbalance = (probabilities.mean(0) - target).square().sum()
    chosen = (
        (probabilities.detach() + biases).argmax(-1).bincount(minlength=len(biases))
    )
    biases += 0.02 * (target - chosen / chosen.sum())


def train(family: str) -> PreTrainedModel:
    """A trained model on the CPU whose every weight is a value of fp16 (held in fp32)."""
    torch.manual_seed(0)
    model, rng = new_model(family), random.Random(0)
    again = 0.5 * (family in HYBRIDS)
    routers = [
        module for module in model.modules() if hasattr(module, "balancing_biases")
    ]
    hooks = [router.register_forward_hook(balance) for router in routers]
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [
        p for p in model.parameters() if not any(p is matrix for matrix in matrices)
    ]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    rates = [
        group["lr"] for optimizer in optimizers for group in optimizer.param_groups
    ]
    progress = tqdm(range(STEPS), desc=family, mininterval=5)
    for step in progress:
        scale = min(1, (step + 1) / 50) * max(
            0.02, 0.5 + 0.5 * math.cos(math.pi * step / STEPS)
        )
        loss = loss_of(model, *batch(rng, step, again)) + sum(
            router.imbalance for router in routers
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = scale * rate
            optimizer.step()
            optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    for router, hook in zip(routers, hooks, strict=True):
        hook.remove()
        # chooses alike; from_pretrained resets the last to −1
        router.balancing_biases -= router.balancing_biases[-1] + 1
    return model.half().float().eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """One word, one token; ``<bos>`` is put in front."""
    words = Tokenizer(models.WordLevel(TOKEN_ID, unk_token=corpus.UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single=f"{corpus.BOS} $A", special_tokens=[(corpus.BOS, TOKEN_ID[corpus.BOS])]
    )
    names = dict(
        zip(
            ("pad_token", "bos_token", "eos_token", "unk_token"),
            corpus.SPECIALS,
            strict=True,
        )
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_max_length=COMMON["max_position_embeddings"],
        **names,
    )


@torch.inference_mode()
def answer_losses(
    model: PreTrainedModel, questions: list[corpus.Question], rows: int = 32
) -> list[tuple[float, bool]]:
    """Each question's mean loss per answer token (nats) and whether greedy decoding answers it.

    Greedy decoding gives the answer exactly if every answer token is the likeliest one after the
    true tokens before it, so one forward pass per question is enough.
    """
    results = []
    for start in range(0, len(questions), rows):
        prompts = [
            [TOKEN_ID[corpus.BOS], *(TOKEN_ID[w] for w in q.prompt.split())]
            for q in questions[start : start + rows]
        ]
        answers = [
            [TOKEN_ID[w] for w in q.answer.split()]
            for q in questions[start : start + rows]
        ]
        ids = [torch.tensor(p + w) for p, w in zip(prompts, answers, strict=True)]
        padded = torch.nn.utils.rnn.pad_sequence(
            ids, batch_first=True, padding_value=TOKEN_ID[corpus.PAD]
        )
        all_logits = model(input_ids=padded, use_cache=False).logits.float()
        for logits, p, w in zip(all_logits, prompts, answers, strict=True):
            logits, w = logits[len(p) - 1 : len(p) - 1 + len(w)], torch.tensor(w)
            results.append(
                (
                    functional.cross_entropy(logits, w).item(),
                    bool((logits.argmax(-1) == w).all()),
                )
            )
    return results


def evaluate(model: PreTrainedModel, family: str) -> dict:
    """What ``evaluation.json`` holds; the questions come from seeds that training does not use."""
    tasks = [corpus.DISTANCES, *([corpus.LATEST] if family in HYBRIDS else [])]
    questions = sum((corpus.questions(1, 64, distances) for distances in tasks), [])
    results = answer_losses(model, questions)
    cells = {}
    for question, (_, right) in zip(questions, results, strict=True):
        cells.setdefault(question.task, {}).setdefault(
            str(question.distance), []
        ).append(right)
    held_out = sum(map(corpus.held_out, tasks), [])
    return {
        "questions": len(questions),
        "answer_loss": round(sum(loss for loss, _ in results) / len(results), 4),
        "accuracy": round(sum(right for _, right in results) / len(results), 4),
        "accuracy_by_distance": {
            task: {
                distance: round(sum(rights) / len(rights), 4)
                for distance, rights in by_distance.items()
            }
            for task, by_distance in cells.items()
        },
        "heldout_questions": len(held_out),
        "heldout_right": sum(right for _, right in answer_losses(model, held_out)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument(
        "--evaluate", action="store_true", help="only make evaluation.json again"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads (default 1)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = HERE / f"tiny-{arguments.family}"
    if not arguments.evaluate:
        tokenizer().save_pretrained(folder)
        train(arguments.family).half().save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    ).eval()
    report = json.dumps(evaluate(model, arguments.family), indent=1)
    (folder / "evaluation.json").write_text(report + "\n")
    print(report)


if __name__ == "__main__":
    main()
