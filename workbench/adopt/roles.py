"""The roles of inputs and outputs, see `Role` in `workbench/bundle/foreign.py`, by the names
that exporters give them."""

import re

# Pattern in the lower-case name of an input or an output → its role; the first one that
# occurs in the name decides. So a special pattern stands before a general one that it
# contains: `write|update` before `mask` (update_mask), `cos_s$` before `cos`,
# `current_?pos` before `position` (current_position).
INPUTS = {
    "write|update": "write",
    "per_layer_raw": "per_layer",
    "causalmask": "mask_inf",
    "mask": "mask",
    "cos_s$": "rope_cos_local",
    "sin_s$": "rope_sin_local",
    "cos_f$": "rope_cos_global",
    "sin_f$": "rope_sin_global",
    "cos": "rope_cos",
    "sin": "rope_sin",
    "ring_?pos": "ring_start",
    "current_?pos|start|^pos$|offset": "start",
    "position": "positions",
    "ids?$|tokens?$": "ids",
    "hidden|embed|^x$": "x",
    # any other input is what an earlier package outputs under its name, or is fed zeros;
    # the table of assumptions names it
    "": "zeros",
}
OUTPUTS = {
    "val|token_logit|max_logit": "top_value",
    "idx|token|argmax": "top",
    "logit": "logits",
    # any other output is the stream, which the next package takes
    "": "x",
}


def find_role(roles: dict[str, str], name: str) -> str:
    """The role of the first pattern that occurs in a name.

    Args:
        roles: pattern → role, as in `INPUTS`.
    """
    lower_name = name.lower()
    return next(
        role for pattern, role in roles.items() if re.search(pattern, lower_name)
    )
