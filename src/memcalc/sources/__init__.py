"""Models outside: on disk and on the Hub. `load` is the door; nothing here runs or unpickles anything."""

from memcalc.sources.loaded import Component, LoadedModel, Traffic
from memcalc.sources.loading import load
from memcalc.sources.remarks import remarks

__all__ = ["Component", "LoadedModel", "Traffic", "load", "remarks"]
