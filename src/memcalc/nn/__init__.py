"""Modules, the stack of repeated blocks, a whole model, KV cache, parameter names and counts, quantized layers."""
