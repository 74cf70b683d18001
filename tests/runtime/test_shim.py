"""coremltools scripts through the shim: what Core ML's own Python binding would give, here."""

import shutil
import sys

import numpy as np
import pytest
import torch

from miltorch import shim
from miltorch.quiet import coremltools, quiet
from workbench.errors import InputError

pytestmark = pytest.mark.shim


@pytest.fixture(scope="module")
def ct():
    with quiet():
        module = coremltools()
        from coremltools.converters.mil.frontend.torch import converter as _  # noqa: F401
    return module


@pytest.fixture(autouse=True)
def installed(ct):
    shim.install()
    yield
    shim.uninstall()


def convert(ct, build, path, **options):
    """Saves a program of MIL's builder (a function of placeholders) or a traced torch module as a
    package."""
    with quiet():
        model = ct.convert(
            build,
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
            **options,
        )
        model.save(str(path))
    return str(path)


def program(ct, *shapes, **dtypes):
    """Decorator: a MIL program whose inputs are float32 unless `dtypes` says otherwise."""
    from coremltools.converters.mil.mil import Builder, types

    specs = [
        Builder.TensorSpec(shape=s, dtype=dtypes.get(f"x{i}", types.fp32))
        for i, s in enumerate(shapes)
    ]
    return lambda function: Builder.program(
        input_specs=specs, opset_version=ct.target.iOS18
    )(function)


@pytest.fixture(scope="module")
def doubling(ct, tmp_path_factory):
    """x [2, 3] → doubled (float32), whole (int32)."""
    from coremltools.converters.mil.mil import Builder as mb

    @program(ct, (2, 3))
    def build(x):
        return mb.add(x=x, y=x, name="doubled"), mb.cast(
            x=x, dtype="int32", name="whole"
        )

    return convert(ct, build, tmp_path_factory.mktemp("shim") / "doubling.mlpackage")


class Counter(torch.nn.Module):
    def __init__(self, step=1.0):
        super().__init__()
        self.step = step
        self.register_buffer("count", torch.zeros(1, 32))

    def forward(self, x):
        self.count[:] = self.count + self.step
        return x + self.count


def counting(ct, path, step=1.0):
    with quiet():
        traced = torch.jit.trace(Counter(step).eval(), torch.zeros(1, 32))
    state = ct.StateType(ct.TensorType(shape=(1, 32), dtype=np.float16), "count")
    shape = (ct.RangeDim(1, 4), 32)
    return convert(
        ct,
        traced,
        path,
        inputs=[ct.TensorType("x", shape)],
        outputs=[ct.TensorType("y")],
        states=[state],
    )


@pytest.fixture(scope="module")
def counter(ct, tmp_path_factory):
    return counting(ct, tmp_path_factory.mktemp("shim") / "counter.mlpackage")


X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_predict_gives_float32_and_int32(ct, doubling):
    found = ct.models.MLModel(doubling).predict({"x": X})
    assert found["doubled"].dtype == np.float32 and np.array_equal(
        found["doubled"], 2 * X
    )
    assert found["whole"].dtype == np.int32 and np.array_equal(found["whole"], X)


def test_predict_takes_lists_tensors_and_halves(ct, doubling):
    model = ct.models.MLModel(doubling)
    for x in (
        X.tolist(),
        torch.from_numpy(X),
        X.astype(np.float16),
        X.astype(np.int32),
    ):
        assert np.array_equal(model.predict({"x": x})["doubled"], 2 * X)


def test_a_list_of_inputs_gives_a_list_of_outputs(ct, doubling):
    found = ct.models.MLModel(doubling).predict([{"x": X}, {"x": -X}])
    assert [
        np.array_equal(y["doubled"], 2 * x) for y, x in zip(found, (X, -X), strict=True)
    ] == [True, True]


def test_a_spec_with_its_weights_loads_too(ct, doubling):
    saved = ct.models.MLModel(doubling, skip_model_load=True)
    model = ct.models.MLModel(saved.get_spec(), weights_dir=saved.weights_dir)
    assert np.array_equal(model.predict({"x": X})["doubled"], 2 * X)


def test_conversion_loads_what_it_made(ct):
    from coremltools.converters.mil.mil import Builder as mb

    @program(ct, (2,))
    def build(x):
        return mb.square(x=x, name="y")

    with quiet():
        model = ct.convert(build, minimum_deployment_target=ct.target.iOS18)
    assert model.predict({"x": np.array([2, 3.0])})["y"].tolist() == [4, 9]


def test_state_counts_across_calls_and_belongs_to_its_maker(ct, counter):
    model, x = ct.models.MLModel(counter), np.zeros((1, 32), np.float32)
    one, other = model.make_state(), model.make_state()
    assert [model.predict({"x": x}, one)["y"][0, 0] for _ in range(3)] == [1, 2, 3]
    assert model.predict({"x": x}, state=other)["y"][0, 0] == 1


def test_state_is_read_as_float32_and_written(ct, counter):
    model = ct.models.MLModel(counter)
    state = model.make_state()
    state.write_state("count", np.full((1, 32), 1 / 3, np.float32))
    found = state.read_state("count")
    assert found.dtype == np.float32 and np.all(found == np.float16(1 / 3))
    found += 1  # a copy: the state stays
    assert state.read_state("count")[0, 0] == np.float16(1 / 3)


def test_bad_states_are_runtime_errors(ct, counter):
    model = ct.models.MLModel(counter)
    state = model.make_state()
    with pytest.raises(RuntimeError, match="no state named 'other'"):
        state.read_state("other")
    with pytest.raises(RuntimeError, match="shape \\[1, 32\\], not \\[2\\]"):
        state.write_state("count", np.zeros(2))
    with pytest.raises(RuntimeError, match="no count"):
        model.predict({"x": np.zeros((1, 32))})


def locked(value):
    value.flags.writeable = False
    return value


REFUSED = {  # `PybindCompatibleArray`, `Utils::convertValueToObjC` and `py::array` itself: what they do not take
    **{
        kind.__name__: np.zeros((1, 32), kind)
        for kind in (np.float16, np.int64, np.int16, np.uint8, np.int8, np.bool_)
    },
    "longdouble": np.zeros((1, 32), np.longdouble),
    "complex": np.zeros((1, 32), np.complex64),
    "swapped": np.zeros((1, 32), ">f4"),
    "scalar": np.array(1.0, np.float32),
    "tensor": torch.zeros(1, 32),
    "read-only": locked(np.zeros((1, 32), np.float32)),
    "broadcast": np.broadcast_to(np.float32(0), (1, 32)),
}


@pytest.mark.matrix(6, wide=20)
@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_arrays_that_the_binding_refuses_are_refused(ct, counter, value, capfd):
    model = ct.models.MLModel(counter)
    state = model.make_state()
    for use in (
        lambda: state.write_state("count", value),
        lambda: model.__proxy__.predict({"x": value}, state.__proxy__),
    ):
        with pytest.raises(RuntimeError, match="^value type not convertible$"):
            use()
        # as natively, on stdout
        assert capfd.readouterr().out.startswith("Error: value type not convertible:\n")
    assert not state.read_state("count").any()


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int32])
def test_arrays_that_the_binding_takes_are_taken_whatever_their_strides(
    ct, counter, kind
):
    model, value = (
        ct.models.CompiledMLModel(ct.models.utils.compile_model(counter)),
        np.arange(64).astype(kind),
    )
    state = model.make_state()
    for strided in (
        value[:32].reshape(1, 32),
        value[::2].reshape(1, 32),
        value.reshape(32, 2)[:, :1].T,
    ):
        state.write_state("count", strided)
        assert np.array_equal(state.read_state("count"), strided)
        assert np.array_equal(
            model.predict({"x": strided}, state)["y"], 2.0 * strided + 1
        )


def test_coremltools_own_upcast_of_halves_comes_before_the_binding(ct, counter):
    model = ct.models.CompiledMLModel(ct.models.utils.compile_model(counter))
    assert (
        model.predict({"x": np.ones((1, 32), np.float16)}, model.make_state())["y"][
            0, 0
        ]
        == 2
    )
    with pytest.raises(RuntimeError, match="not convertible"):  # of int64 there is none
        model.predict({"x": np.ones((1, 32), int)}, model.make_state())
    # the binding makes nil of a list
    with pytest.raises(RuntimeError, match="Feature x is required"):
        model.predict({"x": [[1.0] * 32]}, model.make_state())


@pytest.mark.parametrize("value", [1.0, 1, "one", {"one": 1.0}, [1.0]])
def test_only_arrays_are_written_into_a_state(ct, counter, value):
    with pytest.raises(RuntimeError, match="only multi-array value is supported"):
        ct.models.MLModel(counter).make_state().write_state("count", value)


def test_what_comes_out_is_contiguous_float32_of_its_own(ct, counter):
    model, x = ct.models.MLModel(counter), np.zeros((4, 32), np.float32)
    state = model.make_state()
    for found in (model.predict({"x": x}, state)["y"], state.read_state("count")):
        assert (
            found.dtype == np.float32
            and found.flags.c_contiguous
            and found.flags.writeable
        )
        found += 7
    assert state.read_state("count")[0, 0] == 1


def test_errors_of_core_ml_have_three_lines_the_last_a_brace(ct, counter, tmp_path):
    """`Utils::handleError`: the description of a dictionary, quotes and what is not ASCII
    escaped."""
    model = ct.models.MLModel(counter)
    with pytest.raises(RuntimeError) as failed:
        model.predict({"x": np.zeros((5, 32), np.float32)}, model.make_state())
    first, text, last = str(failed.value).split("\n")
    assert (
        (first, last) == ("{", "}")
        and text.startswith('    NSLocalizedDescription = "For')
        and text.endswith('";')
    )
    assert str(failed.value).isascii()
    empty = tmp_path / "empty.mlmodelc"
    empty.mkdir()
    for refused in (
        lambda: ct.models.CompiledMLModel(str(empty)),
        lambda: shim.Proxy.compileModel(str(empty)),
    ):
        with pytest.raises(
            RuntimeError, match=r"^\{\n    NSLocalizedDescription = .*;\n\}$"
        ):
            refused()
    with pytest.raises(RuntimeError, match='^Error compiling model: ".*".$'):
        shim.Proxy(str(tmp_path / "no.mlpackage"), "ALL")


@pytest.mark.parametrize("rows, fits", [(1, True), (4, True), (5, False)])
def test_range_dims_bound_an_input(ct, counter, rows, fits):
    model = ct.models.MLModel(counter)
    state, x = model.make_state(), np.zeros((rows, 32), np.float32)
    if fits:
        assert model.predict({"x": x}, state)["y"].shape == (rows, 32)
    else:
        with pytest.raises(
            RuntimeError,
            match=r"For input feature 'x', the provided shape 5 \\U00d7 32",
        ):
            model.predict({"x": x}, state)


def test_enumerated_shapes_bound_an_input(ct, tmp_path):
    with quiet():
        traced = torch.jit.trace(torch.nn.ReLU(), torch.zeros(1, 4))
    shapes = ct.EnumeratedShapes(shapes=[[1, 4], [2, 4]], default=[1, 4])
    path = convert(
        ct,
        traced,
        tmp_path / "relu.mlpackage",
        inputs=[ct.TensorType("x", shapes)],
        outputs=[ct.TensorType("y")],
    )
    model = ct.models.MLModel(path)
    assert model.predict({"x": -np.ones((2, 4))})["y"].tolist() == [[0] * 4] * 2
    with pytest.raises(RuntimeError, match=r"3 \\U00d7 4"):
        model.predict({"x": np.ones((3, 4))})


def test_bad_inputs_are_named(ct, doubling):
    model = ct.models.MLModel(doubling)
    with pytest.raises(RuntimeError, match="Feature x is required"):
        model.predict({})
    with pytest.raises(RuntimeError, match=r"'x', the provided shape 3 \\U00d7 2"):
        model.predict({"x": X.T})
    with pytest.raises(KeyError, match="does not match any"):
        model.predict({"z": X})


def test_an_optional_input_has_its_default(ct, tmp_path):
    with quiet():
        traced = torch.jit.trace(torch.nn.ReLU(), torch.zeros(2))
    default = np.full(2, 3.0, np.float32)
    given = ct.TensorType("x", (2,), default_value=default)
    path = convert(
        ct,
        traced,
        tmp_path / "optional.mlpackage",
        inputs=[given],
        outputs=[ct.TensorType("y")],
    )
    assert ct.models.MLModel(path).predict({})["y"].tolist() == [3, 3]


def test_functions_of_one_package_are_chosen_by_name(ct, tmp_path):
    descriptor = ct.utils.MultiFunctionDescriptor()
    for step in (1.0, 10.0):
        descriptor.add_function(
            counting(ct, tmp_path / f"{step}.mlpackage", step), "main", f"by_{step:.0f}"
        )
    descriptor.default_function_name = "by_1"
    with quiet():
        ct.utils.save_multifunction(descriptor, str(tmp_path / "both.mlpackage"))
    for name, expected in (("by_1", 1), ("by_10", 10), (None, 1)):
        model = ct.models.MLModel(str(tmp_path / "both.mlpackage"), function_name=name)
        assert (
            model.predict({"x": np.zeros((1, 32), np.float32)}, model.make_state())[
                "y"
            ][0, 0]
            == expected
        )


def test_a_loaded_model_tells_where_its_compiled_form_is(ct, doubling):
    model = ct.models.MLModel(doubling)
    compiled = ct.models.CompiledMLModel(model.get_compiled_model_path())
    assert np.array_equal(compiled.predict({"x": X})["doubled"], 2 * X)


@pytest.mark.parametrize("layout", ["RGB", "BGR", "GRAYSCALE"])
def test_images_go_in_by_their_channels(ct, tmp_path, layout):
    from PIL import Image

    channels = 1 if layout == "GRAYSCALE" else 3
    with quiet():
        traced = torch.jit.trace(torch.nn.ReLU(), torch.zeros(1, channels, 2, 4))
    image = ct.ImageType(
        "x", (1, channels, 2, 4), color_layout=getattr(ct.colorlayout, layout)
    )
    path = convert(
        ct,
        traced,
        tmp_path / "image.mlpackage",
        inputs=[image],
        outputs=[ct.TensorType("y")],
    )
    model = ct.models.MLModel(path)
    pixels = np.random.default_rng(0).integers(0, 255, (2, 4, 3), np.uint8)
    picture = Image.fromarray(pixels if channels == 3 else pixels[..., 0])
    found = model.predict({"x": picture})["y"][0]
    expected = pixels.transpose(2, 0, 1)[:channels]
    assert np.array_equal(found, expected[::-1] if layout == "BGR" else expected)
    with pytest.raises(
        RuntimeError, match="has size \\(2, 2\\), the model takes \\(4, 2\\)"
    ):
        model.predict({"x": picture.resize((2, 2))})


def test_images_come_out_as_pillow_images(ct, tmp_path):
    with quiet():
        traced = torch.jit.trace(torch.nn.ReLU(), torch.zeros(1, 3, 2, 4))
    given, made = (
        ct.TensorType("x", (1, 3, 2, 4)),
        ct.ImageType("y", color_layout=ct.colorlayout.RGB),
    )
    model = ct.models.MLModel(
        convert(ct, traced, tmp_path / "out.mlpackage", inputs=[given], outputs=[made])
    )
    x = np.random.default_rng(0).uniform(-10, 300, (1, 3, 2, 4)).astype(np.float32)
    found = model.predict({"x": x})["y"]
    assert found.mode == "RGBA" and found.size == (4, 2)
    assert np.array_equal(
        np.asarray(found)[..., :3].transpose(2, 0, 1),
        np.clip(np.round(x[0].astype(np.float16)), 0, 255),
    )


@pytest.mark.parametrize("labels", [["cat", "dog", "eel"], [10, 20, 30]])
def test_classifiers_give_a_label_and_probabilities(ct, tmp_path, labels):
    with quiet():
        traced = torch.jit.trace(torch.nn.Softmax(-1), torch.zeros(1, 3))
    path = convert(
        ct,
        traced,
        tmp_path / "classes.mlpackage",
        inputs=[ct.TensorType("x", (1, 3))],
        classifier_config=ct.ClassifierConfig(labels),
    )
    found = ct.models.MLModel(path).predict({"x": np.array([[0.0, 5, 1]], np.float32)})
    assert found.pop("classLabel") == labels[1]
    (probabilities,) = found.values()
    assert list(probabilities) == labels and abs(sum(probabilities.values()) - 1) < 1e-3


def test_a_model_that_cannot_run_warns_and_says_why(ct, doubling, tmp_path):
    broken = shutil.copytree(doubling, tmp_path / "broken.mlpackage")
    spec = ct.models.MLModel(doubling, skip_model_load=True).get_spec()
    spec.mlProgram.functions["main"].block_specializations["CoreML8"].operations[
        -1
    ].type = "made_up"
    (broken / "Data/com.apple.CoreML/model.mlmodel").write_bytes(
        spec.SerializeToString()
    )
    with pytest.warns(RuntimeWarning, match="operations without a rule: made_up"):
        model = ct.models.MLModel(str(broken))
    with pytest.raises(RuntimeError, match="made_up"):
        model.predict({"x": X})


def test_precision_is_chosen_at_install(ct, tmp_path):
    from coremltools.converters.mil.mil import Builder as mb

    @program(ct, (1,))
    def build(x):
        return mb.mul(x=mb.add(x=x, y=x), y=x, name="y")

    path, x = (
        convert(ct, build, tmp_path / "square.mlpackage"),
        np.array([0.1], np.float32),
    )
    rounded = ct.models.MLModel(path).predict({"x": x})["y"]
    shim.install(precision="exact")
    exact = ct.models.MLModel(path).predict({"x": x})["y"]
    assert exact == (x + x) * x != rounded == rounded.astype(np.float16)
    with pytest.raises(InputError, match="'double'"):
        shim.install(precision="double")


def test_uninstalling_leaves_coremltools_as_it_was(ct, doubling, counter):
    shim.uninstall()
    before = {
        name: vars(ct.models.model)[name]
        for name in ("_MLModelProxy", "_is_macos", "_macos_version")
    }
    assert before["_MLModelProxy"] is None and not hasattr(ct, "libcoremlpython")
    shim.install()
    shim.install()
    assert ct.models.model._MLModelProxy is shim.Proxy and ct.models.model._is_macos()
    shim.uninstall()
    assert {
        name: vars(ct.models.model)[name] for name in before
    } == before and not hasattr(ct, "libcoremlpython")
    assert "coremltools.libcoremlpython" not in sys.modules
    with pytest.raises(Exception, match="macOS version 10.13"), quiet():
        ct.models.MLModel(doubling).predict({"x": X})
    with pytest.raises(Exception, match="macOS 15"):
        ct.models.MLModel(counter).make_state()


def test_a_mac_is_left_alone(monkeypatch):
    shim.uninstall()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(InputError, match="macOS, which has Core ML itself"):
        shim.install()


class Element(torch.nn.Module):
    """Slices at a constant that is an array of one element: the frontend takes int() of it."""

    def forward(self, x):
        at = torch.tensor([1])
        return x[:, at : at + 2]


# a conversion that fails leaves a temporary folder of coremltools to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_converter_is_mended_on_request(ct, tmp_path):
    with quiet():
        traced = torch.jit.trace(Element(), torch.zeros(2, 4), check_trace=False)
    inputs = [ct.TensorType(name="x", shape=(2, 4))]
    with pytest.raises(TypeError, match="0-dimensional"):
        convert(ct, traced, tmp_path / "no.mlpackage", inputs=inputs)
    shim.install(mend_converter=True)
    package = convert(ct, traced, tmp_path / "yes.mlpackage", inputs=inputs)
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    (result,) = ct.models.MLModel(package).predict({"x": x}).values()
    assert result.tolist() == x[:, 1:3].tolist()
    shim.uninstall()
    with pytest.raises(TypeError, match="0-dimensional"):
        convert(ct, traced, tmp_path / "again.mlpackage", inputs=inputs)


@pytest.fixture(scope="module")
def newest(ct, tmp_path_factory):
    """A package of iOS 26 (specification version 10) that doubles x [2, 3]."""
    from coremltools.converters.mil.mil import Builder as mb

    specs = [mb.TensorSpec(shape=(2, 3))]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS26)
    def build(x):
        return mb.add(x=x, y=x, name="doubled")

    path = tmp_path_factory.mktemp("newest") / "m.mlpackage"
    with quiet():
        ct.convert(
            build, minimum_deployment_target=ct.target.iOS26, skip_model_load=True
        ).save(str(path))
    return path


def test_packages_of_ios_26_run(ct, newest):
    model = ct.models.MLModel(str(newest))
    assert model.get_spec().specificationVersion == 10
    (result,) = model.predict({"x": np.ones((2, 3), np.float32)}).values()
    assert (result == 2).all()
