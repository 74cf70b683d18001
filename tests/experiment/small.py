"""Parameters at which each notebook runs within a minute or two."""

SMALL = {
    "05": {"MAX_SEQ_LEN": 64, "T_MAX": 2, "POSITIONS": 12},
    "30": {
        "MAX_SEQ_LEN": 96,
        "T_MAX": 2,
        "PROMPTS": [[42, 100, 200], [2, 42]],
        "POSITIONS": 8,
        "DEPTH": 4,
    },
    "31": {"POSITIONS": 17, "WORST": 1},
    "32": {
        "NORMS": [605.0],
        "QUERY_NORMS": [0, 64, 2048],
        "TOKENS": 4,
        "MAX_SEQ_LEN": 16,
    },
    "33": {"MAX_SEQ_LEN": 64, "CONTEXTS": [24, 33, 48], "ROUNDS": 1},
    "34": {
        "MAX_SEQ_LEN": [16, 32],
        "T": [1, 2],
        "COMPRESS": ["int8-tensor"],
        "LAYERS_PER_SHARD": [1, 4],
        "KV_WRITE": ["mask"],
        "LAYOUT": ["bct1"],
        "DEPTH": 4,
        "N_GEN": 2,
        "REPETITIONS": 1,
        "ROUNDS": 1,
        "POSITIONS": 4,
    },
}
