"""Where an error comes from: its parts, the weights that cost most, the range of every
operation, the variant of the model, the operation that a runtime computes wrongly."""
