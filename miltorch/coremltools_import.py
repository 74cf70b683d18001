"""Imports coremltools when it is needed, because that takes over a second (`coremltools`, and
`kmeans1d` for one module of it), or its protobuf definitions alone, which take 20 ms
(`protobuf_module`). Context managers keep the work of coremltools quiet and fast: `quiet`,
`no_progress`, `seldom_validated`, `lean_passes`, `without_gc`, `frozen_gc`.

Imports nothing of miltorch; every other module imports coremltools through this one.
"""

import gc
import importlib
import importlib.util
import logging
import re
import sys
import threading
import types
import warnings
from contextlib import contextmanager
from functools import cache, partialmethod
from pathlib import Path
from types import SimpleNamespace

# a package of this process alone: coremltools' folder `proto`
_PROTO = "miltorch._proto"


@contextmanager
def quiet(messages: re.Pattern | None = None):
    """Silences every Python warning raised inside, and coremltools' log messages below errors.
    Blocks may be nested: what an outer block silences stays silent when an inner one ends.

    Args:
        messages: the log messages that are silenced, by the words they begin with; default:
            all below errors."""

    # one object for each block: a logger has equal filters once, and the end of an inner
    # block would remove that of the outer one
    def passes(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return True
        return messages is not None and not messages.match(record.getMessage())

    logger = logging.getLogger("coremltools")
    logger.addFilter(passes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.removeFilter(passes)


def no_progress():
    """Context manager that hides coremltools' bars: it draws them with tqdm, and has no switch
    for them."""
    from unittest.mock import patch

    import tqdm

    silent = partialmethod(tqdm.tqdm.__init__, disable=True)
    return patch.object(tqdm.tqdm, "__init__", silent)


@contextmanager
def seldom_validated():
    """Context manager in which coremltools validates a program behind the frontend, after each
    of its pipelines of passes, and before it is stored, where it checks scopes as well. It
    validates after all of its passes otherwise, which is half of a conversion's time and
    changes nothing in the program."""
    from unittest.mock import patch

    coremltools()
    from coremltools.converters.mil.mil import Program
    from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

    validate, apply_passes = Program.validate, PassPipelineManager.apply_pipeline

    def validate_with_scopes(program, check_essential_scope=False):
        if check_essential_scope:
            validate(program, check_essential_scope)

    def validate_after_all(program, pipeline):
        with patch.object(Program, "validate", lambda *_, **__: None):
            apply_passes(program, pipeline)
        # does nothing in a pipeline that a pass of another one applies
        program.validate(check_essential_scope=True)

    with (
        patch.object(Program, "validate", validate_with_scopes),
        patch.object(
            PassPipelineManager, "apply_pipeline", staticmethod(validate_after_all)
        ),
    ):
        yield


@contextmanager
def lean_passes():
    """Context manager in which the passes of coremltools leave out work that changes nothing in
    a program: over a third of a conversion's time.

    - They write the whole program as text for debug messages, which are shown nowhere.
    - After every pass they search upstream of every value for compressed weights, also where
      a program has none, as all have before the pass that compresses them.
    - They compute the description of a type anew whenever they ask what it is.
    - They have sympy solve `volume = number × size` for the size that a reshape infers."""
    from unittest.mock import patch

    coremltools()
    from coremltools.converters.mil.mil import Block, Function, Program
    from coremltools.converters.mil.mil.ops.defs.iOS15 import tensor_transformation
    from coremltools.converters.mil.mil.types import type_mapping

    # what coremltools has imported as sympy
    sympy = tensor_transformation.sm
    search_upstream = Block._propagate_nonreplaceable_vars
    describe_type = type_mapping.get_type_info
    descriptions = {}

    def search_where_compressed(block):
        # values of an inner block can come from the one around it
        if block.outer_op is not None or any(
            op.blocks or op.op_type.startswith("constexpr_") for op in block.operations
        ):
            search_upstream(block)
            return
        for op in block.operations:
            for value in op.outputs or ():
                # a pass may have removed the compressed weight
                if value.nonreplaceable_vars_upstream:
                    value.nonreplaceable_vars_upstream = set()

    def describe_once(kind):
        # a class describes itself; values of other kinds are rare, and need not be hashable
        if not isinstance(kind, type):
            return describe_type(kind)
        if kind not in descriptions:
            descriptions[kind] = describe_type(kind)
        return descriptions[kind]

    def solve_by_division(equations, unknowns, dict):
        """`sympy.solve`, without its preparations where one unknown has a number as its factor
        and occurs nowhere else."""
        (equation,), (unknown,) = equations, unknowns
        factor = equation.coeff(unknown)
        rest = equation - factor * unknown
        if not factor.is_Integer or factor == 0 or unknown in rest.free_symbols:
            return sympy.solve(equations, unknowns, dict=dict)
        return [{unknown: -rest / factor}]

    with (
        patch.object(Program, "__str__", lambda program: "a program"),
        patch.object(Function, "__str__", lambda function: "a function"),
        patch.object(Block, "_propagate_nonreplaceable_vars", search_where_compressed),
        patch.object(type_mapping, "get_type_info", describe_once),
        patch.object(
            tensor_transformation, "sm", SimpleNamespace(solve=solve_by_division)
        ),
    ):
        yield


@contextmanager
def without_gc():
    """Defers garbage collection: an import makes many objects that stay, and visiting
    them again and again takes a fifth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def frozen_gc():
    """Leaves the objects that exist now out of garbage collection. coremltools collects
    after every conversion: half of a small one's time, and seconds in a process with
    many objects."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Hidden:
    """An importer that refuses packages to one thread; others import them as ever."""

    def __init__(self, *packages: str):
        self.packages, self.thread = packages, threading.get_ident()

    def find_spec(self, name, path=None, target=None):
        if name in self.packages and threading.get_ident() == self.thread:
            raise ModuleNotFoundError(f"{name} is hidden", name=name)


@contextmanager
def hidden(*packages: str):
    """Imports of these packages by this thread fail at once inside the block."""
    importer = _Hidden(*packages)
    sys.meta_path.insert(0, importer)
    try:
        yield
    finally:
        sys.meta_path.remove(importer)


def coremltools():
    """The package, imported. It looks for scikit-learn, whose import takes a second and
    whose release here is too new for it, and for transformers, half a second and never
    used (`coremltools._deps`): these imports fail at once."""
    with hidden("sklearn", "transformers"), quiet(), without_gc():
        import coremltools as ct
    return ct


@cache
def kmeans1d():
    """The module with coremltools' exact solver of k-means in one dimension. Its import alone
    would import coremltools too, with a warning for every part that is for a Mac."""
    coremltools()
    from coremltools._deps import kmeans1d as module

    return module


def protobuf_module(name: str):
    """The module `coremltools.proto.NAME`, without an import of coremltools itself:
    protobuf gives the same classes for the same definitions whichever module asks for
    them."""
    if _PROTO not in sys.modules:
        package = types.ModuleType(_PROTO)
        coremltools = Path(importlib.util.find_spec("coremltools").origin).parent
        package.__path__ = [str(coremltools / "proto")]
        sys.modules[_PROTO] = package
    return importlib.import_module(f"{_PROTO}.{name}")
