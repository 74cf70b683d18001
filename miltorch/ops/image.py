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
    span = torch.as_tensor(span, dtype=torch.float64)[..., None]
    i = torch.arange(count, dtype=torch.float64)
    if mode == "ALIGN_CORNERS" and count == 1:
        return span / 2
    if mode in ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS"):
        return i * span / max(count - 1, 1)
    if mode == "OFFSET_CORNERS":
        return (i + 0.5) * span.clamp(min=1) / count
    if mode == "UNALIGN_CORNERS":
        return (i + 0.5) * (span + 1) / count - 0.5
    return i * (span + 1) / count


def linear(x: torch.Tensor, axis: int, positions: torch.Tensor) -> torch.Tensor:
    """x interpolated at `positions` [n] along `axis`, clamped to its ends."""
    positions = positions.clamp(0, x.shape[axis] - 1)
    low = positions.floor().long()
    share = (positions - low).to(x.dtype).reshape([-1] + [1] * (x.dim() - 1 - axis))
    high = (low + 1).clamp(max=x.shape[axis] - 1)
    return x.index_select(axis, low) * (1 - share) + x.index_select(axis, high) * share


def element(x: torch.Tensor, axis: int, positions: torch.Tensor) -> torch.Tensor:
    """x [.., n, ..] at the element below each of `positions` [n] along `axis`."""
    return x.index_select(axis, positions.floor().long().clamp(0, x.shape[axis] - 1))


def closest(x: torch.Tensor, axis: int, positions: torch.Tensor) -> torch.Tensor:
    """x [.., n, ..] at the element closest to each of `positions` [n] along `axis`."""
    return element(x, axis, positions + 0.5)


def _resized(x, sizes, mode: str, sample=linear):
    """x with its last axes brought to `sizes`; `sample(x, axis, positions)` says what
    lies between elements."""
    bounded([*x.shape[: x.dim() - len(sizes)], *sizes])
    kind, x = x.dtype, x.float()
    for axis, size in enumerate(sizes, x.dim() - len(sizes)):
        x = sample(x, axis, grid(x.shape[axis] - 1, size, mode))
    return x.to(kind)


def _scaled(x, *factors) -> list[int]:
    sizes = np.array(x.shape[-2:], np.float32) * np.array(factors, np.float32)
    return sizes.astype(int).tolist()


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
    half_pixel_centers=True,  # read where corners are not aligned
):
    mode = "DEFAULT"
    if align_corners:
        mode = "STRICT_ALIGN_CORNERS"
    elif half_pixel_centers:
        mode = "UNALIGN_CORNERS"
    return _resized(x, _scaled(x, scale_factor_height, scale_factor_width), mode)


@operation
def upsample_nearest_neighbor(x, *, scale_factor_height=1, scale_factor_width=1):
    sizes = _scaled(x, scale_factor_height, scale_factor_width)
    return _resized(x, sizes, "DEFAULT", element)


@operation
def resize(
    x, *, shape, resized_dims, interpolation_mode="LINEAR", sampling_mode="DEFAULT"
):
    """Unlike the older ops, this one's nearest neighbour is the closest, not the one
    below."""
    shape = shape[len(shape) - resized_dims :]
    old = x.shape[x.dim() - resized_dims :]
    sizes = [size or n for size, n in zip(shape, old, strict=True)]
    if interpolation_mode == "LINEAR":
        return _resized(x, sizes, sampling_mode)
    return _resized(x, sizes, sampling_mode, closest)


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
    if roi is not None:
        boxes = roi[:, 0, -4:, 0, 0]
        box_indices = roi[:, 0, 0, 0, 0]
    elif box_indices is None:
        box_indices = torch.arange(len(boxes))
    bounded([x.shape[1], len(boxes), target_height, target_width])
    every_image = roi is not None and roi.shape[2] == 4
    extent = 1.0
    if normalized_coordinates:
        extent = torch.tensor(x.shape[2:]) - 1
    start, end = _corners(boxes, box_coordinate_mode, spatial_scale, extent)
    crops = []
    for n, image in enumerate(box_indices.long()):
        crop, inside = x, torch.ones(())
        if not every_image:
            crop = x[image][None]
        for axis, size in ((2, target_height), (3, target_width)):
            at = start[n, axis - 2] + grid(
                end[n, axis - 2] - start[n, axis - 2], size, sampling_mode
            )
            crop = linear(crop, axis, at)
            within = ((at >= 0) & (at <= x.shape[axis] - 1)).float()
            inside = inside * within.reshape([-1] + [1] * (3 - axis))
        crops.append(torch.where(inside.bool(), crop, torch.tensor(pad_value)))
    if roi is None:
        return torch.cat(crops)
    return torch.stack(crops)


def _pixels(coordinates, sizes, mode: str, align_corners: bool):
    """Coordinates [..., 2] (x, y) in one of MIL's conventions → pixels; `sizes` is (W,
    H)."""
    coordinates = coordinates.float()
    if mode == "unnormalized":
        return coordinates
    if mode != "normalized_zero_to_one":
        coordinates = (coordinates + 1) / 2
    if align_corners:
        return coordinates * (sizes - 1)
    return coordinates * sizes - 0.5


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
    sizes = torch.tensor([x.shape[3], x.shape[2]], dtype=torch.float32)
    pixels = _pixels(coordinates, sizes, coordinates_mode, align_corners)
    centres = padding_mode != "symmetric"
    if centres:
        places = pixels / (sizes - 1).clamp(min=1) * 2 - 1
    else:
        places = (pixels + 0.5) / sizes * 2 - 1
    if padding_mode != "constant":
        padding_value = 0.0
    shifted = x - padding_value
    y = F.grid_sample(shifted, places, sampling_mode, _PADDING[padding_mode], centres)
    return y + padding_value


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
    xs = torch.linspace(-1, 1, output_width)
    ys = torch.linspace(-1, 1, output_height)
    points = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), -1)
    matrix = transform_matrix.reshape(-1, 1, 2, 3)
    coordinates = points @ matrix[..., :2].mT + matrix[..., None, :, 2]
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
    centres, sizes = boxes[:, :2], boxes[:, 2:]
    low = centres - sizes / 2
    high = centres + sizes / 2
    shared = torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)
    shared = shared.clamp(min=0).prod(-1)
    area = sizes.prod(-1)
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
        free = (overlaps[i, rivals] <= iou_threshold).all()
        if best[i] > score_threshold and free:
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
    empty = indices[..., None] < 0
    images = torch.arange(len(boxes))[:, None]
    tops = (
        torch.where(empty, torch.zeros(()), x[images, indices].float())
        for x in (boxes, scores)
    )
    return *tops, indices, (indices >= 0).sum(1)
