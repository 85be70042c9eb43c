"""PyTorch on shapes: tensors, tape, graph, backward engine, checkpointing, offloading."""
