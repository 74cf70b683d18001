"""Goldens: what Hugging Face's implementation computes, layer by layer, in fp32 with
eager attention.

transformers' own model runs its own forward pass. Each decoder layer's tensors are read
when the layer is entered and dropped when it is left, so that a model of any depth
fits. No layer is reimplemented here."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import nn

from workbench.bundle import Bundle, Shard
from workbench.bundle.aimodel import dense, read_weight
from workbench.decode.checks import token_ids
from workbench.errors import InputError
from workbench.files import write_whole
from workbench.models.checkpoint import Checkpoint

LOGIT_ROWS = 4096  # of the head that are float32 at a time
NUDGED = 3  # sequences of `run_nudged`
FORMAT = 1  # of the stored file: raised when `make_golden` changes
WeightReader = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Golden:
    """Per layer l and position: input `x` and output `hidden` [L, n, C], cache rows
    `k`, `v` [L, H_kv, n, D] (zeros where a layer has no cache); `logits` [n, V]; all
    float32. `ids` [n]. Where experts are routed (ZAYA): `router` [L, n, R], the router
    state that layer l hands on, `expert` [L, n], the class it picks, and `margin` [L,
    n], that one's score less the second best.

    `meta`: checkpoint (SHA-256), weights (source, fp16, or a bundle's identity),
    transformers (version)."""

    ids: np.ndarray
    x: np.ndarray
    hidden: np.ndarray
    k: np.ndarray
    v: np.ndarray
    logits: np.ndarray
    meta: dict[str, str]
    router: np.ndarray | None = None
    expert: np.ndarray | None = None
    margin: np.ndarray | None = None

    @property
    def update(self) -> np.ndarray:
        """The update of each layer, [L, n, C]."""
        return self.hidden - self.x

    def rows(self, tensor: str, layer: int) -> np.ndarray:
        """`hidden`, `update`, `k` or `v` of one layer, [n, W]."""
        value = getattr(self, tensor)[layer]
        if tensor in ("k", "v"):
            return by_position(value)
        return value

    def save(self, path: str | Path) -> Path:
        """Writes one safetensors file, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {n: a for n, a in vars(self).items() if isinstance(a, np.ndarray)}
        save_arrays(path, arrays, {"workbench-golden": json.dumps(self.meta)})
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Golden":
        step = "run: workbench golden CHECKPOINT"
        if not Path(path).is_file():
            raise InputError(f"golden {path}", "no such file", "a golden store", step)
        try:
            with safe_open(path, framework="np") as file:
                meta = json.loads(file.metadata()["workbench-golden"])
                arrays = {name: file.get_tensor(name) for name in file.keys()}
            return cls(**arrays, meta=meta)
        except (SafetensorError, KeyError, TypeError, ValueError) as problem:
            raise InputError(
                f"golden {path}",
                f"no golden ({type(problem).__name__})",
                "a file that workbench golden wrote",
                step,
            ) from None


def save_arrays(
    path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]
) -> None:
    """Writes one safetensors file, whole or not at all."""
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    write_whole(path, lambda file: save_file(arrays, file.name, metadata))


def by_position(cache: np.ndarray) -> np.ndarray:
    """Cache rows [H_kv, n, D] → [n, H_kv · D]."""
    return cache.transpose(1, 0, 2).reshape(cache.shape[1], -1)


def check_exported_from(checkpoint: Checkpoint, bundle: Bundle) -> None:
    """Raises an InputError unless `bundle` was exported from this checkpoint."""
    if checkpoint.sha256 != bundle.manifest.checkpoint["sha256"]:
        raise InputError(
            f"checkpoint {checkpoint.name}",
            checkpoint.sha256[:12],
            f"{bundle.manifest.checkpoint['sha256'][:12]}, the one that bundle {bundle.root.name} "
            "was exported from",
            "give that checkpoint, or export this one",
        )


def stored_weights(
    checkpoint: Checkpoint, bundle: Bundle, *, half: bool = False
) -> WeightReader:
    """The values `bundle` stores, decompressed, as float32; tensors its shards do not
    hold as such are the fp16-rounded ones.

    A weight stored with an offset (Gemma's 1 + γ) is handed back without it. `half`:
    matrices stay in fp16, which holds their values exactly.
    """
    check_exported_from(checkpoint, bundle)
    slices: dict[str, list[tuple[torch.Tensor, float]]] = {}
    for shard in sorted(bundle.manifest.shards, key=lambda shard: shard.rows[0]):
        if shard.weights:
            constant_of = constants(bundle, shard)
            for tensor, constant in shard.weights.items():
                part = constant_of(constant), shard.offsets.get(tensor, 0.0)
                slices.setdefault(tensor, []).append(part)

    def read(name: str) -> torch.Tensor:
        shape = checkpoint.shape(name)
        if name not in slices:
            return checkpoint.tensor(name).half().float()
        rows = [part.reshape(-1, *shape[1:]) for part, _ in slices[name]]
        offset = slices[name][0][1]
        if rows[0].numel() == np.prod(shape):
            # every head slice has the whole final norm
            value = rows[0].reshape(shape)
        else:
            value = torch.cat(rows)
        if offset:
            return value.float() - offset
        return value if half else value.float()

    return read


def constants(bundle: Bundle, shard: Shard) -> Callable[[str], torch.Tensor]:
    """Name of a constant → its values, decompressed, fp16 or float32."""
    package = bundle.package(shard)
    if bundle.manifest.options.target == "coreai":
        return lambda name: torch.from_numpy(
            np.float32(dense(read_weight(package, name)))
        )
    import miltorch
    from miltorch.interpret import ConstantsBuilder

    program = miltorch.read(package)
    executable = miltorch.Executable(program, "exact", ConstantsBuilder)
    return executable.body.constants.__getitem__


def fp16_weights(checkpoint: Checkpoint, bundle: Bundle) -> WeightReader:
    """The checkpoint's values rounded to fp16 as an uncompressed bundle would store
    them, with the offsets that `bundle` adds."""
    offsets = {}
    for shard in bundle.manifest.shards:
        offsets |= shard.offsets

    def read(name: str) -> torch.Tensor:
        offset = offsets.get(name, 0.0)
        return (checkpoint.tensor(name) + offset).half().float() - offset

    return read


def golden_path(checkpoint: Checkpoint, ids: Sequence[int], folder: Path) -> Path:
    """Where `stored_golden` has its file: named after the checkpoint's hash, the token
    ids and the version of transformers."""
    key = json.dumps(
        [FORMAT, checkpoint.sha256, np.asarray(ids).tolist(), version("transformers")]
    )
    digest = hashlib.sha256(key.encode()).hexdigest()[:10]
    return folder / f"{checkpoint.name}-{digest}.safetensors"


def stored_golden(checkpoint: Checkpoint, ids: Sequence[int], folder: Path) -> Golden:
    """`make_golden` with the checkpoint's own weights, once: the file stays in `folder`
    (see `golden_path`). A file that cannot be read is replaced."""
    path = golden_path(checkpoint, ids, folder)
    with suppress(InputError):
        return Golden.load(path)
    golden = make_golden(checkpoint, ids)
    golden.save(path)
    return golden


def make_golden(
    checkpoint: Checkpoint | str | Path,
    ids: Sequence[int],
    weights: WeightReader | None = None,
    label: str = "source",
    fed: np.ndarray | None = None,
    fed_router: np.ndarray | None = None,
    model: nn.Module | None = None,
    head: bool = True,
) -> Golden:
    """Runs Hugging Face's model over `ids` [n] with `weights` (default: the
    checkpoint's own).

    Peak memory is one layer and one slice of the head, in float32. `fed` [L, n, C]
    replaces every layer's input, so that layers can be compared one by one;
    `fed_router` [L, n, R] the router state that each one hands on. `model` is what runs
    (default: `empty_model` of the checkpoint's configuration). Without `head` the
    logits are nan and take no memory."""
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    reference = ReferenceModel(checkpoint, weights, label, model)
    reference.replace_inputs(fed, fed_router)
    return reference.run(ids, reference.cache(), head)


class ReferenceModel:
    """Hugging Face's model over one sequence, call by call; see `make_golden`. Without
    `record` nothing is kept of the layers: then `last_hidden` and `logits` are what it
    is for."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        weights: WeightReader | None = None,
        label: str = "source",
        model: nn.Module | None = None,
        record: bool = True,
    ):
        self.checkpoint = checkpoint
        self.weights = weights
        self.label = label
        # [.., n, C], what the last call's logits are made of
        self.normed: np.ndarray | None = None
        model = model or empty_model(checkpoint.config)
        self.config = model.config
        self.base = model.model
        prefix = checkpoint.prefix
        read = weights or checkpoint.tensor
        self.base.embed_tokens.padding_idx = None
        for name, _ in self.base.named_parameters():
            if not name.startswith(("layers.", "embed_tokens.")):
                assign_parameter(self.base, name, read(prefix + name).float())
        # first arguments of each layer and of the final norm: an input and, from the
        # second layer on, a router state
        self.replaced: list[list[torch.Tensor]] = [
            [] for _ in range(len(self.base.layers) + 1)
        ]
        self.nudge: torch.Generator | None = None
        self.records = []
        memory: dict[str, torch.Tensor] = {}
        for i, layer in enumerate(self.base.layers):
            load = partial(_load_layer, layer, f"{prefix}layers.{i}.", read, memory)
            inputs = self._layer_inputs(i)
            self.records.append(_record_layer(layer, load, inputs, record))
        final_norm(self.base).register_forward_pre_hook(
            lambda _, args: (
                tuple(a.expand_as(args[0]) for a in self.replaced[-1]) or args
            )
        )

    def replace_inputs(
        self, fed: Sequence[np.ndarray] | None, fed_router: np.ndarray | None = None
    ) -> None:
        """Layers read `fed` [L, n, C] and `fed_router` [L, n, R] in place of what the
        one before hands on, and the final norm reads fed[L] where there is one; None:
        nothing is replaced."""
        for arguments in self.replaced:
            arguments.clear()
        if fed is None:
            return
        for i, (arguments, array) in enumerate(zip(self.replaced, fed)):
            arguments.append(torch.from_numpy(array)[None])
            if fed_router is not None and 0 < i < len(self.records):
                arguments.append(torch.from_numpy(fed_router[i - 1])[None])

    def _layer_inputs(self, index: int) -> Callable[[tuple], tuple]:
        """The function from what a layer would be fed to what it is fed: replaced, then
        nudged."""

        def inputs(args: tuple) -> tuple:
            replaced = self.replaced[index]
            rest = args[len(self.replaced[index]) :]
            args = (*(a.expand(len(args[0]), -1, -1) for a in replaced), *rest)
            if self.nudge is None:
                return args
            fed = [*range(len(args[0]) - 1), 0]  # the last sequence is the isolated one
            args = tuple(a if a is None else a[fed] for a in args)
            x = args[0]
            shape = NUDGED - 1, *x.shape[1:]
            signs = torch.randint(0, 2, shape, generator=self.nudge) * 2 - 1
            x[1:] *= 1 + signs[1 - len(x) :] * 2.0**-23
            return args

        return inputs

    @cached_property
    def _head(self) -> torch.Tensor:
        """lm_head [V, C] as `weights` has it."""
        return self.weights(head_weight(self.checkpoint))

    def head_rows(self) -> Iterator[torch.Tensor]:
        """lm_head in float32, `LOGIT_ROWS` of its rows at a time; the checkpoint's own
        tensor is read so."""
        name = head_weight(self.checkpoint)
        V = self.checkpoint.config.vocab_size
        for start in range(0, V, LOGIT_ROWS):
            rows = slice(start, min(start + LOGIT_ROWS, V))
            if self.weights is None:
                yield self.checkpoint.tensor(name, rows)
            else:
                yield self._head[rows].float()

    def cache(self):
        """An empty cache of one sequence."""
        return _recording_cache(self.config, self.records)

    def run(self, ids: Sequence[int], cache, head: bool = True) -> Golden:
        """One call over `ids` [n] that continues `cache`: the golden of these n
        positions."""
        (golden,) = self._run([ids], cache, head)
        self.normed = self.normed[0]
        return golden

    def run_nudged(
        self, ids: Sequence[int], cache, seed: int, chained: bool = True
    ) -> list[Golden]:
        """`run`, and what becomes of it when every layer's input is changed by a
        relative 2^-23 of random sign: three goldens without logits. The second one's
        layers are fed what the layer before made, so that changes add up; it is left
        out unless `chained`. The third one's are fed what the first one's are. `cache`
        then holds as many sequences, and continues as many alike."""
        count = NUDGED if chained else NUDGED - 1
        cache.reorder_cache(torch.zeros(count, dtype=torch.long))
        self.nudge = torch.Generator().manual_seed(seed)
        try:
            return self._run([ids] * count, cache, head=False)
        finally:
            self.nudge = None

    def _run(self, ids: Sequence[Sequence[int]], cache, head: bool) -> list[Golden]:
        """The goldens of one call over equally long sequences of token ids; without
        `head` their logits are nan."""
        import transformers

        V = self.config.vocab_size
        ids = np.stack([check_ids(sequence, V) for sequence in ids])
        last = self.last_hidden(ids, past_key_values=cache, use_cache=True)
        self.normed = last.numpy()
        logits = np.broadcast_to(np.float32(np.nan), (*ids.shape, V))
        if head:
            logits = self.logits(last)
        meta = {
            "checkpoint": self.checkpoint.sha256,
            "weights": self.label,
            "transformers": transformers.__version__,
        }
        layers = self._recorded()
        goldens = []
        for i, sequence in enumerate(ids):
            values = {name: array[i] for name, array in layers.items()}
            goldens.append(Golden(sequence, logits=logits[i], meta=meta, **values))
        return goldens

    def _recorded(self) -> dict[str, np.ndarray]:
        """The records of all layers [B, L, n, ..] by name; zeros of a layer without."""
        shapes = {}
        arrays = {}
        for record in self.records:
            shapes |= record
        for name, value in shapes.items():
            zeros = np.zeros_like(value)
            arrays[name] = np.stack([r.get(name, zeros) for r in self.records], axis=1)
        return arrays

    @torch.inference_mode()
    def last_hidden(self, ids: np.ndarray, **arguments) -> torch.Tensor:
        """What the head reads [B, n, C] of sequences `ids` [B, n]; each layer is loaded
        once for all of them. `arguments` go to the model's forward pass."""
        rows, remapped = np.unique(ids, return_inverse=True)
        name = f"{self.checkpoint.prefix}embed_tokens.weight"
        embedded = self.checkpoint.tensor(name, rows.tolist())
        if self.weights is not None:
            embedded = embedded.half().float()
        self.base.embed_tokens.weight = nn.Parameter(embedded, False)
        ids = torch.from_numpy(remapped.reshape(ids.shape))
        return self.base(input_ids=ids, **arguments)[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> np.ndarray:
        """lm_head over [.., n, C]."""
        parts = [hidden @ rows.T for rows in self.head_rows()]
        return torch.cat(parts, dim=-1).div_(logit_divisor(self.config)).numpy()


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


def force_experts(model: nn.Module, expert: np.ndarray) -> None:
    """Makes every layer of Hugging Face's model use the classes `expert` [L, n], the
    one past the experts skipping them, with the probabilities that its own router gives
    them; goldens still record the router's own choice."""
    for layer, classes in zip(model.model.layers, expert, strict=True):
        chosen = torch.from_numpy(np.array(classes, np.int64))[:, None]

        def choose(module, args, output, chosen=chosen):
            logits, _, _, *rest = output
            probabilities = torch.softmax(logits, -1).gather(-1, chosen)
            skipped = chosen == logits.shape[-1] - 1
            experts = chosen.masked_fill(skipped, 0)
            return (logits, probabilities.masked_fill(skipped, 0), experts, *rest)

        for module in layer.modules():
            if hasattr(module, "balancing_biases"):
                module.register_forward_hook(choose)


def whole_prompt(checkpoint: Checkpoint):
    """Hugging Face's model in fp32 with all its weights loaded."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint.path,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
    ).eval()


def check_ids(ids: Sequence[int], V: int) -> np.ndarray:
    """Token ids [n] of a prompt, at least one, all of them in the vocabulary."""
    if not len(ids):
        raise InputError(
            "prompt ids",
            "[]",
            f"at least one id from 0 to {V - 1}",
            "check --prompt-ids",
        )
    return np.array(token_ids(ids, V, "prompt ids"), np.int64)


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


def assign_parameter(module: nn.Module, name: str, value: torch.Tensor | None) -> None:
    """Sets parameter `name` (dotted) to `value`, or back to nothing; tensors that are
    buffers are copied into."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._buffers:
        if value is not None:
            owner._buffers[leaf].copy_(value)
        return
    if value is None:
        value = owner._parameters[leaf].to("meta")
    owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)


def _load_layer(
    layer: nn.Module, prefix: str, read: WeightReader, memory: dict[str, torch.Tensor]
) -> None:
    """Assigns a layer's tensors, in float32. Those that `read` has as fp16 use the
    `memory` of the layers before, as fresh memory takes longer than their values."""
    for name in layer.state_dict():
        value = read(prefix + name)
        if value.dtype == torch.float16:
            if name not in memory or memory[name].shape != value.shape:
                memory[name] = torch.empty(value.shape)
            value = memory[name].copy_(value)
        assign_parameter(layer, name, value)


def _record_layer(
    layer: nn.Module,
    load: Callable[[], None],
    inputs: Callable[[tuple], tuple],
    keep: bool,
) -> dict[str, np.ndarray]:
    """Calls `load` when the layer is entered, records its input and output unless
    `keep` is false, drops the tensors when it is left.

    `inputs` turns the layer's arguments into those that it is fed. Records are [B, n,
    ..]."""
    record = {}

    def enter(module, args, kwargs):
        args = inputs(args or (kwargs.pop("hidden_states"),))
        if keep:
            record["x"] = args[0].float().numpy().copy()
        load()
        return args, kwargs

    def leave(module, args, output):
        outputs = output if isinstance(output, tuple) else (output,)
        for name, value in zip(("hidden", "router"), outputs, strict=False):
            if keep and value is not None:
                record[name] = value.float().numpy().copy()
        for name in module.state_dict():
            assign_parameter(module, name, None)

    def route(module, args, output):
        scores = torch.softmax(output[0].float(), -1) + module.balancing_biases
        scores = scores.unflatten(0, args[0].shape[:2])
        best, second = scores.topk(2, -1).values.unbind(-1)
        record.update(expert=scores.argmax(-1).numpy(), margin=(best - second).numpy())

    for module in layer.modules():
        if hasattr(module, "balancing_biases"):
            module.register_forward_hook(route)
    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(leave)
    return record


def _recording_cache(config, records: list[dict[str, np.ndarray]]):
    """transformers' DynamicCache, copying every K and V row to the records of its
    layers (sliding layers forget theirs)."""
    from transformers import DynamicCache

    class Recording(DynamicCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            records[layer_idx].update(
                k=key_states.numpy().copy(), v=value_states.numpy().copy()
            )
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    return Recording(config=config)


def head_weight(checkpoint: Checkpoint) -> str:
    """Name of the tensor that turns the last hidden state into logits."""
    if checkpoint.config.tie_word_embeddings:
        return f"{checkpoint.prefix}embed_tokens.weight"
    return "lm_head.weight"
