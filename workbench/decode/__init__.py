"""Decoding a bundle: token by token, chunk by chunk. Knows runtimes and bundles, no golden."""

from .decoder import Decoder, Record, greedy, literal
from .host import Host
from .transfer import copy_state

__all__ = ["Decoder", "Host", "Record", "copy_state", "greedy", "literal"]
