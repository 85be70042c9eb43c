"""Autoencoders of diffusion pipelines, one file a kind."""
