"""The bars of long work."""

import sys


def bar(*args, **about):
    """`tqdm.auto.tqdm` in a notebook or on a terminal; silent where the output is
    neither. A kernel's streams are no terminals, so that tqdm's own rule for them
    (`disable=None`) would hide a notebook's bars."""
    from tqdm.auto import tqdm

    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    return tqdm(*args, disable=False if hasattr(shell, "kernel") else None, **about)
