"""The measurements behind the README's figures, each beside its peer in the same
run."""
