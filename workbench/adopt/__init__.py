"""Proposes the manifest of a bundle for packages of another exporter, from their names,
shapes and functions and the checkpoint that was exported."""

from workbench.adopt.propose import propose

__all__ = ["propose"]
