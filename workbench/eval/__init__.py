"""Judging a bundle: goldens from Hugging Face, fidelity of every layer, position and T, gates with reasons."""
