"""Adapters in one file without a config: what trainers of diffusion models write, under the names of each.

kohya's `lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight`, PEFT's and diffusers'
`transformer.transformer_blocks.0.attn.to_q.lora_A.weight`,
ai-toolkit's and ComfyUI's `diffusion_model....lora_A.weight`,
XLabs' `double_blocks.0.processor.qkv_lora1.down.weight`. Source: loaders/lora_conversion_utils.py of diffusers 0.42.1.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memcalc.sources.adapter import Adapter
from memcalc.sources.loaded_model import LoadedModel

_DOWN = re.compile(
    r"^(?P<module>.+?)[._](?:lora_down|lora_A|lora_A\.default|lora\.down|lora_linear_layer\.down"
    r"|(?P<xlabs>\w+_lora\d?)\.down)\.weight$"
)
_UP = re.compile(
    r"^(?P<module>.+?)[._](?:lora_up|lora_B|lora_B\.default|lora\.up|lora_linear_layer\.up|(?P<xlabs>\w+_lora\d?)\.up)"
    r"\.weight$"
)
_OTHER_KINDS: Mapping[str, str] = {
    ".hada_w1_a": "LoHa",
    ".lokr_w1": "LoKr",
    ".lokr_w1_a": "LoKr",
    ".oft_blocks": "OFT",
    ".oft_diag": "OFT",
    ".glora_a": "GLoRA",
}
_MAGNITUDES = (".dora_scale", ".lora_magnitude_vector")
_ENCODERS = ("lora_te_", "lora_te1_", "lora_te2_", "lora_te3_", "text_encoder", "text_model.", "cond_stage_model.")
_PREFIXES = re.compile(
    r"^(?:base_model\.model\.|lora_unet_|lora_transformer_|lora_prior_unet_|unet\.|transformer\.|model\.diffusion_model\."
    r"|diffusion_model\.|lycoris_)+"
)


@dataclass(frozen=True)
class Factors:
    """The two matrices of one module: its rank, and elements of the factor on its input and on its output."""

    rank: int
    down: int
    up: int


@dataclass(frozen=True)
class LoraFile(Adapter):
    """A LoRA without a config: the factors of the denoiser's modules, by the file's names for them."""

    modules: Mapping[str, Factors] = field(default_factory=dict)
    encoders: int = 0
    """Parameters of adapters for text encoders."""
    dora: bool = False


def as_adapter(model: LoadedModel) -> LoadedModel:
    """`model`, which has weights and no config, as an adapter where its names are those of one; unchanged where not."""
    checkpoint = model.checkpoint
    if checkpoint is None or model.config is not None or checkpoint.format != "safetensors":
        return model
    shapes = checkpoint.shapes
    kind = next((kind for name in shapes for end, kind in _OTHER_KINDS.items() if name.endswith(end)), None)
    if kind is not None:
        unfit = f"is an adapter of the kind {kind}, and memcalc computes LoRA only; give its base alone."
        return replace(model, unfit=unfit)
    down = {_module(found): shape for name, shape in shapes.items() if (found := _DOWN.match(name))}
    up = {_module(found): shape for name, shape in shapes.items() if (found := _UP.match(name))}
    both = {name: (shape, up[name]) for name, shape in down.items() if name in up and all(shape) and all(up[name])}
    if not both:
        return model
    modules = {name: Factors(a[0], _elements(a), _elements(b)) for name, (a, b) in both.items()}
    own = {_PREFIXES.sub("", name): factors for name, factors in modules.items() if not name.startswith(_ENCODERS)}
    encoders = sum(f.down + f.up for name, f in modules.items() if name.startswith(_ENCODERS))
    ranks = Counter(factors.rank for factors in own.values())
    adapter = LoraFile(
        _named_base(checkpoint.metadata),
        "LORA",
        ranks.most_common(1)[0][0] if ranks else None,
        tuple(own),
        (),
        checkpoint,
        modules=own,
        encoders=encoders,
        dora=any(name.endswith(_MAGNITUDES) for name in shapes),
    )
    return replace(model, checkpoint=None, adapter=adapter)


def _module(found: re.Match[str]) -> str:
    """The module of a factor; XLabs names the projection in the factor's own name."""
    return f"{found['module']}.{found['xlabs']}" if found["xlabs"] else found["module"]


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _named_base(metadata: Mapping[str, str]) -> str | None:
    """The base that the trainer noted, for people: sd-scripts and ai-toolkit write a file's name, not a model's."""
    for key in ("ss_sd_model_name", "ss_base_model_version", "modelspec.architecture"):
        if metadata.get(key, "").strip():
            return metadata[key].strip()[:100]
    return None
