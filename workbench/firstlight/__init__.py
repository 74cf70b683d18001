"""First light: one command that measures on a Mac what is not known of Core ML yet, in less than 15
minutes, and writes one file to send back. Without Core ML the same code runs over the stand-in and
says so."""

SCHEMA = 1
"""Of a result, and of the zip that holds it."""
EXPERIMENT = "36"
"""Number of the experiment whose runs these are."""
