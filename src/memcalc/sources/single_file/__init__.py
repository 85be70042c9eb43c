"""Checkpoints of one file: the original names of diffusion models, and what config they are of."""
