"""What a report says about where its model came from."""

from typing import Any

from support.weights import checkpoint, layers

from memcalc.sources import LoadedModel, remarks
from memcalc.sources.checkpoint.checkpoint import Checkpoint, IgnoredFile


def model(held: Checkpoint | None, config: dict[str, Any] | None = None, **more: Any) -> LoadedModel:
    return LoadedModel("m", "file", config or {}, held, **more)


def test_nothing_to_say() -> None:
    held = checkpoint(layers(1))
    assert remarks(model(held, {"dtype": "bfloat16"}), parameters=held.parameters) == ()


def test_dtypes_that_differ_and_what_the_other_would_take() -> None:
    """A 16-bit checkpoint that is loaded in 32 bits: the usual surprise on a 24 GB card."""
    held = checkpoint({"a.weight": ("BF16", (1000, 7_000_000))})
    (line,) = remarks(model(held, {"torch_dtype": "bfloat16"}), dtype="float32")
    assert line.text == "dtypes: stored BF16, declared BF16, loaded F32 (weights 26.1 GiB instead of 13.0 GiB)"
    (line,) = remarks(model(held, {"torch_dtype": "float16"}))
    assert line.text.startswith("dtypes: stored BF16, declared F16, loaded F16 (weights 13.0 GiB instead")


def test_quantized_weights() -> None:
    packed = {"a.qweight": ("I32", (128, 128)), "a.scales": ("F16", (1, 1024)), "norm.weight": ("F16", (8,))}
    config = {"quantization_config": {"quant_method": "awq", "bits": 4}, "torch_dtype": "float16"}
    (line,) = remarks(model(checkpoint(packed, config), config))
    assert line.text == "stored quantized (awq 4-bit): 131k of 131k parameters, the others wide"


def test_ignored_files_and_custom_code() -> None:
    ignored = (IgnoredFile("a.bin", 2**30, "x"), IgnoredFile("b.bin", None, "x"))
    lines = remarks(model(None, {"auto_map": {"AutoModel": "x.Y"}}, ignored=ignored, notes=("no weights",)))
    assert lines[0].text == "no weights"
    assert "2 other weight files (1.0 GiB) are not counted" in lines[1].text
    assert "never run" in lines[2].text


def test_what_the_config_builds_may_be_given_as_counts() -> None:
    held = checkpoint(layers(2))
    built = {"model.layers.blocks.0.all": held.parameters // 2, "model.layers.blocks.1.all": held.parameters // 2}
    assert remarks(model(held), expected=built) == ()
    (line,) = remarks(model(held), expected={**built, "lm_head.weight": 100}, tied=False)
    assert "no head" in line.text
