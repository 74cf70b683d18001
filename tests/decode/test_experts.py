import tiny


def test_experts_that_the_host_loads_give_hugging_face_s_logits(exports):
    """Calls of two tokens, and of one beside a column of padding."""
    path = exports.checkpoint("zaya", num_hidden_layers=2, num_experts=2)
    decoder = exports.decoder(path, moe="routed", tokens="1-2")
    g = exports.golden(path, 7)
    assert tiny.logits_error(decoder, g, 2, 1, width=2) < 2e-6
