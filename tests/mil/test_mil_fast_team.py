"""Threads that share a loop: each part is executed once, whoever comes."""

import fcntl
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numba import njit, prange
from one_op import given

from miltorch.fast import kernels, team

OFFERS = 200


@njit
def _share(board, thread, threads, executed):
    for other in range(threads):
        owner = (thread + other) % threads
        i, part = team.take(board, owner)
        while i >= 0:
            executed[i, part] += 1 + 1000 * thread
            team.finish(board, threads)
            i, part = team.take(board, owner)


@njit
def _lead(board, threads, counts, executed):
    for i in range(len(counts)):
        team.offer(board, i, counts[i], threads)
        _share(board, 0, threads, executed)
        team.await_finish(board, counts[i], threads)
        executed[i, -1] = executed[i].sum()  # what was finished is seen here
    team.close(board, threads)


@njit(parallel=True)
def _together(board, threads, counts, executed):
    for thread in prange(threads):
        place = board.ctypes.data
        if thread == 0:
            _lead(place, threads, counts, executed)
        else:
            while team.await_parts(place, thread):
                _share(place, thread, threads, executed)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_part_of_each_offer_is_executed_once(threads, monkeypatch):
    counts = np.random.default_rng(threads).integers(1, 24, OFFERS)
    executed = np.zeros((OFFERS, 25), np.int64)
    before = torch.get_num_threads()
    torch.set_num_threads(
        min(threads, 2)
    )  # the third is late: it finds the board closed
    try:
        kernels.on_threads(_together, team.board(threads), threads, counts, executed)
    finally:
        torch.set_num_threads(before)
    for row, count in zip(executed, counts, strict=True):
        assert (row[:count] % 1000 == 1).all() and not row[count:24].any()
        assert row[24] == row[:24].sum()


def test_parts_of_a_thread_that_never_comes_are_executed_by_others():
    counts, executed = np.full(5, 8), np.zeros((5, 25), np.int64)
    board = team.board(2)
    _lead(board.ctypes.data, 2, counts, executed)
    assert (executed[:, :8] == 1).all()
    assert not team.await_parts(board.ctypes.data, 1)
    assert team.take(board.ctypes.data, 1) == (-1, -1)


@given(elements=st.integers(0, 1 << 30), threads=st.integers(1, 64))
def test_parts_are_one_or_as_many_for_each_thread(elements, threads):
    parts = team.parts.py_func(elements, threads)
    assert parts == 1 or parts % threads == 0 and parts <= threads * team.PARTS
    assert parts == 1 or elements >= team.SMALLEST


def test_a_kernel_is_compiled_by_one_process_at_a_time(tmp_path):
    locked = []

    def kernel():
        with (tmp_path / "kernel.lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                locked.append(True)
            else:
                locked.append(False)

    kernel._cache = SimpleNamespace(cache_path=tmp_path)
    for compiled in (), ("signature",), ():
        kernel.overloads = compiled
        kernels.on_threads(kernel)
    assert locked == [True, False, True]
