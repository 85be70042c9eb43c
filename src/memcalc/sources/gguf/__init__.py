"""GGUF headers."""
