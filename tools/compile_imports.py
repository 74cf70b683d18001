"""Imports what an experiment notebook imports, so that Python compiles these modules.

`tools/ready.py` installs without compiling, because the modules of all packages take minutes and
most of them are never imported. `make run` calls this while it fetches the checkpoint, which leaves
a core idle."""

import importlib

# The first ones import no torch, which the fetch compiles at the same time.
MODULES = (
    "debugpy.server.api",
    "ipykernel.kernelapp",
    "papermill.execute",
    "workbench.nbformat_import",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "fontTools.subset",
    "workbench.check.kernels",
    "scipy.sparse",
    "workbench.cli.app",
    "workbench.widgets",
    "workbench.recommend",
    "workbench.experiment",
    "workbench.plots",
    "workbench.check.validate",
    "workbench.check.transcript",
    "transformers.models.llama.modeling_llama",
)


def main() -> None:
    for name in MODULES:
        importlib.import_module(name)
    from miltorch.coremltools_import import coremltools

    coremltools()


if __name__ == "__main__":
    main()
