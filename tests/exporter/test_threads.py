"""`call_in_parts` and `call_for_each` cover all items once, and raise what a thread has raised."""

import time
from threading import Thread

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.exporter.threads import call_for_each, call_in_parts


@pytest.fixture(autouse=True)
def threads():
    """Gives torch its number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@given(count=st.integers(0, 50), threads=st.integers(1, 6))
def test_the_parts_cover_every_item_once(count, threads):
    torch.set_num_threads(threads)
    items = []
    call_in_parts(lambda part: items.extend(range(part.start, part.stop)), count)
    assert sorted(items) == list(range(count))


def test_there_is_a_part_for_every_thread():
    torch.set_num_threads(3)
    parts = []
    call_in_parts(parts.append, 30)
    assert len(parts) == 3


def test_what_a_part_raises_is_raised():
    torch.set_num_threads(2)

    def refuse_the_last(part):
        if part.stop == 10:
            raise ValueError("the last")

    with pytest.raises(ValueError, match="the last"):
        call_in_parts(refuse_the_last, 10)


def test_every_item_is_called_once_without_gradients():
    items, modes = [], []

    def collect(item):
        items.append(item)
        modes.append(torch.is_inference_mode_enabled())

    call_for_each(collect, range(20))
    assert sorted(items) == list(range(20)) and all(modes)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("threads, share", [(1, 1), (2, 1), (3, 1), (8, 4)])
def test_calls_share_the_threads_of_torch_and_give_them_back(threads, share, fails):
    """Threads that start later have all of them, too."""
    torch.set_num_threads(threads)
    counts = []

    def count(item):
        counts.append(torch.get_num_threads())
        if fails:
            raise ValueError(item)

    try:
        call_for_each(count, range(5))
    except ValueError:
        assert fails
    assert set(counts) == {share}
    assert torch.get_num_threads() == threads
    later = []
    thread = Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [threads]


def test_after_an_error_no_further_item_begins():
    begun = []

    def refuse(item):
        begun.append(item)
        time.sleep(0.001)
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 0"):
        call_for_each(refuse, range(1000))
    assert len(begun) < 1000
