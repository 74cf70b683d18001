"""Checks whether a bundle computes what Hugging Face's model computes: references,
gates, what compression costs."""
