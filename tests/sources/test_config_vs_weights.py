"""Index against shards, config against headers, and three dtypes that are three things."""

import json
from typing import Any

import pytest
from support.weights import checkpoint, header, layers

from memcalc.errors import CheckpointError
from memcalc.sources.checkpoint.checkpoint import Declared, assemble, safetensors_dtype
from memcalc.sources.checkpoint.safetensors import parse_header
from memcalc.sources.checkpoint.shard_index import check_present, disagreements, parse_index
from memcalc.sources.config_vs_weights import declared_dtype, dtypes, reconcile


def test_three_dtypes_are_three_things() -> None:
    held = checkpoint({"a.weight": ("BF16", (1000, 7000))})
    assert dtypes(held, {"torch_dtype": "float32"}).line() == "dtypes: stored BF16, declared F32, loaded F32"
    assert dtypes(held, {"dtype": None}).loaded == "BF16"
    assert (
        dtypes(held, {"torch_dtype": "torch.float16"}, "float32").line()
        == "dtypes: stored BF16, declared F16, loaded F32"
    )
    assert dtypes(None, {}).line() == "dtypes: stored unknown, declared none, loaded BF16"
    assert (held.loaded_bytes("bfloat16"), held.loaded_bytes("F32")) == (14_000_000, 28_000_000)


@pytest.mark.parametrize(
    ("config", "declared"),
    [
        ({"torch_dtype": "bfloat16"}, "BF16"),
        ({"dtype": "bfloat16"}, "BF16"),
        ({"torch_dtype": "torch.float16"}, "F16"),
        ({"dtype": None}, None),
        ({"torch_dtype": "auto"}, None),
        ({"torch_dtype": 16}, None),
        ({"text_config": {"dtype": "bfloat16"}, "torch_dtype": "float32"}, "BF16"),
        ({"text_config": {"hidden_size": 8}, "dtype": "float16"}, "F16"),
    ],
)
def test_declared_dtype(config: dict[str, Any], declared: str | None) -> None:
    assert declared_dtype(config) == declared


def test_dtype_spellings() -> None:
    assert [safetensors_dtype(n) for n in ("bf16", "half", "F8_E4M3", "float8_e4m3fn", "4bit")] == [
        "BF16",
        "F16",
        "F8_E4M3",
        "F8_E4M3",
        None,
    ]


def index(weight_map: Any, metadata: Any = None) -> bytes:
    return json.dumps({"metadata": metadata, "weight_map": weight_map}).encode()


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "a/../../b", "..\\b", "C:\\b", "x\0y"])
def test_an_index_never_leads_outside(shard: str) -> None:
    with pytest.raises(CheckpointError, match="outside the model's folder"):
        parse_index(index({"w": shard}), "model.safetensors.index.json")


@pytest.mark.parametrize("data", [b"{}", index({}), index([]), index({"w": 3}), b"[]", b"", b"<html>"])
def test_an_index_that_is_none(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"i\.json"):
        parse_index(data, "i.json")


def test_a_missing_shard_is_named() -> None:
    found = parse_index(index({"a": "m-1.safetensors", "b": "m-2.safetensors"}), "i.json")
    with pytest.raises(CheckpointError, match=r"1 of 2 shards.*m-2\.safetensors"):
        check_present(found, ["m-1.safetensors"])


def test_what_headers_hold_counts_and_the_index_is_doubted_once() -> None:
    """An index of 1,199 tensors over shards that hold 1,198: one line, no crash."""
    found = parse_index(index({"a.weight": "m-1", "mtp.fc.weight": "m-2"}), "i.json")
    first = parse_header(header({"a.weight": ("F32", (2,)), "extra.weight": ("F32", (3,))})[8:], "m-1", None)
    headers = [("m-1", first), ("m-2", parse_header(b"{}", "m-2", None))]
    lines = disagreements(found, headers)
    assert len(lines) == 2
    assert "mtp.fc.weight" in lines[0]
    assert "not counted" in lines[0]
    assert "extra.weight" in lines[1]
    assert "counted" in lines[1]
    assert assemble(headers).parameters == 5


def test_a_tensor_in_two_shards_counts_once() -> None:
    part = parse_header(header({"a.weight": ("F32", (2,))})[8:], "m", None)
    held = assemble([("m-1", part), ("m-2", part)])
    assert held.parameters == 2
    assert "more than one file" in held.notes[0]


def test_declared_totals_are_a_cross_check_only() -> None:
    """A model of 7,615,616,512 parameters whose index declares 333,312 of them."""
    raw = {"w": {"dtype": "BF16", "shape": [7615616512], "data_offsets": [0, 15231233024]}}
    part = parse_header(json.dumps(raw).encode(), "m", None)
    held = assemble([("m", part)], declared=Declared(15231233024, 333_312))
    assert held.parameters == 7_615_616_512
    (line,) = reconcile(held)
    assert "333,312" in line
    assert "7,615,616,512" in line
    assert "headers are used" in line


def test_totals_that_nearly_agree_are_not_worth_a_line() -> None:
    """An MLX index declares 314,590,621,012 parameters, 2,862 fewer than the headers hold: a rounding, not a fault."""
    raw = {"w": {"dtype": "BF16", "shape": [314_590_623_874], "data_offsets": [0, 2 * 314_590_623_874]}}
    part = parse_header(json.dumps(raw).encode(), "m", None)
    assert reconcile(assemble([("m", part)], declared=Declared(None, 314_590_621_012))) == ()


def small(tied: bool = False) -> dict[str, tuple[str, tuple[int, ...]]]:
    head = {} if tied else {"lm_head.weight": ("BF16", (100, 64))}
    return {"model.embed_tokens.weight": ("BF16", (100, 64)), **layers(2), "model.norm.weight": ("BF16", (64,)), **head}


def shapes(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (_, shape) in tensors.items()}


def test_config_and_headers_agree() -> None:
    held = checkpoint(small())
    assert reconcile(held, parameters=held.parameters, tied=False) == ()
    assert reconcile(held, expected=shapes(small()), tied=False) == ()


def test_fused_names_agree_when_the_parts_do() -> None:
    """What a config builds may be named and fused otherwise than what is stored; parts are compared."""
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 192 * 64 + 2 * 64
    built = {"embed_tokens.weight": (100, 64), "norm.weight": (64,), "lm_head.weight": (100, 64)}
    built |= {"layers.0.all": (layer,), "layers.1.all": (layer,)}
    assert reconcile(checkpoint(small()), expected=built, tied=False) == ()


def test_a_tied_head_that_is_stored_twice() -> None:
    held = checkpoint(small())
    (line,) = reconcile(held, parameters=held.parameters - 6400, tied=True)
    assert "stored twice" in line
    assert "6,400" in line
    assert reconcile(held, expected=shapes(small(tied=True)), tied=True) == (line,)


def test_a_missing_head() -> None:
    held = checkpoint(small(tied=True))
    (line,) = reconcile(held, parameters=held.parameters + 6400, tied=False)
    assert "no head" in line
    assert "6,400" in line
    (line,) = reconcile(held, expected=shapes(small()), tied=False)
    assert "no head" in line
    assert "config" in line


def test_multi_token_prediction_layers_and_projectors() -> None:
    more = {**small(), **layers(1, start=2), "model.layers.2.eh_proj.weight": ("BF16", (64, 128))}
    extra = sum(a * b for a, b in ((64, 64), (32, 64), (32, 64), (64, 64))) + 3 * 192 * 64 + 128 + 64 * 128
    (line,) = reconcile(checkpoint(more), expected=shapes(small()), tied=False, layers=2)
    assert "multi-token prediction" in line
    assert f"{extra:,}" in line
    (line,) = reconcile(checkpoint(more), parameters=checkpoint(small()).parameters, tied=False, layers=2)
    assert "multi-token prediction" in line
    seeing = {
        **small(),
        "multi_modal_projector.linear_1.weight": ("BF16", (64, 64)),
        "vision_tower.patch.weight": ("BF16", (64, 8)),
    }
    lines = reconcile(checkpoint(seeing), expected=shapes(small()), tied=False)
    assert [line.split(", ")[0] for line in lines] == [
        "the files hold multimodal projector",
        "the files hold vision tower",
    ]


def test_another_models_config_is_suspected() -> None:
    held = checkpoint(small())
    (line,) = reconcile(held, parameters=2 * held.parameters, tied=False)
    assert "50% apart" in line
    (line,) = reconcile(held, parameters=held.parameters + 64, tied=False)
    assert "apart" not in line
    assert "the config is used" in line


def test_layers_that_are_called_otherwise_are_compared_in_sum() -> None:
    """Encoders whose blocks the files number below another name: no line while the totals agree."""
    held = checkpoint({f"bert.albert_layer_groups.{i}.w": ("F32", (10,)) for i in range(2)})
    assert reconcile(held, expected={"encoder.layer.0.w": 10, "encoder.layer.1.w": 10}) == ()
    (line,) = reconcile(held, expected={"encoder.layer.0.w": 10, "encoder.layer.1.w": 15})
    assert "the files hold 20 parameters, the config builds 25" in line


def test_a_tied_head_with_more_than_its_table() -> None:
    """Only the table is there twice; dense layer and bias of the head are its own."""
    head = {"lm_head.dense.weight": ("F32", (8, 8)), "lm_head.bias": ("F32", (100,))}
    table = {"embeddings.word_embeddings.weight": ("F32", (100, 8))}
    built = {"embeddings.word_embeddings.weight": 800, "head.dense.weight": 64, "head.bias": 100}
    assert reconcile(checkpoint(table | head), expected=built, tied=True) == ()
    twice = checkpoint(table | head | {"lm_head.decoder.weight": ("F32", (100, 8))})
    (line,) = reconcile(twice, expected=built, tied=True)
    assert line.startswith("the head is tied, but stored twice: 800 parameters counted once, as vLLM loads them")
    only_as_head = checkpoint(head | {"lm_head.decoder.weight": ("F32", (100, 8))})
    assert reconcile(only_as_head, expected=built, tied=True) == ()
