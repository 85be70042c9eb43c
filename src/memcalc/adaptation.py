"""What the setup does to a built model before it is trained: what is frozen, and what is added."""

from __future__ import annotations

from memcalc.model.adapters.injection import Lora, add_lora
from memcalc.model.adapters.sites import input_embeddings, sites
from memcalc.model.freezing import freeze, train_only
from memcalc.model.module import Stack
from memcalc.model.network import Network
from memcalc.setup import TrainingSetup
from memcalc.tables.dtypes import ALIASES


def adapt(network: Network, model_type: str, setup: TrainingSetup) -> list[str]:
    """Freeze and extend `network`, unbound, as `setup` asks; returns what should be said under Assumptions."""
    if setup.checkpoint_every > 1:
        _checkpoint_every(network, setup.checkpoint_every)
    if setup.activation_checkpointing == "full":
        for embedding in input_embeddings(sites(network)):
            embedding.output_needs_gradient = (
                True  # Transformers makes it so, that frozen blocks still pass gradients on
            )
    train_only(network, setup.train)
    if setup.lora_rank is not None:
        add_lora(network, model_type, _lora(setup, setup.lora_rank))
    if setup.freeze is not None:
        freeze(network, setup.freeze)
    return []


def _checkpoint_every(network: Network, step: int) -> None:
    """Checkpoint the first of every `step` blocks only."""
    for _, module in network.modules():
        if isinstance(module, Stack):
            module.split([position % step == 0 for position in range(module.depth)])
            for position, block in module.positions:
                block.checkpoints = block.checkpoints and position % step == 0


def _lora(setup: TrainingSetup, rank: int) -> Lora:
    return Lora(
        rank, setup.lora_targets, ALIASES[setup.lora_dtype], setup.lora_dropout, setup.lora_bias, setup.dora,
        setup.modules_to_save,
    )  # fmt: skip
