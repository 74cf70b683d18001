"""The first day on a Mac: one command that measures in minutes what nobody knows yet of Core ML there, and one file to
send back. Without Core ML the same code runs over the stand-in and says so."""

SCHEMA = 1
"""Of a result, and of the zip that holds it."""
EXPERIMENT = "36"
"""Number of the experiment whose runs these are."""
