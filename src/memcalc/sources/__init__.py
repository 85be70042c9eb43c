"""Models outside: on disk and on the Hub. `load` is the door; nothing here runs or unpickles anything."""

from memcalc.sources.load import load
from memcalc.sources.loaded_model import Component, LoadedModel, Traffic
from memcalc.sources.notes import remarks

__all__ = ["Component", "LoadedModel", "Traffic", "load", "remarks"]
