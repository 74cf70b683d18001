"""Estimates the KL that storing one matrix of a model in a preset causes, by one backward
pass for all matrices.

`estimate_losses` is the entry. During the pass a hook on each matrix adds the matrix's
losses. Those of the head need no gradient and are computed from `_Distributions`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from workbench.bundle.presets import FP16, Preset
from workbench.exporter.candidates import CandidateValues
from workbench.exporter.replaceable import HEAD, ReplaceableModel
from workbench.progress import bar, stage

ESTIMATED_WINDOWS = 4
"""Windows on which losses are estimated: a backward pass takes as long as five
measurements."""


def estimate_losses(
    replaceable: ReplaceableModel,
    presets: Mapping[str, Sequence[Preset]],
    candidates: CandidateValues,
    seed: int,
) -> dict[tuple[str, str], float]:
    """The estimated KL, in nats per token, that storing one matrix in one preset causes, by
    (tensor, preset name).

    To second order a KL is ½ δᵀ F δ for a change δ of the parameters, F their Fisher
    information (Martens, arXiv 1412.1193). For one matrix that is ½ E[(dᵀ Δ x)²]: Δ the
    change of the matrix, x its input, d the gradient of −log p(y) at its output, y drawn
    from the model's own distribution. The products of different tokens are left out. The
    head's is half the variance of the change of its logits, without a draw.

    Args:
        presets: tensor → the presets that it may have.
        candidates: the values of every tensor in each of its presets. Those in fp16 are not
            read: their loss is 0.
        seed: of the draws of y.
    """
    model = replaceable.model
    generator = torch.Generator().manual_seed(seed)
    losses = {
        (tensor, preset.name): 0.0 for tensor in presets for preset in presets[tensor]
    }
    # the rounding to fp16 is far below that of any other preset
    compressed = {
        tensor: [preset for preset in presets_of_tensor if preset != FP16]
        for tensor, presets_of_tensor in presets.items()
    }
    windows = replaceable.ids[:ESTIMATED_WINDOWS]
    head = model.get_submodule(HEAD)
    head_tensors = [t for t, module in replaceable.modules.items() if module is head]

    def add_losses(tensor: str, x: torch.Tensor, gradient: torch.Tensor) -> None:
        weight = replaceable.modules[tensor].weight
        for preset in compressed[tensor]:
            change = candidates.load(tensor, preset.name).sub_(weight)
            products = (x @ change.T * gradient).sum(-1)
            losses[tensor, preset.name] += 0.5 * float(products.square().sum())

    def watch_output(tensor: str, module, arguments: tuple, output) -> None:
        output.register_hook(partial(add_losses, tensor, arguments[0].detach()))

    def add_head_losses(parts: Sequence[_Distributions]) -> None:
        for tensor in head_tensors:
            for preset in compressed[tensor]:
                # read once for all parts: it takes several times as long as a product
                change = candidates.load(tensor, preset.name).sub_(
                    replaceable.unchanged_head
                )
                for part in parts:
                    variance = part.variance(part.x @ change.T / replaceable.divisor)
                    losses[tensor, preset.name] += 0.5 * float(variance.sum())

    stage("export: estimating the cost of every format")
    progress = bar(total=len(windows), desc="losses", unit="window", leave=False)
    with ExitStack() as stack:
        stack.callback(progress.close)
        for tensor, module in replaceable.modules.items():
            if tensor not in head_tensors:
                hook = module.register_forward_hook(partial(watch_output, tensor))
                stack.enter_context(hook)
        embeddings = model.get_input_embeddings()
        stack.enter_context(embeddings.register_forward_hook(_differentiate_output))
        for ids in windows:
            hidden = model.model(input_ids=ids[None], use_cache=False)[0]
            parts = list(_iter_distributions(replaceable, hidden.detach()[0]))
            add_head_losses(parts)
            gradients = [
                part.drawn_gradient(generator) @ replaceable.unchanged_head
                for part in parts
            ]
            del parts  # up to a megabyte for each token
            hidden.backward(torch.cat(gradients)[None] / replaceable.divisor)
            progress.update()
    return {key: loss / windows.numel() for key, loss in losses.items()}


def _differentiate_output(module, arguments: tuple, output: torch.Tensor):
    """A forward hook that makes the module's output require a gradient. No weight requires
    one, so that without this hook nothing would be differentiated."""
    return output.detach().requires_grad_()


@dataclass(frozen=True)
class _Distributions:
    """The unchanged model's distributions of the next token.

    Args:
        x: the final hidden states [n, C], the input of its head.
        p: the probabilities [n, V] of the next token.
        slope: the derivative [n, V] of the bound on logits, 1 − tanh²; 1 where there is
            none.
    """

    x: torch.Tensor
    p: torch.Tensor
    slope: torch.Tensor | float

    def variance(self, change: torch.Tensor) -> torch.Tensor:
        """The variances [n] of a change [n, V] of the logits before their bound."""
        change = change * self.slope
        mean = (self.p * change).sum(-1)
        mean_square = (self.p * change.square()).sum(-1)
        return mean_square - mean.square()

    def drawn_gradient(self, generator: torch.Generator) -> torch.Tensor:
        """The gradients [n, V] of −log p(y) by the logits before their bound, for tokens y
        that are drawn from p."""
        # the gradient of −log softmax by the logits is p − one_hot(y)
        drawn = torch.multinomial(self.p, 1, generator=generator)
        minus_one = torch.full_like(drawn, -1.0, dtype=self.p.dtype)
        return self.p.scatter_add(1, drawn, minus_one) * self.slope


def _iter_distributions(
    replaceable: ReplaceableModel, hidden: torch.Tensor
) -> Iterator[_Distributions]:
    """Yields the distributions of final hidden states [n, C], `scored_tokens` at a time."""
    for x in hidden.split(replaceable.scored_tokens):
        logits = replaceable.logits(x, replaceable.unchanged_head)
        slope = 1.0
        if replaceable.softcap:
            slope = 1 - (logits / replaceable.softcap).square()
        yield _Distributions(x, torch.softmax(logits, -1), slope)
