"""Which stored quantizations can be the frozen base of adapters, and which are dequantized first. One row a method.

A row says what Transformers 5.24 (`is_trainable` of its quantizer) and PEFT 0.21 (the layer that LoRA finds for it) do;
where a trainer loads the weights otherwise (Unsloth's own 4-bit copies), that is another repository.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from memcalc.config.quantization import Quantization


class FrozenBase(NamedTuple):
    """`packed`: adapters train on the weights as they are stored; `why` says who does it, or why nobody does."""

    packed: bool
    why: str
    source: str


def _packed(why: str, source: str) -> FrozenBase:
    return FrozenBase(packed=True, why=why, source=source)


def _wide(why: str, source: str) -> FrozenBase:
    return FrozenBase(packed=False, why=why, source=source)


_BASES: Mapping[str, FrozenBase] = {
    "bitsandbytes": _packed("PEFT's bitsandbytes layers", "peft/tuners/lora/bnb.py"),
    "gptq": _packed("PEFT's GPTQ layer on gptqmodel's PyTorch kernel", "peft/tuners/lora/gptq.py"),
    "awq": _packed("PEFT's AWQ layer, with gptqmodel 5 or later", "quantizer_awq.py, peft/tuners/lora/awq.py"),
    "hqq": _packed("PEFT's HQQ layer", "peft/tuners/lora/hqq.py"),
    "aqlm": _packed("PEFT's AQLM layer", "peft/tuners/lora/aqlm.py"),
    "eetq": _packed("PEFT's EETQ layer", "peft/tuners/lora/eetq.py"),
    "quanto": _packed("quanto's linear layers, which pass gradients on", "quantizer_quanto.py"),
    "fp8": _packed("Transformers' fp8 layers, whose backward dequantizes a weight", "integrations/finegrained_fp8.py"),
    "torchao": _packed("torchao's 8-bit weights under PEFT", "quantizer_torchao.py, peft/tuners/lora/torchao.py"),
    "mxfp4": _wide(
        "Transformers does not train MXFP4 weights, and its Mxfp4Config(dequantize=True) unpacks them",
        "quantizer_mxfp4.py: is_trainable is False",
    ),
    "compressed-tensors": _wide(
        "compressed-tensors unpacks its weights before the first step (fp8 kernels are for inference)",
        "quantizer_compressed_tensors.py: run_compressed=False",
    ),
    "modelopt": _wide(
        "Transformers has no loader of ModelOpt's files, so they are unpacked before training",
        "quantizers/auto.py; quantizer_nvfp4.py refuses stored weights",
    ),
    "fbgemm-fp8": _wide("Transformers does not train fbgemm's fp8 weights", "quantizer_fbgemm_fp8.py"),
    "auto-round": _wide("Transformers does not train auto-round's weights", "quantizer_auto_round.py"),
    "bitnet": _wide("Transformers does not train packed BitNet weights", "quantizer_bitnet.py"),
    "quark": _wide("Transformers does not train Quark's weights", "quantizer_quark.py"),
    "vptq": _wide("Transformers does not train VPTQ's weights", "quantizer_vptq.py"),
    "spqr": _wide("Transformers does not train SpQR's weights", "quantizer_spqr.py"),
    "higgs": _wide("Transformers does not train HIGGS weights", "quantizer_higgs.py"),
    "mlx": _wide("MLX's weights are for Apple's GPUs, and PyTorch reads them unpacked", "MLX's converter"),
}


def frozen_base(stated: Quantization) -> FrozenBase:
    """How adapters are trained on weights that are stored so."""
    if stated.method == "torchao" and stated.bits == 4:
        return _wide("PEFT trains on torchao's 8-bit weights only", "peft/tuners/lora/torchao.py")
    return _BASES.get(stated.method) or _wide(
        f"no library is known to train adapters on {stated.method} weights", "peft/tuners/lora/model.py"
    )
