"""Headings of a paper's tables: what a column holds, with its unit, in the place of the
identifier that a table of the log or of a notebook has."""

import re

HEADINGS = {
    "call_ms": "call, ms",
    "call_p90_ms": "90% quantile of calls, ms",
    "compress": "compression",
    "correction_reason": "reason of correction",
    "error": "relative error",
    "first nan": "first NaN",
    "headroom_bits": "headroom, bits",
    "high_ms": "at most, ms",
    "kl": "mean KL, nats",
    "kl_max": "largest KL, nats",
    "kl_mean": "mean KL, nats",
    "kl_p99": "99% KL, nats",
    "kl_portable": "KL from portable runtime, nats",
    "kv_write": "KV write",
    "low_ms": "at least, ms",
    "max_abs": "largest magnitude",
    "max_seq_len": "context, tokens",
    "mean KL": "mean KL, nats",
    "mib": "matrices, MiB",
    "moe": "MoE",
    "ms": "time, ms",
    "n": "processes",
    "op": "operation",
    "others_moved": "largest change of other updates by rounding",
    "over_rounding": "error over rounding",
    "perplexity_ratio": "perplexity ratio",
    "query_norm": "query norm",
    "reauthoring": "re-authoring",
    "same_top": "same top token, share",
    "streamed_mib": "streamed, MiB",
    "tokens_per_s": "tokens per s",
    "update_moved": "change of update by rounding",
}
"""A column's identifier → its heading in a paper."""
UNITS = {
    "ms": "ms",
    "s": "s",
    "mib": "MiB",
    "gb": "GB",
    "bytes": "bytes",
    "bits": "bits",
    "db": "dB",
    "nats": "nats",
}
"""The last word of an identifier → the unit that it means."""
SYMBOL = re.compile(r"[A-Z]_[A-Za-z0-9]+")


def heading_of(name: str) -> str:
    """The heading of a column. An identifier without an entry in `HEADINGS` is written
    in words, with its unit behind a comma: ``load_wait_ms`` → ``load wait, ms``. A
    symbol with an index, such as ``H_kv``, and a name that is in words already stay as
    they are."""
    if heading := HEADINGS.get(name):
        return heading
    if SYMBOL.fullmatch(name) or not re.fullmatch(r"\w+", name):
        return name
    *words, last = name.strip("_").split("_")
    if words and last in UNITS:
        return f"{' '.join(words)}, {UNITS[last]}"
    return " ".join([*words, last])
