"""A prompt cache: snapshots of sequences in memory and on disk, in several formats."""

from workbench.prompt_cache.store import Store

__all__ = ["Store"]
