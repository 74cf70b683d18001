"""coremltools scripts through the shim have the results of Core ML's own Python binding."""

import shutil
import sys

import numpy as np
import pytest
import torch
from refusal import refused

from miltorch import shim
from miltorch.coremltools_import import coremltools, frozen_gc, quiet
from workbench.exporter import template

pytestmark = pytest.mark.shim


@pytest.fixture(autouse=True)
def installed(ct):
    shim.install()
    with frozen_gc():
        yield
    shim.uninstall()


def package(path, module, *shape, **options) -> str:
    """A package of a torch module, traced on x of a shape, or of a program of MIL's builder."""
    ct = coremltools()
    if shape:
        defaults = {
            "inputs": [ct.TensorType("x", shape)],
            "outputs": [ct.TensorType("y")],
        }
        options = defaults | options
        with quiet():
            traced = torch.jit.trace(module.eval(), torch.zeros(shape), False)
        module = traced
    target = {"minimum_deployment_target": ct.target.iOS18} | options
    with quiet():
        ct.convert(module, skip_model_load=True, **target).save(str(path))
    return str(path)


def program(function, *shape, opset="iOS18"):
    """A program of MIL's builder whose input is float32."""
    from coremltools.converters.mil.mil import Builder as mb

    specs = [mb.TensorSpec(shape=shape)]
    opset = getattr(coremltools().target, opset)
    return mb.program(input_specs=specs, opset_version=opset)(lambda x: function(mb, x))


def doubled_and_whole(mb, x):
    return mb.add(x=x, y=x, name="doubled"), mb.cast(x=x, dtype="int32", name="whole")


@pytest.fixture(scope="module")
def doubling(ct, tmp_path_factory):
    """x [2, 3] → doubled (float32), whole (int32)."""
    path = tmp_path_factory.mktemp("shim") / "doubling.mlpackage"
    return package(path, program(doubled_and_whole, 2, 3))


class Counter(torch.nn.Module):
    """Adds a step to its state, and the state to x."""

    def __init__(self, step=1.0):
        super().__init__()
        self.step = step
        self.register_buffer("count", torch.zeros(1, 32))

    def forward(self, x):
        self.count[:] = self.count + self.step
        return x + self.count


def counting(ct, path, step=1.0) -> str:
    state = ct.StateType(ct.TensorType(shape=(1, 32), dtype=np.float16), "count")
    given = [ct.TensorType("x", (ct.RangeDim(1, 4), 32))]
    return package(path, Counter(step), 1, 32, inputs=given, states=[state])


@pytest.fixture(scope="module")
def counter(ct, tmp_path_factory):
    return counting(ct, tmp_path_factory.mktemp("shim") / "counter.mlpackage")


@pytest.fixture
def model_of(ct, tmp_path):
    """Arguments of `package` behind its path → the model."""

    def make(*what, **options):
        return ct.models.MLModel(package(tmp_path / "m.mlpackage", *what, **options))

    return make


@pytest.fixture
def counting_model(ct, counter):
    return ct.models.CompiledMLModel(ct.models.utils.compile_model(counter))


X = np.arange(6, dtype=np.float32).reshape(2, 3)
ROW = np.zeros((1, 32), np.float32)


# --- inputs and outputs ---------------------------------------------------------------------------


def test_a_model_predicts_however_it_was_loaded_whatever_coremltools_takes(
    ct, doubling
):
    saved = ct.models.MLModel(doubling, skip_model_load=True)
    model = ct.models.MLModel(doubling)
    with quiet():
        target = {"minimum_deployment_target": ct.target.iOS18}
        converted = ct.convert(program(doubled_and_whole, 2, 3), **target)
    for loaded in (
        model,
        converted,
        ct.models.MLModel(saved.get_spec(), weights_dir=saved.weights_dir),
        ct.models.CompiledMLModel(model.get_compiled_model_path()),
    ):
        outputs = loaded.predict({"x": X})
        assert (outputs["doubled"] == 2 * X).all() and outputs[
            "doubled"
        ].dtype == "float32"
        assert (outputs["whole"] == X).all() and outputs["whole"].dtype == "int32"
    arrays = np.float16, np.float32, np.float64, np.int32
    outputs = model.predict([{"x": X}, {"x": -X}])
    assert [y["doubled"].tolist() for y in outputs] == [
        (2 * X).tolist(),
        (-2 * X).tolist(),
    ]
    for given in (list, torch.tensor, *arrays):
        outputs = model.predict({"x": given(X.tolist())})
        assert (outputs["doubled"] == 2 * X).all()


def test_arrays_are_given_as_new_ones(counting_model):
    state, x = counting_model.make_state(), np.arange(64.0)[None, ::2]
    y = counting_model.predict({"x": x}, state)["y"]
    assert np.array_equal(y, x + 1)
    for array in (y, state.read_state("count")):
        array += 7  # writeable, and a copy
    assert (state.read_state("count") == 1).all()


def test_a_state_counts_across_calls_and_belongs_to_its_maker(ct, counter):
    model = ct.models.MLModel(counter)
    one, other = model.make_state(), model.make_state()
    assert [model.predict({"x": ROW}, one)["y"][0, 0] for _ in range(3)] == [1, 2, 3]
    assert model.predict({"x": ROW}, state=other)["y"][0, 0] == 1


@pytest.mark.parametrize("layout", ["RGB", "BGR", "GRAYSCALE"])
def test_images_go_in_by_their_channels(ct, model_of, layout):
    from PIL import Image

    shape = 1, 1 if layout == "GRAYSCALE" else 3, 2, 4
    image = ct.ImageType("x", shape, color_layout=getattr(ct.colorlayout, layout))
    model = model_of(torch.nn.ReLU(), *shape, inputs=[image])
    pixels = np.random.default_rng(0).integers(0, 255, (2, 4, 3), np.uint8)
    picture = Image.fromarray(pixels if shape[1] == 3 else pixels[..., 0])
    expected = pixels.transpose(2, 0, 1)[: shape[1]]
    expected = expected[::-1] if layout == "BGR" else expected
    assert np.array_equal(model.predict({"x": picture})["y"][0], expected)
    with pytest.raises(RuntimeError, match=r"size \(2, 2\), the model takes \(4, 2\)"):
        model.predict({"x": picture.resize((2, 2))})


def test_images_come_out_as_pillow_images(ct, model_of):
    outputs = [ct.ImageType("y", color_layout=ct.colorlayout.RGB)]
    x = np.random.default_rng(0).uniform(-10, 300, (1, 3, 2, 4)).astype(np.float32)
    picture = model_of(torch.nn.ReLU(), *x.shape, outputs=outputs).predict({"x": x})[
        "y"
    ]
    assert picture.mode == "RGBA" and picture.size == (4, 2)
    expected = np.clip(np.round(x[0].astype(np.float16)), 0, 255)
    assert np.array_equal(np.asarray(picture)[..., :3].transpose(2, 0, 1), expected)


@pytest.mark.parametrize("labels", [["cat", "dog", "eel"], [10, 20, 30]])
def test_classifiers_give_a_label_and_probabilities(ct, model_of, labels):
    config = {"classifier_config": ct.ClassifierConfig(labels), "outputs": None}
    model = model_of(torch.nn.Softmax(-1), 1, 3, **config)
    outputs = model.predict({"x": np.array([[0.0, 5, 1]])})
    assert outputs.pop("classLabel") == labels[1]
    (probabilities,) = outputs.values()
    assert list(probabilities) == labels and abs(sum(probabilities.values()) - 1) < 1e-3


def test_an_optional_input_has_its_default(ct, model_of):
    given = ct.TensorType("x", (2,), default_value=np.full(2, 3.0, np.float32))
    model = model_of(torch.nn.ReLU(), 2, inputs=[given])
    assert model.predict({})["y"].tolist() == [3, 3]


def test_functions_of_one_package_are_chosen_by_name(ct, tmp_path):
    descriptor, both = ct.utils.MultiFunctionDescriptor(), tmp_path / "both.mlpackage"
    for step in (1, 10):
        path = counting(ct, tmp_path / f"{step}.mlpackage", float(step))
        descriptor.add_function(path, "main", f"by_{step}")
    descriptor.default_function_name = "by_1"
    with quiet():
        ct.utils.save_multifunction(descriptor, str(both))
    for name, expected in (("by_1", 1), ("by_10", 10), (None, 1)):
        model = ct.models.MLModel(str(both), function_name=name)
        counted = model.predict({"x": ROW}, model.make_state())["y"]
        assert counted[0, 0] == expected


def test_packages_of_ios_26_run(ct, model_of):
    newest = program(doubled_and_whole, 2, 3, opset="iOS26")
    model = model_of(newest, minimum_deployment_target=ct.target.iOS26)
    assert model.get_spec().specificationVersion == 10
    assert (model.predict({"x": X})["doubled"] == 2 * X).all()


# --- refusals -------------------------------------------------------------------------------------


def rows(count):
    return {"x": np.zeros((count, 32), np.float32)}


def writing(value):
    return lambda m, s: s.write_state("count", value)


NO_STATE = '= "The input feature for count must be an MLState, but it was not.";'
NO_ARRAY, NO_TYPE = "only multi-array value is supported", "value type not convertible"
REFUSALS = {  # what a script does with a model and its state → the error's words
    "no input": (lambda m, s: m.predict({}, s), "Feature x is required"),
    "nil": (lambda m, s: m.predict({"x": [[1.0] * 32]}, s), "Feature x is required"),
    "T": (lambda m, s: m.predict(rows(5), s), r"'x', .* shape 5 \\U00d7 32"),
    "axes": (lambda m, s: m.predict({"x": ROW.T}, s), r"shape 32 \\U00d7 1"),
    "no state": (lambda m, s: m.predict({"x": ROW}), NO_STATE),
    "name": (lambda m, s: s.read_state("other"), "no state named 'other'"),
    "size": (writing(np.zeros(2)), r"32\], not \[2\]"),
    **{str(x): (writing(x), NO_ARRAY) for x in (1.0, {"one": 1.0}, [1.0])},
    # beyond those of tests/mac/test_binding.py: what `PybindCompatibleArray`,
    # `Utils::convertValueToObjC` and `py::array` do not take
    "scalar": (writing(np.array(1.0, np.float32)), NO_TYPE),
    "tensor": (writing(torch.zeros(1, 32)), NO_TYPE),
    "swapped": (writing(np.zeros((1, 32), ">f4")), NO_TYPE),
    **{x: (writing(np.zeros((1, 32), x)), NO_TYPE) for x in ("int8", "F")},
}


@pytest.mark.parametrize("use, words", REFUSALS.values(), ids=REFUSALS)
def test_misuse_is_refused_as_the_binding_does(counting_model, use, words, capfd):
    model = counting_model
    state = model.make_state()
    assert model.predict(rows(4), model.make_state())["y"].shape == (4, 32)
    with pytest.raises(RuntimeError, match=words):
        use(model, state)
    assert not state.read_state("count").any()
    # as natively, on stdout
    told = capfd.readouterr().out.startswith(f"Error: {NO_TYPE}:\n")
    assert told == (words == NO_TYPE)


def test_enumerated_shapes_bound_an_input(ct, model_of):
    shapes = ct.EnumeratedShapes(shapes=[[1, 4], [2, 4]], default=[1, 4])
    model = model_of(torch.nn.ReLU(), 1, 4, inputs=[ct.TensorType("x", shapes)])
    assert model.predict({"x": -np.ones((2, 4))})["y"].tolist() == [[0] * 4] * 2
    with pytest.raises(RuntimeError, match=r"3 \\U00d7 4"):
        model.predict({"x": np.ones((3, 4))})


def added(ct, model_of, *options):
    """A model that adds up x [n, 4] and y [1, m], with enumerated n and m."""

    class Both(torch.nn.Module):
        def forward(self, x, y):
            return x.sum() + y

    path = [
        ct.TensorType(name, ct.EnumeratedShapes(shapes=shapes, default=shapes[0]))
        for name, shapes in zip("xy", options)
    ]
    given = [torch.zeros(shapes[0]) for shapes in options]
    with quiet():
        traced = torch.jit.trace(Both().eval(), tuple(given), check_trace=False)
    return model_of(traced, inputs=path, outputs=[ct.TensorType("z")])


def test_inputs_with_enumerated_shapes_go_together_the_nth_with_the_nth(ct, model_of):
    """coremltools' issue 2271, seen on a Mac: length 32 with length 256 fails."""
    model = added(ct, model_of, [[1, 4], [2, 4]], [[1, 6], [1, 8]])
    for n, m in ((1, 6), (2, 8)):
        outputs = model.predict({"x": np.ones((n, 4)), "y": np.zeros((1, m))})
        assert outputs["z"].tolist() == [[4.0 * n] * m]
    for n, m in ((1, 8), (2, 6)):
        with pytest.raises(RuntimeError, match="the n-th of one with the n-th"):
            model.predict({"x": np.ones((n, 4)), "y": np.zeros((1, m))})


def test_a_state_of_other_tensors_is_refused(ct, counter, counting_model, model_of):
    class Larger(Counter):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1, 64))

    kind = ct.StateType(ct.TensorType(shape=(1, 64), dtype=np.float16), "count")
    given = [ct.TensorType("x", (1, 64))]
    other = model_of(Larger(), 1, 64, inputs=given, states=[kind])
    with pytest.raises(RuntimeError, match="another model made it"):
        counting_model.predict({"x": ROW}, other.make_state())


def test_errors_of_core_ml_have_three_lines_the_last_a_brace(
    ct, counting_model, tmp_path
):
    """`Utils::handleError`: the description of a dictionary, quotes and what is not ASCII
    escaped."""
    empty, model = tmp_path / "empty.mlmodelc", counting_model
    empty.mkdir()
    for use in (
        lambda: model.predict(rows(5), model.make_state()),
        lambda: ct.models.CompiledMLModel(str(empty)),
        lambda: shim.Proxy.compileModel(str(empty)),
    ):
        shape = r"^\{\n    NSLocalizedDescription = \".*\";\n\}$"
        with pytest.raises(RuntimeError, match=shape) as failed:
            use()
        assert str(failed.value).isascii()
    with pytest.raises(RuntimeError, match='^Error compiling model: ".*".$'):
        shim.Proxy(str(tmp_path / "no.mlpackage"), "ALL")


def test_a_model_that_cannot_run_warns_and_says_why(ct, doubling, tmp_path):
    broken = shutil.copytree(doubling, tmp_path / "broken.mlpackage")
    spec = ct.models.MLModel(doubling, skip_model_load=True).get_spec()
    block = spec.mlProgram.functions["main"].block_specializations["CoreML8"]
    block.operations[-1].type = "made_up"
    (broken / template.MODEL).write_bytes(spec.SerializeToString())
    with pytest.warns(RuntimeWarning, match="operations without a rule: made_up"):
        model = ct.models.MLModel(str(broken))
    with pytest.raises(RuntimeError, match="made_up"):
        model.predict({"x": X})


# --- installing -----------------------------------------------------------------------------------


def test_precision_is_chosen_at_install(model_of):
    square = program(lambda mb, x: mb.mul(x=mb.add(x=x, y=x), y=x, name="y"), 1)
    x = np.array([0.1], np.float32)
    rounded = model_of(square).predict({"x": x})["y"]
    shim.install(precision="exact")
    exact = model_of(square).predict({"x": x})["y"]
    assert exact == (x + x) * x != rounded == rounded.astype(np.float16)
    with refused("'double'"):
        shim.install(precision="double")


def test_uninstalling_leaves_coremltools_as_it_was(ct, doubling, counter):
    shim.install()  # once more
    shim.uninstall()
    assert "coremltools.libcoremlpython" not in sys.modules
    assert not hasattr(ct, "libcoremlpython")
    with pytest.raises(Exception, match="macOS version 10.13"), quiet():
        ct.models.MLModel(doubling).predict({"x": X})
    with pytest.raises(Exception, match="macOS 15"):
        ct.models.MLModel(counter).make_state()


def test_a_mac_is_left_alone(monkeypatch):
    shim.uninstall()
    monkeypatch.setattr(sys, "platform", "darwin")
    with refused("macOS, which has Core ML itself"):
        shim.install()


class Element(torch.nn.Module):
    """Slices at a constant that is an array of one element: the frontend takes int() of it."""

    def forward(self, x):
        at = torch.tensor([1])
        return x[:, at : at + 2]


# a conversion that fails leaves a temporary folder of coremltools to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_converter_is_mended_on_request_until_it_is_uninstalled(model_of):
    x = np.arange(8.0).reshape(2, 4)
    shim.install(mend_converter=True)
    sliced = model_of(Element(), 2, 4).predict({"x": x})["y"]
    assert sliced.tolist() == x[:, 1:3].tolist()
    for restore in (shim.install, shim.uninstall):
        restore()
        with pytest.raises(TypeError, match="0-dimensional"):
            model_of(Element(), 2, 4)
