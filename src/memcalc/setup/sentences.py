"""What pydantic finds wrong with options, in one sentence for the person who gave them."""

from collections.abc import Iterable, Mapping
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from memcalc.common.escaping import quoted
from memcalc.errors import UsageError, close_matches, option_name

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_NOUNS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a number",
    "string_type": "text",
    "bool_type": "true or false",
}


def usage_error(problem: "ValidationError", fields: Mapping[str, "FieldInfo"]) -> UsageError:
    """The first thing that is wrong; options that are none of `fields` come before all else."""
    errors = problem.errors(include_url=False)
    first = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    return UsageError(_sentence(first, fields))


def value_type(annotation: Any) -> Any:
    """What an option takes when it is given: `annotation` without None and without bounds."""
    if get_origin(annotation) is Annotated:
        return value_type(get_args(annotation)[0])
    others = [argument for argument in get_args(annotation) if argument is not NoneType]
    return value_type(others[0]) if NoneType in get_args(annotation) else annotation


_BITSANDBYTES = (
    "of bitsandbytes, nf4 and fp4 have 4 bits (nf4-double as QLoRA has it) and int8 has 8; gptq-4 and awq-4 are others"
)
_OF_BITSANDBYTES = "4bit 4-bit int4 bnb-4bit load-in-4bit 8bit 8-bit bnb-8bit load-in-8bit bnb bitsandbytes qlora"
_FLOAT8 = (
    "products in 8 bits are --float8-recipe tensorwise (torchao) over --precision bf16, and weights kept in 8 bits "
    "--quantization"
)
_ENGINE = (
    "TransformerEngine is not computed: its layers keep inputs and copies of their weights in 8 bits; "
    "--float8-recipe tensorwise (torchao) over --precision bf16 is near to it"
)
_APEX = (
    "Apex's O2 is not computed; it has 16-bit weights and gradients beside fp32 masters, their gradients and states "
    "(20 bytes a parameter with AdamW), and --parallel zero1 on one GPU, DeepSpeed's way, is near to it"
)
_ZERO_BUBBLE = (
    "schedules that put weight gradients off keep a micro-batch's graph, and gradients within it, until those are "
    "made, which is not computed"
)
_MEANT: Mapping[str, Mapping[str, str]] = {
    "--quantization": {
        **dict.fromkeys(_OF_BITSANDBYTES.split(), _BITSANDBYTES),
        "gguf": "types of GGUF are those of a file: give the .gguf as the model",
    },
    "--activation-checkpointing": {
        **dict.fromkeys(("on", "true", "yes", "1"), "full recomputes whole blocks"),
        "unsloth": "full with --activation-offloading keeps inputs of blocks in host memory, as Unsloth does",
    },
    "--precision": {
        **dict.fromkeys(("fp8", "float8", "fp8-hybrid", "e4m3", "int8"), _FLOAT8),
        **dict.fromkeys(("te-fp8", "te", "transformer-engine", "transformerengine", "transformer-engine-fp8"), _ENGINE),
        **dict.fromkeys(("o2", "apex-o2", "apex", "amp-o2"), _APEX),
        **dict.fromkeys(("o1", "apex-o1", "amp-o1", "amp"), "mixed-fp16 is torch.autocast, which replaced Apex's O1"),
        "tf32": "tf32 keeps tensors in fp32, so that fp32 is its memory",
    },
    "--float8-recipe": {
        **dict.fromkeys(("rowwise", "rowwise-with-gw-hp"), "of torchao's recipes tensorwise alone is computed"),
        **dict.fromkeys(("delayed", "mxfp8", "blockwise", "float8blockscaling", "current"), _ENGINE),
    },
    "--attention": {
        **dict.fromkeys(("flex-attention", "flex"), "flex_attention is compiled, which is not computed"),
        **dict.fromkeys(("xformers", "xformers-attention"), "xformers keeps what flash does"),
        **dict.fromkeys(("sageattention", "sage"), "it is for inference, and not computed"),
    },
    "--kernels": {
        **dict.fromkeys(
            ("rope", "rms-norm", "swiglu", "liger-rope", "liger-rms-norm", "liger-swiglu", "geglu", "liger-glu"),
            "one of Liger's alone is --kernels liger with --liger-kernels",
        ),
        "unsloth": "Unsloth's kernels are not computed, and Liger's are near to them",
    },
    "--loss-implementation": {
        "unsloth": "Unsloth's cross-entropy works in place on the logits, as liger-cross-entropy does",
        **dict.fromkeys(("flash-attn", "flash"), "flash-attn's works in place, as liger-cross-entropy does"),
        **dict.fromkeys(("cce", "cut"), "cut-cross-entropy is its name here"),
    },
    "--engine": dict.fromkeys(
        ("tensorrt-llm", "trt-llm", "trtllm", "tensorrt", "lmdeploy", "exllama", "exllamav2", "mlx", "mlx-lm", "onnx"),
        "what that one allocates is not described",
    )
    | dict.fromkeys(("ollama", "lmstudio", "lm-studio", "koboldcpp", "llamafile"), "it runs llama.cpp"),
    "--pipeline-schedule": dict.fromkeys(
        (
            *("zerobubble", "zero-bubble", "interleavedzerobubble", "interleaved-zero-bubble", "dualpipe", "dualpipev"),
            *("zb", "zb-h1", "zbh1", "zb1p", "zbv", "zbvzerobubble"),
        ),
        _ZERO_BUBBLE,
    ),
}
"""What words of other tools mean where none of the choices has their name, by option."""


def choice_sentence(option: str, value: object, choices: Iterable[str]) -> str:
    """Why `value` is none of `choices`."""
    word = str(value).strip().lower().replace("_", "-")
    known = _MEANT.get(option, {})
    if word.removeprefix("i")[:1] == "q" and word.removeprefix("i")[1:2].isdigit():  # q4_k_m, iq2_xs
        word = "gguf"
    if word in known:
        return f"{option} cannot be {quoted(str(value))}: choose from {', '.join(choices)}; {known[word]}."
    near = close_matches(str(value), choices) or f": choose from {', '.join(choices)}."
    return f"{option} cannot be {quoted(str(value))}{near}"


def _sentence(error: "ErrorDetails", fields: Mapping[str, "FieldInfo"]) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if not error["loc"]:
        return f"Options are given by name, such as batch=4, not as {quoted(value)}."
    name = str(error["loc"][0])
    option = option_name(name)
    if kind == "extra_forbidden":
        return f"There is no option {option}{close_matches(name, fields) or '.'}"
    if kind == "missing":
        return f"{option} is missing: give it a value."
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        limit = context[bound]
        return f"{option} must be {words} {int(limit) if limit == int(limit) else limit}, not {value}."
    if kind in _NOUNS:
        return f"{option} needs {_NOUNS[kind]}, not {quoted(str(value))}."
    if kind == "literal_error":
        return choice_sentence(option, value, get_args(value_type(fields[name].annotation)))
    return f"{option} cannot be {quoted(str(value))}: {error['msg']}."


NO_VIDEO = (
    "--num-frames is described for denoisers and for Qwen-VL, GLM-V, InternVL and SmolVLM, which read frames as "
    "images; how this model reads a video is not: give images with --images-per-sequence and --image-size."
)
"""What is said of frames for another model that reads images."""
