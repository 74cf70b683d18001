"""Checks whether a bundle computes what Hugging Face's model computes: goldens,
fidelity, gates, the checklist."""
