"""A spec becomes a model."""

from __future__ import annotations

from memcalc.config.reader import Config
from memcalc.models.registry import family
from memcalc.models.spec import ModelSpec
from memcalc.nn.model import Network


def build(spec: ModelSpec) -> Network:
    """The model of a spec, unbound. Raises ConfigError where the config lacks or contradicts itself."""
    row = family(spec.model_type)
    config = Config(spec.config, row.defaults, row.aliases)
    network = row.build(config, spec.architecture)
    config.check_unread(spec.model_type)
    return network
