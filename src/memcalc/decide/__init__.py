"""From an estimate to a decision: what would make a job fit, and the largest job that fits."""
