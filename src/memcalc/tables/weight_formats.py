"""How quantized weights lie in memory: bits of a weight, and of the constants that weights share. One row a format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from memcalc.errors import UsageError

Shared = tuple[int, int]
"""So many weights of a matrix share so many bits."""


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """A format of quantized matrices.

    `shared` are scales, zeros and their like: groups of weights, each with its constants. `row_bits` are kept for each
    output of a matrix, `input_bits` for each input (the order of GPTQ), `block_bits` for each square of 128. `experts`
    says whether the matrices of experts, which are no linear layers in Transformers, are quantized too; `only_experts`
    that nothing else is; `experts_apart` that experts are quantized, and dequantized, one by one; `head` that the head
    of a language model is quantized too. `tables` are further tensors of each matrix, in bytes. `kernel` names the
    library's way to multiply: what it dequantizes, and what it keeps. `block` is of GGUF's types: so many weights of a
    row are so many bytes, scales among them.
    """

    name: str
    bits: int
    shared: tuple[Shared, ...] = ()
    row_bits: int = 0
    input_bits: int = 0
    block_bits: int = 0
    experts: bool = True
    only_experts: bool = False
    experts_apart: bool = False
    head: bool = False
    tables: tuple[int, ...] = ()
    block: tuple[int, int] | None = None
    kernel: str = "dequantize"
    source: str

    def tensors(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Bytes of each tensor that a matrix [out, in], or a pile of them, is kept as: weights, then constants."""
        if self.block is not None:
            return {"weights": self.nbytes(shape)}
        count, inputs = prod(shape), shape[-1]
        sizes = {"weights": count * self.bits}
        sizes |= {f"constants {size}": -(-count // size) * constant for size, constant in self.shared}
        sizes["row constants"] = prod(shape[:-1]) * self.row_bits
        sizes["input order"] = prod(shape[:-2]) * inputs * self.input_bits
        sizes["block constants"] = prod(shape[:-2]) * -(-shape[-2] // 128) * -(-inputs // 128) * self.block_bits
        sizes |= {f"table {index}": 8 * nbytes for index, nbytes in enumerate(self.tables)}
        return {name: -(-bits // 8) for name, bits in sizes.items() if bits}

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a matrix [out, in], or of a pile of them, with its constants."""
        if self.block is not None:
            weights, nbytes = self.block
            return prod(shape[:-1]) * -(-shape[-1] // weights) * nbytes
        count, inputs = prod(shape), shape[-1]
        bits = count * self.bits + sum(-(-count // size) * constant for size, constant in self.shared)
        bits += prod(shape[:-1]) * self.row_bits + prod(shape[:-2]) * inputs * self.input_bits
        if self.block_bits:
            bits += prod(shape[:-2]) * -(-shape[-2] // 128) * -(-inputs // 128) * self.block_bits
        return -(-bits // 8)


_BITSANDBYTES = (
    "bitsandbytes 0.50 functional.py: absmax in fp32 for 64 weights; doubled, in 8 bits, with fp32 for 256 of them and "
    "a copy of the 8-bit code (quantize_blockwise)"
)

FORMATS: Mapping[str, WeightFormat] = {
    row.name: row
    for row in (
        WeightFormat(
            name="nf4", bits=4, shared=((64, 32),), experts=False, tables=(64,), kernel="bnb-4bit", source=_BITSANDBYTES
        ),
        WeightFormat(
            name="fp4", bits=4, shared=((64, 32),), experts=False, tables=(64,), kernel="bnb-4bit", source=_BITSANDBYTES
        ),
        WeightFormat(
            name="nf4-double",
            bits=4,
            shared=((64, 8), (64 * 256, 32)),
            experts=False,
            tables=(64, 4, 1024),
            kernel="bnb-4bit",
            source=_BITSANDBYTES,
        ),
        WeightFormat(
            name="int8",
            bits=8,
            row_bits=32,
            experts=False,
            kernel="bnb-8bit",
            source="bitsandbytes nn/modules.py: an fp32 scale per output",
        ),
        WeightFormat(
            name="gptq-4",
            bits=4,
            shared=((128, 20),),
            input_bits=32,
            kernel="gptq",
            source="AutoGPTQ qlinear: an fp16 scale and a 4-bit zero per 128 weights, int32 g_idx per input",
        ),
        WeightFormat(
            name="awq-4",
            bits=4,
            shared=((128, 20),),
            kernel="awq",
            source="AutoAWQ linear: an fp16 scale and a 4-bit zero per 128 weights",
        ),
        WeightFormat(
            name="fp8",
            bits=8,
            block_bits=32,
            kernel="fp8",
            source="Transformers integrations/finegrained_fp8.py: an fp32 scale per block of 128 by 128",
        ),
        WeightFormat(
            name="mxfp4",
            bits=4,
            shared=((32, 8),),
            only_experts=True,
            source="OCP Microscaling Formats: an 8-bit exponent per 32 weights; gpt-oss quantizes its experts alone",
        ),
    )
}
"""The formats of --quantization, by name."""


def asked_format(quantization: str, experts: str) -> WeightFormat:
    """The format of --quantization, with experts: none, one-by-one (layers of their own), or stacked (one tensor).

    Raises UsageError where the format itself says what becomes of experts.
    """
    form = FORMATS[quantization]
    if experts == "none":
        return form
    if form.kernel not in ("bnb-4bit", "bnb-8bit"):
        raise UsageError(
            f"--quantize-moe-experts says what bitsandbytes does with experts, and {quantization} quantizes them by "
            "itself; leave it out."
        )
    return replace(form, experts=True, experts_apart=experts == "one-by-one")
