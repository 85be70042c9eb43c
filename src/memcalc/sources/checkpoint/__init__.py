"""safetensors headers: tensors, roles, packings, shard index, bytes when loaded."""
