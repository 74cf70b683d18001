"""A queue of measurements runs them in order, tells what is left, and ends at an error or when it is
cancelled; no widget takes part."""

import threading

import pytest

from workbench import process
from workbench.widgets import jobs
from workbench.widgets.jobs import (
    CANCELLED,
    CANCELLING,
    NOTHING_FINISHED,
    Job,
    JobQueue,
)


class Listener:
    """Collects what a queue tells."""

    def __init__(self):
        self.texts, self.states, self.errors, self.results = [], [], [], 0
        self.queue = JobQueue(
            say=self.texts.append,
            on_change=lambda: self.states.append(self.queue.is_busy),
            on_result=self.count,
            on_error=self.errors.append,
        )

    def count(self) -> None:
        self.results += 1

    def run(self, *jobs: Job) -> None:
        self.queue.add_first(*jobs)
        self.queue.thread.join(30)


@pytest.fixture
def listener() -> Listener:
    return Listener()


def test_jobs_run_in_order_and_say_what_is_left(listener):
    order = []
    jobs = [Job(name, 4.0, lambda name=name: order.append(name)) for name in "abc"]
    listener.run(*jobs)
    assert order == ["a", "b", "c"] and listener.results == 3
    assert listener.texts == [
        "measuring a, about 12 s to go",
        "measuring b, about 8 s to go",
        "measuring c, about 4 s to go",
        "",
    ]
    assert listener.states == [True, False] and not listener.errors


def test_a_job_that_is_added_meanwhile_runs_before_the_others(listener):
    order = []
    first, last = (Job(name, 1.0, lambda n=name: order.append(n)) for name in "fl")
    adds = Job("adds", 1.0, lambda: listener.queue.add_first(first))
    listener.run(adds, last)
    assert order == ["f", "l"]


def test_a_queue_that_is_cancelled_takes_no_further_job(listener):
    """Also where the running job ends well."""
    cancels = Job("a", 1.0, listener.queue.cancel)
    listener.run(cancels, Job("b", 1.0, pytest.fail))
    assert listener.results == 1 and not listener.queue.is_busy
    assert listener.texts[-1] == CANCELLED


class Cancellable(Job):
    """A job that ends once its queue is cancelled."""

    def __init__(self, queue: JobQueue):
        super().__init__("long", 1.0, self.wait)
        self.queue, self.has_begun = queue, threading.Event()

    def wait(self) -> None:
        self.has_begun.set()
        assert self.queue.cancelled.wait(30)
        raise process.Cancelled


def end(queue: JobQueue) -> None:
    """Waits for the thread of a queue, and for those that follow it."""
    while queue.is_busy:
        queue.thread.join(30)


@pytest.mark.filterwarnings("error")  # of a thread that ends by an exception
def test_jobs_are_not_dropped_while_a_thread_takes_the_next_one(listener):
    taking, dropped = threading.Event(), threading.Event()

    class SlowList(list):
        def pop(self, index: int) -> Job:
            taking.set()
            dropped.wait(0.5)  # the other thread waits for this one
            return super().pop(index)

    def drop() -> None:
        assert taking.wait(30)
        listener.queue.drop_waiting()
        dropped.set()

    listener.queue.jobs = SlowList()
    other = threading.Thread(target=drop)
    other.start()
    listener.run(Job("a", 1.0, lambda: None))
    other.join(30)
    assert listener.results == 1 and not listener.queue.is_busy


@pytest.mark.parametrize("waits", [False, True])
def test_jobs_run_in_the_place_of_the_running_one_and_before_those_that_wait(
    listener, waits
):
    order = []
    long = Cancellable(listener.queue)
    first, last = (Job(name, 1.0, lambda n=name: order.append(n)) for name in "fl")
    listener.queue.add_first(long, *[last] * waits)
    assert long.has_begun.wait(30) and listener.queue.has(long)
    listener.queue.run_instead(first)
    end(listener.queue)
    assert order == ["f", *"l" * waits] and not listener.queue.has(long)
    # nothing says that the work was cancelled
    assert CANCELLED not in listener.texts and NOTHING_FINISHED not in listener.texts
    assert listener.texts[-1] == "" and not listener.errors


def test_a_running_job_that_is_queued_again_runs_from_its_beginning(listener):
    order, began = [], []
    long = Cancellable(listener.queue)
    wait = long.run

    def run() -> None:
        began.append(listener.queue.count_before(long))
        if len(began) == 1:
            wait()
        order.append("long")

    long.run = run
    counts = []
    first = Job("f", 1.0, lambda: counts.append(listener.queue.count_before(long)))
    listener.queue.add_first(long)
    assert long.has_begun.wait(30)
    listener.queue.run_instead(first, long)
    end(listener.queue)
    assert began == [0, 0] and counts == [1] and order == ["long"]
    assert first.is_finished and long.is_finished
    assert listener.queue.count_before(long) == 0  # it has ended


def test_a_result_is_told_once_its_job_no_longer_runs(listener):
    """The text on what is next would name the finished job."""
    running = []
    listener.queue.on_result = lambda: running.append(listener.queue.running)
    listener.run(*(Job(name, 1.0, lambda: None) for name in "ab"))
    assert running == [None, None]


def test_a_job_that_replaces_nothing_runs(listener):
    ran = threading.Event()
    listener.queue.run_instead(Job("a", 1.0, ran.set))
    end(listener.queue)
    assert ran.is_set() and listener.results == 1


def test_a_job_that_is_added_while_the_queue_is_being_cancelled_runs(listener):
    long, ran = Cancellable(listener.queue), threading.Event()
    wait = long.run

    def add_then_end() -> None:
        try:
            wait()
        finally:
            listener.queue.add_first(Job("next", 1.0, ran.set))

    long.run = add_then_end
    listener.queue.add_first(long)
    assert long.has_begun.wait(30)
    listener.queue.cancel()
    end(listener.queue)
    assert ran.is_set() and listener.texts[-1] == ""


def test_a_job_that_fails_ends_the_queue(listener):
    listener.run(Job("a", 1.0, lambda: [][1]), Job("b", 1.0, pytest.fail))
    assert [type(error) for error in listener.errors] == [IndexError]
    assert listener.results == 0 and not listener.queue.jobs
    assert listener.states == [True, False]


def test_a_queue_that_is_cancelled_says_so_and_runs_again(listener):
    started = threading.Event()

    def wait() -> None:
        started.set()
        assert listener.queue.cancelled.wait(30)
        raise process.Cancelled

    listener.queue.add_first(Job("a", 1.0, wait), Job("b", 1.0, pytest.fail))
    assert started.wait(30)
    listener.queue.cancel()
    listener.queue.thread.join(30)
    assert listener.texts[-1] == NOTHING_FINISHED and not listener.errors
    listener.run(Job("c", 1.0, lambda: None))
    assert listener.results == 1 and listener.texts[-1] == ""


def test_a_queue_that_is_cancelled_says_whether_this_time_something_was_finished(
    listener,
):
    def cancelled() -> None:
        listener.queue.cancel()
        raise process.Cancelled

    listener.run(Job("a", 1.0, lambda: None), Job("b", 1.0, cancelled))
    assert listener.texts[-1] == CANCELLED
    listener.run(Job("b", 1.0, cancelled))
    assert listener.texts[-1] == NOTHING_FINISHED


def test_a_job_that_takes_longer_says_so_and_shows_no_estimate(listener):
    queue, late = listener.queue, Job("a", 2.0, lambda: None)
    words = "measuring a, 3 s so far, longer than expected"
    assert queue._progress(late, 3.0) == words
    queue.jobs = [Job("b", 5.0, lambda: None)]
    words += ", then 1 more measurement"
    assert queue._progress(late, 3.0) == words


def test_a_queue_with_a_job_of_unknown_length_counts_what_is_left(listener):
    queue, timed = listener.queue, Job("a", 2.0, lambda: None)
    queue.jobs = [Job(name, None, lambda: None) for name in "bc"]
    assert queue._progress(timed, 0) == (
        "measuring a, no estimate yet, then 2 more measurements"
    )
    words = "measuring b, no estimate yet, 9 s so far, then 1 more measurement"
    assert queue._progress(queue.jobs.pop(0), 9.0) == words
    assert queue._progress(queue.jobs.pop(0), 0) == "measuring c, no estimate yet"


def test_long_times_are_in_minutes(listener):
    queue = listener.queue
    queue.jobs = [Job("a", 100.0, lambda: None)]
    measured = Job("b", 80.0, lambda: None)
    assert queue._progress(measured, 0) == "measuring b, about 3 min to go"
    assert jobs.describe_seconds(119.0) == "about 119 s"
    assert jobs.describe_seconds(120.0) == "about 2 min"


def test_results_that_wait_for_the_kernel_are_told_once(listener, monkeypatch):
    calls = []
    monkeypatch.setattr(jobs, "call_on_kernel_thread", calls.append)
    listener.run(*(Job(name, 1.0, lambda: None) for name in "abc"))
    assert len(calls) == 2  # of the results and of the end
    calls[0]()
    assert listener.results == 1
    listener.queue.jobs = [Job("d", 1.0, lambda: None)]
    listener.queue._work()
    assert len(calls) == 4


def test_a_cancelled_queue_says_at_once_that_it_is_being_cancelled(listener):
    started, end = threading.Event(), threading.Event()

    def run() -> None:
        started.set()
        assert end.wait(30)

    listener.queue.add_first(Job("a", 1.0, run))
    assert started.wait(30)
    listener.queue.cancel()
    assert listener.texts[-1] == CANCELLING
    # the countdown does not write over it
    assert listener.queue._progress(Job("a", 1.0, run), 0.5) == CANCELLING
    end.set()
    listener.queue.thread.join(30)
    assert listener.texts[-1] == CANCELLED
