"""Denoisers of diffusion pipelines."""
