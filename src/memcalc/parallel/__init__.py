"""The only place that divides: what one of several GPUs holds."""
