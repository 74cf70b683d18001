"""coremltools, imported late (it takes over a second) and without its chatter about a machine that is no Mac.

A leaf: the parts that need coremltools take it from here.
"""

import logging
import warnings
from contextlib import contextmanager


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
    """The package, imported."""
    with quiet():
        import coremltools as ct
    return ct
