"""coremltools, imported late (it takes over a second) and without its chatter about a
machine that is no Mac; its protobuf messages alone, which take 20 ms.

A leaf: the parts that need coremltools take it from here.
"""

import importlib
import importlib.util
import logging
import sys
import types
import warnings
from contextlib import contextmanager
from pathlib import Path

# a package of this process alone: coremltools' folder `proto`
_MESSAGES = "miltorch._messages"


@contextmanager
def quiet():
    """Silences coremltools' log messages and every warning raised inside."""
    logger = logging.getLogger("coremltools")
    logger.addFilter(_only_errors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.removeFilter(_only_errors)


def _only_errors(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def coremltools():
    """The package, imported. It looks for scikit-learn, whose import takes a second and
    whose release here is too new for it (`coremltools._deps`): that import fails at
    once."""
    hidden = {"coremltools", "sklearn"}.isdisjoint(sys.modules)
    if hidden:
        sys.modules["sklearn"] = None
    try:
        with quiet():
            import coremltools as ct
    finally:
        if hidden:
            del sys.modules["sklearn"]
    return ct


def messages(name: str):
    """The module `coremltools.proto.NAME`, without an import of coremltools itself:
    protobuf gives the same classes for the same definitions whichever module asks for
    them."""
    if _MESSAGES not in sys.modules:
        package = types.ModuleType(_MESSAGES)
        coremltools = Path(importlib.util.find_spec("coremltools").origin).parent
        package.__path__ = [str(coremltools / "proto")]
        sys.modules[_MESSAGES] = package
    return importlib.import_module(f"{_MESSAGES}.{name}")
