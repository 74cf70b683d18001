"""What Hugging Face's own model computes for a prompt, layer by layer, in float32 with
eager attention.

transformers runs its own forward pass. A layer's weights are read when the layer runs
and dropped when it returns, so that a model of any depth fits. No layer is
reimplemented here."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from workbench.decode.checks import token_ids
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint

Values = dict[str, np.ndarray]  # "k.3" → [n, W], float32: one row for each position
Weights = Callable[[str], torch.Tensor]  # name in the checkpoint → values
Perturb = Callable[[torch.Tensor], torch.Tensor]  # what enters a layer → what it reads
HEAD_ROWS = 4096  # of the head that are float32 at a time


class Layer(nn.Module):
    """A decoder layer that reads its weights when it is called, may be fed other
    inputs, and keeps what entered and left it in `seen`."""

    def __init__(self, layer: nn.Module, read: Weights, keep: bool):
        super().__init__()
        self.layer = layer
        self.read = read
        self.keep = keep
        self.feed: list[torch.Tensor] = []
        self.perturb: Perturb = unchanged
        self.seen: dict[str, torch.Tensor] = {}
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
        x, *rest = *self.feed, *args[len(self.feed) :]
        x = self.perturb(x)
        weights = {name: self.read(name).float() for name in self.layer.state_dict()}
        output = functional_call(self.layer, weights, (x, *rest), kwargs)
        outputs = output if isinstance(output, tuple) else (output,)
        if self.keep:
            self.seen |= {"x": x} | dict(zip(("hidden", "router"), outputs))
        return output

    def note_choice(self, module, args, output) -> None:
        """Keeps the class of each token and its score less the second best."""
        scores = torch.softmax(output[0].float(), -1) + module.balancing_biases
        best, second = scores.topk(2, -1).values.unbind(-1)
        expert = scores.argmax(-1)
        self.seen |= {"expert": expert[..., None], "margin": (best - second)[..., None]}


class Reference:
    """Hugging Face's model on some weights.

    Args:
        weights: the checkpoint's own by default; others are the matrices of a bundle,
            whose embeddings are rounded to fp16.
        model: what runs (default: `empty_model` of the checkpoint's configuration).
        keep: without it nothing is kept of the layers.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        weights: Weights | None = None,
        *,
        model: nn.Module | None = None,
        keep: bool = True,
    ):
        self.checkpoint = checkpoint
        self.weights = weights
        self.model = model or empty_model(checkpoint.config)
        self.base = self.model.model
        self.base.embed_tokens.padding_idx = None
        for i, layer in enumerate(self.base.layers):
            self.base.layers[i] = Layer(layer, self.reader(f"layers.{i}."), keep)
        self.last: list[torch.Tensor] = []  # what the final norm is fed, if anything
        self.perturb: Perturb = unchanged
        norm = final_norm(self.base)
        norm.register_forward_pre_hook(self.enter_norm)

    def enter_norm(self, norm: nn.Module, args: tuple) -> tuple:
        (x,) = self.last or args
        return (self.perturb(x),)

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
        fed = {name: torch.from_numpy(x)[None] for name, x in (feed or {}).items()}
        for i, layer in enumerate(self.base.layers):
            names = f"x.{i}", f"router.{i - 1}"
            layer.feed = [fed[name] for name in names if name in fed]
            layer.perturb = self.perturb = perturb or unchanged
        name = f"x.{len(self.base.layers)}"
        self.last = [fed[name]] if name in fed else []
        ids = check_ids(ids, self.model.config.vocab_size)
        last = self.last_hidden(ids[None], past_key_values=cache, use_cache=True)
        values = {"normed": last[0]}
        for i, layer in enumerate(self.base.layers):
            for name, value in (layer.seen | cache.rows.get(i, {})).items():
                if value is not None:
                    values[f"{name}.{i}"] = value.reshape(len(ids), -1)
        if head:
            values["logits"] = self.logits(last[0])
        arrays = {name: value.float().numpy().copy() for name, value in values.items()}
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
        elif self.weights is not None:
            embedded = self.checkpoint.tensor(name, rows.tolist()).half().float()
        else:
            embedded = self.checkpoint.tensor(name, rows.tolist())
        outer = {"embed_tokens.weight": embedded}
        for name, _ in self.base.named_parameters():
            if not name.startswith(("layers.", "embed_tokens.")):
                outer[name] = read(name).float()
        places = torch.from_numpy(places.reshape(ids.shape))
        arguments["input_ids"] = places
        return functional_call(self.base, outer, (), arguments)[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """lm_head over [.., n, C]."""
        parts = [hidden @ rows.T for rows in self.head_rows()]
        return torch.cat(parts, dim=-1).div_(logit_divisor(self.model.config))

    def head_rows(self) -> Iterator[torch.Tensor]:
        """lm_head in float32, `HEAD_ROWS` of its rows at a time; the checkpoint's own
        tensor is read so."""
        name, V = head_weight(self.checkpoint), self.checkpoint.config.vocab_size
        stored = self.weights and self.weights(name)
        for start in range(0, V, HEAD_ROWS):
            rows = slice(start, min(start + HEAD_ROWS, V))
            if stored is None:
                yield self.checkpoint.tensor(name, rows)
            else:
                yield stored[rows].float()


def updates(values: Values) -> Values:
    """What each layer adds, `update` [n, C], of values with its `hidden` output."""
    layers = [name[7:] for name in values if name.startswith("hidden.")]
    return {f"update.{i}": values[f"hidden.{i}"] - values[f"x.{i}"] for i in layers}


def unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


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
    """transformers' cache, which also keeps the K and V rows [n, W] of the last call by
    layer in `rows` (sliding layers forget theirs)."""
    from transformers import DynamicCache

    class Recording(DynamicCache):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.rows: dict[int, dict[str, torch.Tensor]] = {}

        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            k, v = (x.transpose(1, 2).flatten(2) for x in (key_states, value_states))
            self.rows[layer_idx] = {"k": k, "v": v}
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
    # most of the time would go into random values that nothing stores
    with _parameters_on_meta(), no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
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


@contextmanager
def _parameters_on_meta():
    """Modules built inside have no storage for parameters, but real buffers (rotary
    tables, scales)."""
    register = nn.Module.register_parameter

    def on_meta(module, name, parameter):
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(
                parameter.to("meta"), requires_grad=False
            )

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def final_norm(base: nn.Module) -> nn.Module:
    """The norm in front of the head of Hugging Face's model."""
    return getattr(base, "norm", None) or base.embedding_norm


def has_attention(layer: nn.Module) -> bool:
    """Whether a decoder layer of Hugging Face's model attends: others keep a recurrent
    state."""
    return getattr(layer, "self_attn", None) is not None


def logit_divisor(config) -> float:
    """What Hugging Face's model divides its logits by."""
    return float(getattr(config, "logits_scaling", None) or 1.0)


def head_weight(checkpoint: Checkpoint) -> str:
    """Name of the tensor that turns the last hidden state into logits."""
    if checkpoint.config.tie_word_embeddings:
        return f"{checkpoint.prefix}embed_tokens.weight"
    return "lm_head.weight"


def check_ids(ids: Sequence[int], V: int) -> np.ndarray:
    """Token ids [n] of a prompt, at least one, all of them in the vocabulary."""
    if not len(ids):
        needed = f"at least one id from 0 to {V - 1}"
        raise InputError("prompt ids", "[]", needed, "check --prompt-ids")
    return np.array(token_ids(ids, V, "prompt ids"), np.int64)
