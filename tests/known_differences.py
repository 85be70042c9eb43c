"""Rows in which the instrument and memcalc differ, by how many bytes, and why. memcalc answers for a real GPU."""

KNOWN: dict[str, dict[str, int]] = {
    # T5's zero bias of cross-attention is a leaf that asks for a gradient under checkpointing. The tracker's module hooks
    # keep hold of it, so that it and its gradient outlive their step, and the gradient is copied instead of taken over;
    # with plain tensors (checked with weak references, collector off) both die with the graph.
    "mt5:2": {"forward": -50176, "backward": -75264, "step": -100352},
    "t5:4": {"forward": -512000, "backward": -512000, "step": -1024000},
}
