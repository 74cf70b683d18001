"""One question each: what serves a single notebook."""
