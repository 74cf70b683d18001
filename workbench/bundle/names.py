"""Glossary of the tensors that cross the Core ML boundary, and the limits of fp16.
Imports nothing of the workbench.

Axes, everywhere: B batch; C channels (d_model); T tokens in this call; S max_seq_len; H
query heads; H_kv key/value heads; D head_dim; L decoder layers; V vocabulary; P width
of a layer's second embedding; R router width; E experts. A dimension written "T" in a
shape is the free one. Shapes of activations are those of the layout bct1; bc1t swaps
the last two axes."""

import re

X = "x"  # [B, C, T, 1]: the input of a shard
HIDDEN = "hidden"  # [B, C, T, 1]: the output of its last decoder layer
X0 = "x0"  # [B, C, T, 1]: the first shard's x, which every shard reads
# [B, n·P, T, 1]: the second embedding of the n layers of a shard
PER_LAYER = "per_layer"
# [B, H_kv, T, D]: the cache rows of a call, for later layers that keep a copy of the
# cache; plus the suffix of the layer's rope table
K_ROWS = "k_rows"
V_ROWS = "v_rows"
LOGITS = "logits_k"  # [B, rows, T, 1]: one slice of the vocabulary
IDS = "ids"  # [B, T]: packages of another exporter may read ids in place of x
EMBEDDING = "embedding"  # the weight in which such packages look ids up
# [B, 1, T, D_rotary / 2]; plus the suffix of the layer's rope table
ROPE_COS = "rope_cos"
ROPE_SIN = "rope_sin"
ATTN_MASK = "attn_mask"  # [B, 1, T, S], added to scores; plus the suffix
# [B, 1, S, T], one-hot columns: the cache row that each token takes
KV_WRITE_MASK = "kv_write_mask"
POS = "pos"  # [1] int32: the cache row of the first token, with kv_write = slice
# [B, n, T]: row i is one-hot at the column of this call that row i of the new state takes,
# zeros where it takes an old row
TAIL_SELECT = "tail_select"
# [B, n, n], only where n > 2: row i is one-hot at the old row that row i of the new state
# takes, zeros where it takes a column
TAIL_KEEP = "tail_keep"
ORDER = "order"  # [B, 1, T, 1]: 1, 2, … for valid columns, 0 for others
ROUTER_STATE = "router_state"  # [B, R, T, 1]: input of a router
ROUTER_STATE_OUT = "router_state_out"  # [B, R, T, 1]: for the router of the next layer
BASE = "base"  # [B, C, T, 1]: output of a layer without its expert
EXPERT_IN = "expert_in"  # [B, C, T, 1]: input of the expert
# [B, E + 1, T, 1]: the weights of the experts; the last class runs none
ROUTER_PROBS = "router_probs"
ROUTER_SCORES = "router_scores"  # [B, E + 1, T, 1]: the largest one picks the expert
EXPERT_WEIGHT = "expert_weight"  # [B, 1, T, 1]: factor of an expert shard's output
ACC = "acc"  # [B, C, T, 1]: what an expert shard adds its output to
# Rows [B, H_kv, S, D], one per position; in a ring position p is in row p mod ring. A
# call writes its own rows, so that a sequence goes back by moving its offset (in a ring
# at most by t_max tokens).
K_STATE = "k_state"
V_STATE = "v_state"
# A call overwrites the other states, and only a copy from before it leads back:
CONV_STATE = "conv_state"  # [B, n, channels]: the last n inputs of a convolution
V_DELAYED_STATE = "v_delayed_state"  # [B, 1, H_kv·D / 2]: ZAYA's values, a token late
MATRIX_STATE = "matrix_state"  # [B, H, K, V], a sum over all tokens, which decays
STATES = K_STATE, V_STATE, CONV_STATE, V_DELAYED_STATE, MATRIX_STATE

# additive mask value of a blocked position: finite in fp16, far below any real score
MASKED = -1e4
MAX_FP16 = 65504.0  # the largest finite fp16 number
MIN_NORMAL = 2.0**-14  # the smallest fp16 number of full precision


def is_cache(state: str) -> bool:
    """Whether a logical state (`layers.3.k_state`) holds keys or values, one row per
    position."""
    return state.rpartition(".")[2] in (K_STATE, V_STATE)


def split_layer(name: str) -> tuple[int | None, str]:
    """The decoder layer in a dotted name, and the rest of the name:
    `model.layers.3.mlp.up` → (3, "mlp.up").

    The names of tensors, states and modules have at most one layer; a name without one
    gives (None, name)."""
    match = re.fullmatch(r"(?:.+\.)?layers\.(\d{1,9})(?:\.(.*))?", name)
    return (int(match[1]), match[2] or "") if match else (None, name)
