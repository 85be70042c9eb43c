"""Rows in which the instrument and memcalc differ, by how many bytes, and why. memcalc answers for a real GPU."""

KNOWN: dict[str, dict[str, int]] = {}
