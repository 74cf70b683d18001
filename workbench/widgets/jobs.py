"""A queue of measurements that run one after the other beside a notebook."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from workbench import process
from workbench.widgets.controls import call_on_kernel_thread

CANCELLING = "cancelling …"
CANCELLED = "cancelled; what was finished is kept"
NOTHING_FINISHED = "cancelled; nothing was finished"


@dataclass(eq=False)  # two jobs of equal fields are two measurements
class Job:
    """A measurement."""

    label: str
    seconds: float | None
    """About how long it takes; None where nothing like it was measured. It may be
    corrected while the job waits."""
    run: Callable[[], None]
    """May raise `process.Cancelled` once the queue was cancelled."""
    is_finished: bool = False
    """Whether it ended well; the queue sets this."""


class JobQueue:
    """Runs jobs on a thread of its own; it knows nothing of widgets.

    A job that raises an error, or is cancelled, ends the queue.

    Threads: jobs and `on_error` run on `thread`, which takes jobs from `jobs`, and clears
    it after an error. `add_first`, `run_instead`, `cancel`, `on_result` and `on_change`
    run on the kernel's thread, which alone changes `is_busy`, and changes `jobs` too. A
    thread takes no job once the queue is cancelled: jobs that are added from then on run
    on the next thread.

    Args:
        say: is given a text on the running job and the time left, every second and from
            threads of the queue; in the end "", or that the queue was cancelled.
        on_change: is called when a thread begins, and when work ends; see `is_busy`.
        on_result: is called after jobs that ended well, once for several that end before
            the kernel's thread is free.
        on_error: is given the error of a job that failed.
    """

    def __init__(
        self,
        *,
        say: Callable[[str], None],
        on_change: Callable[[], None],
        on_result: Callable[[], None],
        on_error: Callable[[Exception], None],
    ):
        self.say, self.on_change = say, on_change
        self.on_result, self.on_error = on_result, on_error
        self.jobs: list[Job] = []
        self.running: Job | None = None
        self.is_busy = False
        self._has_finished_job = False  # since work began
        self._result_waits = False  # for `on_result`, which the kernel has yet to call
        self.thread: threading.Thread | None = None
        self.cancelled = threading.Event()
        """Is set once the running job is to end; jobs watch it."""
        # a job is either in `jobs` or the running one when `cancelled` is set
        self._lock = threading.Lock()

    def add_first(self, *jobs: Job) -> None:
        """Puts jobs before all others, and starts a thread unless one is at work."""
        with self._lock:
            self.jobs[:0] = jobs
        self._start_if_needed()

    def run_instead(self, *jobs: Job) -> None:
        """Ends the running job, whose child process is killed, and runs jobs in its
        place. Those that wait run after them. The running job itself may be among the
        jobs: then it runs again from its beginning."""
        with self._lock:
            self.jobs[:0] = jobs
            if self.running:
                self.cancelled.set()
        self._start_if_needed()

    def has(self, job: Job) -> bool:
        """Whether a job is running or waits."""
        with self._lock:
            return job is self.running or job in self.jobs

    def count_before(self, job: Job) -> int:
        """The number of jobs that end before a job begins; 0 for the running one and for
        one that ended."""
        with self._lock:
            if job is self.running or job not in self.jobs:
                return 0
            before = [self.running] if self.running else []
            return len(before) + self.jobs.index(job)

    def _start_if_needed(self) -> None:
        if self.jobs and not self.is_busy:
            self.is_busy = True
            self._start()

    def _start(self) -> None:
        self._has_finished_job = False
        self.cancelled.clear()
        self.on_change()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def drop_waiting(self) -> None:
        """Drops the jobs that wait. The running one goes on."""
        with self._lock:
            self.jobs.clear()

    def cancel(self) -> None:
        """Ends the running job, whose child process is killed, and drops the others."""
        with self._lock:
            self.jobs.clear()
            self.cancelled.set()
        if self.is_busy:
            self.say(CANCELLING)

    def _work(self) -> None:
        while job := self._take_next():
            job.is_finished = False
            ended = threading.Event()
            clock = threading.Thread(target=self._count_down, args=(job, ended))
            clock.daemon = True
            self.say(self._progress(job, 0))
            clock.start()
            try:
                job.run()
                job.is_finished = True
            except process.Cancelled:
                pass  # no further job is taken
            except Exception as problem:
                self.jobs.clear()
                self.on_error(problem)
            finally:
                ended.set()
                clock.join()
            if job.is_finished:
                self._has_finished_job = True
                # `on_result` may describe which job is the next one
                self.running = None
                self._announce_result()
        call_on_kernel_thread(self._end)

    def _announce_result(self) -> None:
        """Has the kernel's thread call `on_result`, once for all jobs that end before it
        does: where jobs are faster than it, calls in a row would delay a click on
        *Cancel*."""
        if not self._result_waits:
            self._result_waits = True
            call_on_kernel_thread(self._tell_result)

    def _tell_result(self) -> None:
        self._result_waits = False  # before the log is read
        self.on_result()

    def _take_next(self) -> Job | None:
        with self._lock:
            is_over = self.cancelled.is_set() or not self.jobs
            self.running = None if is_over else self.jobs.pop(0)
            return self.running

    def _end(self) -> None:
        # jobs that came while the thread ended, or that take the place of its job
        if self.jobs:
            self._start()
            return
        self.is_busy = False
        self.say(self._describe_end())
        self.on_change()

    def _describe_end(self) -> str:
        if not self.cancelled.is_set():
            return ""
        return CANCELLED if self._has_finished_job else NOTHING_FINISHED

    def _count_down(self, job: Job, ended: threading.Event) -> None:
        """Says the time left every second, until the job has ended."""
        start = time.monotonic()
        while not ended.wait(1):
            self.say(self._progress(job, time.monotonic() - start))

    def _progress(self, job: Job, elapsed_s: float) -> str:
        if self.cancelled.is_set():
            return CANCELLING
        later_jobs = [*self.jobs]  # which other threads may change
        seconds = [job.seconds, *(later.seconds for later in later_jobs)]
        words = f"measuring {job.label}"
        if None not in seconds and elapsed_s < job.seconds:
            return f"{words}, {describe_seconds(sum(seconds) - elapsed_s)} to go"
        if None in seconds:
            words += ", no estimate yet"
        # an estimate of the others would be doubtful beside one that proved wrong
        if elapsed_s:
            words += f", {elapsed_s:.0f} s so far"
        if job.seconds is not None and elapsed_s >= job.seconds:
            words += ", longer than expected"
        if later_jobs:
            words += f", then {count_measurements(len(later_jobs), ' more')}"
        return words


def describe_seconds(seconds: float) -> str:
    """A time that is estimated, in seconds or minutes."""
    return f"about {f'{seconds:.0f} s' if seconds < 120 else f'{seconds / 60:.0f} min'}"


def count_measurements(count: int, more: str = "") -> str:
    return f"{count}{more} measurement{'s' if count > 1 else ''}"
