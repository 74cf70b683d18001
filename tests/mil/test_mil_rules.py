"""Rules that MIL's own evaluation does not reach, against definitions written out here or torch's
modules."""

import numpy as np
import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from one_op import Op, Ref, Type, close, given, numbers, program, run

from miltorch import Executable
from workbench.errors import InputError

SIZES = st.integers(3, 7)


def pads(size, taps, stride, dilation, kind):
    """(before, after) of one axis, from MIL's description of pad_type."""
    reach = (taps - 1) * dilation + 1
    if kind == "valid":
        return 0, 0
    total = max((int(np.ceil(size / stride)) - 1) * stride + reach - size, 0)
    return (
        (total // 2, total - total // 2)
        if kind == "same"
        else (total - total // 2, total // 2)
    )


@st.composite
def windows(draw, dilation=1):
    """What conv and pool share: sizes, taps, dilations, padding of two axes; and the op's
    arguments."""
    taps, strides = ([draw(st.integers(1, 3)) for _ in range(2)] for _ in range(2))
    dilations = [draw(st.integers(1, dilation)) for _ in range(2)]
    sizes = [draw(st.integers((k - 1) * d + 1, 7)) for k, d in zip(taps, dilations)]
    kind = draw(st.sampled_from(["valid", "same", "same_lower", "custom"]))
    if kind == "custom":
        pairs = [
            (draw(st.integers(0, k - 1)), draw(st.integers(0, k - 1))) for k in taps
        ]
    else:
        pairs = [pads(*axis, kind) for axis in zip(sizes, taps, strides, dilations)]
    arguments = dict(
        pad_type=kind, strides=strides, pad=[n for pair in pairs for n in pair]
    )
    return sizes, taps, dilations, pairs, arguments


def conv_by_hand(x, weight, strides, dilations, pairs, groups):
    x = np.pad(x, [(0, 0), (0, 0), *pairs])
    n, (outputs, each, kh, kw) = len(x), weight.shape
    high, wide = (
        (x.shape[2 + i] - (k - 1) * dilations[i] - 1) // strides[i] + 1
        for i, k in enumerate((kh, kw))
    )
    y = np.zeros((n, outputs, high, wide))
    for o in range(outputs):
        first = o // (outputs // groups) * each
        for i, j in np.ndindex(high, wide):
            patch = x[
                :,
                first : first + each,
                i * strides[0] :: dilations[0],
                j * strides[1] :: dilations[1],
            ][:, :, :kh, :kw]
            y[:, o, i, j] = (patch * weight[o]).sum((1, 2, 3))
    return y


@given(shared=windows(dilation=2), groups=st.sampled_from([1, 2]), bias=st.booleans())
def test_conv(shared, groups, bias):
    sizes, taps, dilations, pairs, arguments = shared
    x, weight = numbers(1, 4, *sizes), numbers(6, 4 // groups, *taps, seed=1)
    b = numbers(6, seed=2) if bias else None
    found = run(
        "conv",
        x=x,
        weight=weight,
        bias=b,
        dilations=dilations,
        groups=groups,
        **arguments,
    )
    expected = conv_by_hand(x, weight, arguments["strides"], dilations, pairs, groups)
    close(found, expected + (b.reshape(-1, 1, 1) if bias else 0), 1e-4)


@pytest.mark.parametrize(
    "shape, kernel", [((2, 3, 9), (5, 3, 3)), ((1, 2, 4, 5, 4), (3, 2, 2, 3, 2))]
)
def test_conv_of_one_and_three_axes(shape, kernel):
    x, weight = numbers(*shape), numbers(*kernel, seed=1)
    function = (
        torch.nn.functional.conv1d if len(shape) == 3 else torch.nn.functional.conv3d
    )
    close(
        run("conv", x=x, weight=weight),
        function(torch.from_numpy(x), torch.from_numpy(weight)).numpy(),
    )


@given(
    stride=st.integers(1, 3),
    taps=st.integers(1, 4),
    dilation=st.integers(1, 2),
    pad=st.integers(0, 1),
    size=SIZES,
)
def test_conv_transpose_undoes_the_shape_of_conv(stride, taps, dilation, pad, size):
    x, weight = numbers(1, 2, size), numbers(2, 3, taps, seed=1)
    assume((size - 1) * stride + (taps - 1) * dilation + 1 > 2 * pad)
    shared = dict(x=x, weight=weight, strides=[stride], dilations=[dilation])
    found = run("conv_transpose", pad_type="custom", pad=[pad, pad], **shared)
    expected = torch.nn.functional.conv_transpose1d(
        torch.from_numpy(x),
        torch.from_numpy(weight),
        None,
        stride,
        pad,
        dilation=dilation,
    ).numpy()
    close(found, expected)
    assert run("conv_transpose", pad_type="same", **shared).shape == (
        1,
        3,
        size * stride,
    )
    longer = expected.shape[-1] + stride - 1
    close(
        run(
            "conv_transpose",
            pad_type="custom",
            pad=[pad, pad],
            output_shape=[1, 3, longer],
            **shared,
        )[..., :-1],
        run(
            "conv_transpose",
            pad_type="custom",
            pad=[pad, pad],
            output_shape=[1, 3, longer - 1],
            **shared,
        )
        if stride > 1
        else expected[..., :-1],
    )


def pool_by_hand(x, taps, strides, pairs, of):
    """`of` gets the real elements of every window as a flat array, and how many places the window
    has."""
    x = np.pad(x, [(0, 0), (0, 0), *pairs], constant_values=np.nan)
    high, wide = ((x.shape[2 + i] - taps[i]) // strides[i] + 1 for i in range(2))
    y = np.zeros((*x.shape[:2], high, wide))
    for n, c, i, j in np.ndindex(y.shape):
        top, left = i * strides[0], j * strides[1]
        window = x[n, c, top : top + taps[0], left : left + taps[1]]
        y[n, c, i, j] = of(window[~np.isnan(window)], window.size)
    return y


@given(shared=windows())
def test_pooling(shared):
    sizes, taps, _, pairs, arguments = shared
    x, shared = numbers(1, 2, *sizes), dict(kernel_sizes=taps, **arguments)
    expect = lambda of: pool_by_hand(x, taps, arguments["strides"], pairs, of)  # noqa: E731
    close(run("max_pool", x=x, **shared), expect(lambda real, places: real.max()))
    close(
        run("l2_pool", x=x, **shared),
        expect(lambda real, places: np.sqrt((real**2).sum())),
    )
    close(
        run("avg_pool", x=x, **shared), expect(lambda real, places: real.sum() / places)
    )
    close(
        run("avg_pool", x=x, exclude_padding_from_average=True, **shared),
        expect(lambda real, places: real.mean()),
    )


@given(
    size=SIZES,
    taps=st.integers(1, 3),
    stride=st.integers(1, 3),
    pad=st.integers(0, 1),
    count=st.booleans(),
)
def test_pooling_with_ceil_mode(size, taps, stride, pad, count):
    assume(pad <= taps // 2)
    x, F = numbers(1, 2, size), torch.nn.functional
    shared = dict(
        x=x,
        kernel_sizes=[taps],
        strides=[stride],
        pad_type="custom",
        pad=[pad, pad],
        ceil_mode=True,
    )
    close(
        run("max_pool", **shared),
        F.max_pool1d(torch.from_numpy(x), taps, stride, pad, ceil_mode=True).numpy(),
    )
    expected = F.avg_pool1d(
        torch.from_numpy(x),
        taps,
        stride,
        pad,
        ceil_mode=True,
        count_include_pad=not count,
    ).numpy()
    close(run("avg_pool", exclude_padding_from_average=count, **shared), expected)


@given(
    n=st.integers(1, 2), c=st.integers(1, 5), h=st.integers(2, 5), w=st.integers(2, 5)
)
def test_normalizations(n, c, h, w):
    x, gamma, beta, mean, variance = (
        numbers(n, c, h, w),
        *(np.abs(numbers(c, seed=i)) for i in range(1, 5)),
    )
    by_channel = lambda v: v.reshape(c, 1, 1)  # noqa: E731
    shared = dict(x=x, gamma=gamma, beta=beta, epsilon=0.25)
    scaled = lambda y: y * by_channel(gamma) + by_channel(beta)  # noqa: E731
    expected = scaled((x - by_channel(mean)) / np.sqrt(by_channel(variance) + 0.25))
    close(run("batch_norm", mean=mean, variance=variance, **shared), expected)
    own = (x - x.mean((2, 3), keepdims=True)) / np.sqrt(
        x.var((2, 3), keepdims=True) + 0.25
    )
    close(run("instance_norm", **shared), scaled(own))
    close(
        run("l2_norm", x=x, epsilon=0.25),
        x / np.sqrt((x**2).sum((1, 2, 3), keepdims=True) + 0.25),
    )
    window = sum(
        np.pad(x**2, [(0, 0), (1, 1), (0, 0), (0, 0)])[:, i : i + c] for i in range(3)
    )
    close(
        run("local_response_norm", x=x, size=3, alpha=0.5, beta=0.75, k=2.0),
        x / (2 + 0.5 / 3 * window) ** 0.75,
    )


@given(n=st.integers(1, 2), c=st.integers(1, 5), w=st.integers(1, 5))
def test_activations_by_channel(n, c, w):
    x, alpha, beta = (
        numbers(n, c, w),
        np.abs(numbers(c, seed=1)),
        np.abs(numbers(c, seed=2)),
    )
    close(run("prelu", x=x, alpha=alpha), np.where(x > 0, x, alpha[:, None] * x))
    close(
        run("softplus_parametric", x=x, alpha=alpha, beta=beta),
        alpha[:, None] * np.log1p(np.exp(beta[:, None] * x)),
    )
    close(run("silu", x=x), x / (1 + np.exp(-x)))


MODES = {
    "DEFAULT": [0, 0.4, 0.8, 1, 1],
    "STRICT_ALIGN_CORNERS": [0, 0.25, 0.5, 0.75, 1],
    "OFFSET_CORNERS": [0.1, 0.3, 0.5, 0.7, 0.9],
    "UNALIGN_CORNERS": [0, 0.1, 0.5, 0.9, 1],
}


@pytest.mark.parametrize("mode", MODES)
def test_resizing_samples_where_mil_says(mode):
    """The figures are the ones in MIL's description of resize_bilinear, for a ramp from 0 to 1."""
    x = np.array([0, 1], np.float32).reshape(1, 1, 2)
    found = run(
        "resize_bilinear",
        x=x,
        target_size_height=1,
        target_size_width=5,
        sampling_mode=mode,
    )
    close(found.ravel(), MODES[mode])
    found = run(
        "resize",
        x=x,
        shape=[0, 5],
        resized_dims=2,
        interpolation_mode="LINEAR",
        sampling_mode=mode,
    )
    close(found.ravel(), MODES[mode])


@given(high=st.integers(1, 9), wide=st.integers(1, 9))
def test_resizing_against_torch(high, wide):
    x = numbers(1, 2, 4, 3)

    def resized(**how):
        return torch.nn.functional.interpolate(
            torch.from_numpy(x), (high, wide), **how
        ).numpy()

    found = run(
        "resize_nearest_neighbor", x=x, target_size_height=high, target_size_width=wide
    )
    close(found, resized(mode="nearest"))
    shared = dict(x=x, target_size_height=high, target_size_width=wide)
    close(
        run("resize_bilinear", sampling_mode="UNALIGN_CORNERS", **shared),
        resized(mode="bilinear"),
    )
    expected = resized(mode="bilinear", align_corners=True)
    close(
        run("resize_bilinear", sampling_mode="STRICT_ALIGN_CORNERS", **shared), expected
    )


def test_the_nearest_element_is_the_closest_only_in_the_newest_op():
    x = np.array([[1], [2]], np.float32).reshape(1, 1, 2, 1)
    close(
        run(
            "resize",
            x=x,
            shape=[3, 1],
            resized_dims=2,
            interpolation_mode="NEAREST_NEIGHBOR",
        ).ravel(),
        [1, 2, 2],
    )
    close(
        run(
            "resize_nearest_neighbor", x=x, target_size_height=3, target_size_width=1
        ).ravel(),
        [1, 1, 2],
    )


@pytest.mark.parametrize("factor", [2, 1.5])
def test_upsampling_against_torch(factor):
    x = numbers(1, 2, 4, 6)
    shared = dict(x=x, scale_factor_height=factor, scale_factor_width=factor)
    to = tuple(int(n * factor) for n in x.shape[2:])

    def resized(**how):
        return torch.nn.functional.interpolate(torch.from_numpy(x), to, **how).numpy()

    close(run("upsample_nearest_neighbor", **shared), resized(mode="nearest"))
    close(
        run("upsample_bilinear", align_corners=True, **shared),
        resized(mode="bilinear", align_corners=True),
    )
    close(
        run("upsample_bilinear", align_corners=False, **shared),
        resized(mode="bilinear"),
    )


def test_crop_resize_takes_boxes_and_pads_outside():
    x = np.arange(1, 17, dtype=np.float32).reshape(1, 1, 4, 4)
    shared = dict(x=x, target_height=2, target_width=2, sampling_mode="ALIGN_CORNERS")
    boxes, first = np.array([[1, 1, 2, 2]], np.float32), np.array([0], np.int32)
    close(
        run("crop_resize", boxes=boxes, box_indices=first, **shared).ravel(),
        [6, 7, 10, 11],
    )
    outside = np.array([[0.1, 0.3, 1.3, 1.0]], np.float32)
    found = run(
        "crop_resize",
        boxes=outside,
        box_indices=first,
        normalized_coordinates=True,
        pad_value=10.0,
        **shared,
    )
    close(found.ravel(), [3.1, 5.2, 10, 10], 1e-4)
    centred = np.array([[1.5, 1.5, 1, 1]], np.float32)
    found = run(
        "crop_resize",
        boxes=centred,
        box_indices=first,
        box_coordinate_mode="CENTER_SIZE_WIDTH_FIRST",
        **shared,
    )
    close(found.ravel(), [6, 7, 10, 11])
    roi = boxes.reshape(1, 1, 4, 1, 1)
    assert run("crop_resize", roi=roi, **shared).shape == (1, 1, 1, 2, 2)


@pytest.mark.parametrize(
    "padding, left",
    [("constant", 9.0), ("border", 1.0), ("reflection", 2.0), ("symmetric", 1.0)],
)
def test_resample_beyond_the_edge(padding, left):
    x = np.array([[1, 2, 3]], np.float32).reshape(1, 1, 1, 3)
    coordinates = np.array([[-1, 0], [0.5, 0], [2, 0]], np.float32).reshape(1, 1, 3, 2)
    found = run(
        "resample",
        x=x,
        coordinates=coordinates,
        sampling_mode="bilinear",
        padding_mode=padding,
        padding_value=9.0,
        coordinates_mode="unnormalized",
        align_corners=True,
    )
    close(found.ravel(), [left, 1.5, 3])


@pytest.mark.parametrize("transforms", [1, 2])  # for all images, for each of them
def test_the_identity_transform_leaves_an_image_alone(transforms):
    x = numbers(2, 1, 4, 5)
    matrix = np.array([[1, 0, 0, 0, 1, 0]] * transforms, np.float32)
    found = run(
        "affine",
        x=x,
        transform_matrix=matrix,
        output_height=4,
        output_width=5,
        sampling_mode="bilinear",
        padding_mode="constant",
        padding_value=0.0,
        coordinates_mode="normalized_minus_one_to_one",
        align_corners=True,
    )
    close(found, x)


def test_non_maximum_suppression_keeps_the_best_of_overlapping_boxes():
    boxes = np.array(
        [[[0, 0, 2, 2], [0.1, 0, 2, 2], [5, 5, 1, 1], [9, 9, 1, 1]]], np.float32
    )
    scores = np.array([[[0.5], [0.9], [0.7], [0.1]]], np.float32)
    shared = dict(
        boxes=boxes, scores=scores, iou_threshold=0.5, score_threshold=0.2, max_boxes=3
    )
    kept, values, indices, count = run(
        "non_maximum_suppression",
        out=["FLOAT32", "FLOAT32", "INT32", "INT32"],
        **shared,
    )
    assert indices.tolist() == [[1, 2, -1]] and count.tolist() == [2]
    close(kept[0, :2], boxes[0, [1, 2]])
    close(values[0, :, 0], [0.9, 0.7, 0])


@pytest.mark.parametrize("mode", ["add", "sub", "mul", "div", "max", "min", "update"])
@given(
    rows=st.lists(
        st.integers(-4, 3), min_size=1, max_size=4, unique_by=lambda i: i % 4
    ),
    axis=st.integers(-2, 1),
)
def test_scatter_by_every_mode(mode, rows, axis):
    combine = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "max": np.maximum,
        "min": np.minimum,
        "update": lambda old, new: new,
    }[mode]
    data, index = numbers(4, 4) + 4, np.array(rows, np.int32)
    part = (index, slice(None)) if axis % 2 == 0 else (slice(None), index)
    updates = numbers(*data[part].shape, seed=1) + 4
    expected = data.copy()
    expected[part] = combine(expected[part], updates)
    close(
        run("scatter", data=data, indices=index, updates=updates, axis=axis, mode=mode),
        expected,
    )
    along = np.broadcast_to(
        index[:, None] if axis % 2 == 0 else index, updates.shape
    ).astype(np.int32)
    close(
        run(
            "scatter_along_axis",
            data=data,
            indices=along,
            updates=updates,
            axis=axis,
            mode=mode,
        ),
        expected,
    )
    if axis % 2 == 0:
        close(
            run(
                "scatter_nd",
                data=data,
                indices=index[:, None],
                updates=updates,
                mode=mode,
            ),
            expected,
        )


def test_scatter_adds_up_what_meets_in_one_place():
    data, rows, updates = (
        np.zeros((2, 1), np.float32),
        np.array([1, 1, 1], np.int32),
        np.ones((3, 1), np.float32),
    )
    assert run(
        "scatter", data=data, indices=rows, updates=updates, axis=0, mode="add"
    ).tolist() == [[0], [3]]


@given(
    rows=st.lists(
        st.lists(st.integers(-4, 3), min_size=2, max_size=2), min_size=1, max_size=3
    )
)
def test_gather_by_batch(rows):
    x, rows = numbers(len(rows), 4, 3), np.array(rows, np.int32)
    expected = np.stack([x[b][rows[b]] for b in range(len(rows))])
    close(run("gather", x=x, indices=rows, axis=1, batch_dims=1), expected)
    close(run("gather_nd", x=x, indices=rows[..., None], batch_dims=1), expected)
    close(
        run("gather_nd", x=x, indices=np.array([[-1, 3], [0, 0]], np.int32)),
        x[[-1, 0], [3, 0]],
    )


@pytest.mark.parametrize(
    "kind",
    [
        "gather",
        "gather_along_axis",
        "gather_nd",
        "scatter",
        "scatter_along_axis",
        "scatter_nd",
    ],
)
def test_indices_past_the_end_are_refused_and_negative_ones_where_they_are_checked(
    kind,
):
    def read(rows, **checked):
        indices = np.array(rows, np.int32)[:, None]
        if kind.startswith("scatter"):
            indices = indices[:, 0] if kind == "scatter" else indices
            checked |= {
                "data": numbers(2, 1),
                "updates": numbers(2, 1),
                "mode": "update",
            }
        else:
            checked["x"] = numbers(2, 1)
        return run(kind, indices=indices, **checked)

    close(read([0, -1]), read([0, 1]))
    with pytest.raises(InputError, match="bounds|out of range"):
        read([0, 2])
    with pytest.raises(InputError, match="a negative index"):
        read([0, -1], validate_indices=True)


def test_a_zero_in_a_shape_keeps_the_size_as_far_from_the_right():
    x = numbers(2, 3)
    close(run("reshape", x=x, shape=[1, 0, -1, 0]), x.reshape(1, 1, 2, 3))
    close(run("reshape", x=x, shape=[0, -1]), x)


@given(
    n=st.integers(1, 2),
    c=st.integers(1, 3),
    a=st.integers(1, 3),
    b=st.integers(1, 3),
    pad=st.integers(0, 2),
)
def test_blocks_go_to_batch_and_depth_and_back(n, c, a, b, pad):
    x, pads = numbers(n, c, 2 * a, 3 * b), [[pad * a, 0], [0, b]]
    batches = run("space_to_batch", x=x, block_shape=[a, b], paddings=pads)
    assert batches.shape == (n * a * b, c, 2 + pad, 4)
    close(batches[:n], np.pad(x, [(0, 0), (0, 0), *pads])[:, :, ::a, ::b])
    close(run("batch_to_space", x=batches, block_shape=[a, b], crops=pads), x)
    x = numbers(n, c, 2 * a, 3 * a)
    depth = run("space_to_depth", x=x, block_size=a)
    close(depth[:, :c], x[:, :, ::a, ::a])
    close(run("depth_to_space", x=depth, block_size=a), x)
    close(
        run(
            "pixel_shuffle",
            x=run("pixel_unshuffle", x=x, downscale_factor=a),
            upscale_factor=a,
        ),
        x,
    )


def test_shapes_and_fills():
    x = numbers(2, 3, 4)
    close(run("flatten2d", x=x, axis=2), x.reshape(6, 4))
    close(run("sliding_windows", x=x, axis=2, size=2, stride=2), x.reshape(2, 3, 2, 2))
    close(run("crop", x=x, crop_height=[1, 0], crop_width=[0, 2]), x[:, 1:, :2])
    close(run("fill", shape=[2, 2], value=1.5), np.full((2, 2), 1.5))
    close(run("fill_like", ref_tensor=x, value=2.0), np.full(x.shape, 2))
    close(run("range_1d", out="INT32", start=3, end=9, step=2), [3, 5, 7])
    close(run("squeeze", x=x[:1], axes=[0]), x[0])
    close(
        run("concat", values=[x, -x], axis=1, interleave=True),
        np.stack([x, -x], 2).reshape(2, 6, 4),
    )
    close(run("slice_by_size", x=x, begin=[0, 1, -2], size=[1, -1, 1]), x[:1, 1:, 2:3])
    assert run("non_zero", out="INT32", x=np.eye(2, dtype=np.float32)).tolist() == [
        [0, 0],
        [1, 1],
    ]
    close(
        run(
            "one_hot",
            indices=np.array([1, 0], np.int32),
            one_hot_vector_size=2,
            axis=0,
            on_value=2.0,
            off_value=-1.0,
        ),
        [[-1, 2], [2, -1]],
    )
    close(
        run(
            "reshape_like",
            x=x,
            ref_tensors=[numbers(4, 9), numbers(7, 6)],
            begins=[0, 1],
            ends=[1, 2],
            end_masks=[False, False],
        ),
        x.reshape(4, 6),
    )
    rows = run(
        "reverse_sequence",
        x=x,
        lengths=np.array([1, 3], np.int32),
        seq_axis=1,
        batch_axis=0,
    )
    close(rows, np.stack([x[0], x[1, ::-1]]))


@pytest.mark.parametrize(
    "mode, numpy_mode",
    [("constant", "constant"), ("reflect", "reflect"), ("replicate", "edge")],
)
@given(pad=st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_padding(mode, numpy_mode, pad):
    x = numbers(2, 4, 5)
    extra = {"constant_values": 3.0} if mode == "constant" else {}
    expected = np.pad(x, [(0, 0), tuple(pad[:2]), tuple(pad[2:])], numpy_mode, **extra)
    close(run("pad", x=x, pad=pad, mode=mode, constant_val=3.0), expected)


@given(
    n=st.integers(1, 2),
    c=st.integers(1, 3),
    h=st.integers(1, 3),
    w=st.integers(1, 4),
    u=st.integers(1, 3),
)
def test_einsum(n, c, h, w, u):
    x, y = numbers(n, c, h, w), numbers(n, w, h, u, seed=1)
    close(
        run("einsum", values=[x, y], equation="nchw,nwhu->nchu"),
        np.einsum("nchw,nwhu->nchu", x, y),
    )


@pytest.mark.parametrize(
    "kind, arguments, mean, deviation",
    [
        ("random_uniform", {"low": 2.0, "high": 4.0}, 3, 2 / 12**0.5),
        ("random_normal", {"mean": 1.0, "stddev": 2.0}, 1, 2),
        ("random_bernoulli", {"prob": 0.25}, 0.25, (0.25 * 0.75) ** 0.5),
    ],
)
def test_random_distributions(kind, arguments, mean, deviation):
    drawn = run(kind, shape=[200, 200], seed=7, **arguments)
    assert (
        abs(drawn.mean() - mean) < 5 * deviation / 200
        and abs(drawn.std() - deviation) < 0.02 * deviation + 0.01
    )
    assert np.array_equal(drawn, run(kind, shape=[200, 200], seed=7, **arguments))


@pytest.mark.parametrize("mode", ["probs", "logits"])
def test_random_categories_follow_their_probabilities(mode):
    probabilities = np.array([[0.1, 0.6, 0.3]], np.float32)
    x = probabilities if mode == "probs" else np.log(probabilities)
    drawn = run("random_categorical", x=x, mode=mode, size=20000, seed=3)
    assert (
        np.abs(np.bincount(drawn.ravel().astype(int)) / 20000 - probabilities[0]).max()
        < 0.02
    )


def test_classify_names_the_most_probable_label():
    probabilities = np.array([[0.25, 0.5, 0.25]], np.float32)
    op = Op(
        "classify",
        "classify",
        {"probabilities": Ref("p"), "classes": ["a", "b", "c"]},
        [("label", Type("STRING")), ("probs", Type("STRING", (), "dict"))],
    )
    made = program([op], {"p": Type("FLOAT32", (1, 3))}, ["label", "probs"])
    found = Executable(made).run({"p": torch.from_numpy(probabilities)}, {})
    assert found == {"label": "b", "probs": {"a": 0.25, "b": 0.5, "c": 0.25}}
