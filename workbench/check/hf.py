"""What Hugging Face's own model computes for a prompt, layer by layer, in float32 with
eager attention.

transformers runs its own forward pass. A layer's weights are read when the layer runs
and dropped when it returns, so that a model of any depth fits. No layer is
reimplemented here."""

from collections.abc import Callable, Sequence
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from miltorch.quiet import no_progress
from workbench.decode.checks import token_ids
from workbench.errors import InputError
from workbench.models.checkpoint import LOCAL, Checkpoint

Values = dict[str, np.ndarray]  # "k.3" → [n, W], float32: one row for each position
Weights = Callable[[str], torch.Tensor]  # name in the checkpoint → values
Perturb = Callable[[torch.Tensor], torch.Tensor]  # what enters a layer → what it reads
HEAD_ROWS = 4096  # of the head that are float32 at a time


class Layer(nn.Module):
    """A decoder layer of a `Reference`, which reads its weights when it is called."""

    def __init__(self, layer: nn.Module, index: int, reference: "Reference"):
        super().__init__()
        self.layer = layer
        self.index = index
        self.reference = reference
        for module in layer.modules():
            if hasattr(module, "balancing_biases"):
                module.register_forward_hook(self.note_choice)

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:  # what transformers asks of its own layer
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args, **kwargs):
        args = args or (kwargs.pop("hidden_states"),)
        args = self.reference.entering(self.index, args)
        read = self.reference.reader(f"layers.{self.index}.")
        weights = {name: read(name).float() for name in self.layer.state_dict()}
        output = functional_call(self.layer, weights, args, kwargs)
        outputs = output if isinstance(output, tuple) else (output,)
        self.note(x=args[0], **dict(zip(("hidden", "router"), outputs)))
        return output

    def note_choice(self, module, args, output) -> None:
        """Keeps the class of each token and its score less the second best."""
        scores = torch.softmax(output[0].float(), -1) + module.balancing_biases
        best, second = scores.topk(2, -1).values.unbind(-1)
        self.note(expert=scores.argmax(-1), margin=best - second)

    def note(self, **values: torch.Tensor | None) -> None:
        for name, value in values.items():
            if value is not None and self.reference.seen is not None:
                self.reference.seen[f"{name}.{self.index}"] = value


class Reference:
    """Hugging Face's model on some weights.

    Args:
        weights: the checkpoint's own by default; others are the matrices of a bundle,
            whose embeddings are rounded to fp16.
        model: what runs (default: `empty_model` of the checkpoint's configuration).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        weights: Weights | None = None,
        *,
        model: nn.Module | None = None,
    ):
        self.checkpoint = checkpoint
        self.weights = weights
        self.model = model or empty_model(checkpoint.config)
        self.base = self.model.model
        self.base.embed_tokens.padding_idx = None
        for i, layer in enumerate(self.base.layers):
            self.base.layers[i] = Layer(layer, i, self)
        self.fed: dict[str, torch.Tensor] = {}  # in place of what layers hand on
        self.perturb: Perturb | None = None
        # what entered and left layers; None where nothing is kept
        self.seen: dict[str, torch.Tensor] | None = None
        norm = getattr(self.base, "norm", None) or self.base.embedding_norm
        L = len(self.base.layers)
        norm.register_forward_pre_hook(lambda norm, args: self.entering(L, args))

    def entering(self, index: int, args: tuple) -> tuple:
        """What a layer, or the final norm behind the last one, reads in place of
        `args`."""
        names = [f"x.{index}"]
        if index < len(self.base.layers):
            names.append(f"router.{index - 1}")
        fed = [self.fed[name] for name in names if name in self.fed]
        x, *rest = *fed, *args[len(fed) :]
        return self.perturb(x) if self.perturb else x, *rest

    def reader(self, prefix: str) -> Weights:
        read = self.weights or self.checkpoint.tensor
        return lambda name: read(f"{self.checkpoint.prefix}{prefix}{name}")

    @torch.inference_mode()
    def run(
        self,
        ids: Sequence[int],
        cache=None,
        *,
        feed: Values | None = None,
        perturb: Perturb | None = None,
        head: bool = True,
    ) -> Values:
        """The values of `ids` [n] behind what `cache` holds: by layer `x`, `hidden`,
        the `update` between them, `k` and `v` where it attends, `router`, `expert` and
        `margin` where it routes; `normed`, what the head reads, and the `logits` it
        gives.

        Args:
            feed: values whose `x` and `router` every layer reads in place of what the
                one before hands on, and the final norm the `x` of one layer more.
            perturb: changes what enters every layer and the final norm, such as `half`
                or `nudge`.
            head: whether logits are computed.
        """
        cache = recording_cache(self.model.config) if cache is None else cache
        ids = check_ids(ids, self.model.config.vocab_size)
        self.fed = {n: torch.from_numpy(x)[None] for n, x in (feed or {}).items()}
        self.perturb, self.seen = perturb, {}
        last = self.last_hidden(ids[None], past_key_values=cache, use_cache=True)
        values = {"normed": last} | self.seen | cache.rows
        self.seen = None
        if head:
            values["logits"] = self.logits(last)
        arrays = {}
        for name, value in values.items():
            arrays[name] = value.reshape(len(ids), -1).float().numpy().copy()
        return arrays | updates(arrays)

    @torch.inference_mode()
    def last_hidden(self, ids: np.ndarray, **arguments) -> torch.Tensor:
        """What the head reads [B, n, C] of sequences `ids` [B, n]; each layer is read
        once for all of them. `arguments` go to the model's forward pass."""
        read = self.reader("")
        rows, places = np.unique(ids, return_inverse=True)
        name = f"{self.checkpoint.prefix}embed_tokens.weight"
        table = getattr(self.weights, "embedding", None)
        if table is not None:  # packages look tokens up
            embedded = table[rows].float()
        else:
            embedded = self.checkpoint.tensor(name, rows.tolist())
            embedded = embedded.half().float() if self.weights else embedded
        outer = {"embed_tokens.weight": embedded}
        for name, _ in self.base.named_parameters():
            if not name.startswith(("layers.", "embed_tokens.")):
                outer[name] = read(name).float()
        arguments["input_ids"] = torch.from_numpy(places.reshape(ids.shape))
        return functional_call(self.base, outer, (), arguments)[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """lm_head over [.., n, C], `HEAD_ROWS` of its rows in float32 at a time; the
        checkpoint's own tensor is read so."""
        name = self.checkpoint.head
        V = self.checkpoint.config.vocab_size
        stored = self.weights and self.weights(name)
        parts = []
        for start in range(0, V, HEAD_ROWS):
            rows = slice(start, min(start + HEAD_ROWS, V))
            if stored is None:
                matrix = self.checkpoint.tensor(name, rows)
            else:
                matrix = stored[rows].float()
            parts.append(hidden @ matrix.T)
        divisor = getattr(self.model.config, "logits_scaling", None) or 1.0
        return torch.cat(parts, dim=-1).div_(float(divisor))


def updates(values: Values) -> Values:
    """What each layer adds, `update` [n, C], of values with its `hidden` output and
    its input `x`."""
    hidden = [name[7:] for name in values if name.startswith("hidden.")]
    layers = [layer for layer in hidden if f"x.{layer}" in values]
    return {f"update.{i}": values[f"hidden.{i}"] - values[f"x.{i}"] for i in layers}


def half(scale: float) -> Perturb:
    """Rounds to fp16 as a bundle's stream does that holds values / scale."""
    return lambda x: (x / scale).half().float() * scale


def nudge(seed: int) -> Perturb:
    """Changes every value by a relative 2^-23 of random sign."""
    generator = torch.Generator().manual_seed(seed)

    def nudged(x: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
        return x * (1 + signs * 2.0**-23)

    return nudged


def recording_cache(config):
    """transformers' cache, which also keeps the K and V rows [1, n, W] of the last call
    in `rows`, as `k.3` (sliding layers forget theirs)."""
    from transformers import DynamicCache

    class Recording(DynamicCache):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.rows: dict[str, torch.Tensor] = {}

        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            for name, heads in (("k", key_states), ("v", value_states)):
                self.rows[f"{name}.{layer_idx}"] = heads.transpose(1, 2).flatten(2)
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    return Recording(config=config)


def empty_model(config) -> nn.Module:
    """Hugging Face's model of a configuration in fp32 with eager attention; its
    parameters have no storage until they are assigned, its buffers (rotary tables,
    scales) are real."""
    import transformers
    from transformers.initialization import no_init_weights

    if config.model_type == "qwen3_vl_text":
        config = _without_pictures(config)
    register = nn.Module.register_parameter

    def on_meta(module, name, parameter):
        register(module, name, parameter)
        if parameter is not None:
            empty = nn.Parameter(parameter.to("meta"), requires_grad=False)
            module._parameters[name] = empty

    # most of the time would go into random values that nothing stores
    with no_init_weights(), patch.object(nn.Module, "register_parameter", on_meta):
        model = transformers.AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=False,
        )
    return model.eval()


def _without_pictures(config):
    """The configuration of Qwen 3 that Qwen 3-VL's text model is for text alone: its
    rope gives a token of text the same position three times."""
    import transformers

    rope = config.rope_parameters.items()
    rope = {name: value for name, value in rope if not name.startswith("mrope")}
    fields = config.to_dict() | {"model_type": "qwen3", "rope_parameters": rope}
    return transformers.Qwen3Config(**fields)


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

    how = dict(dtype=torch.float32, attn_implementation="eager")
    with no_progress():
        return transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.path, **LOCAL, **how
        ).eval()
