"""The part of gate `weights` for matrices whose values were fitted to a calibration text.

Letters: v is a row of a matrix in the checkpoint, Δ the change of it that a bundle
stores, x an input of the matrix, H = E[x xᵀ].

**Figures.** Fitted values are not the nearest ones: error feedback (GPTQ, arXiv
2210.17323) moves the rounding error of one input onto others, and so lowers the error
Δ H Δᵀ that the change adds to the row's output. Figures of a whole tensor would hide one
faulty row, so that every row is judged by four figures:

    error   Δ H Δᵀ of the stored row, over Δ H Δᵀ of the nearest values that the same
            tables or scales can express
    slope   the factor by which the row is scaled: the regression of the stored row onto
            the checkpoint's, in standard deviations
    loss    what 16 neighbouring inputs lost of what they add to the row: the regression
            of the missing values on the nearest ones, in standard deviations
    levels  the error of the nearest values over that of an even grid. It shows a poor
            table or scale, which the other figures do not: it is poor for the nearest
            values, too

A matrix is also judged by the median of its rows' errors. A fit to the inputs of another
layer raises that median above the one of nearest values, 1.

**H.** The gate computes H without the exporter's code. Hugging Face's layers run one
after the other over the token ids that the bundle keeps, with the stored matrices, and
x xᵀ is summed over the inputs of each linear module. An exporter may have fitted o_proj
and down_proj while the other matrices of their layer had the checkpoint's values. A
matrix that exceeds a limit is therefore judged again by its inputs in a layer with these
values, and is sound if it keeps the limits in one of the two cases. Memory holds one
layer, the H of its inputs, and one slice of the head.

No text excites every direction, so that H is damped: its diagonal is raised by the
sampling error of an ordinary input, the median |x|² over the number of inputs. The mean
|x|² would be too much: one attention sink can be so long that a hundredth of the mean is
more than all other inputs, which the damped H would then hide.

**Slope.** With H = U Uᵀ (U upper triangular), error feedback in the order of the inputs
makes the elements i of Δ U independent, each a rounding error times U_ii. The usual order
is the one of falling E[x²]. The best linear unbiased estimate of a factor c in Δ = c v is
then the weighted least squares of (Δ U)_i / U_ii on (v U)_i / U_ii, the inverse variances
being the weights (`_regress`):

    c = Σ w_i s_i e_i / Σ w_i s_i²,  s_i = (v U)_i / U_ii,  e_i = (Δ U)_i / U_ii

The variances are measured over the rows: an exporter may improve entries and indices
after the feedback, or use another order or damping, and all rows of a matrix show that
alike. Nearest values pull large weights toward the middle of a table, and error feedback
keeps this pull. It is computed from the nearest values and subtracted. Weights that are
stored as the last entry of a table or as the largest integer are left out of slope and
loss, since error feedback may ask for more than these by any amount.

**Small faults.** A significant factor may be small: the inputs of an attention sink
determine the slope of a row to a thousandth. A row is therefore RED for its slope only if
it is scaled by 2.5% at 4 bits and 1% above (`LEAST_SCALE`), and for a loss only if a block
lost three quarters of its values (`LOST`) and the loss is a hundredth of the row's error
(`LEAST_SHARE`). A scaled row also scales its output: the plain regression of v + Δ on v
with H as weights must show such a factor, too. It shows none where a table that a row
shares with smaller rows draws the weights of inputs that matter little to its middle. The
slope is not judged of a row that is so small beside the rows of its table that the
nearest values lose a large part of it (`LARGEST_ROUNDING`).

A row × 1.05 at 4 bits is therefore RED only where the row is long and the calibration text
has enough tokens. Its slope must differ from 1 by `SLOPE_LIMIT`, 10 standard deviations.
In random matrices of 576 columns it does so by 13 to 15 with 4,096 tokens, by 9 to 11 with
1,024 and by 7 to 9 with 256; rows of 256 columns have 8 to 13 with 4,096 tokens. In
SmolLM2-135M-Instruct the figure is 4 to 50, so that not every such row is RED there."""

import hashlib
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    MutableMapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from workbench.bundle import Bundle
from workbench.check.compare import safe_ratio
from workbench.check.deviation import Deviation, worst_of
from workbench.models.checkpoint import Checkpoint
from workbench.models.layerwise import WrappedLayer, empty_model, run_base
from workbench.progress import bar

# Limits. The comments give the largest value in a sound SmolLM2-135M-Instruct at 4 bits,
# and the values with a fault in its layers 0, 2, 11 and 29.
#
# Of a row's error, 1 + ROW_ERROR_SPREAD / √C for C inputs: two errors of equal size are
# sums of C squares, and four standard deviations of their ratio are about 8 / √C.
ROW_ERROR_SPREAD = 8.0  # sound 1.12, the table of another group 1 to 300
MEDIAN_ERROR_LIMIT = 1.05  # sound 0.70, the inputs of another layer 1.1 to 1.8
SLOPE_LIMIT = 10.0  # sound 8.7, a row × 1.05 4 to 50, × 1.02 at 6 bits 10 to 68
LOSS_LIMIT = 6.0  # sound 0, sixteen inputs that are zero 5 to 18
LEVELS_LIMIT = 1.5  # sound 1.03
# Bits of a weight → the least |factor − 1| that counts as a scaled row
LEAST_SCALE = {4: 0.025, 6: 0.01, 8: 0.01}
# Largest |rounding of a row| / |row| with which its slope is judged; 0.1 is usual
LARGEST_ROUNDING = 0.3
BLOCK = 16  # neighbouring inputs, whose loss is judged
LOST = 0.75  # least share of a block's values that counts as a loss
LEAST_SHARE = 0.01  # least share of a row's error that a loss has to cause
LEAST_DAMPING = 1e-5  # in parts of the mean of H's diagonal
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


# A tensor's name in the checkpoint → its slices, shard after shard, and in a package of
# several functions the copies of each.
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
    """What H is computed from.

    Attributes:
        total: the sum of x xᵀ over inputs x, [C, C] float64.
        squares: |x|² of every input, [n] float64.
    """

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
    pieces = -(-count // ROWS)  # rounded up
    size = -(-groups // pieces) * rows.group
    figures = [
        _piece_figures(rows.piece(start, start + size), inputs)
        for start in range(0, count, size)
    ]
    return RowFigures(
        error=np.concatenate([of_piece.error for of_piece in figures]),
        slope=np.concatenate([of_piece.slope for of_piece in figures]),
        loss=np.concatenate([of_piece.loss for of_piece in figures]),
        levels=np.concatenate([of_piece.levels for of_piece in figures]),
    )


@dataclass(frozen=True)
class _FactoredRows:
    """Rows of a matrix, and their products with the factor U of their inputs; all
    [R, C] float32.

    Attributes:
        values: v of every row, inputs in their own order.
        change: Δ of the stored values.
        rounding: Δ of the nearest values.
        values_u, change_u, rounding_u: these times U, inputs in the order of U. The
            squared length of a row of Δ U is Δ H Δᵀ.
    """

    values: torch.Tensor
    change: torch.Tensor
    rounding: torch.Tensor
    values_u: torch.Tensor
    change_u: torch.Tensor
    rounding_u: torch.Tensor

    @classmethod
    def of(cls, rows: FittedRows, inputs: InputWeights) -> "_FactoredRows":
        values, order, factor = rows.values, inputs.order, inputs.factor
        change, rounding = rows.stored - values, rows.nearest - values
        return cls(
            values=values,
            change=change,
            rounding=rounding,
            values_u=values[:, order] @ factor,
            change_u=change[:, order] @ factor,
            rounding_u=rounding[:, order] @ factor,
        )


def _piece_figures(rows: FittedRows, inputs: InputWeights) -> RowFigures:
    """The figures of rows that are compared with each other; see `row_figures`."""
    factored = _FactoredRows.of(rows, inputs)
    output_power = _squared_length(factored.values_u)  # v H vᵀ, [R]
    error = _squared_length(factored.change_u)
    # float32 products know Δ H Δᵀ to a small share of v H vᵀ
    nearest_error = _squared_length(factored.rounding_u) + 1e-12 * output_power
    return RowFigures(
        error=safe_ratio(error.numpy(), nearest_error.numpy()),
        slope=_slopes(rows, factored, inputs, output_power).numpy(),
        loss=_largest_losses(rows, inputs, error).numpy(),
        levels=_levels(rows, factored.rounding, inputs),
    )


def _slopes(
    rows: FittedRows,
    factored: _FactoredRows,
    inputs: InputWeights,
    output_power: torch.Tensor,
) -> torch.Tensor:
    """`RowFigures.slope` [R] float64; 0 for rows that are not scaled by enough to count.

    Args:
        output_power: v H vᵀ [R] float64.
    """
    is_free = ~rows.clipped
    diagonal = inputs.factor.diagonal()
    factors, deviations = _regress(
        factored.values_u / diagonal * is_free[:, inputs.order],
        factored.change_u / diagonal * is_free[:, inputs.order],
        (factored.rounding * is_free)[:, inputs.order],
        factored.rounding.square().mean(1, keepdim=True) + 1e-20,
    )
    # the same factor of the row's output, where weights of small inputs count little
    output_products = (factored.values_u * factored.change_u).double().sum(1)
    output_factors = output_products / (output_power + 1e-30)
    least = LEAST_SCALE[rows.bits]
    is_scaled = (factors.abs() >= least) & (output_factors * factors.sign() >= least)
    # a table cannot express a row that is small beside its others
    largest = LARGEST_ROUNDING**2 * _squared_length(factored.values)
    is_scaled &= _squared_length(factored.rounding) <= largest
    return torch.where(is_scaled, factors / deviations, 0).double()


def _largest_losses(
    rows: FittedRows, inputs: InputWeights, error: torch.Tensor
) -> torch.Tensor:
    """`RowFigures.loss` [R] float64; 0 for rows of whose error no lost block causes
    enough to count.

    Args:
        error: Δ H Δᵀ [R] float64.
    """
    is_free = ~rows.clipped
    # of an error that is uniform within half a step
    variance = rows.step.square() / 12 + 1e-20
    stored = rows.stored * is_free
    # a block whose nearest values are zeros cannot lose them
    statistics = torch.minimum(
        _loss_statistics(rows.nearest * is_free, stored, variance),
        _loss_statistics(rows.values * is_free, stored, variance),
    )
    # the errors [R, blocks] that the loss of each block would cause
    nearest_power = (rows.nearest * is_free).double().square()
    errors_if_lost = _block_sums(inputs.power * nearest_power)
    statistics *= errors_if_lost >= LEAST_SHARE * error[:, None]
    return statistics.amax(1).double()


def _levels(
    rows: FittedRows, rounding: torch.Tensor, inputs: InputWeights
) -> np.ndarray:
    """`RowFigures.levels` [R] float64.

    Args:
        rounding: Δ of the nearest values [R, C].
    """
    even = rows.even - rows.values
    squares = torch.stack([rounding.square(), even.square()])
    nearest_error, even_error = _group_sums(squares.double() @ inputs.power, rows.group)
    return safe_ratio(nearest_error.numpy(), even_error.numpy())


def _squared_length(x: torch.Tensor) -> torch.Tensor:
    """The squared length [R] float64 of every row of `x` [R, C]."""
    return x.double().square().sum(1)


def _group_sums(values: torch.Tensor, group: int) -> torch.Tensor:
    """`values` [2, R] with every element replaced by the sum of its group of rows."""
    sums = values.reshape(2, -1, group).sum(2)
    return sums.repeat_interleave(group, 1)


def _column_variance(changes: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """The mean square [C] over the rows of `changes` [R, C], in parts of `variance`, [R, 1]
    or [R, C]."""
    return (changes.square() / variance).mean(0)


def _regress(
    signal: torch.Tensor,
    errors: torch.Tensor,
    rounding: torch.Tensor,
    variance: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted least squares of `errors` on `signal`, row by row: the factor [R], less the
    part of it that `rounding`, the errors of the nearest values, has; and the factor's
    standard deviation [R].

    Args:
        signal, errors, rounding: [R, C].
        variance: of a row's rounding, [R, 1]. The weight of a column is the inverse of
            the variance that `errors` have in it over the rows, in parts of `variance`.
    """
    column_variance = _column_variance(errors, variance).clamp(min=1e-6)
    weights = 1 / (column_variance * variance)
    power = (weights * signal.square()).sum(1)
    factor = (weights * signal * errors).sum(1) / power
    residual = (weights * (errors - factor[:, None] * signal).square()).mean(1)
    rounding_factor = (weights * signal * rounding).sum(1) / power
    # float32 products know a factor to this
    deviation = (residual / power).sqrt() + 1e-6
    return (factor - rounding_factor).nan_to_num(), deviation.nan_to_num(1)


def _loss_statistics(
    expected: torch.Tensor, stored: torch.Tensor, variance: torch.Tensor
) -> torch.Tensor:
    """The t statistics [R, blocks] of a loss of `BLOCK` neighbouring inputs: weighted least
    squares of what is missing from `stored` on what is `expected`, both [R, C], without a
    constant; 0 where the factor is below `LOST`.

    Args:
        variance: of the rounding of a weight [R, C]. The changes of a column may be
            larger than that in all rows, since error feedback uses some inputs more
            than others.
    """
    missing = expected - stored
    column_variance = _column_variance(missing, variance).clamp(min=1)
    weights = 1 / (column_variance * variance)
    # the sums of squares and products of the regression, for each block
    expected_squares = _block_sums(weights * expected.square()).clamp(min=1e-20)
    products = _block_sums(weights * expected * missing)
    missing_squares = _block_sums(weights * missing.square())
    residual_variance = (missing_squares - products.square() / expected_squares) / BLOCK
    # where feedback moves the weights of a row by many steps, much of a block is chance
    row_variance = (missing_squares / BLOCK).median(1, keepdim=True).values
    deviation = torch.maximum(residual_variance, row_variance).clamp(min=1).sqrt()
    t = products / (expected_squares.sqrt() * deviation)
    return torch.where(products >= LOST * expected_squares, t, 0)


def _block_sums(values: torch.Tensor) -> torch.Tensor:
    """Sums [R, blocks] of `BLOCK` columns each of `values` [R, C], the last of fewer."""
    missing = -values.shape[1] % BLOCK
    padded = nn.functional.pad(values, (0, missing))
    return padded.reshape(len(values), -1, BLOCK).sum(2)


def matrix_deviations(rows: list[FittedRows], inputs: InputWeights) -> list[Deviation]:
    """The worst row of each slice in each figure, and the median error, of a matrix with
    these `inputs`; `rows` are its slices."""
    deviations = []
    slice_figures = [row_figures(part, inputs) for part in rows]
    errors = np.concatenate([figures.error for figures in slice_figures])
    median = float(np.median(errors))
    row_error_limit = 1 + ROW_ERROR_SPREAD / rows[0].values.shape[1] ** 0.5
    for part, figures in zip(rows, slice_figures):
        judged = [
            (figures.error, row_error_limit, "times the error of nearest values"),
            (np.abs(figures.slope), SLOPE_LIMIT, "deviations from a slope of 1"),
            (figures.loss, LOSS_LIMIT, f"deviations from no loss of {BLOCK} inputs"),
            (figures.levels, LEVELS_LIMIT, "times the error of an even grid"),
        ]
        for values, limit, unit in judged:
            row = int(np.argmax(np.nan_to_num(values, nan=np.inf)))
            place = f"{part.place}, row {part.first + row}"
            deviation = Deviation.at(place, float(values[row]), limit, unit)
            deviations.append(deviation)
    reason = (
        f"{rows[0].place}: a median of {median:.4g} times the error of nearest values"
    )
    return [*deviations, Deviation(median, MEDIAN_ERROR_LIMIT, reason)]


def judge_by_moments(
    fitted: dict[str, list[FittedRows]], moments: dict[str, list[Moment]]
) -> dict[str, list[Deviation]]:
    """The deviations of matrices by their names.

    Args:
        fitted: a matrix's name → its slices.
        moments: the name → the moments of its inputs, one for each call; matrices that
            read the same inputs have the same objects.
    """
    inputs: dict[tuple[int, ...], InputWeights] = {}
    results = {}
    for name, calls in moments.items():
        key = tuple(id(moment) for moment in calls)
        if key not in inputs:
            inputs[key] = InputWeights.of(calls)
        results[name] = matrix_deviations(fitted[name], inputs[key])
    return results


def worst_ratio(deviations: list[Deviation]) -> float:
    """The largest ratio to a limit."""
    return worst_of(deviations).ratio_to_limit


@contextmanager
def recorded_moments(
    modules: dict[str, nn.Module],
) -> Iterator[dict[str, list[Moment]]]:
    """Yields the moments of what modules read, by the modules' names, one for each call;
    modules that read the same tensor have the same object. They are filled in while the
    modules run."""
    moments: dict[str, list[Moment]] = {}
    # The tensor is kept: another one at the address of a freed one would be taken for it.
    last_input: torch.Tensor | None = None
    last_moment: Moment | None = None

    def record(name: str, module: nn.Module, arguments: tuple) -> None:
        nonlocal last_input, last_moment
        if arguments[0] is not last_input:
            last_input = arguments[0]
            last_moment = Moment.of(last_input)
        moments.setdefault(name, []).append(last_moment)

    with ExitStack() as hooks:
        for name, module in modules.items():
            hook = partial(record, name)
            hooks.enter_context(module.register_forward_pre_hook(hook))
        yield moments


@dataclass(frozen=True)
class Judgement:
    """What `JudgedLayer`s share: what they read, and `results`, which they fill in.

    Attributes:
        tensors: names of the matrices to judge.
        read_rows: reads a matrix as it is stored.
        results: deviations of the matrices that were judged, by their names.
        progress: a bar that counts layers.
    """

    checkpoint: Checkpoint
    tensors: set[str]
    read_rows: ReadRows
    results: dict[str, list[Deviation]]
    progress: Any


class JudgedLayer(WrappedLayer):
    """A decoder layer that runs on its stored matrices and judges them by their
    inputs."""

    def __init__(self, layer: nn.Module, prefix: str, judgement: Judgement):
        super().__init__(layer)
        self.prefix = prefix
        self.judgement = judgement

    def forward(self, *args, **kwargs):
        linear = {
            f"{name}.weight": module
            for name, module in self.layer.named_modules()
            if isinstance(module, nn.Linear)
        }
        stored, values = self._read_weights(linear)
        with recorded_moments({name: linear[name] for name in stored}) as moments:
            output = functional_call(self.layer, values, args, kwargs)
        results = judge_by_moments(stored, moments)
        doubtful = [name for name, result in results.items() if worst_ratio(result) > 1]
        if doubtful:
            for name in stored:
                values[name] = checkpoint_matrix(stored[name])
            with recorded_moments({name: linear[name] for name in doubtful}) as moments:
                functional_call(self.layer, values, args, _with_copied_caches(kwargs))
            for name, result in judge_by_moments(stored, moments).items():
                results[name] = min(results[name], result, key=worst_ratio)
        for name, result in results.items():
            self.judgement.results[self.prefix + name] = result
        self.judgement.progress.update()
        return output

    def _read_weights(
        self, linear: Collection[str]
    ) -> tuple[dict[str, list[FittedRows]], dict[str, torch.Tensor]]:
        """Parameter → slices, of the matrices to judge; and parameter → values float32, of
        all parameters of the layer, those matrices as they are stored.

        Args:
            linear: names of the parameters that are weights of linear modules.
        """
        judgement = self.judgement
        stored, values = {}, {}
        for name in self.layer.state_dict():
            tensor = self.prefix + name
            if tensor in judgement.tensors and name in linear:
                stored[name] = [*judgement.read_rows(tensor)]
                values[name] = stored_matrix(stored[name])
            else:
                values[name] = judgement.checkpoint.tensor(tensor).half().float()
        return stored, values


def _with_copied_caches(arguments: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a layer with shallow copies of its dictionaries. A layer
    may put K and V rows in one for later layers, which are to have those of the run with
    the stored matrices."""
    return {
        name: copy(value) if isinstance(value, MutableMapping) else value
        for name, value in arguments.items()
    }


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
        self.judgement.results[self.tensor] = matrix_deviations(rows, inputs)
        self.judgement.progress.update()
        return nn.functional.linear(x, stored_matrix(rows))


def stored_matrix(parts: Sequence[FittedRows]) -> torch.Tensor:
    """The matrix [R, C] that slices of it store."""
    return _join_rows((part.first, part.stored) for part in parts)


def checkpoint_matrix(parts: Sequence[FittedRows]) -> torch.Tensor:
    """The matrix [R, C] of the checkpoint, rounded to fp16, whose slices are stored."""
    return _join_rows((part.first, part.values) for part in parts)


def _join_rows(slices: Iterable[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """One matrix of (number of the first row, rows). Every function of a package stores
    all rows; one copy of them is taken."""
    by_first_row = dict(slices)
    return torch.cat([by_first_row[first] for first in sorted(by_first_row)])


def calibration_ids(bundle: Bundle) -> np.ndarray:
    """The token ids [windows, window] of the text that a bundle's values were fitted to.

    Raises:
        ValueError: ids that are not the manifest's, or not in the vocabulary.
    """
    record, V = bundle.manifest.calibration, bundle.manifest.dims.V
    ids = bundle.calibration_ids
    is_shape = ids.ndim == 2 and ids.shape[1] == record.window
    if ids.dtype.kind not in "iu" or not is_shape or ids.size != record.tokens:
        raise ValueError(
            f"calibration: token ids {ids.dtype} {[*ids.shape]}, not the "
            f"{record.tokens} integers of the manifest in windows of {record.window}"
        )
    digest = hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
    if digest != record.ids_sha256:
        raise ValueError(
            "calibration: token ids of another SHA-256 than the manifest's"
        )
    if ids.min() < 0 or ids.max() >= V:
        raise ValueError(
            f"calibration: token ids from {ids.min()} to {ids.max()}, not all in the "
            f"vocabulary of {V}"
        )
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
) -> dict[str, list[Deviation]]:
    """Deviations of matrices that were fitted to the bundle's calibration text, by their
    names. A matrix that no linear module read in the run is left out.

    Args:
        tensors: names of the matrices.
        read_rows: see `ReadRows`.
    """
    ids = calibration_ids(bundle)
    base = empty_model(checkpoint.config, "sdpa").model
    results: dict[str, list[Deviation]] = {}
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
                results[checkpoint.head] += matrix_deviations([part], inputs)
        shown.update()
    return results
