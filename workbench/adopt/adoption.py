"""Makes a bundle of another exporter's packages."""

from collections.abc import Sequence
from pathlib import Path

from workbench.adopt.assumptions import Assumption, list_assumptions
from workbench.adopt.caches import match_caches
from workbench.adopt.describe import link_and_describe
from workbench.adopt.packages import open_packages
from workbench.bundle import Bundle, new_bundle
from workbench.models import family_of, layerwise
from workbench.models.checkpoint import Checkpoint


def adopt_packages(
    sources: Sequence[Path], checkpoint: Checkpoint, out: Path
) -> tuple[Bundle, list[Assumption]]:
    """Makes a bundle at `out` of the packages at `sources`, or in folders there.

    Returns:
        The bundle, and what had to be guessed.

    Raises:
        InputError: packages that cannot be read, or whose caches are not those of the
            checkpoint's model; a model family that bundles do not have; something is at
            `out`.
    """
    packages = open_packages(sources)
    # a vision model's text has the configuration of the text model alone
    config = layerwise.empty_model(checkpoint.config).config
    plan = family_of(config).plan(config)
    with new_bundle(out) as root:
        manifest = link_and_describe(packages, checkpoint, plan, root)
        manifest, error = match_caches(manifest, checkpoint, root)
        manifest.save(root)
    assumptions = list_assumptions(manifest, checkpoint, error)
    return Bundle.open(out), assumptions
