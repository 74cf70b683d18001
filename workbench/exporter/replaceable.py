"""Hugging Face's model with matrices that can be replaced, and its distance from the
unchanged model on a text."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from miltorch.coremltools_import import no_progress
from workbench.errors import InputError
from workbench.exporter.allocation import Quality
from workbench.models.checkpoint import Checkpoint
from workbench.models.folder import LOCAL

LOGIT_BYTES = 32 << 20
"""Bytes of the logits in float32 that are computed at a time. A head is read from memory for
each of these products, so that fewer tokens would wait for it."""
KEPT_BYTES = 512 << 20
"""Bytes of the unchanged model's distributions that are kept for later measurements."""
HEAD = "lm_head"


def load_model(checkpoint: Checkpoint) -> nn.Module:
    """Hugging Face's model of a checkpoint in float32. Its head has a copy of the matrix
    where the checkpoint ties it to the embeddings, which stay as they are."""
    import transformers

    with no_progress():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.path, dtype=torch.float32, **LOCAL
        )
    head = model.get_submodule(HEAD)
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    return model.eval().requires_grad_(False)


def linear_modules(
    model: nn.Module, checkpoint: Checkpoint, tensors: Iterable[str]
) -> dict[str, str]:
    """Tensor name → name of the `nn.Linear` of the model whose weight the tensor is.

    Raises:
        InputError: a tensor that is no such weight, such as a stack of experts.
    """
    names = {checkpoint.head: HEAD}
    # a multimodal model has its language model deeper
    decoder = model.get_decoder()
    path = next(name for name, module in model.named_modules() if module is decoder)
    for name, module in decoder.named_modules():
        if isinstance(module, nn.Linear):
            names[f"{checkpoint.prefix}{name}.weight"] = f"{path}.{name}"
    for tensor in tensors:
        if tensor not in names:
            raise InputError(
                "--compress mixed",
                f"tensor {tensor!r}, which is no linear layer of Hugging Face's model",
                "a model whose matrices are linear layers",
                "choose one format for all of them, such as --compress int8-channel",
            )
    return {tensor: names[tensor] for tensor in tensors}


@dataclass(frozen=True)
class ReplaceableModel:
    """Hugging Face's model, whose matrices can be replaced, and the hidden states that it
    computed before any change. `from_unchanged` makes it.

    Args:
        model: in float32; `replace_matrix` changes it in place.
        modules: tensor name → the `nn.Linear` whose weight the tensor is.
        ids: [windows, window] tokens of a text, int64.
        divisor: of the logits (1: none). Granite divides them.
        softcap: the bound b of logits b · tanh(x / b); None: not bounded. Gemma 4 bounds
            them.
        unchanged_head: a copy of the head's matrix [V, C] from before any change.
        unchanged_hidden: the final hidden states [window, C] of the unchanged model, the
            input of its head, of each window.
        kept_log_p: log p [n, V] of the unchanged model, by (window, first token). The first
            measurement keeps as many as `KEPT_BYTES` hold.
    """

    model: nn.Module
    modules: dict[str, nn.Linear]
    ids: torch.Tensor
    divisor: float
    softcap: float | None
    unchanged_head: torch.Tensor
    unchanged_hidden: list[torch.Tensor]
    kept_log_p: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def from_unchanged(
        cls, model: nn.Module, modules: Mapping[str, str], ids: torch.Tensor
    ) -> "ReplaceableModel":
        """Runs a model that is still unchanged over a text, and keeps its hidden states.

        Args:
            model: in float32, see `load_model`.
            modules: tensor name → name of the `nn.Linear` whose weight the tensor is.
            ids: [windows, window] tokens of the text, int64.
        """
        model = model.eval().requires_grad_(False)
        config = model.config.get_text_config(decoder=True)
        return cls(
            model,
            {tensor: model.get_submodule(name) for tensor, name in modules.items()},
            ids,
            divisor=getattr(config, "logits_scaling", None) or 1.0,
            softcap=getattr(config, "final_logit_softcapping", None),
            unchanged_head=model.get_submodule(HEAD).weight.detach().clone(),
            unchanged_hidden=[_last_hidden(model, window) for window in ids],
        )

    @property
    def scored_tokens(self) -> int:
        """The number of tokens whose logits are computed at a time."""
        return max(1, LOGIT_BYTES // (4 * len(self.unchanged_head)))

    def logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """The model's logits [.., V] for `hidden` [.., C] with the matrix `head`
        [V, C]."""
        logits = hidden @ head.T / self.divisor
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def replace_matrix(self, tensor: str, values: torch.Tensor) -> None:
        """Gives a matrix other values [R, K], float32."""
        self.modules[tensor].weight.copy_(values)

    @torch.inference_mode()
    def quality(self) -> Quality:
        """The distance of the model from the unchanged one."""
        head = self.model.get_submodule(HEAD).weight
        kls, log_ratios, same = [], [], []
        for window, ids in enumerate(self.ids):
            hidden = _last_hidden(self.model, ids)
            for start in range(0, len(ids), self.scored_tokens):
                log_p = self._unchanged_log_p(window, start)
                changed = self.logits(hidden[start : start + len(log_p)], head)
                log_q = F.log_softmax(changed, -1)
                kls.append((log_p.exp() * (log_p - log_q)).sum(-1))
                same.append(log_p.argmax(-1) == log_q.argmax(-1))
                targets = ids[start + 1 : start + 1 + len(log_p), None]
                count = len(targets)  # the last token of a window predicts none
                log_ratio = log_p[:count] - log_q[:count]
                log_ratios.append(log_ratio.gather(1, targets))
        kl = torch.cat(kls).double()
        return Quality(
            kl=float(kl.mean()),
            kl_p99=float(kl.quantile(0.99)),
            perplexity_ratio=float(torch.cat(log_ratios).double().mean().exp()),
            same_top=float(torch.cat(same).double().mean()),
        )

    def _unchanged_log_p(self, window: int, start: int) -> torch.Tensor:
        """log p [n, V] of the unchanged model for `scored_tokens` tokens of a window."""
        kept = self.kept_log_p.get((window, start))
        if kept is not None:
            return kept
        hidden = self.unchanged_hidden[window][start : start + self.scored_tokens]
        log_p = F.log_softmax(self.logits(hidden, self.unchanged_head), -1)
        if (len(self.kept_log_p) + 1) * log_p.nbytes <= KEPT_BYTES:
            self.kept_log_p[window, start] = log_p
        return log_p


@torch.inference_mode()
def _last_hidden(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The final hidden states [n, C], the input of the head, for tokens [n]."""
    return model.model(input_ids=ids[None], use_cache=False)[0][0]
