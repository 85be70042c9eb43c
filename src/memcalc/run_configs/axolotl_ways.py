"""axolotl's checkpointing, kernels and losses, and what it trains.

Source: axolotl 0.18 (core/builders, integrations).
"""

from __future__ import annotations

from memcalc.run_configs import option_names as our
from memcalc.run_configs import training
from memcalc.run_configs.keys import Keys
from memcalc.run_configs.mapping import Given
from memcalc.run_configs.sharding import Sharding


def checkpointing(keys: Keys, found: Sharding, objective: str) -> None:
    on, kwargs = keys.get("gradient_checkpointing"), keys.get("gradient_checkpointing_kwargs")
    offloading = keys.get("activation_offloading")
    word = str(on.value).lower()
    offloads = str(offloading.value).lower() not in ("none", "false", "")
    if word in ("offload", "offload_disk"):
        offloads, offloading = True, on
    active = word not in ("none", "false", "")
    named = " ".join(str(keys.value(key) or "").lower() for key in ("base_model", "model_config_type"))
    free = keys.value("rl") is None and not keys.value("unfrozen_parameters")
    plain = free and "gemma-4" not in named and "gemma4" not in named
    reason = "axolotl turns it on where neither rl nor unfrozen_parameters is set" if plain else ""
    how = training.use_reentrant(kwargs, plain, reason)
    if offloads and how.default:
        how = Given("use_reentrant", False, False, True, "off with activation offloading")
    if found.checkpointing and active:
        keys.out.assume(
            "checkpointing is on twice, in the trainer and in FSDP: recent Trainers refuse that; taken once"
        )
    training.checkpointing(keys.out, on, active or bool(found.checkpointing), how)
    if offloads:
        keys.out.take(our.ACTIVATION_OFFLOADING, True, offloading, "checkpointed inputs in host memory")
    elif not offloading.default:
        keys.out.note(offloading)


def loss_and_kernels(keys: Keys, found: Sharding, objective: str, lora: bool) -> None:
    out = keys.out
    plugins = " ".join(str(name) for name in keys.value("plugins"))
    parts = {name: keys.value(name) for name in ("liger_rope", "liger_rms_norm", "liger_layer_norm")}
    parts["liger_glu_activation"] = keys.value("liger_glu_activation") or keys.value("liger_swiglu")
    on = [name for name, value in parts.items() if value]
    fused, plain = keys.get("liger_fused_linear_cross_entropy"), keys.get("liger_cross_entropy")
    if "LigerPlugin" in plugins:
        own = {"liger_rope": "rope", "liger_rms_norm": "rms_norm", "liger_glu_activation": "swiglu"}
        named = [part for name, part in own.items() if name in on]
        given = Given("liger parts", ",".join(on), "liger")
        if named:
            out.take(our.KERNELS, "liger", given, "norms, rotary embedding and SwiGLU fused")
        if 0 < len(named) < len(own):
            out.take(our.LIGER_KERNELS, ",".join(named), given, "some of them alone")
        if fused.value:
            out.take(our.LOSS, our.LOSS_LIGER, fused, "Liger's fused linear cross-entropy")
        elif plain.value:
            out.take(our.LOSS, our.LOSS_LIGER_ON_LOGITS, plain, "Liger's cross-entropy on full logits")
    else:
        for given in (
            fused,
            plain,
            *(keys.get(name) for name in ("liger_rope", "liger_rms_norm", "liger_glu_activation")),
        ):
            if given.value:
                out.drop(given, "the Liger plugin is not among the plugins")
    cut = keys.get("cut_cross_entropy")
    if "CutCrossEntropyPlugin" in plugins and (cut.value or cut.default):
        out.take(our.LOSS, our.LOSS_CUT, Given("plugins", "CutCrossEntropyPlugin", "cut"), "cut cross-entropy")
    chunked = keys.get("chunked_cross_entropy")
    if chunked.value:
        out.take(our.LOSS, our.LOSS_CHUNKED, chunked)
        out.take(
            our.LOSS_CHUNKS,
            keys.value("chunked_cross_entropy_num_chunks") or 8,
            keys.get("chunked_cross_entropy_num_chunks"),
        )
    if lora and not quantized_in_eight(keys) and keys.value("rl") is None and not keys.value("trust_remote_code"):
        named = [
            name
            for name in ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
            if keys.get(name).value is not False
        ]
        if named and not (found.kind == "fsdp" and found.version == 1) and not out.setup.get(our.DORA):
            out.lack(
                "axolotl's LoRA kernels (on by default) save fewer tensors than PEFT's: the estimate is an upper bound"
            )


def quantized_in_eight(keys: Keys) -> bool:
    """Whether the base is in 8 bits, where axolotl has no LoRA kernels."""
    return bool(keys.value("load_in_8bit"))


def trained(keys: Keys) -> None:
    given = keys.get("unfrozen_parameters")
    if given.value:
        patterns = [str(pattern) for pattern in given.value]
        keys.out.note(given, "only these are trained")
        keys.out.facts["train"] = patterns
        if any("language_model" in pattern for pattern in patterns) and not any(
            "visual" in pattern for pattern in patterns
        ):
            keys.out.take(our.FREEZE, "vision", given, "the vision tower is not trained")
        else:
            keys.out.lack(
                "unfrozen_parameters are regular expressions, which are not read: the estimate is of all weights "
                "trained"
            )
    if keys.value("freeze_mm_modules"):
        keys.out.take(our.FREEZE, "vision", keys.get("freeze_mm_modules"))
    tokens = keys.get("tokens")
    if tokens.value:
        keys.out.assume(f"{len(tokens.value)} added tokens may add rows to the embedding and the head: not counted")
    special = keys.value("model_quantization_config_kwargs")
    if special.get("dequantize"):
        keys.out.take(
            "dequantize",
            True,
            keys.get("model_quantization_config_kwargs"),
            "weights are dequantized to bf16 when loading",
        )
        keys.out.setup.pop("dequantize")
    for name in ("eval_batch_size", "eval_sample_packing", "sample_packing_eff_est", "excess_length_strategy"):
        keys.get(name)
