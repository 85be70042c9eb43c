"""JSON Schema of a report's `setup`: every option of the mode, with the value that was used."""

from typing import Any

from memcalc.setup.options import Options
from memcalc.setup.setup import InferenceSetup, TrainingSetup

_RESOLVED: dict[str, dict[str, Any]] = {
    "mode": {"type": "string", "description": "What the model is used for."},
    "cuda_context": {"type": "integer", "description": "Bytes of the CUDA context outside the allocator."},
    "cudnn_workspace": {"type": "integer", "description": "Bytes of cuDNN's workspaces."},
    "cublas_workspace": {"type": "integer", "description": "Bytes of one cuBLAS workspace."},
    "allocator_reserve": {
        "type": "number",
        "description": "Reserved but unallocated memory, as a fraction of what is allocated.",
    },
}
"""Values that are always there, whatever the option takes."""

_FURTHER: dict[str, dict[str, Any]] = {
    "sequences": {"type": "integer", "description": "Sequences of a micro-batch of pairs or prompts."},
    "teacher": {"type": "string", "description": "Name of the teacher that distillation asks."},
}
"""Values without an option of the same name, which are there where they mean something."""

_AS_FOUND = ("quantization", "kv_dtype", "dtype")
"""Options whose value may be what files state, which is no choice of the option."""


def setup_schema(schema: dict[str, Any]) -> None:
    """Let `schema`, that of the field, say what the keys of each mode are."""
    schema.pop("additionalProperties", None)
    schema.pop("type", None)
    schema["anyOf"] = [_mode("training", TrainingSetup), _mode("inference", InferenceSetup), _pipeline()]


def _mode(mode: str, setup: type[Options]) -> dict[str, Any]:
    options = setup.model_json_schema()["properties"]
    for name in _AS_FOUND:
        if name in options:
            options[name] = {
                "anyOf": [{"type": "string"}, {"type": "null"}],
                "description": options[name]["description"],
            }
    fixed = _RESOLVED | {"mode": {"const": mode, "description": _RESOLVED["mode"]["description"]}}
    properties = {**fixed, **{name: field for name, field in options.items() if name not in fixed}}
    return _object(setup.__doc__ or "", properties | _FURTHER, required=[*properties])


def _pipeline() -> dict[str, Any]:
    return _object("The weights of a diffusion pipeline.", _RESOLVED, required=[*_RESOLVED])


def _object(text: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": text.split("\n")[0],
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
