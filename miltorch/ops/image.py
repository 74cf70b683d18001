"""Resizing, cropping and sampling of images, and the choice among boxes. The last two
axes are height and width."""

import numpy as np
import torch
import torch.nn.functional as F

from miltorch.ops.registry import bounded, operation


def grid(span, count: int, mode: str) -> torch.Tensor:
    """Where `count` samples lie on a segment of `span` = size − 1 (a number or tensor
    [...]), float64 [..., count].

    Modes as MIL's resize_bilinear describes them.
    """
    span, i = (
        torch.as_tensor(span, dtype=torch.float64)[..., None],
        torch.arange(count, dtype=torch.float64),
    )
    if mode in ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS"):
        if count == 1:
            return span / 2 if mode == "ALIGN_CORNERS" else span * 0
        return i * span / (count - 1)
    if mode == "OFFSET_CORNERS":
        return (i + 0.5) * span.clamp(min=1) / count
    offset = 0.5 if mode == "UNALIGN_CORNERS" else 0.0
    return (i + offset) * (span + 1) / count - offset


def linear(x: torch.Tensor, axis: int, positions: torch.Tensor) -> torch.Tensor:
    """x interpolated at `positions` [n] along `axis`, clamped to its ends."""
    positions = positions.clamp(0, x.shape[axis] - 1)
    low = positions.floor().long()
    share = (
        (positions - low)
        .to(x.dtype)
        .reshape([-1] + [1] * (x.dim() - 1 - axis % x.dim()))
    )
    high = (low + 1).clamp(max=x.shape[axis] - 1)
    return x.index_select(axis, low) * (1 - share) + x.index_select(axis, high) * share


def element(x: torch.Tensor, axis: int, positions: torch.Tensor) -> torch.Tensor:
    """x [.., n, ..] at the element below each of `positions` [n] along `axis`."""
    return x.index_select(axis, positions.floor().long().clamp(0, x.shape[axis] - 1))


def _resized(x, sizes, mode: str, sample=linear):
    """x with its last axes brought to `sizes`; `sample(x, axis, positions)` says what
    lies between elements."""
    bounded([*x.shape[: x.dim() - len(sizes)], *sizes])
    kind, x = x.dtype, x.float()
    for axis, size in enumerate(sizes, x.dim() - len(sizes)):
        x = sample(x, axis, grid(x.shape[axis] - 1, size, mode))
    return x.to(kind)


def _scaled(x, *factors) -> list[int]:
    return [
        int(np.float32(f) * np.float32(n))
        for n, f in zip(x.shape[-2:], factors, strict=True)
    ]


@operation
def resize_bilinear(
    x, *, target_size_height=1, target_size_width=1, sampling_mode="DEFAULT"
):
    return _resized(x, (target_size_height, target_size_width), sampling_mode)


@operation
def resize_nearest_neighbor(x, *, target_size_height, target_size_width):
    return _resized(x, (target_size_height, target_size_width), "DEFAULT", element)


@operation
def upsample_bilinear(
    x,
    *,
    scale_factor_height=1,
    scale_factor_width=1,
    align_corners=True,
    half_pixel_centers=None,
):
    half = not align_corners if half_pixel_centers is None else half_pixel_centers
    mode = (
        "STRICT_ALIGN_CORNERS"
        if align_corners
        else "UNALIGN_CORNERS"
        if half
        else "DEFAULT"
    )
    return _resized(x, _scaled(x, scale_factor_height, scale_factor_width), mode)


@operation
def upsample_nearest_neighbor(x, *, scale_factor_height=1, scale_factor_width=1):
    return _resized(
        x, _scaled(x, scale_factor_height, scale_factor_width), "DEFAULT", element
    )


@operation
def resize(
    x, *, shape, resized_dims, interpolation_mode="LINEAR", sampling_mode="DEFAULT"
):
    """Unlike the older ops, this one's nearest neighbour is the closest, not the one
    below."""
    lead = x.dim() - resized_dims
    sizes = [
        size or n
        for size, n in zip(
            shape[len(shape) - resized_dims :], x.shape[lead:], strict=True
        )
    ]
    closest = lambda x, axis, positions: element(x, axis, positions + 0.5)  # noqa: E731
    return _resized(
        x, sizes, sampling_mode, linear if interpolation_mode == "LINEAR" else closest
    )


def _corners(boxes, mode: str, scale: float, extent):
    """boxes [N, 4] in MIL's coordinate mode → start [N, 2], end [N, 2] as (h, w), in
    pixels."""
    boxes = boxes.float() * scale
    if mode.endswith("WIDTH_FIRST"):
        boxes = boxes[:, [1, 0, 3, 2]]
    first, second = boxes[:, :2], boxes[:, 2:]
    if mode.startswith("CENTER_SIZE"):
        first, second = first - second / 2, first + second / 2
    return first * extent, second * extent


@operation
def crop_resize(
    x,
    boxes=None,
    box_indices=None,
    roi=None,
    *,
    target_height=1,
    target_width=1,
    normalized_coordinates=False,
    spatial_scale=1.0,
    box_coordinate_mode="CORNERS_HEIGHT_FIRST",
    sampling_mode="DEFAULT",
    pad_value=0.0,
):
    """Boxes cut out of x [B, C, H, W]; samples outside the image are `pad_value`.

    iOS 17 gives `boxes` [N, 4] and `box_indices` [N]; before it `roi` [N, 1, 4 or 5, 1,
    1] (with the image's index first, or every box on every image) and results keep an
    axis for it."""
    bounded(
        [x.shape[1], len(boxes if roi is None else roi), target_height, target_width]
    )
    if roi is not None:
        boxes, images = (
            roi[:, 0, -4:, 0, 0],
            roi[:, 0, 0, 0, 0].long() if roi.shape[2] == 5 else None,
        )
    else:
        images = torch.arange(len(boxes)) if box_indices is None else box_indices.long()
    extent = (
        torch.tensor([x.shape[2] - 1, x.shape[3] - 1])
        if normalized_coordinates
        else 1.0
    )
    start, end = _corners(boxes, box_coordinate_mode, spatial_scale, extent)
    crops = []
    for n in range(len(boxes)):
        crop = x if images is None else x[images[n]][None]
        inside = torch.ones(())
        for axis, size in ((2, target_height), (3, target_width)):
            at = start[n, axis - 2] + grid(
                end[n, axis - 2] - start[n, axis - 2], size, sampling_mode
            )
            crop = linear(crop, axis, at)
            within = ((at >= 0) & (at <= x.shape[axis] - 1)).float()
            inside = inside * within.reshape([-1] + [1] * (3 - axis))
        crops.append(torch.where(inside.bool(), crop, torch.tensor(pad_value)))
    return torch.stack(crops) if roi is not None else torch.cat(crops)


def _pixels(coordinates, sizes, mode: str, align_corners: bool):
    """Coordinates [..., 2] (x, y) in one of MIL's conventions → pixels; `sizes` is (W,
    H)."""
    sizes = torch.tensor(sizes, dtype=torch.float32)
    if mode == "unnormalized":
        return coordinates.float()
    unit = (
        coordinates.float()
        if mode == "normalized_zero_to_one"
        else (coordinates.float() + 1) / 2
    )
    return unit * (sizes - 1) if align_corners else unit * sizes - 0.5


_PADDING = {
    "constant": "zeros",
    "border": "border",
    "reflection": "reflection",
    "symmetric": "reflection",
}


@operation
def resample(
    x,
    coordinates,
    *,
    sampling_mode,
    padding_mode,
    padding_value,
    coordinates_mode,
    align_corners,
):
    """x [B, C, H, W] sampled at coordinates [B, H2, W2, 2].

    torch reflects about the outer pixels' centres or about their edges, as its own
    `align_corners` says; MIL's reflection and symmetric padding are these two."""
    sizes = (x.shape[3], x.shape[2])
    pixels = _pixels(coordinates, sizes, coordinates_mode, align_corners)
    centres = padding_mode != "symmetric"
    reach = torch.tensor(sizes, dtype=torch.float32)
    unit = pixels / (reach - 1).clamp(min=1) if centres else (pixels + 0.5) / reach
    shift = padding_value if padding_mode == "constant" else 0.0
    y = F.grid_sample(
        x - shift, unit * 2 - 1, sampling_mode, _PADDING[padding_mode], centres
    )
    return y + shift


@operation
def affine(
    x,
    transform_matrix,
    *,
    output_height,
    output_width,
    sampling_mode,
    padding_mode,
    padding_value,
    coordinates_mode,
    align_corners,
):
    bounded([*x.shape[:2], output_height, output_width])
    ys, xs = (torch.linspace(-1, 1, n) for n in (output_height, output_width))
    points = torch.stack(
        [xs.expand(output_height, -1), ys[:, None].expand(-1, output_width)], -1
    )
    matrix = transform_matrix.reshape(-1, 1, 2, 3)
    coordinates = points @ matrix[..., :2].transpose(-1, -2) + matrix[
        ..., None, :, 2
    ].squeeze(-2)
    return resample(
        x,
        coordinates.expand(len(x), -1, -1, -1),
        sampling_mode=sampling_mode,
        padding_mode=padding_mode,
        padding_value=padding_value,
        coordinates_mode=coordinates_mode,
        align_corners=align_corners,
    )


def _overlaps(boxes):
    """Intersection over union of boxes [N, 4] (centre x, y, width, height) with each
    other: [N, N]."""
    low, high = boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2
    shared = (
        (torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low))
        .clamp(min=0)
        .prod(-1)
    )
    area = boxes[:, 2:].prod(-1)
    union = area[:, None] + area - shared
    return torch.where(union > 0, shared / union, torch.zeros(()))


def _peaks(
    boxes, scores, iou_threshold, score_threshold, max_boxes, per_class
) -> list[int]:
    """Indices of the boxes that no better one overlaps too much, best first."""
    best, label = scores.max(-1)
    overlaps, peaks = _overlaps(boxes), []
    for i in torch.argsort(best, descending=True, stable=True).tolist():
        rivals = [j for j in peaks if not per_class or label[j] == label[i]]
        if best[i] > score_threshold and all(
            overlaps[i, j] <= iou_threshold for j in rivals
        ):
            peaks.append(i)
    return peaks[:max_boxes] or [int(best.argmax())]


@operation
def non_maximum_suppression(
    boxes,
    scores,
    *,
    iou_threshold,
    max_boxes,
    score_threshold=-torch.inf,
    per_class_suppression=False,
):
    """boxes [B, N, 4], scores [B, N, K] → boxes, scores, indices [B, max_boxes], count
    [B]; at least one box each."""
    bounded([len(boxes), max_boxes, scores.shape[-1] + 4])
    indices = torch.full((len(boxes), max_boxes), -1)
    for row, *image in zip(indices, boxes, scores, strict=True):
        peaks = _peaks(
            *image, iou_threshold, score_threshold, max_boxes, per_class_suppression
        )
        row[: len(peaks)] = torch.tensor(peaks)
    empty, images = indices[..., None] < 0, torch.arange(len(boxes))[:, None]
    tops = (
        torch.where(empty, torch.zeros(()), x[images, indices].float())
        for x in (boxes, scores)
    )
    return *tops, indices, (indices >= 0).sum(1)
