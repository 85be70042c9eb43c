"""A spec and a setup become a report: traced steps, the sweep, what the process holds."""
