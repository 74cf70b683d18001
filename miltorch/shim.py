"""coremltools' native layer on PyTorch: `MLModel(...).predict()` where there is no Core
ML.

```
from miltorch import shim
shim.install()                 # the one added line
model = coremltools.models.MLModel("model.mlpackage")
state = model.make_state()
model.predict({"x": x}, state)
```
Inputs are PIL images and the NumPy arrays that Core ML's Python binding takes: writeable ones of
float32, float64 or int32. All others are refused, as the binding refuses them (coremltools' Python
code upcasts float16 inputs first). Outputs are those of the binding: float32 for fp16, int32,
images, class labels; errors are RuntimeErrors in its wording. Compute units and hints are accepted
and have no effect. Compiling copies the package. The shim has no compute plans, devices or model
assets, and runs ML Programs alone.
"""

import json
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import torch

import miltorch
from miltorch.coremltools_import import coremltools
from miltorch.errors import InputError
from miltorch.precision import check_precision
from miltorch.program import files

# the version that coremltools reads: the system whose features (iOS 18) miltorch has
MACOS = (15, 5)
ACCEPTED = (np.float32, np.float64, np.int32)  # int8 too, once built for macOS 26
_patches = ExitStack()  # what `install` replaced; closing it restores coremltools


def install(precision: str = "declared", mend_converter: bool = False) -> None:
    """Replaces coremltools' native layer; the options of a second call replace those of
    the first, for models loaded later.

    `mend_converter` also mends coremltools 9.0's PyTorch frontend for NumPy 2.4, which
    refuses `int()` of an array of one element (coremltools' issue 2632): without it
    many conversions stop with "only 0-dimensional arrays can be converted to Python
    scalars".

    Raises:
        InputError: on a Mac, where the native layer is better; an unknown precision.
    """
    if sys.platform == "darwin":
        raise InputError(
            "shim",
            "macOS, which has Core ML itself",
            "a machine without Core ML",
            "leave shim.install() out here",
        )
    check_precision(precision)
    Proxy.precision = precision
    uninstall()
    _patches.enter_context(replaced(Proxy))
    if mend_converter:
        _patches.enter_context(mended_converter())


@contextmanager
def mended_converter() -> Iterator[None]:
    """Context manager in which coremltools' PyTorch frontend casts constant arrays of one
    element; see `install`."""
    coremltools()
    from coremltools.converters.mil.frontend.torch import ops

    original = ops._cast

    def cast(context, node, dtype, name):
        value = ops._get_inputs(context, node, expected=1)[0].val
        if not isinstance(value, np.ndarray) or value.size != 1:
            return original(context, node, dtype, name)
        context.add(ops.mb.const(val=dtype(value.item()), name=node.name), node.name)

    with mock.patch.object(ops, "_cast", cast):
        yield


@contextmanager
def replaced(proxy: "type[Proxy]") -> Iterator[None]:
    """Context manager in which `proxy` is coremltools' native layer; compute plans work if
    it has them."""
    ct = coremltools()
    from coremltools.models import _compiled_model, compute_plan, model, utils

    native = ModuleType("coremltools.libcoremlpython")
    native._MLModelProxy = proxy
    # modules, and the value that replaces a name in each of them
    replacements = [
        ([model, _compiled_model], "_MLModelProxy", proxy),
        ([model, _compiled_model, utils], "_macos_version", lambda: MACOS),
        ([model], "_is_macos", lambda: True),
        ([ct], "libcoremlpython", native),
    ]
    if hasattr(proxy, "get_compute_plan"):
        replacements.append(([compute_plan], "_MLModelProxy", proxy))
    original = sys.modules.pop(native.__name__, None)
    with ExitStack() as patches:
        if original:
            patches.callback(sys.modules.__setitem__, native.__name__, original)
        patches.callback(sys.modules.pop, native.__name__, None)
        sys.modules[native.__name__] = native
        for modules, name, value in replacements:
            for module in modules:
                patch = mock.patch.object(module, name, value, create=True)
                patches.enter_context(patch)
        yield


def uninstall() -> None:
    """Restores what `install` replaced; models loaded meanwhile still predict."""
    _patches.close()


class StateProxy:
    """State of one model: fp16 tensors, read as float32."""

    def __init__(self, executable: miltorch.Executable):
        self.cells, self.types = executable.make_state(), executable.program.states

    def _cell(self, name: str):
        if name not in self.cells:
            raise RuntimeError(
                f"no state named {name!r}; this model has {sorted(self.cells) or 'none'}"
            )
        return self.cells[name]

    def read_state(self, name: str) -> np.ndarray:
        return self._cell(name).value.float().numpy().copy()

    def write_state(self, name: str, value) -> None:
        if isinstance(value, (bool, int, float, str, bytes, dict, list, tuple)):
            raise RuntimeError(
                "Failed to write state, only multi-array value is supported"
            )
        cell = self._cell(name)
        value = torch.from_numpy(np.array(_accepted(value), np.float32))
        if value.shape != cell.value.shape:
            raise RuntimeError(
                f"state {name!r} has shape {list(cell.value.shape)}, not {list(value.shape)}"
            )
        if self.types[name].dtype == "FLOAT16":
            value = value.half()
        cell.value = value.to(cell.value.dtype)


class Proxy:
    """One loaded function of one package, in the place of coremltools'
    `_MLModelProxy`."""

    precision = "declared"

    def __init__(
        self,
        path: str,
        compute_units: str,
        function_name: str = "",
        hints: dict | None = None,
        asset=None,
    ):
        start = time.perf_counter_ns()
        self.path, self.compiled, self.last_predict_ns = Path(path), None, None
        try:
            program = miltorch.read(self.path, function_name or None)
            self.executable = miltorch.Executable(program, self.precision).release()
        except InputError as problem:
            error = RuntimeError(f'Error compiling model: "{problem}".')
            if self.path.suffix == ".mlmodelc":
                error = _error(problem)
            raise error from problem
        self.description = program.description
        self.load_ns = time.perf_counter_ns() - start

    @staticmethod
    def maximum_supported_specification_version() -> int:
        return coremltools()._SPECIFICATION_VERSION_IOS_26

    @staticmethod
    def compileModel(path: str) -> str:
        """A folder `.mlmodelc` that this shim can load: the package itself, copied."""
        target = Path(tempfile.mkdtemp()) / f"{Path(path).stem}.mlmodelc"
        try:
            miltorch.read(path)
            for file in files(Path(path)):
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(Path(path) / file, target / file)
            return str(target)
        except InputError as problem:
            raise _error(problem) from problem

    def get_compiled_model_path(self) -> str:
        """A path that stays valid for the lifetime of this object, as the native one
        does."""
        if self.path.suffix == ".mlmodelc":
            return str(self.path)
        if not self.compiled:
            self.compiled = self.compileModel(str(self.path))
            weakref.finalize(
                self, shutil.rmtree, Path(self.compiled).parent, ignore_errors=True
            )
        return self.compiled

    def get_load_duration_in_nano_seconds(self) -> int:
        return self.load_ns

    def get_last_predict_duration_in_nano_seconds(self) -> int | None:
        return self.last_predict_ns

    def newState(self) -> StateProxy:
        return StateProxy(self.executable)

    def batchPredict(self, batch: list[dict]) -> list[dict]:
        return [self.predict(data) for data in batch]

    def predict(self, data: dict, state: StateProxy | None = None) -> dict:
        start, declared = time.perf_counter_ns(), self.executable.program.inputs
        inputs = {
            f.name: _input(f, data.get(f.name), declared[f.name])
            for f in self.description.input
        }
        _check_enumerated(self.description.input, inputs)
        cells = _cells(self.executable.program.states, state)
        try:
            outputs = self.executable.run(inputs, cells)
        except InputError as problem:
            raise _error(
                f"Unable to compute the prediction using ML Program. {problem}"
            ) from problem
        self.last_predict_ns = time.perf_counter_ns() - start
        return {f.name: _output(f, outputs[f.name]) for f in self.description.output}


def _error(message: object) -> RuntimeError:
    """An error of Core ML as the binding words it: the description of a dictionary,
    three lines."""
    quoted = json.dumps(str(message), ensure_ascii=False)
    text = "".join(c if c.isascii() else f"\\U{ord(c):04x}" for c in quoted)
    return RuntimeError(f"{{\n    NSLocalizedDescription = {text};\n}}")


def _accepted(value) -> np.ndarray:
    """An array that the binding takes.

    Raises:
        RuntimeError: a read-only array, one without dimensions or of another dtype,
            anything that is no array.
    """
    if (
        isinstance(value, np.ndarray)
        and value.ndim
        and value.flags.writeable
        and value.dtype in ACCEPTED
    ):
        return value
    # the binding prints this line, too
    print(f"Error: value type not convertible:\n{value}")
    raise RuntimeError("value type not convertible")


def _input(feature, value, declared: miltorch.Type) -> torch.Tensor:
    """A user's value as the program's input, checked against the feature's
    description."""
    # the binding takes a list for a missing value
    if value is None or isinstance(value, (list, tuple)):
        array = _default(feature)
    elif feature.type.WhichOneof("Type") == "imageType":
        return _from_image(feature, value)
    else:
        array = _accepted(value)
    if not _allowed(feature.type.multiArrayType, array.shape):
        raise _error(
            f"For input feature '{feature.name}', the provided shape "
            f"{' × '.join(map(str, array.shape))} "
            "is not compatible with the model's feature description."
        )
    dtype = np.float32 if array.dtype.kind == "f" else np.int32
    tensor = torch.from_numpy(array.astype(dtype))
    return tensor.reshape(()) if declared.shape == () else tensor


def _cells(states: dict[str, miltorch.Type], state: StateProxy | None) -> dict:
    """The cells of a model's states. Without a state Core ML names the first one in
    these words (coremltools' issue 2519); the words for a state of other tensors are not
    known, and are ours."""
    if states and not isinstance(state, StateProxy):
        name = next(iter(states))
        raise _error(
            f"The input feature for {name} must be an MLState, but it was not."
        )
    if not states:
        return {}
    shapes = {name: tuple(cell.value.shape) for name, cell in state.cells.items()}
    if shapes != {name: tuple(kind.shape) for name, kind in states.items()}:
        raise _error(
            f"The state has {shapes}, this model {sorted(states)}: another model made "
            "it; use make_state of this one."
        )
    return state.cells


def _check_enumerated(features, inputs: dict[str, torch.Tensor]) -> None:
    """Refuses inputs with enumerated shapes that do not go together: Core ML takes the
    n-th of one with the n-th of every other (coremltools' issue 2271). The words are
    ours."""
    places = {}
    for feature in features:
        shapes = feature.type.multiArrayType.enumeratedShapes.shapes
        if len(shapes) > 1:
            shape = tuple(inputs[feature.name].shape)
            places[feature.name] = {
                number
                for number, allowed in enumerate(shapes, 1)
                if tuple(allowed.shape) == shape
            }
    if places and not set.intersection(*places.values()):
        numbers = ", ".join(f"{name} its {min(n)}." for name, n in places.items())
        raise _error(
            "Inputs with enumerated shapes go together, the n-th of one with the n-th "
            f"of every other: {numbers}"
        )


def _allowed(described, shape: tuple[int, ...]) -> bool:
    """Whether a feature's description allows arrays of this shape."""
    ranges = described.shapeRange.sizeRanges
    if ranges:
        return len(ranges) == len(shape) and all(
            r.lowerBound <= n and (n <= r.upperBound or r.upperBound < 0)
            for r, n in zip(ranges, shape)
        )
    shapes = [tuple(s.shape) for s in described.enumeratedShapes.shapes]
    return shape in (shapes or [tuple(described.shape)])


def _default(feature):
    """The value of an input that was left out, if it may be."""
    array = feature.type.multiArrayType
    value = array.WhichOneof("defaultOptionalValue")
    if not feature.type.isOptional or value is None:
        raise _error(f"Feature {feature.name} is required but not specified.")
    return np.full(tuple(array.shape), getattr(array, value))


def _from_image(feature, image) -> torch.Tensor:
    """PIL image → [1, C, H, W] in 0…255, channels in the model's order."""
    expected = feature.type.imageType
    if image.size != (expected.width, expected.height):
        raise _error(
            f"image input {feature.name!r} has size {image.size}, the model takes "
            f"{(expected.width, expected.height)}"
        )
    pixels = np.atleast_3d(np.array(image, np.float32)).transpose(2, 0, 1)[None]
    if expected.colorSpace == expected.BGR:
        pixels = pixels[:, ::-1]
    return torch.from_numpy(pixels.copy())


def _output(feature, value):
    """A program's result as Core ML's Python binding returns it."""
    kind = feature.type.WhichOneof("Type")
    if kind == "imageType":
        return _to_image(feature.type.imageType, value[0])
    if kind == "int64Type":  # a class label
        return int(value)
    if kind != "multiArrayType":  # a label's text, or every label's probability
        return value
    array = feature.type.multiArrayType
    dtypes = {array.INT32: np.int32, array.INT8: np.int8, array.DOUBLE: np.float64}
    dtype = dtypes.get(array.dataType, np.float32)
    # Core ML knows no scalars
    return np.atleast_1d(value.numpy().astype(dtype, order="C"))


def _to_image(kind, value: torch.Tensor):
    """[C, H, W] → PIL image: RGBA, L, or F for float16 grayscale."""
    from PIL import Image

    if kind.colorSpace == kind.GRAYSCALE_FLOAT16:
        return Image.fromarray(value[0].numpy())
    pixels = value.round().clamp(0, 255).to(torch.uint8).numpy()
    if kind.colorSpace == kind.GRAYSCALE:
        return Image.fromarray(pixels[0])
    if kind.colorSpace == kind.BGR:
        pixels = pixels[::-1]
    return Image.fromarray(pixels.transpose(1, 2, 0).copy()).convert("RGBA")
