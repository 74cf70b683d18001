"""The windows in which a long text is read, and the check of their sizes, which needs
only the manifest of a bundle: nothing heavy is imported here."""

from typing import NamedTuple

from workbench.errors import InputError


class Span(NamedTuple):
    """A window: it reads the tokens from `begin` to before `end` of a text, and scores
    those from `first` on."""

    begin: int
    first: int
    end: int


def windows(n: int, window: int, stride: int) -> list[Span]:
    """Every window over n tokens, in their order. Every token but number 0, which nothing
    predicts, is scored once.

    Args:
        window: tokens of a window; the last one may have fewer.
        stride: tokens from one window's begin to the next.
    """
    spans = []
    for begin in range(0, max(n - window, 0) + stride, stride):
        end_of_previous = begin - stride + window
        first = end_of_previous if begin else 1
        spans.append(Span(begin, first, min(begin + window, n)))
    return spans


def check_sizes(S: int, window: int | None, stride: int | None) -> tuple[int, int]:
    """Window and stride in tokens, with their defaults, checked.

    Args:
        S: `max_seq_len` of the bundle.
        window: None: S.
        stride: None: half a window.

    Raises:
        InputError: a window that the cache cannot hold or that scores nothing, or a
            stride that leaves tokens out.
    """
    window = S if window is None else window
    if not 2 <= window <= S:
        needed = f"at least 2 and at most max_seq_len = {S}"
        step = "choose a shorter one, or export with a larger --max-seq-len"
        raise InputError("--window", f"{window} tokens", needed, step)
    stride = window // 2 if stride is None else stride
    if not 1 <= stride < window:
        needed = (
            f"1 … {window - 1}, so that every token follows another one in its window"
        )
        step = "choose a stride below the window"
        raise InputError("--stride", str(stride), needed, step)
    return window, stride
