"""Measures what `workbench.exporter.allocation` chooses by, and chooses the formats of a
mixed export.

The search compresses every matrix in every format for the inputs that it has in the
unchanged model, and measures Hugging Face's model with such matrices on a text for
selection. The export compresses each matrix again, for inputs that the layers before it
have changed, as every calibrated export does. Hugging Face's model with these values is
measured too, and a costlier choice is exported until the limit holds for them.

Beside the model, which is in float32, memory has the values of one matrix at a time. The
values of all candidates are in a folder, which an interrupted export finds again."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from miltorch.quiet import no_progress
from workbench.bundle import Options, Selection, file_entries
from workbench.bundle.presets import FP16, Preset, find_preset
from workbench.errors import InputError
from workbench.exporter.allocation import (
    Choice,
    Cost,
    Limit,
    Quality,
    frontier,
    matrix_bytes,
    next_choice,
    rescale,
    search,
    uniform,
)
from workbench.exporter.calibrate import (
    Calibrated,
    InputSum,
    Text,
    calibrate,
    code_version,
    prepare,
)
from workbench.exporter.compress import InputStatistics, compress_matrix, decompress
from workbench.exporter.shards import HEAD_ROWS, specs
from workbench.exporter.weights import WeightSource, load_values, weight_sources
from workbench.files import check_room
from workbench.models.checkpoint import LOCAL, Checkpoint
from workbench.models.family import Plan
from workbench.progress import bar

CANDIDATES = ("lut4-g8", "lut6-g16", "int8-channel", "fp16")
"""The formats that a matrix may have."""
WINDOW = 256
"""Tokens of the text for selection that the model reads at a time."""
WINDOWS = 16
"""The most windows that are measured."""
ESTIMATED_WINDOWS = 4
"""Windows on which losses are estimated: a backward pass takes as long as five
measurements."""
MAX_THREADS = 2
"""Formats in which one matrix is compressed at a time."""
SCORED_TOKENS = 32
"""Tokens whose logits are computed at a time."""
EXPORTS = 4
"""The most choices that are compressed for an export until one keeps the limit."""
HEAD = "lm_head"
IDS = "selection.npy"
FILE = "allocation.json"


class Timing(Protocol):
    """Predicted times on one chip; `workbench.ane.timing` has them."""

    chip: str

    def prices(self, weights: int, preset: Preset) -> tuple[float, float]:
        """The milliseconds of streaming a matrix, and of unpacking it."""

    def milliseconds(self, weights: dict[str, int]) -> float:
        """The milliseconds of a call, by the number of weights of each preset."""


@dataclass(frozen=True)
class Search:
    """How the formats of a mixed export are chosen.

    Args:
        text: token ids on which choices are measured; weights are calibrated with
            another text.
        limit: what the choice has to keep.
        timing: predicts the time of choices; None: no time is predicted.
        minimizes: the bytes of matrices, or the predicted milliseconds of a call.
        compared: further presets that are measured for all matrices alike, and that no
            matrix gets.
        further: mean KLs in nats; the cheapest choice that is predicted to have at most
            this one is measured too.

    Raises:
        InputError: milliseconds to be minimized under a limit of bytes.
    """

    text: Text
    limit: Limit
    timing: Timing | None = None
    minimizes: Literal["bytes", "ms"] = "bytes"
    compared: tuple[str, ...] = ()
    further: tuple[float, ...] = ()

    def __post_init__(self):
        if self.minimizes == "ms" and self.timing is None:
            raise ValueError("milliseconds are minimized on a chip: give a timing")
        if self.minimizes == "ms" and self.limit.kl is None:
            raise InputError(
                "--ms-on",
                "a limit of bytes",
                "a limit on the mean KL, at which the time is the least",
                "give --max-kl in place of --bytes",
            )

    @property
    def key(self) -> list:
        """What decides the choice, as JSON."""
        chip = self.timing.chip if self.timing else None
        measured = [list(self.compared), list(self.further)]
        text = [self.text.source, self.text.sha256]
        return [*text, asdict(self.limit), self.minimizes, chip, *measured]

    @property
    def measured(self) -> tuple[str, ...]:
        """The presets that are measured for all matrices alike."""
        return tuple(dict.fromkeys((*CANDIDATES, *self.compared)))


@dataclass(frozen=True)
class Allocation:
    """The result of a search.

    Args:
        limit: what the choice keeps.
        minimizes: `bytes` or `ms`.
        chip: for which the choices' `ms` are predicted; None: for none.
        chosen: the choice that is exported.
        exported: quality of Hugging Face's model with the values that the bundle
            stores; None: the choice is not exported yet.
        frontier: choices from the cheapest to the one with the least loss, measured or
            only predicted.
        uniform: the measured choices of one format for all matrices.
        costs: of every matrix in every format, rescaled.
    """

    limit: Limit
    minimizes: str
    chip: str | None
    chosen: Choice
    exported: Quality | None
    frontier: tuple[Choice, ...]
    uniform: tuple[Choice, ...]
    costs: tuple[Cost, ...]

    def record(self, folder: Path, text: Text) -> Selection:
        """Writes `allocation.json` and the ids of the text for selection to a bundle's
        folder; returns their entry in its manifest."""
        write_allocation(self, folder / FILE)
        np.save(folder / IDS, text.ids.astype("<i4"))
        windows, window = text.ids.shape
        return Selection(
            file=file_entries(folder, folder / IDS)[0],
            allocation=file_entries(folder, folder / FILE)[0],
            ids_sha256=text.sha256,
            tokens=windows * window,
            window=window,
            source=text.source,
        )


def write_allocation(allocation: Allocation, path: Path) -> None:
    """Writes an allocation as JSON. The formats of choices other than the chosen one are
    left out: they follow from the costs."""
    fields = asdict(allocation)
    for choice in [*fields["frontier"], *fields["uniform"]]:
        del choice["formats"]
    path.write_text(json.dumps(fields), encoding="utf-8")


def read_allocation(path: Path) -> Allocation:
    """The allocation that `write_allocation` wrote; only the chosen one has formats."""
    fields = json.loads(path.read_text(encoding="utf-8"))

    def quality(record: dict | None) -> Quality | None:
        return None if record is None else Quality(**record)

    def choice(record: dict) -> Choice:
        record = {"formats": {}} | record
        return Choice(**record | {"quality": quality(record["quality"])})

    costs = [Cost(**c | {"prices": tuple(c["prices"])}) for c in fields["costs"]]
    return Allocation(
        limit=Limit(**fields["limit"]),
        minimizes=fields["minimizes"],
        chip=fields["chip"],
        chosen=choice(fields["chosen"]),
        exported=quality(fields["exported"]),
        frontier=tuple(map(choice, fields["frontier"])),
        uniform=tuple(map(choice, fields["uniform"])),
        costs=tuple(costs),
    )


class CandidateValues:
    """The values of matrices in several formats, in a folder of fp16 files."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, tensor: str, preset: str) -> Path:
        name = hashlib.sha256(f"{tensor} {preset}".encode()).hexdigest()
        return self.folder / f"{name[:32]}.npy"

    def save(self, tensor: str, preset: str, values: torch.Tensor) -> None:
        path = self.path(tensor, preset)
        unfinished = path.with_suffix(".partial")
        with unfinished.open("wb") as file:
            np.save(file, values.half().numpy())
        unfinished.rename(path)

    def load(self, tensor: str, preset: str) -> torch.Tensor:
        """Values [R, K] in float32."""
        return torch.from_numpy(np.load(self.path(tensor, preset))).float()


class Measurement:
    """Hugging Face's model, whose matrices can be replaced, and its distance from what it
    was before.

    Args:
        model: in float32, whose head shares its matrix with no embedding; it is changed.
        modules: tensor name → name of the `nn.Linear` that has the tensor.
        ids: [windows, window] tokens of the text for selection.
    """

    def __init__(self, model: nn.Module, modules: Mapping[str, str], ids: torch.Tensor):
        self.model = model.eval().requires_grad_(False)
        self.modules = {
            tensor: model.get_submodule(name) for tensor, name in modules.items()
        }
        self.ids = ids
        config = model.config.get_text_config(decoder=True)
        # Granite divides its logits, Gemma 4 bounds them
        self.divisor = getattr(config, "logits_scaling", None) or 1.0
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.head = model.get_submodule(HEAD).weight.detach().clone()
        self.hidden = [self._last_hidden(window) for window in ids]

    @torch.inference_mode()
    def _last_hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.model(input_ids=ids[None], use_cache=False)[0][0]

    def logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """What the model makes of `hidden` [.., C] with the matrix `head` [V, C]."""
        logits = hidden @ head.T / self.divisor
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def replace_matrix(self, tensor: str, values: torch.Tensor) -> None:
        self.modules[tensor].weight.copy_(values)

    @torch.inference_mode()
    def quality(self) -> Quality:
        """The distance of the model from what it was before any matrix was replaced."""
        head = self.model.get_submodule(HEAD).weight
        kls, log_ratios, same = [], [], []
        for ids, reference in zip(self.ids, self.hidden):
            hidden = self._last_hidden(ids)
            for start in range(0, len(ids), SCORED_TOKENS):
                part = slice(start, start + SCORED_TOKENS)
                p = F.log_softmax(self.logits(reference[part], self.head), -1)
                q = F.log_softmax(self.logits(hidden[part], head), -1)
                kls.append((p.exp() * (p - q)).sum(-1))
                same.append(p.argmax(-1) == q.argmax(-1))
                targets = ids[start + 1 : start + 1 + len(p), None]
                count = len(targets)  # the last token of a window predicts none
                log_ratios.append((p[:count] - q[:count]).gather(1, targets))
        kl = torch.cat(kls).double()
        return Quality(
            kl=float(kl.mean()),
            kl_p99=float(kl.quantile(0.99)),
            perplexity_ratio=float(torch.cat(log_ratios).double().mean().exp()),
            same_top=float(torch.cat(same).double().mean()),
        )


def load_model(source: Checkpoint) -> nn.Module:
    """Hugging Face's model of a checkpoint in float32. Its head has a copy of the matrix
    where the checkpoint ties it to the embeddings, which stay as they are."""
    import transformers

    with no_progress():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.path, dtype=torch.float32, **LOCAL
        )
    head = model.get_submodule(HEAD)
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    return model.eval().requires_grad_(False)


def linear_modules(
    model: nn.Module, source: Checkpoint, tensors: Iterable[str]
) -> dict[str, str]:
    """Tensor name → name of the `nn.Linear` of the model that has it.

    Raises:
        InputError: a tensor of no such module, such as experts in one tensor.
    """
    names = {source.head: HEAD}
    # a multimodal model has its language model deeper
    decoder = model.get_decoder()
    path = next(name for name, module in model.named_modules() if module is decoder)
    for name, module in decoder.named_modules():
        if isinstance(module, nn.Linear):
            names[f"{source.prefix}{name}.weight"] = f"{path}.{name}"
    for tensor in tensors:
        if tensor not in names:
            raise InputError(
                "--compress mixed",
                f"tensor {tensor!r}, which is no linear layer of Hugging Face's model",
                "a model whose matrices are linear layers",
                "choose one format for all of them, such as --compress int8-channel",
            )
    return {tensor: names[tensor] for tensor in tensors}


def store_candidates(
    model: nn.Module,
    modules: Mapping[str, str],
    ids: torch.Tensor,
    presets: Mapping[str, Sequence[Preset]],
    candidates: CandidateValues,
) -> None:
    """Stores every matrix in every format, compressed for what it reads in the unchanged
    model. Values that are stored already are left as they are.

    Args:
        modules: tensor name → name of the `nn.Linear`.
        ids: [windows, window] tokens of the text for calibration.
        presets: tensor name → its formats.
    """
    inputs: list[tuple[torch.Tensor, InputStatistics]] = []  # of the last matrix
    progress = bar(total=len(modules), desc="formats", unit="matrix", leave=False)

    def store(tensor: str, module: nn.Linear, arguments: tuple) -> None:
        missing = [
            preset
            for preset in presets[tensor]
            if not candidates.path(tensor, preset.name).is_file()
        ]
        values = module.weight.detach().half()
        if any(preset != FP16 for preset in missing):
            x = arguments[0]
            if not inputs or inputs[0][0] is not x:  # q, k and v read the same tensor
                inputs[:] = [(x, _statistics(x))]

        @torch.inference_mode()  # a mode of the thread
        def store_in(preset: Preset) -> None:
            result = values
            if preset != FP16:
                result = compressed_values(values, preset, inputs[0][1])
            candidates.save(tensor, preset.name, result)

        list(pool.map(store_in, missing))  # raises what one of them has raised
        progress.update()

    # most of the time no thread holds Python's lock
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        with torch.inference_mode(), _hooked(model, modules, store):
            hidden = model.model(input_ids=ids, use_cache=False)[0]
        for tensor, name in modules.items():
            if name == HEAD:  # its logits of all tokens would fill the memory
                store(tensor, model.get_submodule(name), (hidden,))
    progress.close()


def compressed_values(
    values: torch.Tensor, preset: Preset, inputs: InputStatistics
) -> torch.Tensor:
    """The values [R, K] fp16 that a matrix has when it is stored, a slice of rows at a
    time, as the slices of the head are stored."""
    pieces = []
    for piece in values.split(HEAD_ROWS):
        arrays = compress_matrix(piece, preset, inputs)
        pieces.append(decompress(arrays, preset, tuple(piece.shape)))
    return torch.cat(pieces)


def _statistics(x: torch.Tensor) -> InputStatistics:
    """The statistics of inputs [windows, window, C]."""
    total = InputSum()
    total.add(x)
    return total.statistics


@contextmanager
def _hooked(model: nn.Module, modules: Mapping[str, str], before) -> Iterator[None]:
    """Calls `before(tensor, module, arguments)` before each of the modules runs."""
    handles = [
        model.get_submodule(name).register_forward_pre_hook(partial(before, tensor))
        for tensor, name in modules.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def estimate_losses(
    measurement: Measurement,
    presets: Mapping[str, Sequence[Preset]],
    candidates: CandidateValues,
    seed: int,
) -> dict[tuple[str, str], float]:
    """(tensor, preset) → the estimated KL in nats per token of storing one matrix so.

    To second order it is ½ E[(dᵀ Δ x)²]: Δ the change of the matrix, x its input, d the
    gradient of −log p(y) at its output, y drawn from the model's own distribution. The
    products of different tokens are left out. The head's is half the variance of the
    change of its logits, without a draw."""
    model, divisor = measurement.model, measurement.divisor
    generator = torch.Generator().manual_seed(seed)
    losses = {
        (tensor, preset.name): 0.0 for tensor in presets for preset in presets[tensor]
    }
    # what fp16 rounds is far below what any other format does
    compressed = {
        tensor: [preset for preset in of_tensor if preset != FP16]
        for tensor, of_tensor in presets.items()
    }
    windows = measurement.ids[:ESTIMATED_WINDOWS]
    progress = bar(total=len(windows), desc="losses", unit="window", leave=False)

    def add_losses(tensor: str, x: torch.Tensor, gradient: torch.Tensor) -> None:
        weight = measurement.modules[tensor].weight
        for preset in compressed[tensor]:
            change = candidates.load(tensor, preset.name).sub_(weight)
            products = (x @ change.T * gradient).sum(-1)
            losses[tensor, preset.name] += 0.5 * float(products.square().sum())

    def watch_output(tensor: str, module, arguments: tuple, output) -> None:
        output.register_hook(partial(add_losses, tensor, arguments[0].detach()))

    def add_head_losses(x: torch.Tensor, p: torch.Tensor, slope) -> None:
        for tensor in heads:
            for preset in compressed[tensor]:
                change = candidates.load(tensor, preset.name).sub_(measurement.head)
                logits = x @ change.T / divisor * slope
                mean = (p * logits).sum(-1)
                variance = (p * logits.square()).sum(-1) - mean.square()
                losses[tensor, preset.name] += 0.5 * float(variance.sum())

    heads = [t for t, m in measurement.modules.items() if m is model.lm_head]
    hooks = [
        module.register_forward_hook(partial(watch_output, tensor))
        for tensor, module in measurement.modules.items()
        if tensor not in heads
    ]
    try:
        for ids in windows:
            embedded = model.get_input_embeddings()(ids[None]).detach()
            embedded.requires_grad_()
            hidden = model.model(inputs_embeds=embedded, use_cache=False)[0]
            gradient = torch.empty_like(hidden)
            for start in range(0, len(ids), SCORED_TOKENS):
                part = slice(start, start + SCORED_TOKENS)
                x = hidden.detach()[0, part]
                logits = measurement.logits(x, measurement.head)
                p = torch.softmax(logits, -1)
                # the derivative of the bound on logits, 1 where there is none
                slope = 1.0
                if measurement.softcap:
                    slope = 1 - (logits / measurement.softcap).square()
                add_head_losses(x, p, slope)
                drawn = torch.multinomial(p, 1, generator=generator)
                p.scatter_add_(1, drawn, torch.full_like(drawn, -1.0, dtype=p.dtype))
                gradient[0, part] = (p * slope) @ measurement.head / divisor
            hidden.backward(gradient)
            progress.update()
    finally:
        for hook in hooks:
            hook.remove()
        progress.close()
    return {key: loss / windows.numel() for key, loss in losses.items()}


def search_formats(
    measurement: Measurement,
    shapes: Mapping[str, tuple[int, int]],
    presets: Mapping[str, Mapping[str, Preset]],
    candidates: CandidateValues,
    setup: Search,
    seed: int = 0,
) -> Allocation:
    """Chooses a format for every matrix on Hugging Face's model with stored candidates.

    Args:
        shapes: tensor → [rows, inputs].
        presets: tensor → candidate → the preset that stores it.
        seed: of the estimates' draws.

    Raises:
        InputError: no choice keeps the limit.
    """
    of_tensor = {tensor: list(fitted.values()) for tensor, fitted in presets.items()}
    losses = estimate_losses(measurement, of_tensor, candidates, seed)
    costs = []
    for tensor, (rows, inputs) in shapes.items():
        for name, preset in presets[tensor].items():
            size, prices = matrix_bytes(rows, inputs, preset), None
            if setup.minimizes == "ms":
                prices = setup.timing.prices(rows * inputs, preset)
            cost = Cost(
                tensor=tensor,
                format=name,
                preset=preset.name,
                weights=rows * inputs,
                bytes=size,
                prices=prices or (float(size),),
                loss=losses[tensor, preset.name],
            )
            costs.append(cost)
    current: dict[str, str] = {}
    progress = bar(desc="measuring", unit="choice", leave=False)

    def timed(choice: Choice) -> Choice:
        if setup.timing is None:
            return choice
        weights: dict[str, int] = {}
        for tensor, preset in choice.formats.items():
            rows, inputs = shapes[tensor]
            weights[preset] = weights.get(preset, 0) + rows * inputs
        return replace(choice, ms=setup.timing.milliseconds(weights))

    def measure(choice: Choice) -> Choice:
        for tensor, preset in choice.formats.items():
            if current.get(tensor) != preset:
                measurement.replace_matrix(tensor, candidates.load(tensor, preset))
                current[tensor] = preset
        quality = measurement.quality()
        progress.update()
        progress.set_postfix_str(f"{choice.bits:.2f} bits: KL {quality.kl:.3g}")
        return timed(replace(choice, quality=quality))

    try:
        uniforms = [measure(uniform(costs, name)) for name in setup.measured]
        costs = rescale(costs, {c.name: c.quality.kl for c in uniforms})
        choices = frontier([cost for cost in costs if cost.format in CANDIDATES])
        chosen, measured = search(choices, setup.limit, measure)
        factor = chosen.quality.kl / chosen.predicted_kl if chosen.predicted_kl else 1.0
        for kl in setup.further:
            within = (c for c in choices if factor * c.predicted_kl <= kl)
            measured.append(measure(next(within, choices[-1])))
    finally:
        progress.close()
    measured_by_formats = {
        tuple(choice.formats.items()): choice for choice in [*uniforms, *measured]
    }
    choices = [
        measured_by_formats.get(tuple(choice.formats.items())) or timed(choice)
        for choice in choices
    ]
    return Allocation(
        limit=setup.limit,
        minimizes=setup.minimizes,
        chip=setup.timing.chip if setup.timing else None,
        chosen=chosen,
        exported=None,
        frontier=tuple(choices),
        uniform=tuple(uniforms),
        costs=tuple(costs),
    )


@dataclass(frozen=True)
class MixedExport:
    """The formats of an export, and its compressed matrices."""

    allocation: Allocation
    calibrated: Calibrated


def choose_formats(
    source: Checkpoint,
    plan: Plan,
    options: Options,
    calibration: Text,
    setup: Search,
    folder: Path,
) -> MixedExport:
    """Chooses a format for every matrix of an export and compresses the matrices.

    Args:
        calibration: token ids that matrices are compressed for.
        folder: a work folder, which needs two bytes for each weight and candidate.

    Raises:
        InputError: a matrix that is no linear layer of Hugging Face's model, a second
            embedding, no choice that keeps the limit, no space on the disk.
    """
    if plan.dims.P:
        raise InputError(
            "--compress mixed",
            "an embedding of its own for every layer",
            "a model whose layers share one embedding",
            "choose one format for all matrices, such as --compress int8-channel",
        )
    shard_specs = list(specs(plan, options))
    presets: dict[str, dict[str, Preset]] = {}
    for name in setup.measured:
        alike = options.model_copy(update={"compress": name})
        for spec in shard_specs:
            for weight in weight_sources(spec, source, plan, alike):
                if weight.tensor and weight.is_compressible:
                    presets.setdefault(weight.tensor, {})[name] = weight.preset
    model = load_model(source)
    modules = linear_modules(model, source, presets)
    shapes = {
        tensor: tuple(model.get_submodule(name).weight.shape)
        for tensor, name in modules.items()
    }
    work = folder / "candidates"
    prepare(work, _candidates_key(source, calibration, presets))
    candidates = CandidateValues(work)
    # an interrupted search has left some
    missing = sum(
        math.prod(shapes[tensor])
        for tensor, fitted in presets.items()
        for name in {preset.name for preset in fitted.values()}
        if not candidates.path(tensor, name).is_file()
    )
    check_room(work, 2 * missing, "values of all formats")
    of_tensor = {tensor: list(fitted.values()) for tensor, fitted in presets.items()}
    calibration_ids = torch.from_numpy(calibration.ids).long()
    store_candidates(model, modules, calibration_ids, of_tensor, candidates)
    selection_ids = torch.from_numpy(setup.text.ids).long()
    measurement = Measurement(model, modules, selection_ids)
    seed = calibration.seed
    allocation = search_formats(measurement, shapes, presets, candidates, setup, seed)
    return _compress_within(
        allocation, measurement, source, plan, options, calibration, folder
    )


def _candidates_key(
    source: Checkpoint, calibration: Text, presets: Mapping[str, Mapping[str, Preset]]
) -> dict[str, Any]:
    """What decides the values of candidates."""
    names = {t: [p.name for p in fitted.values()] for t, fitted in presets.items()}
    return {
        "code": code_version(),
        "checkpoint": source.sha256,
        "ids": calibration.sha256,
        "presets": names,
    }


def _compress_within(
    allocation: Allocation,
    measurement: Measurement,
    source: Checkpoint,
    plan: Plan,
    options: Options,
    calibration: Text,
    folder: Path,
) -> MixedExport:
    """Compresses the matrices of the chosen formats as the export stores them and
    measures them; takes a costlier choice until the limit holds for these values."""
    choices, chosen = allocation.frontier, allocation.chosen
    for attempt in range(EXPORTS):
        presets = {tensor: find_preset(name) for tensor, name in chosen.formats.items()}
        weights = [
            weight
            for spec in specs(plan, options)
            for weight in weight_sources(spec, source, plan, options, presets)
        ]
        digest = hashlib.sha256(json.dumps(chosen.formats).encode()).hexdigest()
        calibrated = calibrate(source, weights, calibration, folder / digest[:16])
        quality = _stored_quality(measurement, weights, calibrated, source)
        allocation = replace(allocation, chosen=chosen, exported=quality)
        limit = allocation.limit.kl
        if limit is None or quality.kl <= limit:
            return MixedExport(allocation, calibrated)
        following = next_choice(choices, chosen, quality.kl, limit)
        if following is None or attempt == EXPORTS - 1:
            raise InputError(
                "--max-kl",
                f"{limit:g}",
                f"at least {quality.kl:.3g}, the mean KL of the values that "
                f"{chosen.bits:.2f} bits per weight store",
                "give a larger limit",
            )
        chosen = following


def _stored_quality(
    measurement: Measurement,
    weights: Iterable[WeightSource],
    calibrated: Calibrated,
    source: Checkpoint,
) -> Quality:
    """The quality of Hugging Face's model with the values that an export stores."""
    pieces: dict[str, list[torch.Tensor]] = {}
    for weight in weights:
        if not weight.tensor or not weight.is_compressible:
            continue
        shape = weight.shape[:2]
        if weight.preset == FP16:
            values = load_values(weight, source).reshape(shape)
        else:
            values = decompress(calibrated.arrays(weight), weight.preset, shape)
        pieces.setdefault(weight.tensor, []).append(values)
    for tensor, values in pieces.items():
        measurement.replace_matrix(tensor, torch.cat(values).float())
    return measurement.quality()
