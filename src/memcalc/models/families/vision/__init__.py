"""Image and video networks."""
