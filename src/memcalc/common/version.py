"""The version of memcalc, and those of the libraries that its numbers stand for."""

VERSION = "0.2.0"

TORCH = "2.14.1"
TRANSFORMERS = "5.24.0"
"""What the measured rows of the tests were run with."""
