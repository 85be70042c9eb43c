"""How an option is declared: a field of a pydantic model, with its meaning, its panel of the help, and its bounds."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from memcalc.setup.sentences import usage_error

Panel = Literal[
    "Batch",
    "Images",
    "Precision",
    "Kernels",
    "Checkpointing",
    "Optimizer",
    "LoRA",
    "Loss",
    "Objective",
    "Diffusion",
    "Diffusion components",
    "Serving",
    "vLLM",
    "llama.cpp",
    "Device map",
    "Serving on several GPUs",
    "Parallel",
    "Context parallel",
    "Pipeline",
    "FSDP and DDP",
    "DeepSpeed",
    "DeepSpeed ZeRO-3",
    "Megatron",
    "GPU",
    "Output",
]
"""Headings under which the help lists options."""


def option(panel: Panel, default: Any, description: str, *, unset: str = "", **bounds: Any) -> Any:
    """A field that is an option of the command line.

    `unset` says in a few words what the default None stands for. `bounds` are pydantic's: ge, gt, le, lt.
    """
    extra: dict[str, Any] = {"panel": panel, "unset": unset} if unset else {"panel": panel}
    return Field(default=default, description=description, json_schema_extra=extra, **bounds)


class Options(BaseModel):
    """Options with values of the right kind. Raises UsageError, in one sentence, for values that are not."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_sentence(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            made = handler(values)
        except ValidationError as problem:
            raise usage_error(problem, cls.model_fields) from None
        made.check()
        return made

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """These options with other values for some fields, checked as if they had been given so.

        pydantic's own does not check, and would keep a misspelt name in silence.
        """
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**(given | dict(update or {})))

    def check(self) -> None:
        """Raise UsageError for fields that contradict each other; for subclasses to say."""
