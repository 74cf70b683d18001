"""Resizing, cropping and sampling of images, and the choice among boxes. The last two
axes are height and width.

Every function without an underscore is a rule, see `registry`.
"""

import numpy as np
import torch
import torch.nn.functional as F

from miltorch.ops.registry import bounded


def _grid(span, count: int, mode: str) -> torch.Tensor:
    """The positions of `count` samples on a segment of `span` = size − 1 (a number or tensor
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


def _linear(x: torch.Tensor, axis: int, positions: torch.Tensor) -> torch.Tensor:
    """x interpolated at `positions` [n] along `axis`, clamped to its ends."""
    positions = positions.clamp(0, x.shape[axis] - 1)
    low = positions.floor().long()
    share = (positions - low).to(x.dtype).reshape([-1] + [1] * (x.dim() - 1 - axis))
    high = (low + 1).clamp(max=x.shape[axis] - 1)
    return x.index_select(axis, low) * (1 - share) + x.index_select(axis, high) * share


def _element(x: torch.Tensor, axis: int, positions: torch.Tensor) -> torch.Tensor:
    """x [.., n, ..] at the element below each of `positions` [n] along `axis`."""
    return x.index_select(axis, positions.floor().long().clamp(0, x.shape[axis] - 1))


def _closest(x: torch.Tensor, axis: int, positions: torch.Tensor) -> torch.Tensor:
    """x [.., n, ..] at the element closest to each of `positions` [n] along `axis`."""
    return _element(x, axis, positions + 0.5)


def _resized(x, sizes, mode: str, sample=_linear):
    """x with its last axes brought to `sizes`; `sample(x, axis, positions)` says what
    lies between elements."""
    bounded([*x.shape[: x.dim() - len(sizes)], *sizes])
    kind, x = x.dtype, x.float()
    for axis, size in enumerate(sizes, x.dim() - len(sizes)):
        x = sample(x, axis, _grid(x.shape[axis] - 1, size, mode))
    return x.to(kind)


def _scaled(x, *factors) -> list[int]:
    sizes = np.array(x.shape[-2:], np.float32) * np.array(factors, np.float32)
    return sizes.astype(int).tolist()


def resize_bilinear(
    x, *, target_size_height=1, target_size_width=1, sampling_mode="DEFAULT"
):
    return _resized(x, (target_size_height, target_size_width), sampling_mode)


def resize_nearest_neighbor(x, *, target_size_height, target_size_width):
    return _resized(x, (target_size_height, target_size_width), "DEFAULT", _element)


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


def upsample_nearest_neighbor(x, *, scale_factor_height=1, scale_factor_width=1):
    sizes = _scaled(x, scale_factor_height, scale_factor_width)
    return _resized(x, sizes, "DEFAULT", _element)


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
    return _resized(x, sizes, sampling_mode, _closest)


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


def _from_roi(roi: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`roi` [N, 1, 5, 1, 1] (the index of an image, then a box) or [N, 1, 4, 1, 1] (boxes
    alone, each of which is cut out of every image) → boxes [N, 4] and the indices of each
    box's images [N, 1 or batch]."""
    boxes = roi[:, 0, -4:, 0, 0]
    if roi.shape[2] == 4:
        return boxes, torch.arange(batch).expand(len(boxes), -1)
    return boxes, roi[:, 0, 0, 0, :].long()


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

    iOS 17 gives `boxes` [N, 4] and `box_indices` [N], the image of each box (default:
    box i is cut out of image i). Before it there was `roi`, see `_from_roi`, and results
    have an axis more, for the images of a box: [N, images, C, target sizes]."""
    if roi is not None:
        boxes, image_indices = _from_roi(roi, len(x))
    elif box_indices is None:
        image_indices = torch.arange(len(boxes))[:, None]
    else:
        image_indices = box_indices[:, None].long()
    outer = torch.tensor(x.shape[2:]) - 1
    extent = outer if normalized_coordinates else 1.0
    start, end = _corners(boxes, box_coordinate_mode, spatial_scale, extent)
    most = max(x.shape[2:].numel(), target_height * target_width)
    bounded([image_indices.numel(), x.shape[1], most])
    rows, columns = (
        start[:, axis, None] + _grid((end - start)[:, axis], size, sampling_mode)
        for axis, size in enumerate((target_height, target_width))
    )
    pixels = torch.broadcast_tensors(columns[:, None], rows[:, :, None])
    pixels = torch.stack(pixels, -1).repeat_interleave(image_indices.shape[1], 0)
    inside = ((pixels >= 0) & (pixels <= outer.flip(0))).all(-1)
    images = x[image_indices.flatten()]
    crops = _sampled(images, pixels.float(), "bilinear", "border")
    crops = torch.where(inside[:, None], crops, pad_value)
    return crops if roi is None else crops.unflatten(0, image_indices.shape)


def _sampled(x, pixels, sampling_mode: str, padding_mode: str, centres: bool = True):
    """x [N, C, H, W] at pixels [N, h, w, 2] (x, y). torch reflects about the outer
    pixels' centres or about their edges."""
    sizes = torch.tensor([x.shape[3], x.shape[2]])
    places = (pixels + 0.5) / sizes * 2 - 1
    if centres:
        places = pixels / (sizes - 1).clamp(min=1) * 2 - 1
    return F.grid_sample(x, places, sampling_mode, padding_mode, centres)


_PADDING = {
    "constant": "zeros",
    "border": "border",
    "reflection": "reflection",
    "symmetric": "reflection",
}


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
    """x [B, C, H, W] sampled at coordinates [B, H2, W2, 2] (x, y) in one of MIL's
    conventions."""
    sizes, pixels = torch.tensor([x.shape[3], x.shape[2]]), coordinates.float()
    if coordinates_mode == "normalized_minus_one_to_one":
        pixels = (pixels + 1) / 2
    if coordinates_mode != "unnormalized":
        pixels = pixels * (sizes - 1) if align_corners else pixels * sizes - 0.5
    value = padding_value if padding_mode == "constant" else 0.0
    modes = sampling_mode, _PADDING[padding_mode]
    by_centres = padding_mode != "symmetric"
    # grid_sample pads with zeros alone
    return _sampled(x - value, pixels, *modes, by_centres) + value


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
    shape = bounded([*x.shape[:2], output_height, output_width])
    matrix = transform_matrix.reshape(-1, 2, 3).expand(len(x), -1, -1)
    return resample(
        x,
        F.affine_grid(matrix, shape, align_corners=True),
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


def _select_boxes(
    boxes, scores, iou_threshold, score_threshold, max_boxes, per_class
) -> list[int]:
    """Indices of the boxes of one image that are kept, best first and at least one. A box is
    dropped where a better one that is kept overlaps it by more than the threshold."""
    best, label = scores.max(-1)
    overlaps, selected = _overlaps(boxes), []
    for i in torch.argsort(best, descending=True, stable=True).tolist():
        rivals = [j for j in selected if not per_class or label[j] == label[i]]
        is_free = (overlaps[i, rivals] <= iou_threshold).all()
        if best[i] > score_threshold and is_free:
            selected.append(i)
    return selected[:max_boxes] or [int(best.argmax())]


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
        selected = _select_boxes(
            *image, iou_threshold, score_threshold, max_boxes, per_class_suppression
        )
        row[: len(selected)] = torch.tensor(selected)
    is_empty = indices[..., None] < 0
    images = torch.arange(len(boxes))[:, None]
    selected_values = (
        torch.where(is_empty, torch.zeros(()), x[images, indices].float())
        for x in (boxes, scores)
    )
    return *selected_values, indices, (indices >= 0).sum(1)
