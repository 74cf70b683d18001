"""The part of gate `weights` for matrices whose values were fitted to a calibration text.

Such values are not the nearest ones: error feedback (GPTQ, arXiv 2210.17323) moves the
rounding error of one input onto others. It lowers the error Δ H Δᵀ that the change Δ of
a row adds to the row's output, where H = E[x xᵀ] of the inputs x. A faulty row
disappears in the figures of its tensor, so that every row is judged by four figures:

    error   Δ H Δᵀ of the stored row, over Δ H Δᵀ of the nearest values that the same
            tables or scales can express
    slope   the factor by which the row is scaled: the regression of the stored row onto
            the checkpoint's, in standard deviations
    loss    what 16 neighbouring inputs lost of what they add to the row: the regression
            of the missing values on the nearest ones, in standard deviations
    levels  the error of the nearest values over that of an even grid, so that a poor
            table or scale does not excuse itself

and every matrix by the median of its rows' errors, which a fit to another layer's inputs
raises above that of the nearest values.

H is the gate's own. Hugging Face's layers run one after the other over the token ids
that the bundle keeps, with the stored matrices, and the inputs of their linear modules
are summed. An exporter may have fitted o_proj and down_proj to the inputs that
uncompressed matrices of their own layer give. A matrix that exceeds a limit is
therefore judged by these inputs, too, and has to be sound by one of the two. Memory
holds one layer, the H of its inputs, and one slice of the head.

No text excites every direction, so that H is damped: its diagonal is raised by the
sampling error of an ordinary input, the median |x|² over the number of inputs. The mean
|x|² would not do. One attention sink can be so long that a hundredth of the mean is more
than all other inputs, and the damped H then says nothing of them.

With H = U Uᵀ (U upper triangular), error feedback in the order of the inputs makes the
elements i of Δ U independent, each a rounding error times U_ii. The usual order is the
one of falling E[x²]. The best unbiased estimate of a factor c in Δ = c v is then a
regression of (Δ U)_i / U_ii on (v U)_i / U_ii with the inverse variances as weights.
These are measured: an exporter may improve entries and indices after the feedback, or
use another order or damping, which all rows of a matrix show alike. Nearest values pull
large weights toward the middle of a table, and error feedback keeps this pull: it is
computed from the nearest values and subtracted. Weights that are stored as the last
entry of a table or the largest integer are left out of slope and loss, since error
feedback may ask for more than these by any amount.

A significant factor may be small: the row of an attention sink knows its slope to a
thousandth. Slope and loss are therefore judged only from a least size on, below which
this gate judges nothing: 2.5% for a row at 4 bits and 1% above, three quarters of a
block's values, and a loss of a hundredth of the row's error. A scaled row also scales
its output: the plain regression of v + Δ on v with H as weights must have such a
factor, too. It has none where the weights of inputs that matter little were drawn to
the middle of a table that a row shares with smaller ones. Nor is the slope of a row
judged that is so small beside the rows of its table that the nearest values lose a
large part of it."""

import hashlib
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from workbench.bundle import Bundle
from workbench.check import gates
from workbench.check.compare import safe_ratio
from workbench.check.gates import Gate
from workbench.models.checkpoint import Checkpoint
from workbench.models.layerwise import WrappedLayer, empty_model, run_base
from workbench.progress import bar

# Limits, each with the largest value in a sound SmolLM2-135M-Instruct at 4 bits, and the
# values with a fault in its layers 0, 2, 11 and 29. Two errors of equal size differ by
# chance: each is a sum of C squares, and four standard deviations of their ratio are
# about 8 / √C. The limit is 1 + 8 / √C: 1.12; another group's table has 1 to 300.
ROW_ERROR_SPREAD = 8.0
MEDIAN_ERROR_LIMIT = 1.05  # 0.70; another layer's inputs 1.1 to 1.8
SLOPE_LIMIT = 10.0  # 8.7; a row × 1.05 has 4 to 50, × 1.02 at 6 bits 10 to 68
LOSS_LIMIT = 6.0  # 0; sixteen inputs that are zero have 5 to 18
LEVELS_LIMIT = 1.5  # 1.03
# Least factor of a scaled row, less 1, by the bits of a weight
LEAST_SCALE = {4: 0.025, 6: 0.01, 8: 0.01}
LARGEST_ROUNDING = 0.3  # of a row's length, in a row whose slope is judged; usual 0.1
BLOCK = 16  # inputs
LOST = 0.75  # least share of a block's values that is a loss
LEAST_SHARE = 0.01  # least share of a row's error that a loss causes
LEAST_DAMPING = 1e-5  # of the mean of H's diagonal
ROWS = 4096  # rows that are compared at a time


@dataclass(frozen=True)
class FittedRows:
    """Rows of a matrix as one shard stores them, float32 [R, C].

    Attributes:
        place: the shard and the tensor, in messages.
        first: the number of the first row within the matrix.
        bits: of a weight.
        group: rows that share a table or a scale; divides R.
        values: the checkpoint's, rounded to fp16.
        stored: what the program multiplies by.
        nearest: the nearest values that the stored tables or scales can express.
        even: the nearest values on an even grid: with the preset's scales, or from the
            least to the largest value of a group in as many steps as its table has.
        step: the distance between the values that can be stored in the place of
            `nearest`.
        clipped: bool, where the largest or smallest entry or integer is stored. Error
            feedback may ask for more than it, by any amount.
    """

    place: str
    first: int
    bits: int
    group: int
    values: torch.Tensor
    stored: torch.Tensor
    nearest: torch.Tensor
    even: torch.Tensor
    step: torch.Tensor
    clipped: torch.Tensor

    def piece(self, start: int, stop: int) -> "FittedRows":
        """Rows from `start` to before `stop`, of whole groups."""
        rows = slice(start, stop)
        return FittedRows(
            place=self.place,
            first=self.first + start,
            bits=self.bits,
            group=self.group,
            values=self.values[rows],
            stored=self.stored[rows],
            nearest=self.nearest[rows],
            even=self.even[rows],
            step=self.step[rows],
            clipped=self.clipped[rows],
        )


# A tensor's name in the checkpoint → its rows, shard after shard.
ReadRows = Callable[[str], Iterator[FittedRows]]


@dataclass(frozen=True)
class RowFigures:
    """Figures of the rows of a matrix, float64 [R].

    Attributes:
        error: Δ H Δᵀ over that of the nearest values.
        slope: the factor of the row less 1, in standard deviations.
        loss: the largest deviation of a block of inputs from no loss, in standard
            deviations, of the blocks that lost most of what they add to the row.
        levels: the error of the nearest values over that of the nearest values on an
            even grid, each E[x²] times the squared distance, of the row's group.
    """

    error: np.ndarray
    slope: np.ndarray
    loss: np.ndarray
    levels: np.ndarray


@dataclass(frozen=True)
class Moment:
    """The sum of x xᵀ [C, C] float64 over inputs x, and the |x|² [n] of every one."""

    total: torch.Tensor
    squares: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> "Moment":
        """The moment of inputs [.., n, C], summed window by window."""
        total = torch.zeros(x.shape[-1], x.shape[-1], dtype=torch.float64)
        for window in x.reshape(-1, *x.shape[-2:]):
            total += (window.T @ window).double()
        return cls(total, x.double().square().sum(-1).flatten())


@dataclass(frozen=True)
class InputWeights:
    """How the inputs of a matrix weigh the errors of its rows.

    Attributes:
        order: the numbers [C] of the inputs by falling E[x²].
        factor: the upper triangular U [C, C] float32 with U Uᵀ = H + damping, inputs in
            `order`.
        power: E[x²] [C] float64 with damping, in the inputs' own order.
    """

    order: torch.Tensor
    factor: torch.Tensor
    power: torch.Tensor

    @classmethod
    def of(cls, moments: Sequence[Moment]) -> "InputWeights":
        """The weights of the inputs of all `moments`, of which H is the mean."""
        squares = torch.cat([moment.squares for moment in moments])
        hessian = sum(moment.total for moment in moments) / len(squares)
        power = hessian.diagonal()
        damping = float(squares.median()) / len(squares)
        # a few long inputs may have all the power, and inputs that are all zero none
        damping += LEAST_DAMPING * float(power.mean()) + 1e-30
        hessian.diagonal().add_(damping)
        order = torch.argsort(power, descending=True, stable=True)
        ordered = hessian[order][:, order]
        factor = torch.linalg.cholesky(ordered.flip(0, 1)).flip(0, 1)
        return cls(order, factor.float(), power)


def row_figures(rows: FittedRows, inputs: InputWeights) -> RowFigures:
    """The figures of `rows`, whose errors are weighed by their `inputs`."""
    count = len(rows.values)
    # equal pieces of whole groups, since columns are compared over the rows of a piece
    groups = count // rows.group
    pieces = -(-count // ROWS)
    size = -(-groups // pieces) * rows.group
    of_pieces = []
    for start in range(0, count, size):
        of_pieces.append(_piece_figures(rows.piece(start, start + size), inputs))
    return RowFigures(
        *(np.concatenate(figures) for figures in zip(*map(astuple, of_pieces)))
    )


def _piece_figures(rows: FittedRows, inputs: InputWeights) -> RowFigures:
    values, order, factor = rows.values, inputs.order, inputs.factor
    change, rounding = rows.stored - values, rows.nearest - values
    # products of the row, of its change and of its rounding with U
    signal = values[:, order] @ factor
    error = change[:, order] @ factor
    least = rounding[:, order] @ factor
    # float32 products know an error to this share of the row's output
    noise = _squared_length(signal) * 1e-12
    errors = torch.stack([_squared_length(error), _squared_length(least) + noise])
    even = rows.even - values
    levels = torch.stack([rounding.square(), even.square()]).double() @ inputs.power
    is_free = ~rows.clipped
    scales = factor.diagonal()
    factors, deviations = _regress(
        signal / scales * is_free[:, order],
        error / scales * is_free[:, order],
        (rounding * is_free)[:, order],
        rounding.square().mean(1, keepdim=True) + 1e-20,
    )
    # the factor by which the row's output is scaled
    of_outputs = (signal * error).double().sum(1) / (_squared_length(signal) + 1e-30)
    least = LEAST_SCALE[rows.bits]
    is_scaled = (factors.abs() >= least) & (of_outputs * factors.sign() >= least)
    # a row that is small beside those of its table is not expressed by it
    lost = _squared_length(rounding)
    is_scaled &= lost <= LARGEST_ROUNDING**2 * _squared_length(values)
    slope = torch.where(is_scaled, factors / deviations, 0).double()
    variance = rows.step.square() / 12 + 1e-20
    # a block whose nearest values are zeros cannot lose them
    stored = rows.stored * is_free
    loss = torch.minimum(
        _losses(rows.nearest * is_free, stored, variance),
        _losses(values * is_free, stored, variance),
    )
    # errors that the lost blocks would cause
    powers = _block_sums(inputs.power * (rows.nearest * is_free).double().square())
    loss *= powers >= LEAST_SHARE * errors[0][:, None]
    return RowFigures(
        error=_ratio(errors),
        slope=slope.numpy(),
        loss=loss.amax(1).double().numpy(),
        levels=_ratio(_group_sums(levels, rows.group)),
    )


def _squared_length(x: torch.Tensor) -> torch.Tensor:
    """The squared length [R] float64 of every row of `x` [R, C]."""
    return x.double().square().sum(1)


def _group_sums(values: torch.Tensor, group: int) -> torch.Tensor:
    """`values` [2, R] with every element replaced by the sum of its group of rows."""
    sums = values.reshape(2, -1, group).sum(2)
    return sums.repeat_interleave(group, 1)


def _ratio(errors: torch.Tensor) -> np.ndarray:
    """The first row of `errors` [2, R] over the second."""
    return safe_ratio(errors[0].numpy(), errors[1].numpy())


def _column_variance(changes: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """The mean square [C] over the rows of `changes` [R, C], in parts of `variance`."""
    return (changes.square() / variance).mean(0)


def _regress(
    signal: torch.Tensor,
    errors: torch.Tensor,
    rounding: torch.Tensor,
    variance: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor [R] of the regression of `errors` on `signal`, both [R, C], less the
    part of it that `rounding`, the errors of the nearest values, has; and its standard
    deviation [R].

    Every column counts by the inverse of the variance that `errors` have in it, in
    parts of the row's rounding `variance` [R, 1], over the rows."""
    of_columns = _column_variance(errors, variance).clamp(min=1e-6)
    weights = 1 / (of_columns * variance)
    power = (weights * signal.square()).sum(1)
    factor = (weights * signal * errors).sum(1) / power
    residual = (weights * (errors - factor[:, None] * signal).square()).mean(1)
    expected = (weights * signal * rounding).sum(1) / power
    # float32 products know a factor to this
    deviation = (residual / power).sqrt() + 1e-6
    return (factor - expected).nan_to_num(), deviation.nan_to_num(1)


def _losses(
    expected: torch.Tensor, stored: torch.Tensor, variance: torch.Tensor
) -> torch.Tensor:
    """The t statistics [R, blocks] of a loss of `BLOCK` neighbouring inputs: of the
    regression of what is missing from `stored` on what is `expected`, both [R, C]; 0
    where the factor is below `LOST`.

    Args:
        variance: of the rounding of a weight [R, C]. The changes of a column may be
            larger than that in all rows, since error feedback uses some inputs more
            than others.
    """
    missing = expected - stored
    of_columns = _column_variance(missing, variance).clamp(min=1)
    weights = 1 / (of_columns * variance)
    power = _block_sums(weights * expected.square()).clamp(min=1e-20)
    explained = _block_sums(weights * expected * missing)
    total = _block_sums(weights * missing.square())
    # where feedback moves the weights of a row by many steps, much of a block is chance
    residual = (total - explained.square() / power) / BLOCK
    of_row = (total / BLOCK).median(1, keepdim=True).values
    deviation = torch.maximum(residual, of_row).clamp(min=1).sqrt()
    t = explained / (power.sqrt() * deviation)
    return torch.where(explained >= LOST * power, t, 0)


def _block_sums(values: torch.Tensor) -> torch.Tensor:
    """Sums of `BLOCK` columns each of `values` [R, C], the last of fewer."""
    missing = -values.shape[1] % BLOCK
    padded = nn.functional.pad(values, (0, missing))
    return padded.reshape(len(values), -1, BLOCK).sum(2)


def matrix_gates(rows: list[FittedRows], inputs: InputWeights) -> list[Gate]:
    """The worst row in each figure, and the median error, of a matrix with these
    `inputs`; `rows` are its slices."""
    results = []
    of_parts = [row_figures(part, inputs) for part in rows]
    median = float(np.median(np.concatenate([part.error for part in of_parts])))
    row_error_limit = 1 + ROW_ERROR_SPREAD / rows[0].values.shape[1] ** 0.5
    for part, figures in zip(rows, of_parts):
        judged = [
            (figures.error, row_error_limit, "times the error of nearest values"),
            (np.abs(figures.slope), SLOPE_LIMIT, "deviations from a slope of 1"),
            (figures.loss, LOSS_LIMIT, f"deviations from no loss of {BLOCK} inputs"),
            (figures.levels, LEVELS_LIMIT, "times the error of an even grid"),
        ]
        for values, limit, unit in judged:
            row = int(np.argmax(np.nan_to_num(values, nan=np.inf)))
            reason = f"{part.place}, row {part.first + row}: {values[row]:.4g} {unit}"
            results.append(gates.at_most("weights", float(values[row]), limit, reason))
    reason = (
        f"{rows[0].place}: a median of {median:.4g} times the error of nearest values"
    )
    results.append(gates.at_most("weights", median, MEDIAN_ERROR_LIMIT, reason))
    return results


def judge_inputs(
    stored: dict[str, list[FittedRows]], moments: dict[str, list[Moment]]
) -> dict[str, list[Gate]]:
    """The gates of matrices by their names; matrices of the same inputs share their
    weights."""
    weights: dict[tuple[int, ...], InputWeights] = {}
    results = {}
    for name, of_calls in moments.items():
        key = tuple(id(moment) for moment in of_calls)
        if key not in weights:
            weights[key] = InputWeights.of(of_calls)
        results[name] = matrix_gates(stored[name], weights[key])
    return results


def excess(results: list[Gate]) -> float:
    """The largest value over its limit; nan counts as inf."""
    ratios = [gate.value / gate.threshold for gate in results]
    return float(np.max(np.nan_to_num(ratios, nan=np.inf)))


@contextmanager
def recorded_moments(
    modules: dict[str, nn.Module],
) -> Iterator[dict[str, list[Moment]]]:
    """Computes the moment of what modules read in each of their calls, by the modules'
    names; modules that read one tensor share it."""
    moments: dict[str, list[Moment]] = {}
    # The last input is kept: another tensor at the address of a freed one would be taken
    # for it.
    latest: list[tuple[torch.Tensor, Moment]] = []

    def record(name: str, x: torch.Tensor) -> None:
        if not latest or latest[0][0] is not x:
            latest[:] = [(x, Moment.of(x))]
        moments.setdefault(name, []).append(latest[0][1])

    handles = []
    for name, module in modules.items():

        def hook(module, arguments, name=name):
            record(name, arguments[0])

        handles.append(module.register_forward_pre_hook(hook))
    try:
        yield moments
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Judgement:
    """What the layers of one run need and fill in.

    Attributes:
        tensors: names of the matrices to judge.
        results: gates of the matrices that were judged, by their names.
        progress: a bar that counts layers.
    """

    checkpoint: Checkpoint
    tensors: set[str]
    read_rows: ReadRows
    results: dict[str, list[Gate]]
    progress: Any


class JudgedLayer(WrappedLayer):
    """A decoder layer that runs on its stored matrices and judges them by their
    inputs."""

    def __init__(self, layer: nn.Module, prefix: str, judgement: Judgement):
        super().__init__(layer)
        self.prefix = prefix
        self.judgement = judgement

    def forward(self, *args, **kwargs):
        judgement = self.judgement
        read = judgement.checkpoint.tensor
        linear, stored, values = {}, {}, {}
        for name, module in self.layer.named_modules():
            if isinstance(module, nn.Linear):
                linear[f"{name}.weight"] = module
        for name in self.layer.state_dict():
            tensor = self.prefix + name
            if tensor in judgement.tensors and name in linear:
                stored[name] = [*judgement.read_rows(tensor)]
                values[name] = stored_matrix(stored[name])
            else:
                values[name] = read(tensor).half().float()
        modules = {name: linear[name] for name in stored}
        with recorded_moments(modules) as moments:
            output = functional_call(self.layer, values, args, kwargs)
        results = judge_inputs(stored, moments)
        doubtful = {
            name: linear[name] for name, result in results.items() if excess(result) > 1
        }
        if doubtful:
            for name in stored:
                values[name] = read(self.prefix + name).half().float()
            # later layers may read K and V rows that this one has put in a dictionary:
            # they are to have those of the stored matrices
            kwargs = {
                name: copy(value) if isinstance(value, MutableMapping) else value
                for name, value in kwargs.items()
            }
            with recorded_moments(doubtful) as moments:
                functional_call(self.layer, values, args, kwargs)
            for name, result in judge_inputs(stored, moments).items():
                results[name] = min(results[name], result, key=excess)
        for name, result in results.items():
            judgement.results[self.prefix + name] = result
        judgement.progress.update()
        return output


class JudgedLinear(nn.Module):
    """A linear module outside the layers, without a bias, that runs on its stored matrix
    and judges it by its inputs. It has no parameters."""

    def __init__(self, tensor: str, judgement: Judgement):
        super().__init__()
        self.tensor = tensor
        self.judgement = judgement

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [*self.judgement.read_rows(self.tensor)]
        inputs = InputWeights.of([Moment.of(x)])
        self.judgement.results[self.tensor] = matrix_gates(rows, inputs)
        self.judgement.progress.update()
        return nn.functional.linear(x, stored_matrix(rows))


def stored_matrix(parts: Sequence[FittedRows]) -> torch.Tensor:
    """The matrix [R, C] that slices of it store. Every function of a package stores all
    rows; one copy of them is taken."""
    slices = {part.first: part.stored for part in parts}
    return torch.cat([slices[first] for first in sorted(slices)])


def calibration_ids(bundle: Bundle) -> np.ndarray:
    """The token ids [windows, window] of the text that a bundle's values were fitted to.

    Raises:
        ValueError: ids that are not the manifest's, or not in the vocabulary.
    """
    record = bundle.manifest.calibration
    ids = bundle.calibration_ids
    digest = hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
    if digest != record.ids_sha256 or ids.shape[-1] != record.window:
        raise ValueError("calibration: token ids that are not the manifest's")
    if ids.size != record.tokens or ids.ndim != 2:
        raise ValueError("calibration: token ids that are not the manifest's")
    if ids.min() < 0 or ids.max() >= bundle.manifest.dims.V:
        raise ValueError("calibration: token ids that are not in the vocabulary")
    return ids


def fitted_tensors(checkpoint: Checkpoint) -> set[str]:
    """The checkpoint's tensors that calibration can fit: the weights of linear modules
    in and around the layers, and the head."""
    tensors = {checkpoint.head}
    base = empty_model(checkpoint.config).model
    names = [
        name
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("layers.")
    ]
    for name in [*names, *outer_linear(base)]:
        tensors.add(f"{checkpoint.prefix}{name}.weight")
    return tensors


def outer_linear(base: nn.Module) -> list[str]:
    """The names of the linear modules outside the layers that have no bias."""
    return [
        name
        for name, module in base.named_children()
        if isinstance(module, nn.Linear) and module.bias is None
    ]


@torch.inference_mode()
def judge_matrices(
    bundle: Bundle, checkpoint: Checkpoint, tensors: set[str], read_rows: ReadRows
) -> dict[str, list[Gate]]:
    """Gates of matrices that were fitted to the bundle's calibration text, by their
    names. A matrix that no linear module read in the run is left out.

    Args:
        tensors: names of the matrices.
        read_rows: reads one matrix, slice after slice.
    """
    ids = calibration_ids(bundle)
    base = empty_model(checkpoint.config, "sdpa").model
    results: dict[str, list[Gate]] = {}
    outer = [
        name
        for name in outer_linear(base)
        if f"{checkpoint.prefix}{name}.weight" in tensors
    ]
    total = len(base.layers) + len(outer) + 1
    with bar(total=total, desc="weights: inputs", unit="layer") as shown:
        judgement = Judgement(checkpoint, tensors, read_rows, results, shown)
        for name in outer:
            tensor = f"{checkpoint.prefix}{name}.weight"
            setattr(base, name, JudgedLinear(tensor, judgement))
        for index, layer in enumerate(base.layers):
            prefix = f"{checkpoint.prefix}layers.{index}."
            base.layers[index] = JudgedLayer(layer, prefix, judgement)

        def read(name: str) -> torch.Tensor:
            return checkpoint.tensor(checkpoint.prefix + name).half()

        def embed(table: str, rows: np.ndarray) -> torch.Tensor:
            return checkpoint.tensor(checkpoint.prefix + table, rows.tolist()).half()

        hidden = run_base(base, ids, embed, read, use_cache=False)
        if checkpoint.head in tensors:
            inputs = InputWeights.of([Moment.of(hidden)])
            results[checkpoint.head] = []
            for part in read_rows(checkpoint.head):
                results[checkpoint.head] += matrix_gates([part], inputs)
        shown.update()
    return results
