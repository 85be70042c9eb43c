"""docs/compile.md says what memcalc computes now for eager modules."""

import re

import pytest
from support.paths import ROOT

from memcalc import ModelSpec, TrainingSetup, estimate

TABLE = re.findall(
    r"^\| (\w+) \| (\S+) \| (\d+) / (\d+) / (\d+) / (\d+) \| (\d+) × (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|$",
    (ROOT / "docs" / "compile.md").read_text(),
    re.M,
)


@pytest.mark.parametrize("row", TABLE)
def test_row(row: tuple[str, ...]) -> None:
    model, precision, *numbers = row
    hidden, mlp, heads, kv_heads, batch, tokens, eager, compiled = (int(n.replace(",", "")) for n in numbers[:-1])
    config: dict[str, object] = {
        "model_type": model,
        "vocab_size": 512,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
    }
    if model == "gemma2":
        config |= {"head_dim": 64, "layer_types": ["full_attention"] * 2}
    setup = TrainingSetup.model_validate(
        {
            "batch": batch,
            "seq_len": tokens,
            "precision": precision,
            "attention": "eager" if model == "gemma2" else "sdpa",
        }
    )
    assert estimate(ModelSpec.from_config(config), setup).saved_for_backward_bytes == eager
    assert f"{compiled / eager:.2f}" == numbers[-1]


def test_the_table_is_read() -> None:
    assert len(TABLE) == 16
