"""Four figures of every row of a matrix whose values were fitted to a calibration text,
and their limits. `calibrated` computes the inputs that they need.

Letters: v is a row of C weights in the checkpoint, Δ the change of it that a bundle
stores, x an input of the matrix, H = E[x xᵀ]. U is upper triangular with U Uᵀ = H. Δ adds
the error Δ H Δᵀ to the row's output, the squared length of Δ U. c is the relative change
of a row that is scaled as a whole: Δ = c v, so that the slope of v + Δ on v is 1 + c.

Fitted values are not the nearest ones: error feedback (GPTQ, arXiv 2210.17323) moves the
rounding error of one input onto others, and so lowers Δ H Δᵀ. Figures of a whole tensor
would hide one faulty row, so that every row is judged by itself:

    error_ratio  Δ H Δᵀ of the stored row, over Δ H Δᵀ of the nearest values that the
                 same tables or scales can express
    slope        how far the slope of v + Δ on v is from 1 (`_slope_deviations`)
    loss         what `BLOCK` neighbouring inputs lost of what they add to the row
                 (`_largest_losses`)
    levels       the error of the nearest values over that of an even grid (`_levels`)

Slope and loss are in standard deviations. A matrix is also judged by the median of its
rows' error ratios: a fit to the inputs of another layer raises that median above the one
of nearest values, 1.

Data: `Moment` (sums over inputs) → `InputWeights` (H, U) → `row_figures` of `FittedRows` →
`matrix_deviations`, which compares the figures with the limits."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from workbench.check.compare import safe_ratio
from workbench.check.deviation import Deviation

# Limits. The comments give the largest value in a sound SmolLM2-135M-Instruct at 4 bits,
# and the values with a fault in its layers 0, 2, 11 and 29.
#
# Of a row's error ratio, 1 + ROW_ERROR_SPREAD / √C for C inputs: two errors of equal size
# are sums of C squares, and four standard deviations of their ratio are about 8 / √C.
ROW_ERROR_SPREAD = 8.0  # sound 1.12, the table of another group 1 to 300
MEDIAN_ERROR_LIMIT = 1.05  # sound 0.70, the inputs of another layer 1.1 to 1.8
# Sound 8.7, a row × 1.05 4 to 50, × 1.02 at 6 bits 10 to 68: at 4 bits such a row is RED
# only where it is long and the calibration text has enough tokens. In random matrices of
# 576 columns × 1.05 has 13 to 15 with 4,096 tokens, 9 to 11 with 1,024 and 7 to 9 with
# 256; rows of 256 columns have 8 to 13 with 4,096 tokens.
SLOPE_LIMIT = 10.0
LOSS_LIMIT = 6.0  # sound 0, sixteen inputs that are zero 5 to 18
LEVELS_LIMIT = 1.5  # sound 1.03

# A significant c may be small: the inputs of an attention sink determine the slope of a
# row to a thousandth. These are the least faults that count, and the rows that do not.
#
# Bits of a weight → the least |c| that counts as a scaled row
LEAST_RELATIVE_CHANGE = {4: 0.025, 6: 0.01, 8: 0.01}
# Largest |rounding of a row| / |row| with which its slope is judged; 0.1 is usual
LARGEST_ROUNDING = 0.3
BLOCK = 16  # neighbouring inputs, whose loss is judged
LOST = 0.75  # least share of a block's values that counts as a loss
LEAST_SHARE = 0.01  # least share of a row's error that a loss has to cause

LEAST_DAMPING = 1e-5  # in parts of the mean of H's diagonal
ROWS = 4096  # rows that are compared at a time
COLUMNS = 384  # of a moment that are computed at a time
# inputs of a moment whose products are summed in float32 before they go to float64
INPUTS = 1024

# Guards of divisors and of what is below the accuracy of float32 products.
TINY = 1e-30  # in place of a power of zero
LEAST_VARIANCE = 1e-20  # of rounding, where every value can be stored
LEAST_SQUARES = 1e-20  # of a block of zeros
LEAST_COLUMN_VARIANCE = (
    1e-6  # of an input whose weights are all exact, in parts of the row's
)
ERROR_ACCURACY = 1e-12  # of Δ H Δᵀ, in parts of v H vᵀ
RELATIVE_CHANGE_ACCURACY = 1e-6  # of c


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


@dataclass(frozen=True)
class RowFigures:
    """Figures of the rows of a matrix, float64 [R].

    Attributes:
        error_ratio: Δ H Δᵀ over that of the nearest values.
        slope: the slope of v + Δ on v less 1, in standard deviations: 0 for a row that
            is not scaled.
        loss: the largest deviation of a block of inputs from no loss, in standard
            deviations, of the blocks that lost most of what they add to the row.
        levels: the error of the nearest values over that of the nearest values on an
            even grid, each E[x²] times the squared distance, of the row's group.
    """

    error_ratio: np.ndarray
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
        """The moments of inputs [.., C]. `INPUTS` of them are summed in float32 at a time.

        x xᵀ is symmetric: the blocks of `COLUMNS` columns below its diagonal are copied
        from those above it."""
        width = x.shape[-1]
        total = torch.zeros(width, width, dtype=torch.float64)
        for start in range(0, width, COLUMNS):
            stop = min(start + COLUMNS, width)
            upper = total[start:stop, start:]
            for inputs in x.reshape(-1, width).split(INPUTS):
                upper += inputs[:, start:stop].T @ inputs[:, start:]
            total[stop:, start:stop] = upper[:, stop - start :].T
        return cls(total, x.double().square().sum(-1).flatten())


@dataclass(frozen=True)
class InputWeights:
    """How the inputs of a matrix weigh the errors of its rows.

    No text excites every direction, so that H is damped: its diagonal is raised by the
    sampling error of an ordinary input, the median |x|² over the number of inputs. The
    mean |x|² would be too much: one attention sink can be so long that a hundredth of the
    mean is more than all other inputs, which the damped H would then hide.

    Attributes:
        order: the numbers [C] of the inputs by falling E[x²].
        cholesky: the upper triangular U [C, C] float32 with U Uᵀ = H + damping, inputs in
            `order`.
        power: E[x²] [C] float64 with damping, in the inputs' own order.
    """

    order: torch.Tensor
    cholesky: torch.Tensor
    power: torch.Tensor

    @classmethod
    def of(cls, moments: Sequence[Moment]) -> "InputWeights":
        """The weights of the inputs of all `moments`, of which H is the mean."""
        squares = torch.cat([moment.squares for moment in moments])
        hessian = sum(moment.total for moment in moments) / len(squares)
        power = hessian.diagonal()  # a view, to which the damping is added below
        damping = float(squares.median()) / len(squares)
        # a few long inputs may have all the power, and inputs that are all zero none
        damping += LEAST_DAMPING * float(power.mean()) + TINY
        hessian.diagonal().add_(damping)
        order = torch.argsort(power, descending=True, stable=True)
        ordered = hessian[order][:, order]
        # flipped, since torch's factor is lower triangular
        cholesky = torch.linalg.cholesky(ordered.flip(0, 1)).flip(0, 1)
        return cls(order, cholesky.float(), power)


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
        error_ratio=np.concatenate([of_piece.error_ratio for of_piece in figures]),
        slope=np.concatenate([of_piece.slope for of_piece in figures]),
        loss=np.concatenate([of_piece.loss for of_piece in figures]),
        levels=np.concatenate([of_piece.levels for of_piece in figures]),
    )


@dataclass(frozen=True)
class _FactoredRows:
    """Rows of a matrix, and their products with the Cholesky factor U of their inputs; all
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
        values, order, cholesky = rows.values, inputs.order, inputs.cholesky
        change, rounding = rows.stored - values, rows.nearest - values
        return cls(
            values=values,
            change=change,
            rounding=rounding,
            values_u=values[:, order] @ cholesky,
            change_u=change[:, order] @ cholesky,
            rounding_u=rounding[:, order] @ cholesky,
        )


def _piece_figures(rows: FittedRows, inputs: InputWeights) -> RowFigures:
    """The figures of rows that are compared with each other; see `row_figures`."""
    factored = _FactoredRows.of(rows, inputs)
    output_power = _squared_length(factored.values_u)  # v H vᵀ, [R]
    error = _squared_length(factored.change_u)  # Δ H Δᵀ, [R]
    nearest_error = _squared_length(factored.rounding_u) + ERROR_ACCURACY * output_power
    return RowFigures(
        error_ratio=safe_ratio(error.numpy(), nearest_error.numpy()),
        slope=_slope_deviations(rows, factored, inputs, output_power).numpy(),
        loss=_largest_losses(rows, inputs, error).numpy(),
        levels=_levels(rows, factored.rounding, inputs),
    )


def _slope_deviations(
    rows: FittedRows,
    factored: _FactoredRows,
    inputs: InputWeights,
    output_power: torch.Tensor,
) -> torch.Tensor:
    """`RowFigures.slope` [R] float64; 0 for rows that are not scaled by enough to count.

    Error feedback in the order of the inputs makes the elements i of Δ U independent,
    each the rounding error of weight i times U_ii. The usual order is the one of falling
    E[x²]. The best linear unbiased estimate of c in Δ = c v is then the weighted least
    squares of e_i on s_i, the inverse variances w_i being the weights:

        c = Σ w_i s_i e_i / Σ w_i s_i²,  s_i = (v U)_i / U_ii,  e_i = (Δ U)_i / U_ii

    Nearest values pull large weights toward the middle of a table, and error feedback
    keeps this pull, so that the pull's c is subtracted. It is fitted to the rounding
    errors of the nearest values, which have no product with U: e_i is the rounding error
    of one weight, too.

    Three kinds of rows and weights do not count:

    - Weights that are stored as the last entry of a table or as the largest integer,
      since error feedback may ask for more than these by any amount.
    - Rows whose c is below `LEAST_RELATIVE_CHANGE`, or whose output is scaled by less
      than that: the plain regression of v + Δ on v with H as weights. A scaled row scales
      its output. A table that a row shares with smaller rows, which draws the weights of
      inputs that matter little to its middle, does not.
    - Rows that are so small beside the rows of their table that the nearest values lose
      a large part of them (`LARGEST_ROUNDING`).

    Args:
        output_power: v H vᵀ [R] float64.
    """
    is_free = ~rows.clipped
    diagonal = inputs.cholesky.diagonal()
    variance = factored.rounding.square().mean(1, keepdim=True) + LEAST_VARIANCE
    fit = _fit_relative_changes(
        signal=factored.values_u / diagonal * is_free[:, inputs.order],
        errors=factored.change_u / diagonal * is_free[:, inputs.order],
        pull=(factored.rounding * is_free)[:, inputs.order],
        variance=variance,
    )
    # c of the row's output, where weights of small inputs count little
    output_products = (factored.values_u * factored.change_u).double().sum(1)
    output_change = output_products / (output_power + TINY)
    least = LEAST_RELATIVE_CHANGE[rows.bits]
    is_scaled = fit.relative_change.abs() >= least
    # and the output is scaled by as much, in the same direction
    is_scaled &= output_change * fit.relative_change.sign() >= least
    # a table cannot express a row that is small beside its others
    largest = LARGEST_ROUNDING**2 * _squared_length(factored.values)
    is_scaled &= _squared_length(factored.rounding) <= largest
    return torch.where(is_scaled, fit.relative_change / fit.deviation, 0).double()


@dataclass(frozen=True)
class _Fit:
    """By row [R], c by least squares and its standard deviation."""

    relative_change: torch.Tensor
    deviation: torch.Tensor


def _fit_relative_changes(
    *,
    signal: torch.Tensor,
    errors: torch.Tensor,
    pull: torch.Tensor,
    variance: torch.Tensor,
) -> _Fit:
    """Weighted least squares of `errors` on `signal`, row by row, less the
    coefficient of `pull` on `signal`.

    The variance of a column is measured over the rows: an exporter may improve entries
    and indices after the feedback, or use another order or damping, and all rows of a
    matrix show that alike.

    Args:
        signal, errors, pull: [R, C].
        variance: of a row's rounding, [R, 1]. The weight of a column is the inverse of
            the variance that `errors` have in it over the rows, in parts of `variance`.
    """
    column_variance = _column_variance(errors, variance)
    weights = 1 / (column_variance.clamp(min=LEAST_COLUMN_VARIANCE) * variance)
    power = (weights * signal.square()).sum(1)
    coefficient = (weights * signal * errors).sum(1) / power
    residual = (weights * (errors - coefficient[:, None] * signal).square()).mean(1)
    pull_coefficient = (weights * signal * pull).sum(1) / power
    deviation = (residual / power).sqrt() + RELATIVE_CHANGE_ACCURACY
    # a row without a signal, 0 / 0, counts as one that is not scaled
    relative_change = (coefficient - pull_coefficient).nan_to_num()
    return _Fit(relative_change, deviation.nan_to_num(1))


def _largest_losses(
    rows: FittedRows, inputs: InputWeights, error: torch.Tensor
) -> torch.Tensor:
    """`RowFigures.loss` [R] float64: the regression of the missing values of a block of
    neighbouring inputs on its nearest ones, in standard deviations; 0 for rows of whose
    error no lost block causes enough to count. Weights that are stored as the last entry
    of a table or as the largest integer are left out, as they are in `_slope_deviations`.

    Args:
        error: Δ H Δᵀ [R] float64.
    """
    is_free = ~rows.clipped
    # of an error that is uniform within half a step
    variance = rows.step.square() / 12 + LEAST_VARIANCE
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
    """`RowFigures.levels` [R] float64. It shows a poor table or scale, which the other
    figures do not: it is poor for the nearest values, too.

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


def _loss_statistics(
    expected: torch.Tensor, stored: torch.Tensor, variance: torch.Tensor
) -> torch.Tensor:
    """The t statistics [R, blocks] of a loss of `BLOCK` neighbouring inputs: weighted least
    squares of what is missing from `stored` on what is `expected`, both [R, C], without a
    constant; 0 where the coefficient is below `LOST`.

    Args:
        variance: of the rounding of a weight [R, C]. The changes of a column may be
            larger than that in all rows, since error feedback uses some inputs more
            than others.
    """
    missing = expected - stored
    column_variance = _column_variance(missing, variance).clamp(min=1)
    weights = 1 / (column_variance * variance)
    # the sums of squares and products of the regression, for each block
    expected_squares = _block_sums(weights * expected.square())
    expected_squares = expected_squares.clamp(min=LEAST_SQUARES)
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
    """The worst row of each slice in each figure, and the median error ratio, of a matrix
    with these `inputs`; `rows` are its slices."""
    deviations = []
    slice_figures = [row_figures(part, inputs) for part in rows]
    ratios = np.concatenate([figures.error_ratio for figures in slice_figures])
    median = float(np.median(ratios))
    row_error_limit = 1 + ROW_ERROR_SPREAD / rows[0].values.shape[1] ** 0.5
    for part, figures in zip(rows, slice_figures):
        judged = [
            (figures.error_ratio, row_error_limit, "times the error of nearest values"),
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
    return [*deviations, Deviation(median, MEDIAN_ERROR_LIMIT, reason, rows[0].place)]
