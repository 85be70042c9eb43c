"""Vision encoders that several vision-language families share, and their registry by model_type."""
