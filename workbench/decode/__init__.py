"""Decoding a bundle: token by token, chunk by chunk, from the start or from a snapshot. Knows no golden."""

from .contexts import literal
from .decoder import Decoder, Record
from .host import Host
from .sampling import Sampling
from .snapshot import Snapshot
from .store import Store
from .transfer import copy_state

__all__ = ["Decoder", "Host", "Record", "Sampling", "Snapshot", "Store", "copy_state", "literal"]
