"""Packed rows beside `measured/packing.jsonl`, which holds them to the byte."""

from typing import Any

import pytest

from memcalc import ModelSpec, TrainingSetup, estimate
from memcalc.errors import UsageError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 640,
    "vocab_size": 1000,
}


def peak(**options: Any) -> int:
    setup = TrainingSetup(seq_len=2048, precision="bf16", **options)
    return estimate(ModelSpec.from_config(LLAMA), setup).peak.allocated_bytes


@pytest.mark.parametrize("trainer", ["plain", "hf", "trl"])
def test_a_block_wise_mask_is_made_but_for_flash_attention(trainer: Any) -> None:
    """A boolean of 2,048 x 2,048, and in each layer that is not recomputed sdpa's own in 16 bits."""
    plain, packed = peak(trainer=trainer), peak(trainer=trainer, packing=True)
    assert packed - plain >= 2048 * 2048 * (1 if trainer == "trl" else 2)
    flash = [peak(trainer=trainer, attention="flash", packing=packing) for packing in (False, True)]
    assert 0 <= flash[1] - flash[0] < 2**20


@pytest.mark.parametrize(
    ("config", "options", "says"),
    [
        (LLAMA, {"padding_mask": True}, "leave one of them out"),
        (LLAMA, {"objective": "dpo"}, "belongs to --objective sft"),
        ({"model_type": "bert"}, {}, "no use for them"),
        ({"model_type": "mamba2", "num_hidden_layers": 2}, {}, "no use for them"),
        ({"model_type": "t5"}, {}, "no use for them"),
    ],
)
def test_where_rows_are_not_packed(config: dict[str, Any], options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        estimate(ModelSpec.from_config(config), TrainingSetup(packing=True, **options))


def test_sequences_are_padded_to_a_multiple() -> None:
    setups = [TrainingSetup(seq_len=n, pad_to_multiple_of=m) for n, m in ((2048, 1), (2041, 64), (2049, 1))]
    whole, padded, longer = (estimate(ModelSpec.from_config(LLAMA), setup) for setup in setups)
    assert padded.peak == whole.peak
    assert padded.setup["seq_len"] == 2048
    assert longer.peak.allocated_bytes > whole.peak.allocated_bytes
