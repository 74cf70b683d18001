import pytest

from workbench.quiet import quiet


@pytest.fixture(scope="session")
def ct():
    """coremltools with its torch frontend loaded; its warnings about this machine stay inside the import."""
    with quiet():
        import coremltools
        from coremltools.converters.mil.frontend.torch import converter as _  # noqa: F401
    return coremltools
