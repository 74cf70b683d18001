"""Where an error comes from: its split into causes, the weights that cost most, the
range of every operation."""
