"""Options that training and inference share."""

from typing import Annotated, Literal

from pydantic import Field

from memcalc.common.image_sides import ImageSides, ImageSize
from memcalc.errors import UsageError
from memcalc.setup.defaults import DEFAULT_IMAGE_SIDE, DEFAULT_SEQ_LEN, LONGEST
from memcalc.setup.device_map_options import DeviceMapOptions
from memcalc.setup.options import option

Attention = Literal["eager", "sdpa", "flash"]
Quantization = Literal["none", "nf4", "nf4-double", "fp4", "int8", "gptq-4", "awq-4", "fp8", "mxfp4"]

PositiveInt = Annotated[int, Field(ge=1, le=2**40)]
Tokens = Annotated[int, Field(ge=1, le=LONGEST)]
Probability = Annotated[float, Field(ge=0, lt=1)]


class SharedOptions(DeviceMapOptions):
    """The options of `--mode training` and of `--mode inference`."""

    batch: PositiveInt = option(
        "Batch",
        1,
        "Micro-batch size: sequences per GPU and forward pass (pairs of dpo and reward, prompts of grpo and ppo).",
    )
    seq_len: Tokens | None = option(
        "Batch",
        None,
        "Sequence length in tokens (source length of an encoder-decoder).",
        unset=f"{DEFAULT_SEQ_LEN}, besides images",
    )
    target_len: Tokens | None = option(
        "Batch", None, "Target length of an encoder-decoder in tokens.", unset="the source length"
    )
    images_per_sequence: int = option("Images", 1, "Images per sequence, where the model reads images.", ge=0, le=2**20)
    image_size: PositiveInt | None = option(
        "Images", None, "Height and width of an image in pixels.", unset="the config's, or 448 if any will do"
    )
    image_width: PositiveInt | None = option(
        "Images",
        None,
        "Width of an image in pixels, with --image-height, where images need not be squares.",
        unset="the size that --image-size or the config says",
    )
    image_height: PositiveInt | None = option(
        "Images", None, "Height of an image in pixels, with --image-width.", unset="as --image-width"
    )
    image_min_pixels: PositiveInt | None = option(
        "Images",
        None,
        "Least area of an image in pixels, to which Qwen-VL's processors enlarge it (min_pixels).",
        unset="no limit",
    )
    image_max_pixels: PositiveInt | None = option(
        "Images",
        None,
        "Largest area of an image in pixels, to which Qwen-VL's processors shrink it (max_pixels).",
        unset="no limit",
    )
    resolution: PositiveInt | None = option(
        "Diffusion", None, "Height and width of a picture in pixels.", unset="the pipeline's own"
    )
    height: PositiveInt | None = option("Diffusion", None, "Height of a picture in pixels.", unset="--resolution")
    width: PositiveInt | None = option("Diffusion", None, "Width of a picture in pixels.", unset="--resolution")
    num_frames: PositiveInt | None = option(
        "Diffusion",
        None,
        "Frames of a video: of a denoiser's, or of each that a vision-language model reads.",
        unset="the pipeline's own, or images alone",
    )
    condition_images: int = option(
        "Diffusion",
        0,
        "Pictures beside the noisy one in the denoiser's input, each of its size (FLUX.1 Kontext, FLUX.2, "
        "Qwen-Image-Edit).",
        ge=0,
        le=16,
    )
    max_sequence_length: PositiveInt | None = option(
        "Diffusion", None, "Tokens of text that the denoiser reads.", unset="the pipeline's own"
    )
    padding_mask: bool = option(
        "Batch",
        False,
        "Sequences are padded to --seq-len, the longest of their micro-batch: padding takes what tokens take, and a "
        "real mask reaches attention.",
    )
    attention: Attention = option("Precision", "sdpa", "Attention implementation.")
    state_space_kernels: Literal["torch", "mamba-ssm"] = option(
        "Precision",
        "torch",
        "Scans of Mamba layers: plain PyTorch, as Transformers runs them alone, or the kernels of mamba-ssm, which it "
        "takes where they are installed.",
    )
    linear_attention_kernels: Literal["torch", "fla"] = option(
        "Precision",
        "torch",
        "Gated delta nets and Kimi's delta attention: plain PyTorch, as Transformers runs them alone, or the kernels "
        "of flash-linear-attention, which it takes where they are installed.",
    )
    quantization: Quantization = option(
        "Precision",
        "none",
        "Quantize the weights of linear layers when loading (embeddings, norms and head stay wide).",
    )
    quantize_moe_experts: Literal["none", "one-by-one", "stacked"] = option(
        "Precision",
        "none",
        "Quantize experts too, which bitsandbytes leaves wide in Transformers 5: one-by-one (Transformers 4, Unsloth) "
        "or stacked (a layer's experts at once: axolotl's quantize_moe_experts).",
    )
    cuda_context: str | None = option(
        "GPU", None, "Size of the CUDA context outside the allocator, such as 500MiB.", unset="by GPU"
    )
    cudnn_workspace: str | None = option(
        "GPU",
        None,
        "Size of cuDNN's workspaces for convolutions at the peak, such as 2GiB; published runs of autoencoders take up "
        "to 7 GiB.",
        unset="none",
    )
    cublas_workspace: str | None = option(
        "GPU", None, "Size of one cuBLAS workspace, such as 8MiB.", unset="by GPU generation"
    )
    alloc_conf: str | None = option(
        "GPU",
        None,
        "Settings of PyTorch's allocator, as PYTORCH_CUDA_ALLOC_CONF has them, such as expandable_segments:True.",
        unset="PyTorch's defaults",
    )
    allocator_reserve: float | None = option(
        "GPU",
        None,
        "Reserved but unallocated memory, as a fraction of what is allocated, in place of simulating the allocator.",
        unset="simulated for a --gpu in training, else 0.02",
        ge=0,
        le=4,
    )

    @property
    def image(self) -> ImageSize:
        """How large images are: one side, or both with limits. Raises UsageError for one of two sides alone."""
        if (self.image_width is None) != (self.image_height is None):
            raise UsageError("--image-width and --image-height go together; give both, or --image-size for a square.")
        if self.image_width is not None and self.image_size is not None:
            raise UsageError("--image-size makes a square of what --image-width and --image-height say; leave one out.")
        limits = (self.image_min_pixels, self.image_max_pixels)
        least, most = limits
        if least is not None and most is not None and least > most:
            raise UsageError(f"--image-min-pixels {least} is more than --image-max-pixels {most}; change one of them.")
        side = self.image_size or (DEFAULT_IMAGE_SIDE if limits != (None, None) else None)
        height, width = self.image_height or side, self.image_width or side
        if height is None or width is None or (self.image_width is None and limits == (None, None)):
            return self.image_size
        return ImageSides(height, width, *limits)
