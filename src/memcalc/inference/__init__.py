"""Prefill, decode, engine caches, loaded weights, the largest batch and context."""
