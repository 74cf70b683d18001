"""Glossary of the tensors that cross the Core ML boundary, and the limits of fp16. A
leaf.

Axes, everywhere: B batch; C channels (d_model); T tokens in this call; S max_seq_len; H
query heads; H_kv key/value heads; D head_dim; L decoder layers; V vocabulary; P width
of a layer's second embedding; R router width; E experts. A dimension written "T" in a
shape is the free one. Shapes of activations are those of the layout bct1; bc1t swaps
the last two axes."""

import re

X, HIDDEN = "x", "hidden"  # [B, C, T, 1]: input of a shard, output of decoder layers
X0 = "x0"  # [B, C, T, 1]: the first shard's x, which every shard reads
# [B, n·P, T, 1]: the second embedding of the n layers of a shard
PER_LAYER = "per_layer"
# [B, H_kv, T, D]: the cache rows of a call, for later layers that keep a copy of the
# cache; plus the suffix of the layer's rope table
K_ROWS, V_ROWS = "k_rows", "v_rows"
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
# [B, n, T] and, where n > 2, [B, n, n]; one-hot rows: the last n tokens among the valid
# columns of a call and, where these are fewer, among the n rows of the state
TAIL_SELECT = "tail_select"
TAIL_KEEP = "tail_keep"
ORDER = "order"  # [B, 1, T, 1]: 1, 2, … for valid columns, 0 for others
ROUTER_STATE, ROUTER_STATE_OUT = "router_state", "router_state_out"  # [B, R, T, 1]
# [B, C, T, 1]: the layer's output without its expert, the expert's input
BASE = "base"
EXPERT_IN = "expert_in"
ROUTER_PROBS, ROUTER_SCORES = "router_probs", "router_scores"  # [B, E + 1, T, 1]
# [B, 1, T, 1], [B, C, T, 1]: inputs of an expert shard
EXPERT_WEIGHT, ACC = ("expert_weight", "acc")
# Rows [B, H_kv, S, D], one per position; in a ring position p is in row p mod ring. A
# call writes its own rows, so that a sequence goes back by moving its offset (in a ring
# at most by t_max tokens).
K_STATE, V_STATE = "k_state", "v_state"
# A call overwrites the other states, and only a copy from before it leads back:
# a convolution's last n inputs: [B, 2, (H + H_kv)·D], [B, 1, H_kv·D / 2]
CONV_STATE, V_DELAYED_STATE = ("conv_state", "v_delayed_state")
MATRIX_STATE = "matrix_state"  # [B, H, K, V], a sum over all tokens, which decays
STATES = K_STATE, V_STATE, CONV_STATE, V_DELAYED_STATE, MATRIX_STATE

# additive mask value of a blocked position: finite in fp16, far below any real score
MASKED = -1e4
# largest finite fp16, smallest that has full precision
MAX_FP16, MIN_NORMAL = (65504.0, 2.0**-14)


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
