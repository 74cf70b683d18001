"""A bundle as a model for EleutherAI's lm-evaluation-harness, which is an optional
package (`workbench[harness]`).

    import lm_eval
    from workbench.harness import BundleModel

    lm_eval.simple_evaluate(BundleModel("build/llama"), tasks=["lambada_openai"])
"""

from pathlib import Path
from types import SimpleNamespace

import torch
from lm_eval.models.huggingface import HFLM

from workbench.decode import Decoder
from workbench.decode.tokenizer import load_tokenizer
from workbench.errors import InputError


class BundleModel(HFLM):
    """A bundle of batch 1 as a model of the harness.

    The base class is the harness' class for Hugging Face's models. It encodes texts,
    splits them into windows and truncates them from the left to max_seq_len tokens; logits
    and greedy tokens are the bundle's.

    Args:
        folder: the bundle's folder; the bundle needs a tokenizer.
        options: options of `Decoder` (default: `fast=True`).
    """

    def __init__(self, folder: str | Path, **options):
        self.decoder = Decoder(Path(folder), **({"fast": True} | options))
        if (batch := self.decoder.options.batch) > 1:
            needed, step = "a batch of 1", "export with --batch 1"
            raise InputError(f"bundle {folder}", f"a batch of {batch}", needed, step)
        config = SimpleNamespace(model_type=self.decoder.manifest.family)
        # the base class reads no more of a model than its device and its type
        super().__init__(
            SimpleNamespace(device=torch.device("cpu"), config=config),
            backend="causal",
            tokenizer=load_tokenizer(self.decoder.bundle.tokenizer),
            max_length=self.decoder.options.max_seq_len,
        )

    @property
    def max_gen_toks(self) -> int:
        """The number of new tokens for a task that names none."""
        return min(super().max_gen_toks, self.max_length - 1)

    def _model_call(self, inps: torch.Tensor, *_, **__) -> torch.Tensor:
        """Logits [1, T, V], float32, of token ids [1, T]."""
        ids = inps.tolist()
        return torch.from_numpy(self.decoder.sequence_logits(ids, len(ids[0])))

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **options
    ) -> torch.Tensor:
        """The token ids [1, T] and their greedy continuation, which ends with the first stop
        sequence or after `max_length` tokens in all."""
        if options.get("do_sample"):
            step = "set do_sample: false"
            raise InputError("do_sample", "true", "greedy decoding", step)
        (ids,) = context.tolist()
        count, tokens = max_length - len(ids), []
        for record in self.decoder.stream(ids, count, stop=[self.eot_token_id]):
            tokens.append(record.token)
            text = self.tok_decode(tokens)
            if any(word in text for word in stop):
                break
        return torch.tensor([ids + tokens])
