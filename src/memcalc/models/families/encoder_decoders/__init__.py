"""The BART and T5 lines."""
