"""Decoding a bundle: token by token, chunk by chunk. Knows runtimes and bundles, no golden."""

from .decoder import Decoder, Record, greedy
from .host import Host

__all__ = ["Decoder", "Host", "Record", "greedy"]
