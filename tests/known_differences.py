"""Rows in which the instrument and memcalc differ, by how many bytes, and why. memcalc answers for a real GPU."""

KNOWN: dict[str, dict[str, int]] = {
    # T5's zero bias of cross-attention is a leaf under checkpointing (see `module_hooks.kept_leaves`). Since the
    # tracker's hook holds its gradient, that is copied into the leaf instead of being taken over: here at the peak.
    "mt5:2": {"backward": -25088},
}
