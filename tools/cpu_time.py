"""The processor time of child processes."""

import resource


def cpu_seconds_of_children() -> float:
    """CPU seconds of all child processes that have ended and were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
