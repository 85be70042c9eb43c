"""The command line: one file per command. Nothing is computed here."""

from memcalc.cli.program import app, main

__all__ = ["app", "main"]
