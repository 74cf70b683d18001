"""The bars of long work, and the stage that is running."""

import sys

# the line of the running stage, where one is shown
_stage_line = None


def bar(*args, **about):
    """`tqdm.auto.tqdm` in a notebook or on a terminal; silent where the output is
    neither. A kernel's streams are no terminals, so that tqdm's own rule for them
    (`disable=None`) would hide a notebook's bars."""
    from tqdm.auto import tqdm

    end_stage()
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    return tqdm(*args, disable=False if hasattr(shell, "kernel") else None, **about)


def stage(name: str) -> None:
    """Shows on a terminal which stage begins, for work that cannot be counted. The line
    goes when the next stage or bar begins, or a command prints its result."""
    global _stage_line
    from tqdm import tqdm

    end_stage()
    _stage_line = tqdm(desc=name, bar_format="{desc} …", leave=False, disable=None)


def end_stage() -> None:
    """Removes the line of the running stage."""
    global _stage_line
    line, _stage_line = _stage_line, None
    if line is not None:
        line.close()
