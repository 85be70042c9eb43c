"""Options that training and inference share."""

from typing import Annotated, Literal

from pydantic import Field

from memcalc.setup.defaults import DEFAULT_SEQ_LEN
from memcalc.setup.options import Options, option

Attention = Literal["eager", "sdpa", "flash"]
Quantization = Literal["none", "nf4", "nf4-double", "fp4", "int8", "gptq-4", "awq-4", "fp8", "mxfp4"]

PositiveInt = Annotated[int, Field(ge=1, le=2**40)]
Probability = Annotated[float, Field(ge=0, lt=1)]


class SharedOptions(Options):
    """The options of `--mode training` and of `--mode inference`."""

    batch: PositiveInt = option(
        "Batch",
        1,
        "Micro-batch size: sequences per GPU and forward pass (pairs of dpo and reward, prompts of grpo and ppo).",
    )
    seq_len: PositiveInt | None = option(
        "Batch",
        None,
        "Sequence length in tokens (source length of an encoder-decoder).",
        unset=f"{DEFAULT_SEQ_LEN}, besides images",
    )
    target_len: PositiveInt | None = option(
        "Batch", None, "Target length of an encoder-decoder in tokens.", unset="the source length"
    )
    images_per_sequence: int = option("Batch", 1, "Images per sequence, where the model reads images.", ge=0, le=2**20)
    image_size: PositiveInt | None = option(
        "Batch", None, "Height and width of an image in pixels.", unset="the config's, or 448 if any will do"
    )
    padding_mask: bool = option(
        "Batch",
        False,
        "Sequences are padded to --seq-len, the longest of their micro-batch: padding takes what tokens take, and a "
        "real mask reaches attention.",
    )
    attention: Attention = option("Precision", "sdpa", "Attention implementation.")
    quantization: Quantization = option(
        "Precision",
        "none",
        "Quantize the weights of linear layers when loading (embeddings, norms and head stay wide).",
    )
    cuda_context: str | None = option(
        "GPU", None, "Size of the CUDA context outside the allocator, such as 500MiB.", unset="by GPU"
    )
    cublas_workspace: str | None = option(
        "GPU", None, "Size of one cuBLAS workspace, such as 8MiB.", unset="by GPU generation"
    )
    allocator_reserve: float | None = option(
        "GPU", None, "Reserved but unallocated memory, as a fraction of what is allocated.", unset="0.02", ge=0, le=4
    )
