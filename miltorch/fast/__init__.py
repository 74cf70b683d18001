"""The fast path: patterns of MIL operations replaced by compiled kernels, one call per
shard for one token."""
