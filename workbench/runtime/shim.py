"""The shim's former name: `miltorch.shim`."""

from miltorch.shim import install, uninstall

__all__ = ["install", "uninstall"]
