"""The user's own script, run for a few steps beside the estimate, and what was measured kept for later."""
