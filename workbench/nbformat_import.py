"""Imports nbformat without a parser that no notebook needs."""

import sys
from types import ModuleType

IRI_PARSER = "rfc3987_syntax"
"""An optional package of jsonschema, which nbformat imports. Its import compiles the
grammar of internationalized addresses, which takes a second of CPU time. A notebook has
no field of this format."""


def import_nbformat() -> ModuleType:
    """The module nbformat. Its first import takes a tenth of the time that
    ``import nbformat`` takes where `IRI_PARSER` is installed."""
    is_blocked = IRI_PARSER not in sys.modules
    if is_blocked:
        sys.modules[IRI_PARSER] = None
    try:
        import nbformat
    finally:
        if is_blocked:
            del sys.modules[IRI_PARSER]
    return nbformat
