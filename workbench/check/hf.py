"""What Hugging Face's own model computes for a prompt, layer by layer, in float32 with
eager attention.

transformers runs its own forward pass. A layer's weights are read when the layer runs
and dropped when it returns, so that a model of any depth fits. No layer is
reimplemented here."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from miltorch.coremltools_import import no_progress
from workbench.check.trace import Trace, unstack
from workbench.decode.checks import token_ids
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.models.folder import LOCAL
from workbench.models.layerwise import WrappedLayer, empty_model, run_base

# The name of a tensor in the checkpoint → its values. A reader may be a `TokenTable` or a
# `SlicedHead` too.
Weights = Callable[[str], torch.Tensor]
# What enters a layer [.., n, C] → what the layer reads in its place.
Perturb = Callable[[torch.Tensor], torch.Tensor]
HEAD_ROWS = 4096  # rows of the head that are float32 at a time


@runtime_checkable
class TokenTable(Protocol):
    """A reader of weights whose packages look tokens up.

    Attributes:
        embedding: their table [V, C]; None where the host looks tokens up.
    """

    embedding: torch.Tensor | None


@runtime_checkable
class SlicedHead(Protocol):
    """A reader of weights that never needs the whole head in memory."""

    def head_slices(self) -> Iterator[torch.Tensor]:
        """The rows of the head in order, [r, C] at a time."""


@dataclass(frozen=True)
class SequenceRun:
    """How the model runs over one sequence of a batch. All sequences of a batch have the
    same token ids; see `Reference.run_batch`.

    By default every layer reads the output of the layer before. For each input of a
    layer or of the final norm, `feed` comes first, then `reads_first_sequence`, then
    that default; `perturb` changes the input that was chosen.

    Attributes:
        feed: a trace whose `x` and `router` every layer reads, and whose `final_input`
            the final norm reads; a field that is None feeds nothing.
        reads_first_sequence: whether every layer reads the unperturbed input that the
            same layer has in sequence 0 of the batch.
        perturb: changes what enters every layer and the final norm, such as
            `round_stream` or `nudge`.
        head: whether logits are computed.
        token_scales: [n] float32, what multiplies the embeddings of every token, from
            all tables; None: nothing does.
    """

    feed: Trace | None = None
    reads_first_sequence: bool = False
    perturb: Perturb | None = None
    head: bool = True
    token_scales: np.ndarray | None = None

    @property
    def replaces_inputs(self) -> bool:
        """Whether any layer may read anything but the output of the layer before."""
        return bool(self.feed or self.reads_first_sequence or self.perturb)


@dataclass(frozen=True)
class Head:
    """The head of Hugging Face's model.

    Attributes:
        config: of the model, whose scaling of logits applies.
        read: gives the rows of the matrix in order, [r, C] in any numbers and dtype.
    """

    config: Any
    read: Callable[[], Iterator[torch.Tensor]]

    def slices(self, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        """The logits [.., n, r] of `hidden` [.., n, C] for one slice of the vocabulary
        after another, of at most `HEAD_ROWS` rows, which are float32 at a time."""
        divisor = float(getattr(self.config, "logits_scaling", None) or 1.0)
        softcap = getattr(self.config, "final_logit_softcapping", None)
        for stored in self.read():
            for rows in stored.split(HEAD_ROWS):
                logits = (hidden @ rows.float().T).div_(divisor)
                if softcap:
                    logits.div_(softcap).tanh_().mul_(softcap)
                yield logits

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits [.., n, V] of `hidden` [.., n, C]."""
        logits = hidden.new_empty(*hidden.shape[:-1], self.config.vocab_size)
        # A list of slices would leave small tensors between the large ones that are freed,
        # and the heap would grow by a part of every slice of the head.
        start = 0
        for part in self.slices(hidden):
            logits[..., start : start + part.shape[-1]] = part
            start += part.shape[-1]
        return logits[..., :start]


class ReferenceLayer(WrappedLayer):
    """A decoder layer of a `Reference`, which reads its weights when it is called."""

    def __init__(self, layer: nn.Module, index: int, reference: "Reference"):
        super().__init__(layer)
        self.index = index
        self.reference = reference
        for module in layer.modules():
            if hasattr(module, "balancing_biases"):
                module.register_forward_hook(self.record_choice)

    def forward(self, *args, **kwargs):
        args = args or (kwargs.pop("hidden_states"),)
        args = self.reference.replace_layer_inputs(self.index, args)
        read = self.reference.reader(f"layers.{self.index}.")
        weights = {name: read(name).float() for name in self.layer.state_dict()}
        output = functional_call(self.layer, weights, args, kwargs)
        outputs = output if isinstance(output, tuple) else (output,)
        router = outputs[1] if len(outputs) > 1 else None
        self.record(x=args[0], hidden=outputs[0], router=router)
        if self.reference.batch and "layer_scalar" in weights:
            self.record(
                scalar=weights["layer_scalar"].expand(self.reference.batch.shape)
            )
        return output

    def record_choice(self, module, args, output) -> None:
        """Hook of a router: records the expert of each token, and its score less the
        second best. A score is a probability plus the expert's balancing bias."""
        scores = torch.softmax(output[0].float(), -1) + module.balancing_biases
        best, second = scores.topk(2, -1).values.unbind(-1)
        self.record(expert=scores.argmax(-1), margin=best - second)

    def record(self, **tensors: torch.Tensor | None) -> None:
        """Sets fields of this layer's `LayerTrace`, where a trace is being made; None
        leaves a field as it is."""
        batch = self.reference.batch
        if batch is None:
            return
        for name, tensor in tensors.items():
            if tensor is not None:
                setattr(batch.trace.layers[self.index], name, batch.as_rows(tensor))


@dataclass(frozen=True)
class RecordedBatch:
    """The sequences that a `Reference` is running, which its hooks read and record.

    Attributes:
        runs: one for each of the B sequences.
        token_count: n, of every sequence.
        trace: of all sequences, stacked: arrays [B, n, W].
    """

    runs: Sequence[SequenceRun]
    token_count: int
    trace: Trace

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one number for each token: (B, n, 1)."""
        return len(self.runs), self.token_count, 1

    def as_rows(self, tensor: torch.Tensor) -> np.ndarray:
        """A tensor of the batch's tokens as rows [B, n, W] in float32."""
        shape = len(self.runs), self.token_count, -1
        return tensor.reshape(shape).float().numpy().copy()


class Reference:
    """Hugging Face's model on some weights.

    Attributes:
        batch: what the hooks read and record, while `recording` is open; None: the
            model runs as it is, and nothing is recorded.

    Args:
        weights: the checkpoint's own by default; others are the matrices of a bundle,
            whose embeddings are rounded to fp16.
        model: the module that runs (default: `empty_model` of the checkpoint's
            configuration).
        attention: transformers' implementation: `eager`, which computes all scores, or
            `sdpa`, torch's fused one, which is faster on long sequences.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        weights: Weights | None = None,
        *,
        model: nn.Module | None = None,
        attention: str = "eager",
    ):
        self.checkpoint = checkpoint
        self.weights = weights
        self.model = model or empty_model(checkpoint.config, attention)
        self.base = self.model.model
        for i, layer in enumerate(self.base.layers):
            self.base.layers[i] = ReferenceLayer(layer, i, self)
        self.batch: RecordedBatch | None = None
        norm = getattr(self.base, "norm", None) or self.base.embedding_norm
        norm.register_forward_pre_hook(self.replace_norm_inputs)
        for module in self.base.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(self.scale_embeddings)

    @contextmanager
    def recording(
        self, runs: Sequence[SequenceRun], token_count: int
    ) -> Iterator[RecordedBatch]:
        """While it is open, the model runs one sequence of `token_count` tokens for each
        of `runs`, and its layers record their values."""
        trace = Trace.empty(len(self.base.layers))
        self.batch = RecordedBatch(runs, token_count, trace)
        try:
            yield self.batch
        finally:
            self.batch = None

    @property
    def replaces_inputs(self) -> bool:
        """Whether some layer reads another input than the one that the model computes."""
        return self.batch is not None and any(
            run.replaces_inputs for run in self.batch.runs
        )

    def replace_norm_inputs(self, norm: nn.Module, args: tuple) -> tuple:
        """Hook of the final norm: the arguments that it reads in place of `args`, of which
        the first is x [B, n, C], the last layer's output."""
        if not self.replaces_inputs:
            return args
        x, *others = args
        return self.choose_x(x, lambda feed: feed.final_input), *others

    def replace_layer_inputs(self, index: int, args: tuple) -> tuple:
        """The arguments that layer `index` reads in place of `args`.

        Args:
            args: x [B, n, C], which the layer before returned; in models that route by
                the layer before, then its router state [B, n, R]; then the rest.
        """
        if not self.replaces_inputs:
            return args
        x, *others = args
        if index > 0 and self.batch.trace.layers[index - 1].router is not None:
            routers = self.choose(others[0], lambda feed: feed.layers[index - 1].router)
            others[0] = torch.cat(routers)
        return self.choose_x(x, lambda feed: feed.layers[index].x), *others

    def choose_x(
        self, computed: torch.Tensor, read_feed: Callable[[Trace], np.ndarray | None]
    ) -> torch.Tensor:
        """`choose`, perturbed, as one tensor [B, n, C]."""
        chosen = zip(self.batch.runs, self.choose(computed, read_feed))
        return torch.cat([run.perturb(x) if run.perturb else x for run, x in chosen])

    def choose(
        self, computed: torch.Tensor, read_feed: Callable[[Trace], np.ndarray | None]
    ) -> list[torch.Tensor]:
        """What each sequence reads in place of its part of `computed` [B, n, W], each
        [1, n, W]; see `SequenceRun`.

        Args:
            read_feed: what a feed has for this input, [n, W]; None: nothing.
        """
        chosen = []
        for seq, run in enumerate(self.batch.runs):
            fed = None if run.feed is None else read_feed(run.feed)
            source = 0 if run.reads_first_sequence else seq
            chosen.append(_fed_or_computed(fed, computed, source))
        return chosen

    def scale_embeddings(self, module, args, output: torch.Tensor) -> torch.Tensor:
        """Hook of an embedding table: multiplies its output [B, n, W] by the
        `token_scales` of each sequence."""
        runs = self.batch.runs if self.batch else ()
        for seq, run in enumerate(runs):
            if run.token_scales is not None:
                output[seq] *= torch.from_numpy(run.token_scales)[:, None]
        return output

    @property
    def sources(self) -> dict[int, int]:
        """Layer that has no K and V rows of its own → the earlier layer whose rows it
        attends to."""
        modes = getattr(self.model.config, "kv_sharing_modes", [])
        types = self.model.config.layer_types if modes else []
        owners = {types[i]: i for i, mode in enumerate(modes) if mode == "store"}
        # the model may have been cut to its first layers
        modes = modes[: len(self.base.layers)]
        return {i: owners[types[i]] for i, mode in enumerate(modes) if mode == "reuse"}

    def reader(self, prefix: str) -> Weights:
        """Reads tensors by their names behind `prefix`, such as `layers.3.`."""
        read = self.weights or self.checkpoint.tensor

        def read_tensor(name: str) -> torch.Tensor:
            return read(f"{self.checkpoint.prefix}{prefix}{name}")

        return read_tensor

    @torch.inference_mode()
    def run(
        self,
        ids: Sequence[int],
        cache=None,
        *,
        feed: Trace | None = None,
        perturb: Perturb | None = None,
        head: bool = True,
    ) -> Trace:
        """The trace of one sequence; see `run_batch`, and `SequenceRun` for `feed`,
        `perturb` and `head`."""
        run = SequenceRun(feed, perturb=perturb, head=head)
        return self.run_batch(ids, [run], cache)[0]

    @torch.inference_mode()
    def run_batch(
        self, ids: Sequence[int], runs: Sequence[SequenceRun], cache=None
    ) -> list[Trace]:
        """The trace of `ids` [n] for each of `runs`. They are the sequences of one batch,
        so that each weight is read once for all.

        A trace has `x` and `hidden` of every layer, `k` and `v` where it attends,
        `router`, `expert` and `margin` where it routes; `normed`, and the `logits`.

        Args:
            cache: holds tokens that come before, in as many sequences as there are
                runs; it is updated in place.
        """
        cache = recording_cache(self.model.config) if cache is None else cache
        ids = check_ids(ids, self.model.config.vocab_size)
        B = len(runs)
        with self.recording(runs, len(ids)) as batch:
            copies = np.tile(ids, (B, 1))
            last = self.last_hidden(copies, past_key_values=cache, use_cache=True)
        trace = batch.trace
        for index, (k, v) in cache.last_written.items():
            trace.layers[index].k = batch.as_rows(k)
            trace.layers[index].v = batch.as_rows(v)
        for index, source in self.sources.items():
            trace.layers[index].k = trace.layers[source].k
            trace.layers[index].v = trace.layers[source].v
        trace.normed = batch.as_rows(last)
        traces = unstack(trace, B)
        with_head = [seq for seq, run in enumerate(runs) if run.head]
        if with_head:
            logits = self.logits(last[with_head]).numpy()
            for seq, logits_of_sequence in zip(with_head, logits):
                traces[seq].logits = logits_of_sequence
        return traces

    @torch.inference_mode()
    def last_hidden(self, ids: np.ndarray, **arguments) -> torch.Tensor:
        """What the head reads [B, n, C] of sequences `ids` [B, n]; each layer is read
        once for all of them. `arguments` go to the model's forward pass."""
        return run_base(self.base, ids, self.embed, self.reader(""), **arguments)

    def embed(self, table: str, ids: np.ndarray) -> torch.Tensor:
        """The rows [R, W] of token ids [R] in an embedding table."""
        if isinstance(self.weights, TokenTable) and self.weights.embedding is not None:
            return self.weights.embedding[ids]
        embedded = self.checkpoint.tensor(
            f"{self.checkpoint.prefix}{table}", ids.tolist()
        )
        return embedded.half() if self.weights else embedded

    @torch.inference_mode()
    def perturbed_hidden(self, ids: np.ndarray, perturb: Perturb) -> torch.Tensor:
        """`last_hidden` [B, n, C] with what enters every layer and the final norm
        changed."""
        B, n = ids.shape
        with self.recording([SequenceRun(perturb=perturb)] * B, n):
            return self.last_hidden(ids, use_cache=False)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits [.., n, V] of `hidden` [.., n, C]; see `Head`."""
        return Head(self.model.config, self.head_slices).logits(hidden)

    def head_slices(self) -> Iterator[torch.Tensor]:
        """The rows of lm_head in order, [r, C] at a time where they can be read so."""
        name = self.checkpoint.head
        if self.weights is None:
            V = self.checkpoint.config.vocab_size
            for start in range(0, V, HEAD_ROWS):
                rows = slice(start, min(start + HEAD_ROWS, V))
                yield self.checkpoint.tensor(name, rows)
        elif isinstance(self.weights, SlicedHead):
            yield from self.weights.head_slices()
        else:
            yield self.weights(name)


def _fed_or_computed(
    fed: np.ndarray | None, computed: torch.Tensor, seq: int
) -> torch.Tensor:
    """[1, n, W]: an array [n, W] of a feed, or where it is None sequence `seq` of what
    the model has computed [B, n, W]."""
    return computed[seq : seq + 1] if fed is None else torch.from_numpy(fed)[None]


def trace_reference(
    checkpoint: Checkpoint,
    weights: Weights | None,
    ids: Sequence[int],
    *,
    feed: Trace | None = None,
    perturb: Perturb | None = None,
    head: bool = True,
) -> Trace:
    """The trace of Hugging Face's model with `weights` (None: the checkpoint's own)
    over `ids`; see `Reference.run`."""
    return Reference(checkpoint, weights).run(
        ids, feed=feed, perturb=perturb, head=head
    )


def round_stream(scale: float) -> Perturb:
    """The change that rounds to fp16 as a bundle rounds its stream, which it stores
    divided by `scale`."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return (x / scale).half().float() * scale

    return rounded


def nudge(seed: int) -> Perturb:
    """Changes every value by a relative 2^-23 of random sign."""
    generator = torch.Generator().manual_seed(seed)

    def nudged(x: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
        return x * (1 + signs * 2.0**-23)

    return nudged


def recording_cache(config):
    """transformers' cache, with an attribute `last_written`: by layer, the K and V rows
    [B, n, H_kv · D] of the last call. (A sliding layer of transformers' cache drops rows
    that have left its window.)"""
    from transformers import DynamicCache

    class Recording(DynamicCache):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.last_written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            # [B, H_kv, n, D] → [B, n, H_kv · D]
            k = key_states.transpose(1, 2).flatten(2)
            v = value_states.transpose(1, 2).flatten(2)
            self.last_written[layer_idx] = k, v
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    return Recording(config=config)


def has_attention(layer: nn.Module) -> bool:
    """Whether a decoder layer of Hugging Face's model attends: others keep a recurrent
    state."""
    return getattr(layer, "self_attn", None) is not None


def check_ids(ids: Sequence[int], V: int) -> np.ndarray:
    """Token ids [n] of a prompt, at least one, all of them in the vocabulary."""
    if not len(ids):
        needed = f"at least one id from 0 to {V - 1}"
        raise InputError("prompt ids", "[]", needed, "check --prompt-ids")
    return np.array(token_ids(ids, V, "prompt ids"), np.int64)


def whole_model(checkpoint: Checkpoint) -> nn.Module:
    """Hugging Face's model in fp32 with all its weights loaded, without transformers'
    own progress bar."""
    import transformers

    with no_progress():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.path, dtype=torch.float32, attn_implementation="eager", **LOCAL
        )
    return model.eval()
