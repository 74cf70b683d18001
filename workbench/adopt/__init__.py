"""Makes a bundle of another exporter's packages: they are linked into its folder, and a
manifest describes them. `adopt_packages` in adoption.py is the entry; its steps are

    packages.py     reads the packages, sorts them as they run, and finds the role of each
                    input and output by its name (roles.py)
    describe.py     links the packages and describes them; which plane of a state holds
                    which cache may still be wrong
    caches.py       runs one token, and puts the planes right by their values
    assumptions.py  lists what was guessed

weights.py finds the checkpoint's matrices among the constants of the packages.

The manifest only names roles; `workbench/runtime/foreign_call.py` computes what an input
with a role is fed. For a new convention add a pattern to roles.py, and a branch where
`describe_functions`, `describe_calls` or `count_tokens` in describe.py decide by names."""

from workbench.adopt.adoption import adopt_packages

__all__ = ["adopt_packages"]
