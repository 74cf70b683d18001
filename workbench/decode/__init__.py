"""Decoding a bundle token by token or chunk by chunk, from the start or from a
snapshot. Nothing here uses a golden."""

from workbench.decode.decoder import Decoder, Record, Sequences
from workbench.decode.inputs import Host
from workbench.decode.sampling import Sampling
from workbench.decode.snapshot import Snapshot
from workbench.decode.times import Times

__all__ = ["Decoder", "Host", "Record", "Sampling", "Sequences", "Snapshot", "Times"]
