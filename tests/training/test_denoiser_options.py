"""No option of training is taken in silence by a denoiser: it changes the answer, is refused, or has a line."""

from collections.abc import Iterator
from typing import Any, Literal, get_origin

import pytest

from memcalc import ModelSpec, TrainingSetup, estimate
from memcalc.errors import MemcalcError, UsageError
from memcalc.setup.sentences import value_type

FLUX = {
    "_class_name": "FluxTransformer2DModel",
    "attention_head_dim": 128,
    "guidance_embeds": True,
    "in_channels": 64,
    "joint_attention_dim": 32,
    "num_attention_heads": 2,
    "num_layers": 1,
    "num_single_layers": 1,
    "patch_size": 1,
    "pooled_projection_dim": 32,
}
CHANGES_NOTHING = {
    "parallel": "one GPU shares nothing",
    "ranks": "one GPU is all ranks",
    "max_grad_norm": "clipping costs the same at any norm",
}
VAE = {"_class_name": "AutoencoderKL", "block_out_channels": [32], "down_block_types": ["DownEncoderBlock2D"]}


def others(name: str) -> Iterator[Any]:
    """Values of an option that differ from its default."""
    field = TrainingSetup.model_fields[name]
    kind = value_type(field.annotation)
    if kind is bool:
        yield not field.default
    elif get_origin(kind) is Literal:
        yield from (value for value in kind.__args__ if value != field.default)
    elif kind is int:
        yield from (2, 64)


def answer(**options: Any) -> dict[str, Any]:
    spec = ModelSpec.from_config(FLUX)
    report = estimate(spec, TrainingSetup(**{"resolution": 256, **options}))
    return report.model_dump(mode="json", exclude={"setup"})


def test_every_option_matters_or_is_refused() -> None:
    plain = answer()
    silent = []
    for name in TrainingSetup.model_fields.keys() - CHANGES_NOTHING.keys():
        for value in others(name):
            try:
                same = answer(**{name: value}) == plain
            except MemcalcError:
                continue
            silent += [f"{name}={value}"] if same else []
    assert silent == []


def test_an_autoencoder_is_not_trained() -> None:
    with pytest.raises(UsageError, match="--mode inference"):
        estimate(ModelSpec.from_config(VAE), TrainingSetup())
