"""Precision recipes: one row a recipe. What is kept in which dtype, named for the engine that does it so."""

from typing import NamedTuple

from memcalc.tables.dtypes import BF16, FP16, FP32, DType


class PrecisionRecipe(NamedTuple):
    """Dtype of the weights (gradients and optimizer states follow it) and of autocast, if it is on.

    `casts_to` is the dtype that a sharding engine gathers weights in, where that is another one.
    """

    name: str
    weights: DType
    autocast: DType | None
    source: str
    casts_to: DType | None = None

    @property
    def compute(self) -> DType:
        """The dtype of the weights that modules see."""
        return self.casts_to or self.weights


_AUTOCAST = "torch.autocast over fp32 weights: Hugging Face Trainer's bf16=True / fp16=True"
_PURE = "the model is loaded in this dtype and trained as it is; torch.optim states follow the parameter's dtype"

PRECISIONS = {
    row.name: row
    for row in (
        PrecisionRecipe("fp32", FP32, None, _PURE),
        PrecisionRecipe("bf16", BF16, None, _PURE),
        PrecisionRecipe("fp16", FP16, None, _PURE),
        PrecisionRecipe("mixed-bf16", FP32, BF16, _AUTOCAST),
        PrecisionRecipe("mixed-fp16", FP32, FP16, _AUTOCAST),
    )
}
