"""Finds the rows, columns or elements of a tensor that are wrong while the others are the
checkpoint's."""

import torch

from workbench.explain.weight_values import (
    CORRELATED,
    EXPLAINED,
    ROUNDING,
    compute_cosine,
    is_factor_significant,
)

# A row is wrong by itself if it is this many times as far away as the median row, and by
# more than rounding to fp16.
OUTLIER = 2.5


def describe_wrong_rows(
    actual: torch.Tensor,
    values: torch.Tensor,
    head_rows: int | None = None,
    head_columns: int | None = None,
) -> str | None:
    """Which rows of a tensor are wrong, in words, if at most half of them are; else which
    columns. A tensor of one row has elements in place of both.

    Args:
        head_rows, head_columns: how many rows and columns belong to one head, by whose
            number a block of them is named; None where they are not those of heads.
    """
    if len(actual) == 1:
        return _describe_wrong(actual.T, values.T, "elements", None)
    rows = _describe_wrong(actual, values, "rows", head_rows)
    return rows or _describe_wrong(actual.T, values.T, "columns", head_columns)


def _describe_wrong(
    actual: torch.Tensor, values: torch.Tensor, unit: str, head_size: int | None
) -> str | None:
    """`describe_wrong_rows` for the rows of two matrices, which the words call `unit`."""
    sizes = values.norm(dim=1).clamp(min=1e-9)
    errors = (actual - values).norm(dim=1) / sizes
    limit = max(OUTLIER * float(errors.median()), ROUNDING)
    # where most rows are wrong, the median says so
    if float(errors.median()) > EXPLAINED:
        return None
    is_wrong = errors > limit
    wrong = torch.nonzero(is_wrong).flatten().tolist()
    if not wrong or 2 * len(wrong) > len(errors):
        return None
    # many rows stand out by chance where all are scaled alike
    is_scaled = is_factor_significant(actual[~is_wrong], values[~is_wrong])
    if is_scaled and len(wrong) > len(errors) // 4:
        return None
    counted = unit if len(wrong) > 1 else unit.removesuffix("s")
    return (
        f"has {len(wrong)} wrong {counted} of {len(errors)}"
        f"{_describe_block(wrong, head_size)}; "
        f"{_describe_worst(actual, values, errors, is_wrong, unit)}"
    )


def _describe_block(wrong: list[int], head_size: int | None) -> str:
    """The first and the last of several rows without a gap, and the heads that they are;
    an empty text for others."""
    first, last = wrong[0], wrong[-1]
    if len(wrong) == 1 or last - first + 1 != len(wrong):
        return ""
    words = f", numbers {first} to {last}"
    if head_size and first % head_size == 0 and (last + 1) % head_size == 0:
        head, last_head = first // head_size, last // head_size
        heads = f"head {head}" if head == last_head else f"heads {head} to {last_head}"
        words += f" ({heads})"
    return words


def _describe_worst(
    actual: torch.Tensor,
    values: torch.Tensor,
    errors: torch.Tensor,
    is_wrong: torch.Tensor,
    unit: str,
) -> str:
    """What the wrong rows hold: zeros, or how the worst one differs."""
    if not actual[is_wrong].any():
        return "they hold zeros"
    worst = int(errors.argmax())
    detail = f"the worst is number {worst}"
    if (
        unit != "elements"
        and abs(compute_cosine(actual[worst], values[worst])) > CORRELATED
    ):
        factor = float(actual[worst] @ values[worst] / values[worst].square().sum())
        detail += f", scaled by {factor:.4g}"
    return detail
