"""Plants the hypotheses of the batch-2 cache bug report and records each one's pattern
of failures.

In the report's scenario two requests load one stored session and decode together, from
a warm or hot cache, on the streaming or the other path, at three contexts. Streaming
drops the entry from memory once both requests are submitted, the other path before each
submission. A hypothesis is a temporary change of the store, the quantizer or the
decoder; `scenario` lists the configurations whose results then differ from an unchanged
run."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from unittest.mock import patch

import numpy as np
import pandas as pd

from workbench.bundle.names import KV_WRITE_MASK, is_cache
from workbench.bundle.states import RING, ROWS
from workbench.check import gates, metrics
from workbench.decode import Decoder, Record, Snapshot
from workbench.decode import decoder as decoding
from workbench.prompt_cache import Store, formats
from workbench.studies.cache_reuse import PATHS, differs, greedy

STEP = 256  # the report's cache grows by this many tokens
HOT_BYTES = {"warm": 0, "hot": 1 << 28}
# configurations without output in the report
REPORTED_PATTERN = {
    *product(("warm", "hot"), PATHS, (1024,)),
    ("hot", "generate", 2048),
}
# (owner, name of its function, the function that replaces it)
Replace = Callable[[object, str, Callable], None]
Plant = Callable[[Replace, Decoder], None]
HYPOTHESES: dict[str, tuple[str, Plant]] = {}


def hypothesis(says: str):
    def register(plant: Plant) -> Plant:
        HYPOTHESES[plant.__name__] = (says, plant)
        return plant

    return register


@hypothesis(
    "H1: rows read through a strided view of a buffer that grows in steps, as if it were contiguous"
)
def strided_view(replace: Replace, decoder: Decoder) -> None:
    original = decoding.put

    def put(target, kind, value, offset):
        if kind in (ROWS, RING):
            buffer = np.pad(value, ((0, 0), (0, -value.shape[1] % STEP), (0, 0)))
            value = buffer.reshape(-1)[: value.size].reshape(value.shape)
        original(target, kind, value, offset)

    replace(decoding, "put", put)


@hypothesis(
    "H1': a merged buffer has no room, and tokens that do not fit are dropped: min(new, room)"
)
def dropped_tokens(replace: Replace, decoder: Decoder) -> None:
    write = decoder._write
    inputs = decoder.host.inputs
    room = [decoder.options.max_seq_len]

    def merged(snapshots, fresh=False):
        write(snapshots, fresh)
        S = decoder.options.max_seq_len
        room[0] = int(decoder.offsets.max()) if snapshots else S

    def short(*arguments):
        io = inputs(*arguments)
        for name in [n for n in io if n.startswith(KV_WRITE_MASK)]:
            io[name] = io[name].copy()
            io[name][:, :, room[0] :] = 0
        return io

    replace(decoder, "_write", merged)
    replace(decoder.host, "inputs", short)


@hypothesis(
    "aliased entry: memory hands out the stored arrays themselves, "
    "and a request clears what it has taken in"
)
def aliased_entry(replace: Replace, decoder: Decoder) -> None:
    def shared(encoded: formats.Encoded) -> Snapshot:
        if not hasattr(encoded, "shared"):
            object.__setattr__(encoded, "shared", decode(encoded))
        return encoded.shared

    decode = formats.decode_rows
    write = decoder._write

    def clearing(snapshots, fresh=False):
        write(snapshots, fresh)
        for snapshot in snapshots.values():
            for value in snapshot.states.values():
                value[:] = 0

    replace(formats, "decode_rows", shared)
    replace(decoder, "_write", clearing)


@hypothesis(
    "H2: as an aliased entry, and taking it out of memory writes it back to the disk"
)
def invalidated(replace: Replace, decoder: Decoder) -> None:
    aliased_entry(replace, decoder)
    cool = Store.cool

    def write_back(store, name=None):
        entry = store.hot.get(name)
        cool(store, name)
        if entry and hasattr(entry[1], "shared"):
            store.save(name, entry[1].shared, entry[1].header["values"])
            cool(store, name)

    replace(Store, "cool", write_back)


@hypothesis(
    "H3: quantization groups run along tokens, and a slice loses the scales of a group it cuts"
)
def groups_along_tokens(replace: Replace, decoder: Decoder) -> None:
    decode = formats.decode_rows

    def along_tokens(rows):
        whole = rows.shape[1] // formats.GROUP * formats.GROUP
        result = np.zeros_like(rows)
        if whole:
            turned = np.ascontiguousarray(rows[:, :whole].swapaxes(1, 2))
            values = formats.dequantize_groups(*formats.quantize_groups(turned))
            result[:, :whole] = values.swapaxes(1, 2)
        return result

    def cut(encoded):
        snapshot = decode(encoded)
        for name in filter(is_cache, snapshot.states):
            if encoded.header["values"] == "q4":
                snapshot.states[name] = along_tokens(snapshot.states[name])
        return snapshot

    replace(formats, "decode_rows", cut)


@contextmanager
def planted_hypothesis(name: str | None, *decoders: Decoder) -> Iterator[None]:
    """Plants one hypothesis (None: nothing) in every decoder within the block."""
    with ExitStack() as stack:
        if name:
            _, plant = HYPOTHESES[name]
            for decoder in decoders:
                plant(lambda *names: stack.enter_context(patch.object(*names)), decoder)
        yield


def scenario(
    alone: Decoder, together: Decoder, contexts: Sequence[int], *, new: int = 3
) -> pd.DataFrame:
    """Every configuration under every hypothesis.

    Args:
        alone, together: of bundles that differ only in their batch.
        new: tokens decoded by each request.

    Returns:
        A row per hypothesis ("none" first), format, cache, path, context: `ok`,
        `first_token_ok`, `apart` (relative RMS of the first token's logits against the
        session decoded alone), `reason`; `entry_ok`: the stored session is unchanged.
    """
    rng = np.random.default_rng(0)
    V = alone.manifest.dims.V
    sessions = {}
    for context in contexts:
        ids = rng.integers(0, V, context).tolist()
        alone.begin()
        alone.prefill(ids[:-1])
        sessions[context] = (alone.snapshot(), ids)
    rows = []
    for name in (None, *HYPOTHESES):
        settings = product(formats.FORMATS, sessions.items())
        for format, (context, (snapshot, ids)) in settings:
            stored = formats.decode_rows(formats.encode_rows(snapshot, format))
            reference = list(alone.stream(ids[-1:], new, after=stored, stop=()))
            for (cache, hot), path in product(HOT_BYTES.items(), PATHS):
                with tempfile.TemporaryDirectory() as folder:
                    store = Store(folder, together, hot_bytes=hot)
                    store.save("session", snapshot, format)
                    requests = store, together, ids[-1], path, reference
                    with planted_hypothesis(name, together):
                        result = _two_requests(*requests)
                    store.cool()
                    states = store.load("session").states
                alike = all(np.array_equal(states[n], stored.states[n]) for n in states)
                row = {"hypothesis": name or "none", "format": format, "cache": cache}
                row |= {"path": path, "context": context} | result | {"entry_ok": alike}
                rows.append(row)
    return pd.DataFrame(rows)


def _two_requests(
    store: Store, decoder: Decoder, token: int, path: str, reference: list[Record]
) -> dict:
    """Restores the session in every sequence, decodes all, and compares them with the
    session decoded alone."""
    fault = {"ok": False, "first_token_ok": False, "apart": np.nan}
    try:
        decoder.begin()
        for seq in range(decoder.options.batch):
            snapshot = store.load("session")
            if path == "generate":
                store.cool("session")
            decoder.add(seq, snapshot)
        store.cool("session")
        sequences = greedy(decoder, token, len(reference))
    except Exception as problem:  # a planted fault may raise anything
        return fault | {"reason": f"{type(problem).__name__}: {problem}"}
    reasons = [differs(each, reference, decoder.arithmetic) for each in sequences]
    first = reference[0]
    same_tokens = []
    apart = []
    for other, *_ in sequences:
        same_tokens.append(other.token == first.token)
        apart.append(metrics.relative_rms(first.logits, other.logits))
    return {
        "ok": not any(reasons),
        "first_token_ok": all(same_tokens),
        "reason": next(filter(None, reasons), ""),
        "apart": max(apart),
    }


def patterns(rows: pd.DataFrame) -> pd.DataFrame:
    """Results of q4 caches, the report's own first: ``hypothesis``, ``context``,
    ``cache``, ``path``, ``result`` (ok or FAIL). The two smallest contexts stand for
    the report's 1024 and 2048."""
    q4 = rows[rows["format"] == "q4"]
    nominal = dict(zip(sorted(q4["context"].unique()), (1024, 2048)))
    report = q4[q4["hypothesis"] == "none"].assign(hypothesis="the report")
    settings = zip(report["cache"], report["path"], report["context"].map(nominal))
    report["ok"] = [setting not in REPORTED_PATTERN for setting in settings]
    both = pd.concat([report, q4], ignore_index=True)
    both["result"] = np.where(both["ok"], "ok", "FAIL")
    return both[["hypothesis", "context", "cache", "path", "result"]]


def cache_bug_gates(rows: pd.DataFrame) -> list[gates.Gate]:
    """Gates: nothing fails without a fault, and every hypothesis fails in some
    configuration, so that the scenario is sensitive to each."""
    fails = ~rows.set_index("hypothesis")["ok"]
    wrong = int(fails["none"].sum())
    tried = len(fails["none"])
    reason = f"{tried} configurations, {wrong} differ from the session decoded alone"
    silent = [name for name in HYPOTHESES if not fails[name].any()]
    fine = "every planted hypothesis fails in some configuration"
    return [
        gates.holds("unharmed", not wrong, reason),
        gates.none("faults_show", silent, fine, "never seen: "),
    ]


def cache_bug_conclusion(rows: pd.DataFrame) -> str:
    """The conclusion: the configurations that each hypothesis breaks, and in how many
    of them it agrees with the report."""
    axes = ["context", "cache", "path"]
    table = patterns(rows).pivot(index="hypothesis", columns=axes, values="result")
    agrees = (table == table.loc["the report"]).sum(axis=1)
    columns = table.shape[1]
    lines = []
    for name, (says, _) in HYPOTHESES.items():
        tried = rows[rows["hypothesis"] == name]
        broken = tried[~tried["ok"]]
        text = f"- {says}. Breaks {len(broken)} of {len(tried)} configurations"
        if where := _restriction(broken, rows):
            text += f", only {where}"
        lines.append(f"{text}; as reported in {agrees[name]} of {columns}.")
    best = agrees[list(HYPOTHESES)].max()
    answer = "One hypothesis gives the report's whole pattern."
    if best < columns:
        nearest = f"the nearest agrees in {best} of {columns}"
        answer = f"No hypothesis gives the report's pattern ({nearest}): "
        answer += "'sole root cause' does not follow from it."
    lines.append(answer)
    return "\n".join(lines)


def _restriction(broken: pd.DataFrame, rows: pd.DataFrame) -> str:
    """The axes on which the broken configurations have not all the values of `rows`, in
    words."""
    texts = []
    for axis in ("format", "cache", "path", "context"):
        values = broken[axis].unique()
        if 0 < len(values) < rows[axis].nunique():
            texts.append(f"{axis} {'/'.join(map(str, values))}")
    return ", ".join(texts)
