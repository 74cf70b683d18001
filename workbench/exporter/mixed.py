"""Chooses the presets of a mixed export: measures what `workbench.exporter.allocation`
chooses by, and compresses the matrices in the chosen presets. `allocation` explains what
candidates, presets, costs and choices are.

`choose_and_compress` is the entry. It

1. compresses every matrix in every candidate for the inputs that it has in the unchanged
   model (`candidates.py`);
2. estimates the losses of these (`losses.py`), measures choices of them in Hugging Face's
   model on a text for selection (`replaceable.py`), and chooses one (`measure_and_choose`);
3. compresses each matrix of the choice again, for inputs that the layers before it have
   changed, as every calibrated export does (`calibrate.py`), and measures Hugging Face's
   model with these values too. A costlier choice is taken until the limit holds for them
   (`_compress_within_limit`).

The result is an `Allocation`, which the bundle keeps in `allocation.json`."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from workbench.bundle import Options, Selection, file_entries
from workbench.bundle.presets import FP16, Preset
from workbench.errors import InputError
from workbench.exporter.allocation import (
    Choice,
    Cost,
    Limit,
    Quality,
    find_cheapest,
    frontier,
    kl_ratio,
    matrix_bytes,
    next_choice,
    rescale,
    uniform_choice,
)
from workbench.exporter.calibrate import (
    CompressedMatrices,
    Text,
    calibrate,
    code_version,
    prepare_work_folder,
)
from workbench.exporter.candidates import CandidateValues, store_candidates
from workbench.exporter.compress import decompress
from workbench.exporter.losses import estimate_losses
from workbench.exporter.replaceable import ReplaceableModel, linear_modules, load_model
from workbench.exporter.weights import (
    WeightSource,
    all_weights,
    find_presets,
    load_values,
)
from workbench.files import check_free_space
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan
from workbench.progress import bar, stage

# the candidates that a search chooses from
CANDIDATES = ("lut4-g8", "lut6-g16", "int8-channel", "fp16")
WINDOW = 256  # tokens of the text for selection that the model reads at a time
WINDOWS = 16  # the most of them that are measured
MAX_COMPRESSED_CHOICES = 4  # compressed one after another until one keeps the limit
# files of a bundle
SELECTION_IDS = "selection.npy"
ALLOCATION = "allocation.json"

CandidatePresets = Mapping[str, Mapping[str, Preset]]
"""Tensor → candidate → the preset that stores the matrix: the candidate with groups that
divide the matrix's rows."""


class TimePredictor(Protocol):
    """Predicted times on one chip; `workbench.ane.timing` has them."""

    chip: str

    def matrix_time(self, weights: int, preset: Preset) -> tuple[float, float]:
        """The milliseconds of streaming a matrix, and of unpacking it."""

    def call_time(self, weights: dict[str, int]) -> tuple[float, float, float]:
        """The milliseconds of a call, and the ends of their 90% interval, by the number of
        weights of each preset."""


@dataclass(frozen=True)
class SearchSettings:
    """How the presets of a mixed export are chosen.

    Args:
        text: token ids on which choices are measured; weights are calibrated with
            another text.
        limit: what the choice has to keep.
        timing: predicts the time of choices; None: no time is predicted.
        minimizes: the bytes of matrices, or the predicted milliseconds of a call.
        compared_presets: candidates beside `CANDIDATES` that are measured, each for all
            matrices, and never chosen.
        further_limits: mean KLs in nats; for each of them the cheapest choice that is
            predicted to keep it is measured, too.

    Raises:
        InputError: milliseconds to be minimized under a limit of bytes.
    """

    text: Text
    limit: Limit
    timing: TimePredictor | None = None
    minimizes: Literal["bytes", "ms"] = "bytes"
    compared_presets: tuple[str, ...] = ()
    further_limits: tuple[float, ...] = ()

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
    def chip(self) -> str | None:
        """The chip for which times are predicted."""
        return self.timing.chip if self.timing else None

    @property
    def key(self) -> list:
        """Everything that decides the choice, as JSON."""
        text = [self.text.source, self.text.sha256]
        measured = [list(self.compared_presets), list(self.further_limits)]
        return [*text, asdict(self.limit), self.minimizes, self.chip, *measured]

    @property
    def uniform_candidates(self) -> tuple[str, ...]:
        """The candidates that are measured for all matrices at once: those that the search
        chooses from, and those that are only compared."""
        return tuple(dict.fromkeys((*CANDIDATES, *self.compared_presets)))


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
        uniform: the measured choices of one candidate for all matrices.
        costs: of every matrix in every candidate, rescaled.
    """

    limit: Limit
    minimizes: str
    chip: str | None
    chosen: Choice
    exported: Quality | None
    frontier: tuple[Choice, ...]
    uniform: tuple[Choice, ...]
    costs: tuple[Cost, ...]

    def save(self, folder: Path, text: Text) -> Selection:
        """Writes `allocation.json` and the ids of the text for selection to a bundle's
        folder; returns their entry in its manifest."""
        write_allocation(self, folder / ALLOCATION)
        np.save(folder / SELECTION_IDS, text.ids.astype("<i4"))
        windows, window = text.ids.shape
        return Selection(
            file=file_entries(folder, folder / SELECTION_IDS)[0],
            allocation=file_entries(folder, folder / ALLOCATION)[0],
            ids_sha256=text.sha256,
            tokens=windows * window,
            window=window,
            source=text.source,
        )


def write_allocation(allocation: Allocation, path: Path) -> None:
    """Writes an allocation as JSON. The presets of choices other than the chosen one are
    left out: they follow from the costs. A cost's candidate has the key `format`."""
    fields = asdict(allocation)
    for choice in [*fields["frontier"], *fields["uniform"]]:
        del choice["formats"]
    fields["costs"] = [
        {
            "format" if name == "candidate" else name: value
            for name, value in cost.items()
        }
        for cost in fields["costs"]
    ]
    path.write_text(json.dumps(fields), encoding="utf-8")


def read_allocation(path: Path) -> Allocation:
    """The allocation that `write_allocation` wrote; only the chosen one has presets."""
    fields = json.loads(path.read_text(encoding="utf-8"))

    def parse_quality(record: dict | None) -> Quality | None:
        return None if record is None else Quality(**record)

    def parse_choice(record: dict) -> Choice:
        # records of choices that were not chosen have no presets
        parsed = {"formats": {}} | record
        parsed["quality"] = parse_quality(record["quality"])
        return Choice(**parsed)

    def parse_cost(record: dict) -> Cost:
        parsed = record | {"prices": tuple(record["prices"])}
        return Cost(candidate=parsed.pop("format"), **parsed)

    return Allocation(
        limit=Limit(**fields["limit"]),
        minimizes=fields["minimizes"],
        chip=fields["chip"],
        chosen=parse_choice(fields["chosen"]),
        exported=parse_quality(fields["exported"]),
        frontier=tuple(map(parse_choice, fields["frontier"])),
        uniform=tuple(map(parse_choice, fields["uniform"])),
        costs=tuple(map(parse_cost, fields["costs"])),
    )


def measure_and_choose(
    model: ReplaceableModel,
    shapes: Mapping[str, tuple[int, int]],
    presets: CandidatePresets,
    candidates: CandidateValues,
    settings: SearchSettings,
    seed: int = 0,
) -> Allocation:
    """Chooses a preset for every matrix on Hugging Face's model with stored candidates.

    Args:
        shapes: tensor → [rows, inputs].
        presets: of all candidates, also of those that are only compared.
        seed: of the estimates' draws.

    Raises:
        InputError: no choice keeps the limit.
    """
    losses = estimate_losses(model, _presets_of_tensors(presets), candidates, seed)
    costs = _matrix_costs(shapes, presets, losses, settings)
    stage("export: measuring choices of formats")
    measurement = _Measurement(model, shapes, candidates, settings)
    try:
        uniform = [
            measurement.run(uniform_choice(costs, name))
            for name in settings.uniform_candidates
        ]
        costs = rescale(costs, {c.name: c.quality.kl for c in uniform})
        choices = frontier([cost for cost in costs if cost.candidate in CANDIDATES])
        result = find_cheapest(choices, settings.limit, measurement.run)
        measured = list(result.measured)
        ratio = kl_ratio([*measured, result.chosen])
        for kl in settings.further_limits:
            within = (c for c in choices if ratio * c.predicted_kl <= kl)
            measured.append(measurement.run(next(within, choices[-1])))
    finally:
        measurement.progress.close()
    return Allocation(
        limit=settings.limit,
        minimizes=settings.minimizes,
        chip=settings.chip,
        chosen=result.chosen,
        exported=None,
        frontier=tuple(
            _describe_frontier(choices, [*uniform, *measured], shapes, settings)
        ),
        uniform=tuple(uniform),
        costs=tuple(costs),
    )


@dataclass
class _Measurement:
    """Measures choices one after another on one model, in which only those matrices are
    replaced whose presets differ from those of the choice before.

    Args:
        shapes: tensor → [rows, inputs].
        current: tensor → the name of the preset whose values the model has now; a tensor
            that is missing is unchanged.
        progress: a bar that counts choices.
    """

    model: ReplaceableModel
    shapes: Mapping[str, tuple[int, int]]
    candidates: CandidateValues
    settings: SearchSettings
    current: dict[str, str] = field(default_factory=dict)
    progress: Any = field(
        default_factory=lambda: bar(desc="measuring", unit="choice", leave=False)
    )

    def run(self, choice: Choice) -> Choice:
        """Measures a choice; returns it with its quality and its predicted time."""
        for tensor, preset in choice.formats.items():
            if self.current.get(tensor) != preset:
                values = self.candidates.load(tensor, preset)
                self.model.replace_matrix(tensor, values)
                self.current[tensor] = preset
        quality = self.model.quality()
        self.progress.update()
        self.progress.set_postfix_str(f"{choice.bits:.2f} bits: KL {quality.kl:.3g}")
        return _with_time(replace(choice, quality=quality), self.shapes, self.settings)


def _describe_frontier(
    choices: Iterable[Choice],
    measured: Iterable[Choice],
    shapes: Mapping[str, tuple[int, int]],
    settings: SearchSettings,
) -> list[Choice]:
    """The choices of a frontier with their predicted times; those that were measured also
    have their qualities."""
    measured_by_formats = {tuple(c.formats.items()): c for c in measured}
    described = []
    for choice in choices:
        measured_choice = measured_by_formats.get(tuple(choice.formats.items()))
        described.append(measured_choice or _with_time(choice, shapes, settings))
    return described


def _presets_of_tensors(presets: CandidatePresets) -> dict[str, Sequence[Preset]]:
    """Tensor → the presets of its candidates. Two candidates may have the same preset."""
    return {tensor: list(of_tensor.values()) for tensor, of_tensor in presets.items()}


def _matrix_costs(
    shapes: Mapping[str, tuple[int, int]],
    presets: CandidatePresets,
    losses: Mapping[tuple[str, str], float],
    settings: SearchSettings,
) -> list[Cost]:
    """The costs of every matrix in every candidate, see `measure_and_choose`.

    Args:
        losses: (tensor, preset) → nats per token.
    """
    costs = []
    for tensor, (rows, inputs) in shapes.items():
        for candidate, preset in presets[tensor].items():
            size = matrix_bytes(rows, inputs, preset)
            if settings.minimizes == "ms":
                prices = settings.timing.matrix_time(rows * inputs, preset)
            else:
                prices = (float(size),)
            cost = Cost(
                tensor=tensor,
                candidate=candidate,
                preset=preset.name,
                weights=rows * inputs,
                bytes=size,
                prices=prices,
                loss=losses[tensor, preset.name],
            )
            costs.append(cost)
    return costs


def _with_time(
    choice: Choice, shapes: Mapping[str, tuple[int, int]], settings: SearchSettings
) -> Choice:
    """A choice with its predicted milliseconds, where the search predicts any."""
    if settings.timing is None:
        return choice
    weights = Counter()
    for tensor, preset in choice.formats.items():
        weights[preset] += math.prod(shapes[tensor])
    ms, low_ms, high_ms = settings.timing.call_time(dict(weights))
    return replace(choice, ms=ms, low_ms=low_ms, high_ms=high_ms)


@dataclass(frozen=True)
class MixedExport:
    """The chosen presets of an export, and its compressed matrices."""

    allocation: Allocation
    matrices: CompressedMatrices


def choose_and_compress(
    checkpoint: Checkpoint,
    plan: Plan,
    options: Options,
    calibration: Text,
    settings: SearchSettings,
    folder: Path,
) -> MixedExport:
    """Chooses a preset for every matrix of an export and compresses the matrices.

    Args:
        calibration: token ids that matrices are compressed for.
        folder: a work folder, which needs two bytes for each weight and candidate.

    Raises:
        InputError: a matrix that is no linear layer of Hugging Face's model, no choice
            that keeps the limit, no space on the disk.
    """
    presets = _candidate_presets(checkpoint, plan, options, settings.uniform_candidates)
    hf_model = load_model(checkpoint)
    modules = linear_modules(hf_model, checkpoint, presets)
    shapes = {
        tensor: tuple(hf_model.get_submodule(name).weight.shape)
        for tensor, name in modules.items()
    }
    work = folder / "candidates"
    prepare_work_folder(work, _candidates_key(checkpoint, calibration, presets))
    candidates = CandidateValues(work)
    missing_bytes = _missing_bytes(shapes, presets, candidates)
    check_free_space(work, missing_bytes, "values of all formats")
    ids = torch.from_numpy(calibration.ids).long()
    store_candidates(hf_model, modules, ids, _presets_of_tensors(presets), candidates)
    model = ReplaceableModel.from_unchanged(
        hf_model, modules, torch.from_numpy(settings.text.ids).long()
    )
    allocation = measure_and_choose(
        model, shapes, presets, candidates, settings, seed=calibration.seed
    )
    return _compress_within_limit(
        allocation, model, checkpoint, plan, options, calibration, folder
    )


def _candidate_presets(
    checkpoint: Checkpoint, plan: Plan, options: Options, names: Iterable[str]
) -> dict[str, dict[str, Preset]]:
    """The preset of every matrix of an export in each candidate of `names`."""
    presets: dict[str, dict[str, Preset]] = {}
    for name in names:
        uniform_options = options.model_copy(update={"compress": name})
        for weight in all_weights(checkpoint, plan, uniform_options):
            if weight.tensor and weight.is_compressible:
                presets.setdefault(weight.tensor, {})[name] = weight.preset
    return presets


def _missing_bytes(
    shapes: Mapping[str, tuple[int, int]],
    presets: CandidatePresets,
    candidates: CandidateValues,
) -> int:
    """The bytes of the fp16 values that candidates still lack: an interrupted search has
    left some. See `measure_and_choose` for the arguments."""
    missing_values = 0
    for tensor, preset_of_candidate in presets.items():
        # two candidates may be one preset once their groups divide the rows
        for name in {preset.name for preset in preset_of_candidate.values()}:
            if not candidates.path(tensor, name).is_file():
                missing_values += math.prod(shapes[tensor])
    return 2 * missing_values


def _candidates_key(
    checkpoint: Checkpoint, calibration: Text, presets: CandidatePresets
) -> dict[str, Any]:
    """Everything that decides the values of candidates, as JSON."""
    names = {
        tensor: [preset.name for preset in of_tensor.values()]
        for tensor, of_tensor in presets.items()
    }
    return {
        "code": code_version(),
        "checkpoint": checkpoint.sha256,
        "ids": calibration.sha256,
        "presets": names,
    }


def _compress_within_limit(
    allocation: Allocation,
    model: ReplaceableModel,
    checkpoint: Checkpoint,
    plan: Plan,
    options: Options,
    calibration: Text,
    folder: Path,
) -> MixedExport:
    """Compresses the matrices in the chosen presets, as the export stores them, and measures
    the model with these values; tries costlier choices until the limit holds.

    Raises:
        InputError: the limit does not hold for the costliest choice, or
            `MAX_COMPRESSED_CHOICES` choices do not keep it.
    """
    chosen, limit = allocation.chosen, allocation.limit.kl
    for _ in range(MAX_COMPRESSED_CHOICES):
        weights = all_weights(checkpoint, plan, options, find_presets(chosen.formats))
        digest = hashlib.sha256(json.dumps(chosen.formats).encode()).hexdigest()
        matrices = calibrate(checkpoint, weights, calibration, folder / digest[:16])
        quality = _stored_quality(model, weights, matrices, checkpoint)
        if limit is None or quality.kl <= limit:
            allocation = replace(allocation, chosen=chosen, exported=quality)
            return MixedExport(allocation, matrices)
        last = chosen
        chosen = next_choice(allocation.frontier, last, quality.kl, limit)
        if chosen is None:
            break
    raise InputError(
        "--max-kl",
        f"{limit:g}",
        f"at least {quality.kl:.3g}, the mean KL of the values that {last.bits:.2f} bits "
        "per weight store",
        "give a larger limit",
    )


def _stored_quality(
    model: ReplaceableModel,
    weights: Iterable[WeightSource],
    matrices: CompressedMatrices,
    checkpoint: Checkpoint,
) -> Quality:
    """The quality of Hugging Face's model with the values that an export stores."""
    slices: dict[str, list[torch.Tensor]] = {}  # a large head is stored in several
    for weight in weights:
        if not weight.tensor or not weight.is_compressible:
            continue
        shape = weight.shape[:2]
        if weight.preset == FP16:
            values = load_values(weight, checkpoint).reshape(shape)
        else:
            values = decompress(matrices.load(weight), weight.preset, shape)
        slices.setdefault(weight.tensor, []).append(values)
    for tensor, values in slices.items():
        model.replace_matrix(tensor, torch.cat(values).float())
    return model.quality()
