"""Goldens: what Hugging Face's implementation computes, layer by layer, in fp32 with eager attention.

transformers' own model runs its own forward; only its weights come and go: each decoder layer's tensors are read when
the layer is entered and dropped when it is left, so that a model of any depth fits. Nothing is re-typed here.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import nn

from workbench.bundle import Bundle
from workbench.decode.checks import token_ids
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint

LOGIT_ROWS = 16_384
FORMAT = 1  # of what is kept: raised when `make` changes
WeightReader = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Golden:
    """Per layer l and position: input `x` and output `hidden` [L, n, C], cache rows `k`, `v` [L, H_kv, n, D]; `logits`
    [n, V]; all float32. `ids` [n]. Where experts are routed (ZAYA): `router` [L, n, R], the router state that layer l hands
    on, `expert` [L, n], the class it picks, and `margin` [L, n], that one's score less the second best.

    `meta`: checkpoint (SHA-256), weights (source, fp16, or a bundle's identity), transformers (version).
    """

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
        """What each layer adds, [L, n, C]."""
        return self.hidden - self.x

    def save(self, path: str | Path) -> Path:
        """Writes one safetensors file, whole or not at all."""
        from safetensors.numpy import save_file

        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {n: getattr(self, n) for n in ("ids", "x", "hidden", "k", "v", "logits", "router", "expert", "margin")}
        temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            save_file({n: np.ascontiguousarray(a) for n, a in arrays.items() if a is not None}, temporary,
                      {"workbench-golden": json.dumps(self.meta)})  # fmt: skip
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Golden":
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise InputError(f"golden {path}", "no such file", "a golden store", "run: workbench golden CHECKPOINT")
        try:
            with safe_open(path, framework="np") as file:
                meta = json.loads(file.metadata()["workbench-golden"])
                return cls(**{name: file.get_tensor(name) for name in file.keys()}, meta=meta)
        except (SafetensorError, KeyError, TypeError, ValueError) as problem:
            raise InputError(f"golden {path}", f"no golden ({type(problem).__name__})", "a file that workbench golden wrote",
                             "run: workbench golden CHECKPOINT") from None  # fmt: skip


def stored_weights(checkpoint: Checkpoint, bundle: Bundle) -> WeightReader:
    """The values `bundle` stores, decompressed; tensors its shards do not hold as such are the fp16-rounded ones.

    A weight stored with an offset (Gemma's 1 + γ) is handed back without it.
    """
    import miltorch

    if checkpoint.sha256 != bundle.manifest.checkpoint["sha256"]:
        raise InputError(f"checkpoint {checkpoint.path.name}", checkpoint.sha256[:12],
                         f"{bundle.manifest.checkpoint['sha256'][:12]}, the one that bundle {bundle.root.name} was exported from",
                         "give that checkpoint, or export this one")  # fmt: skip
    held: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for shard in bundle.manifest.shards:
        if shard.weights:
            executable = miltorch.Executable(miltorch.read(bundle.package(shard)), "exact")
            for tensor, constant in shard.weights.items():
                value = executable.constant(constant) - shard.offsets.get(tensor, 0.0)
                held.setdefault(tensor, []).append((shard.rows[0], value))

    def read(name: str) -> torch.Tensor:
        shape = checkpoint.shape(name)
        if name not in held:
            return checkpoint.tensor(name).half().float()
        parts = [value for _, value in sorted(held[name], key=lambda part: part[0])]
        if parts[0].numel() == np.prod(shape):  # whole, perhaps in every slice (the final norm)
            return parts[0].reshape(shape)
        return torch.cat([p.reshape(-1, *shape[1:]) for p in parts])

    return read


def stored_golden(checkpoint: Checkpoint, ids: Sequence[int], folder: Path) -> Golden:
    """`make` with the checkpoint's own weights, once: the file stays in `folder`, named after the checkpoint's hash, the token
    ids and the version of transformers. One that cannot be read is made again."""
    key = json.dumps([FORMAT, checkpoint.sha256, np.asarray(ids).tolist(), version("transformers")])
    path = folder / f"{checkpoint.path.name}-{hashlib.sha256(key.encode()).hexdigest()[:10]}.safetensors"
    if path.is_file():
        with suppress(InputError):
            return Golden.load(path)
    made = make_golden(checkpoint, ids)
    made.save(path)
    return made


def make_golden(checkpoint: Checkpoint | str | Path, ids: Sequence[int], weights: WeightReader | None = None,
         label: str = "source", fed: np.ndarray | None = None, fed_router: np.ndarray | None = None) -> Golden:  # fmt: skip
    """Runs Hugging Face's model over `ids` [n] with `weights` (default: the checkpoint's own).

    Peak memory is one layer and one slice of the head, in float32. `fed` [L, n, C] replaces what each layer is given,
    so that layers can be compared one by one; `fed_router` [L, n, R] the router state that each one hands on.
    """
    import transformers

    checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    read = weights or checkpoint.tensor
    ids = check_ids(ids, checkpoint.config.vocab_size)
    with _parameters_on_meta():
        model = transformers.AutoModelForCausalLM.from_config(checkpoint.config, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    base, prefix = model.model, checkpoint.prefix
    rows, remapped = np.unique(ids, return_inverse=True)
    embedded = checkpoint.tensor(f"{prefix}embed_tokens.weight", rows.tolist())
    base.embed_tokens.weight = nn.Parameter(embedded if weights is None else embedded.half().float(), False)
    base.embed_tokens.padding_idx = None
    for name, _ in base.named_parameters():
        if not name.startswith(("layers.", "embed_tokens.")):
            _assign(base, name, read(prefix + name))
    seen = [_watch(layer, f"{prefix}layers.{i}.", read, _given(i, fed, fed_router)) for i, layer in enumerate(base.layers)]
    cache = _recording_cache(checkpoint.config)
    with torch.inference_mode():
        last = base(input_ids=torch.from_numpy(remapped)[None], past_key_values=cache, use_cache=True)[0][0]
        logits = _logits(checkpoint, last, weights, prefix)
    k, v = (np.stack([cache.rows[i][side] for i in range(len(seen))]) for side in (0, 1))
    layers = {name: np.stack([s[name] for s in seen]) for name in ("x", "hidden", "router", "expert", "margin") if name in seen[0]}
    return Golden(ids=ids, k=k, v=v, logits=logits, **layers,
                  meta={"checkpoint": checkpoint.sha256, "weights": label, "transformers": transformers.__version__})  # fmt: skip


def whole_prompt(checkpoint: Checkpoint):
    """Hugging Face's model in fp32 with all its weights loaded."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32, attn_implementation="eager",
                                                             local_files_only=True).eval()  # fmt: skip


def check_ids(ids: Sequence[int], V: int) -> np.ndarray:
    """Token ids [n] of a prompt, at least one, all of them in the vocabulary."""
    if not len(ids):
        raise InputError("prompt ids", "[]", f"at least one id from 0 to {V - 1}", "check --prompt-ids")
    return np.array(token_ids(ids, V, "prompt ids"), np.int64)


@contextmanager
def _parameters_on_meta():
    """Modules built inside have no storage for parameters, but real buffers (rotary tables, scales)."""
    register = nn.Module.register_parameter

    def on_meta(module, name, parameter):
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _assign(module: nn.Module, name: str, value: torch.Tensor | None) -> None:
    """Sets parameter `name` (dotted) to `value`, or back to nothing; tensors that are buffers are copied into."""
    *path, leaf = name.split(".")
    owner = module.get_submodule(".".join(path))
    if leaf in owner._buffers:
        if value is not None:
            owner._buffers[leaf].copy_(value)
        return
    value = owner._parameters[leaf].to("meta") if value is None else value
    owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)


def _given(layer: int, fed: np.ndarray | None, router: np.ndarray | None) -> tuple[torch.Tensor, ...]:
    """What replaces the first arguments of a layer: nothing, its input, or its input and its router state."""
    if fed is None:
        return ()
    arrays = [fed[layer]] if router is None or not layer else [fed[layer], router[layer - 1]]
    return tuple(torch.from_numpy(array)[None] for array in arrays)


def _watch(layer: nn.Module, prefix: str, read: WeightReader, given: tuple[torch.Tensor, ...]) -> dict:
    """Loads the layer's tensors when it is entered, records its input and output, drops the tensors when it is left."""
    seen = {}

    def enter(module, args, kwargs):
        args = args or (kwargs.pop("hidden_states"),)
        args = (*given, *args[len(given) :])
        seen["x"] = args[0][0].float().numpy().copy()
        for name in module.state_dict():
            _assign(module, name, read(prefix + name))
        return args, kwargs

    def leave(module, args, kwargs, output):
        hidden = output[0] if isinstance(output, tuple) else output
        seen["hidden"] = hidden[0].float().numpy().copy()
        if isinstance(output, tuple) and len(output) > 1 and output[1] is not None:
            seen["router"] = output[1][0].float().numpy().copy()
        for name in module.state_dict():
            _assign(module, name, None)

    def route(module, args, output):
        scores = torch.softmax(output[0].float(), -1) + module.balancing_biases
        best = scores.topk(2, -1)
        seen["expert"] = best.indices[:, 0].numpy().copy()
        seen["margin"] = (best.values[:, 0] - best.values[:, 1]).numpy().copy()

    for module in layer.modules():
        if hasattr(module, "balancing_biases"):
            module.register_forward_hook(route)
    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(leave, with_kwargs=True)
    return seen


def _recording_cache(config):
    """transformers' DynamicCache, keeping every K and V row it is given (sliding layers forget theirs)."""
    from transformers import DynamicCache

    class Recording(DynamicCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            self.rows[layer_idx] = (key_states[0].numpy().copy(), value_states[0].numpy().copy())
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    cache = Recording(config=config)
    cache.rows = {}
    return cache


def _logits(checkpoint: Checkpoint, last: torch.Tensor, weights: WeightReader | None, prefix: str) -> np.ndarray:
    """lm_head over [n, C]; the checkpoint's own tensor is read one slice of the vocabulary at a time."""
    name = f"{prefix}embed_tokens.weight" if checkpoint.config.tie_word_embeddings else "lm_head.weight"
    if weights is not None:
        return (last @ weights(name).T).numpy()
    V = checkpoint.config.vocab_size
    slices = (checkpoint.tensor(name, slice(i, min(i + LOGIT_ROWS, V))) for i in range(0, V, LOGIT_ROWS))
    return torch.cat([last @ w.T for w in slices], dim=-1).numpy()
