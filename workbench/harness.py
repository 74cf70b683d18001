"""A bundle as a model of EleutherAI's lm-evaluation-harness, an optional package
(`workbench[harness]`).

    import lm_eval
    from workbench.harness import BundleModel

    lm_eval.simple_evaluate(BundleModel("build/llama"), tasks=["lambada_openai"])
"""

from pathlib import Path

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm.auto import tqdm

from workbench.decode import Decoder
from workbench.decode.transcript import load_tokenizer
from workbench.errors import InputError


class BundleModel(TemplateLM):
    """A bundle of batch 1 as a model. Texts are
    encoded, windowed and truncated from the left to max_seq_len tokens as by the
    harness' own class for Hugging Face's models.

    Args:
        folder: of the bundle; it needs a tokenizer.
        options: of `Decoder` (default: `fast=True`).
    """

    def __init__(self, folder: str | Path, **options):
        super().__init__()
        self.decoder = Decoder(Path(folder), **({"fast": True} | options))
        if self.decoder.options.batch > 1:
            raise InputError(
                f"bundle {folder}",
                f"a batch of {self.decoder.options.batch}",
                "a batch of 1",
                "export with --batch 1",
            )
        self.tokenizer = load_tokenizer(self.decoder.bundle.tokenizer)
        self.max_length = self.decoder.options.max_seq_len

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: beginning of sequence, else end of
        text."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_
    ) -> list[int]:
        if add_special_tokens is None:
            if string.startswith(self.tokenizer.decode(self.prefix_token_id)):
                return self.tokenizer.encode(string, add_special_tokens=False)
            return self.tokenizer.encode(string)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False, **_
    ) -> list[tuple]:
        """(summed log-likelihood in nats, whether each token is the most likely one) of
        the continuation in each (texts, context, continuation) of token ids."""
        results = []
        for _, context, continuation in tqdm(
            requests, desc="score", disable=disable_tqdm
        ):
            ids = (context + continuation)[-self.max_length - 1 :]
            count = len(continuation)
            logits = self.decoder.sequence_logits([ids[:-1]], count)[0]
            likelihoods = torch.log_softmax(torch.from_numpy(logits).double(), -1)
            tokens = torch.tensor(ids[-count:])
            greedy = bool((likelihoods.argmax(-1) == tokens).all())
            results.append(
                (float(likelihoods.gather(1, tokens[:, None]).sum()), greedy)
            )
        return results

    def loglikelihood_rolling(
        self, requests, disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood in nats of each whole text, each of its tokens scored once."""
        totals = []
        for (text,) in tqdm(
            [request.args for request in requests], disable=disable_tqdm
        ):
            ids = self.tok_encode(text)
            first = self.prefix_token_id
            rolling = get_rolling_token_windows(
                ids, first, self.max_length, context_len=1
            )
            windows = []
            for window in rolling:
                windows.append((None, *make_disjoint_window(window)))
            totals.append(
                sum(nats for nats, _ in self._loglikelihood_tokens(windows, True))
            )
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """The greedy continuation of each text, up to the first stop sequence."""
        texts = []
        for text, options in tqdm([r.args for r in requests], disable=disable_tqdm):
            options = normalize_gen_kwargs(options)
            if options.get("do_sample"):
                raise InputError(
                    "do_sample", "true", "greedy decoding", "set do_sample: false"
                )
            until = handle_stop_sequences(options["until"], self.tokenizer.eos_token)
            limit = min(options["max_gen_toks"], self.max_length - 1)
            ids = self.tok_encode(text)[limit - self.max_length :]
            text = ""
            tokens = []
            for record in self.decoder.stream(ids, limit, stop=[self.eot_token_id]):
                tokens.append(record.token)
                text = self.tokenizer.decode(tokens)
                if any(stop in text for stop in until if stop):
                    break
            texts.append(postprocess_generated_text(text, until, None))
        return texts
