"""The batch-2 cache bug report's hypotheses, planted: which pattern of failures would each of them give?

The report's scenario: two requests load one stored session and decode together, from a warm or hot cache, on the
streaming or the other path, at three contexts. Streaming takes the entry out of memory once both requests are
submitted, the other path before each submission. Each hypothesis is a change to the store, the quantizer or the decoder,
undone on leaving; `scenario` says which configurations then no longer compute what an unharmed run does.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import pandas as pd

from workbench.bundle.names import KV_WRITE_MASK, is_cache
from workbench.check import gates, metrics
from workbench.decode import Decoder, Record, Snapshot
from workbench.decode import decoder as decoding
from workbench.prompt_cache import Store, formats
from workbench.studies.cache_reuse import differs

STEP = 256  # the report's cache grows by this many tokens
REPORTED_PATTERN = {(cache, path, 1024) for cache in ("warm", "hot") for path in ("stream", "generate")}  # no output
REPORTED_PATTERN |= {("hot", "generate", 2048)}
Plant = Callable[[ExitStack, Decoder], None]
HYPOTHESES: dict[str, tuple[str, Plant]] = {}


def hypothesis(says: str):
    def register(plant: Plant) -> Plant:
        HYPOTHESES[plant.__name__] = (says, plant)
        return plant

    return register


@hypothesis("H1: rows read through a strided view of a buffer that grows in steps, as if it were contiguous")
def strided_view(stack: ExitStack, decoder: Decoder) -> None:
    original = decoding.put

    def put(target, name, value, offset):
        if is_cache(name) and value.shape[1] % STEP:
            grown = np.zeros((value.shape[0], -(-value.shape[1] // STEP) * STEP, value.shape[2]), value.dtype)
            grown[:, : value.shape[1]] = value
            value = grown.reshape(-1, value.shape[2])[: value.shape[0] * value.shape[1]].reshape(value.shape)
        original(target, name, value, offset)

    stack.enter_context(patch.object(decoding, "put", put))


@hypothesis("H1': a merged buffer has no room, and tokens that do not fit are dropped: min(new, room)")
def dropped_tokens(stack: ExitStack, decoder: Decoder) -> None:
    write, inputs, room = decoder._write, decoder.host.inputs, [decoder.options.max_seq_len]

    def merged(held, fresh=False):
        write(held, fresh)
        room[0] = int(decoder.offsets.max()) if held else decoder.options.max_seq_len

    def short(offsets, counts, T):
        made = inputs(offsets, counts, T)
        for name in [n for n in made if n.startswith(KV_WRITE_MASK)]:
            made[name] = made[name].copy()
            made[name][:, :, room[0] :] = 0
        return made

    stack.enter_context(patch.object(decoder, "_write", merged))
    stack.enter_context(patch.object(decoder.host, "inputs", short))


@hypothesis("aliased entry: memory hands out the stored arrays themselves, and a request clears what it has taken in")
def aliased_entry(stack: ExitStack, decoder: Decoder) -> None:
    def shared(encoded: formats.Encoded) -> Snapshot:
        if not hasattr(encoded, "shared"):
            object.__setattr__(encoded, "shared", decode(encoded))
        return encoded.shared

    decode, write = formats.decode_rows, decoder._write

    def clearing(held, fresh=False):
        write(held, fresh)
        for snapshot in held.values():
            for value in snapshot.states.values():
                value[:] = 0

    stack.enter_context(patch.object(formats, "decode", shared))
    stack.enter_context(patch.object(decoder, "_write", clearing))


@hypothesis("H2: as an aliased entry, and taking it out of memory writes it back to the disk")
def invalidated(stack: ExitStack, decoder: Decoder) -> None:
    aliased_entry(stack, decoder)
    cool = Store.cool

    def write_back(store, name=None):
        entry = store.hot.get(name)
        cool(store, name)
        if entry and hasattr(entry[1], "shared"):
            store.save(name, entry[1].shared, entry[1].header["values"])
            cool(store, name)

    stack.enter_context(patch.object(Store, "cool", write_back))


@hypothesis("H3: quantization groups run along tokens, and a slice loses the scales of a group it cuts")
def groups_along_tokens(stack: ExitStack, decoder: Decoder) -> None:
    decode = formats.decode_rows

    def along_tokens(rows):
        whole = rows.shape[1] // formats.GROUP * formats.GROUP
        kept = np.zeros_like(rows)
        if whole:
            turned = np.ascontiguousarray(rows[:, :whole].swapaxes(1, 2))
            kept[:, :whole] = formats.dequantize_groups(*formats.quantize_groups(turned)).swapaxes(1, 2)
        return kept

    def cut(encoded):
        found = decode(encoded)
        for name in filter(is_cache, found.states if encoded.header["values"] == "q4" else ()):
            found.states[name] = along_tokens(found.states[name])
        return found

    stack.enter_context(patch.object(formats, "decode", cut))


@contextmanager
def planted_hypothesis(name: str | None, *decoders: Decoder) -> Iterator[None]:
    """Plants one hypothesis (None: nothing) in every decoder for as long as the context lasts."""
    with ExitStack() as stack:
        for decoder in decoders if name else ():
            HYPOTHESES[name][1](stack, decoder)
        yield


def scenario(alone: Decoder, together: Decoder, contexts: Sequence[int], *, new: int = 3, seed: int = 0,
             progress: bool = False) -> pd.DataFrame:  # fmt: skip
    """Every configuration under every hypothesis.

    Args:
        alone, together: of bundles that differ in their batch alone.
        new: tokens decoded by each request.

    Returns:
        A row per hypothesis ("none" first), format, cache, path, context: `ok`, `first_token_ok`, `apart` (relative RMS
        of the first token's logits against the session decoded alone), `reason`; `entry_ok`: the stored session survived.
    """
    from tqdm.auto import tqdm

    rng, V, sessions = np.random.default_rng(seed), alone.manifest.dims.V, {}
    for context in contexts:
        ids = rng.integers(0, V, context).tolist()
        alone.begin()
        alone.prefill(ids[:-1])
        sessions[context] = (alone.snapshot(), ids)
    rows = []
    for name in tqdm([None, *HYPOTHESES], desc="hypotheses", disable=not progress):
        for format in formats.FORMATS:
            for context, (snapshot, ids) in sessions.items():
                through = formats.decode_rows(formats.encode_rows(snapshot, format))
                wanted = list(alone.stream(ids[-1:], new, after=through, stop=()))
                for cache in ("warm", "hot"):
                    for path in ("stream", "generate"):
                        with tempfile.TemporaryDirectory() as folder:
                            store = Store(folder, together, hot_bytes=1 << 28 if cache == "hot" else 0)
                            store.save("session", snapshot, format)
                            with planted_hypothesis(name, together):
                                found = _two_requests(store, together, ids[-1], path, wanted)
                            store.cool()
                            kept = store.load("session").states
                        found["entry_ok"] = all(np.array_equal(v, through.states[n]) for n, v in kept.items())
                        rows.append({"hypothesis": name or "none", "format": format, "cache": cache, "path": path,
                                     "context": context, **found})  # fmt: skip
    return pd.DataFrame(rows)


def _two_requests(store: Store, decoder: Decoder, token: int, path: str, wanted: list[Record]) -> dict:
    """Every slot loads the one session and takes it in, then all decode; compared with the session decoded alone."""
    try:
        decoder.begin()
        for slot in range(decoder.options.batch):
            snapshot = store.load("session")
            if path == "generate":
                store.cool("session")
            decoder.add(slot, snapshot)
        store.cool("session")
        found = _decode_through(decoder, token, len(wanted))
    except Exception as problem:  # a planted fault may raise anything
        return {"ok": False, "first_token_ok": False, "apart": np.nan, "reason": f"{type(problem).__name__}: {problem}"}
    said = [why for records in found if (why := differs(records, wanted, decoder.precision))]
    return {"ok": not said, "first_token_ok": all(r[0].token == wanted[0].token for r in found), "reason": (said or [""])[0],
            "apart": max(metrics.relative_rms(wanted[0].logits, r[0].logits) for r in found)}  # fmt: skip


def _decode_through(decoder: Decoder, token: int, count: int) -> list[list[Record]]:
    """Greedy records by slot, every slot going on from `token`."""
    tokens, found = [token] * decoder.options.batch, [[] for _ in range(decoder.options.batch)]
    for _ in range(count):
        logits = decoder.decode_one_token(tokens)
        tokens = logits.argmax(-1).tolist()
        for slot, records in enumerate(found):
            records.append(Record(tokens[slot], logits[slot], decoder.times, slot))
    return found


def patterns(rows: pd.DataFrame) -> pd.DataFrame:
    """Failures of q4 caches, which the report used, its own first: ``hypothesis``, ``context``, ``cache``, ``path``,
    ``result`` (ok or FAIL). Contexts go by rank: the first is the report's 1024, the second its 2048."""
    keys = ["hypothesis", "context", "cache", "path"]
    found = rows[rows["format"] == "q4"].assign(result=lambda r: np.where(r["ok"], "ok", "FAIL"))[[*keys, "result"]]
    nominal = dict(zip(sorted(found["context"].unique()), (1024, 2048)))
    report = found[found["hypothesis"] == "none"].assign(hypothesis="the report")
    failed = [(r.cache, r.path, nominal.get(r.context)) in REPORTED_PATTERN for r in report.itertuples()]
    return pd.concat([report.assign(result=np.where(failed, "FAIL", "ok")), found], ignore_index=True)


def cache_bug_gates(rows: pd.DataFrame) -> list[gates.Gate]:
    """Nothing fails unharmed, and every hypothesis fails somewhere: a scenario that shows no planted fault shows nothing."""
    failed = rows[~rows["ok"]].groupby("hypothesis").size().to_dict()
    silent = [name for name in HYPOTHESES if name not in failed]
    return [gates.holds("unharmed", "none" not in failed, f"{(rows['hypothesis'] == 'none').sum()} configurations, "
                        f"{failed.get('none', 0)} differ from the session decoded alone"),
            gates.holds("faults_show", not silent, f"never seen: {', '.join(silent)}" if silent else
                        "every planted hypothesis fails in some configuration")]  # fmt: skip


def cache_bug_conclusion(rows: pd.DataFrame) -> str:
    """Which configurations each hypothesis breaks, and how that compares with the report's table, in words."""
    table = patterns(rows).pivot(index="hypothesis", columns=["context", "cache", "path"], values="result")
    agrees, columns, lines = (table == table.loc["the report"]).sum(axis=1), table.shape[1], []
    for name, (says, _) in HYPOTHESES.items():
        broken = rows[(rows["hypothesis"] == name) & ~rows["ok"]]
        where = ", ".join(f"{axis} {'/'.join(map(str, found))}" for axis in ("format", "cache", "path", "context")
                          if 0 < len(found := list(broken[axis].drop_duplicates())) < rows[axis].nunique())  # fmt: skip
        lines.append(f"- {says}. Breaks {len(broken)} of {(rows['hypothesis'] == name).sum()} configurations"
                     f"{f', only {where}' if where else ''}; as reported in {agrees[name]} of {columns}.")  # fmt: skip
    best = agrees[list(HYPOTHESES)].max()
    lines.append(f"No hypothesis gives the report's pattern (the nearest agrees in {best} of {columns}): 'sole root cause' "
                 "does not follow from it." if best < columns else "One hypothesis gives the report's whole pattern.")  # fmt: skip
    return "\n".join(lines)
