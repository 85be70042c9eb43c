"""Layers that carry a state from token to token: state spaces, gated linear attention, recurrences."""
