"""First light: measures on a Mac what is not known of Core ML yet, in less than 15
minutes, and writes one zip to send back. Without Core ML the same code runs over the
stand-in, and the result is marked so."""

SCHEMA = 1
"""Schema version of a result and of its zip."""
EXPERIMENT = "36"
"""Number of the experiment in the log."""
