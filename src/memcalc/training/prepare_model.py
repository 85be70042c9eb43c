"""What the setup does to a built model before it is trained: what is frozen, and what is added."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from memcalc.common.assumption import Assumption
from memcalc.config.quantization import find_quantization, quantized_once
from memcalc.errors import UsageError
from memcalc.models.common.causal_lm import CausalLM
from memcalc.models.common.lm_losses import LanguageLoss
from memcalc.models.spec import ModelSpec
from memcalc.nn.layers.mixture_of_experts import Experts
from memcalc.nn.model import Network
from memcalc.nn.module import Buffer
from memcalc.nn.module_paths import input_embeddings, sites
from memcalc.nn.quantized_layers import Packed, QuantizedExperts, quantize, tell_apart
from memcalc.nn.stack import Stack
from memcalc.nn.state_space_kernels import use_fla, use_mamba_ssm
from memcalc.peft.freezing import freeze, tell_trained_apart, train_only
from memcalc.setup.setup import TrainingSetup
from memcalc.tables.dtypes import ALIASES, FP32, DType
from memcalc.tables.frozen_bases import frozen_base
from memcalc.tables.precisions import PRECISIONS
from memcalc.tables.stated_formats import module_formats, stated_format, unknown_layout
from memcalc.tables.weight_formats import WeightFormat, asked_format
from memcalc.training.float8 import use_float8
from memcalc.training.liger import use_liger

if TYPE_CHECKING:
    from memcalc.peft.targets import Lora


def adapt(network: Network, spec: ModelSpec, setup: TrainingSetup) -> list[Assumption]:
    """Freeze and extend `network`, unbound, as `setup` asks; returns the assumptions."""
    stated = find_quantization(spec.config)
    if stated is not None and (form := _base_format(spec, setup)[0]) is not None:
        tell_apart(network, module_formats(stated, form))
    tell_trained_apart(network, setup.train_only)
    if setup.lora_rank is not None:
        from memcalc.peft.selection import tell_layers_apart  # the default, training in full, does not pay for these

        tell_layers_apart(network, _lora(setup).selection)
        if setup.activation_checkpointing != "full":  # else what the embedding gives requires a gradient already
            from memcalc.peft.injection import tell_reached_apart

            with suppress(UsageError):  # what has no adapters is said by `add_lora`, after what `load` refuses
                tell_reached_apart(network, spec.model_type, _lora(setup))
    if setup.checkpoint_every_n_blocks > 1:
        _checkpoint_every(network, setup.checkpoint_every_n_blocks)
    reads_ids = network.reads_text and network.main_input == "input_ids"
    if setup.activation_checkpointing == "full" and (reads_ids or setup.lora_rank is not None):
        for embedding in input_embeddings(sites(network)):  # Transformers does it, and PEFT: frozen blocks pass on then
            embedding.output_needs_gradient = True
    _shape_loss(network, setup)
    notes = load(network, spec, setup)
    train_only(network, setup.train_only)
    if setup.lora_rank is not None:
        from memcalc.peft.injection import add_lora

        setup = _with_new_head(network, setup, notes)
        notes += add_lora(network, spec.model_type, _lora(setup))
    if setup.freeze is not None:
        freeze(network, setup.freeze)
    if setup.frozen_dtype is not None:
        _narrow(network, ALIASES[setup.frozen_dtype])
    return notes


def _narrow(network: Network, dtype: DType) -> None:
    """Have what is frozen in `dtype`, as people load a base in 16 bits and train parts of it in fp32."""
    frozen = [p for _, p in network.parameters() if not p.trainable and p.fixed_dtype is None]
    if not frozen:
        raise UsageError(
            "--frozen-dtype is the dtype of weights that are not trained, and all are; leave it out, or say with "
            "--train-only or --freeze what is trained."
        )
    for parameter in frozen:
        parameter.fixed_dtype = dtype


def load(network: Network, spec: ModelSpec, setup: TrainingSetup) -> list[Assumption]:
    """Give `network`, unbound, the kernels and the quantized weights that it is loaded with; returns notes."""
    if setup.kernels == "liger":
        use_liger(network, spec.model_type, setup.liger_kernels)
    form, notes = _base_format(spec, setup)
    if setup.state_space_kernels == "mamba-ssm":
        notes.append(use_mamba_ssm(network))
    if setup.linear_attention_kernels == "fla":
        notes.append(use_fla(network))
    if setup.float8_recipe != "none":
        if form is not None:
            raise UsageError(
                f"--float8-recipe multiplies weights that are wide, and this model's are {form.name}; leave it out."
            )
        notes.append(use_float8(network))
    if form is not None:
        _quantize(network, form, spec, setup)
        notes += _training_notes(network, form, setup)
    return notes


def _shape_loss(network: Network, setup: TrainingSetup) -> None:
    """Let the language model compute its loss as the setup says."""
    loss = LanguageLoss(
        setup.loss_implementation, setup.loss_num_chunks, setup.logits_to_keep, setup.label_smoothing > 0, setup.z_loss
    )
    if loss == LanguageLoss(chunks=setup.loss_num_chunks):
        return
    models = [module for _, module in network.modules() if isinstance(module, CausalLM)]
    if not models:
        raise UsageError(
            "--loss-implementation, --logits-to-keep, --label-smoothing and --z-loss shape the loss of a decoder "
            "with a language-model head, which this model is not; leave them out."
        )
    models[0].loss = loss


def _base_format(spec: ModelSpec, setup: TrainingSetup) -> tuple[WeightFormat | None, list[Assumption]]:
    """What the base is quantized to: as the setup says, else as the repository is, where adapters are trained."""
    stated = quantized_once(spec.config, setup.quantization)
    if setup.quantization == "mxfp4":
        raise UsageError(
            "MXFP4 weights cannot be trained on, as Transformers has no backward for them; leave out --quantization, "
            "or use nf4, which bitsandbytes trains on."
        )
    if setup.quantization != "none":
        return asked_format(setup.quantization, setup.quantize_moe_experts), []
    if stated is None:
        return None, []
    form = stated_format(stated)
    if form is None and spec.stored is None and not stated.known:
        raise unknown_layout(stated)
    if setup.lora_rank is None or "quantization" in setup.model_fields_set:
        return None, [
            Assumption(
                "weights_dequantized", f"the repository's weights ({stated}) are dequantized when they are loaded"
            )
        ]
    base = frozen_base(stated)
    if not base.packed or form is None:
        why = base.why if not base.packed else f"the layout of {stated.method} weights is not known"
        return None, [
            Assumption(
                "weights_dequantized", f"the repository's weights ({stated}) are dequantized for training: {why}"
            )
        ]
    if setup.dora and not form.kernel.startswith("bnb"):
        raise UsageError(
            f"PEFT has no DoRA on a base like this repository's ({stated}); leave out --dora, or take the model "
            "that it was made from."
        )
    return form, [
        Assumption(
            "base_quantization",
            f"base weights quantized as {stated.where} of the config says: {stated}, trained by {base.why}",
        )
    ]


def _quantize(network: Network, form: WeightFormat, spec: ModelSpec, setup: TrainingSetup) -> None:
    recipe = PRECISIONS[setup.precision]
    compute = recipe.autocast or recipe.weights
    stated = find_quantization(spec.config)
    quantize(network, form, compute, module_formats(stated, form), "" if stated is None else stated.where)
    keeps = ("gptq",)
    for _, parameter in network.tensors():
        if isinstance(parameter, (Buffer, Packed)) or parameter.fixed_dtype is not None:
            continue
        if setup.prepare_kbit_training and form.kernel not in keeps:
            parameter.fixed_dtype = FP32
        elif recipe.autocast is not None:
            parameter.fixed_dtype = recipe.autocast


def _training_notes(network: Network, form: WeightFormat, setup: TrainingSetup) -> Iterator[Assumption]:
    """What is assumed of a quantized base."""
    wide = "fp32" if setup.prepare_kbit_training and form.kernel != "gptq" else "16 bits"
    yield Assumption(
        "quantized_base_wide_parts",
        f"quantized base: head, embeddings, norms and biases stay in {wide} (--prepare-kbit-training)",
    )
    if form.kernel == "bnb-4bit":
        yield Assumption(
            "bitsandbytes_4bit",
            "bitsandbytes dequantizes a layer's weight in forward (from 8 tokens on) and again in backward",
        )
    elif form.kernel == "bnb-8bit":
        yield Assumption(
            "bitsandbytes_8bit",
            "LLM.int8 meets no outlier columns; it holds each layer's input through backward, checkpointed or not",
        )
    elif form.kernel == "gptq":
        yield Assumption(
            "gptq_kernel",
            "gptqmodel's PyTorch kernel, the one that trains: autograd keeps each dequantized weight until it is used",
        )
    elif form.kernel == "dequantize":
        yield Assumption(
            "dequantized_in_forward_and_backward",
            f"{form.name} weights are dequantized in forward and again in backward, as no training kernel is known",
        )
    if any(isinstance(module, Experts) and not isinstance(module, QuantizedExperts) for _, module in network.modules()):
        yield Assumption(
            "experts_not_quantized",
            f"experts stay wide: in Transformers 5.24 {form.name} quantizes linear layers only; Transformers 4, "
            "Unsloth and axolotl quantize experts (--quantize-moe-experts)",
        )
    elif form.experts_apart:
        text = "experts are quantized one by one, as Transformers 4 and Unsloth have them (--quantize-moe-experts)"
        yield Assumption("experts_quantized_apart", text)


def _checkpoint_every(network: Network, step: int) -> None:
    """Checkpoint the first of every `step` blocks only, counted through all stacks."""
    before = 0
    for _, module in network.modules():
        if isinstance(module, Stack):
            chosen = [(before + position) % step == 0 for position in range(module.depth)]
            module.split(chosen)
            for position, block in module.positions:
                block.skips_checkpointing = not chosen[position]
            before += module.depth


def _with_new_head(network: Network, setup: TrainingSetup, notes: list[Assumption]) -> TrainingSetup:
    """A reward model's head is new, so PEFT (task type SEQ_CLS) trains it in full next to the adapters."""
    leaves = {site.leaf for site in sites(network)} & {"score", "classifier"}
    if setup.objective != "reward" or setup.modules_to_save is not None or not leaves:
        return setup
    head = min(leaves)
    notes.append(
        Assumption(
            "new_head_trained", f"the new head is trained in full beside the adapters (--modules-to-save {head})"
        )
    )
    return setup.model_copy(update={"modules_to_save": head})


def _lora(setup: TrainingSetup) -> Lora:
    from memcalc.peft.targets import Lora

    assert setup.lora_rank is not None
    return Lora(
        setup.lora_rank,
        setup.lora_targets,
        ALIASES[setup.lora_dtype],
        setup.lora_dropout,
        setup.lora_bias,
        setup.dora,
        setup.modules_to_save,
        setup.lora_exclude_modules,
        setup.lora_layers_to_transform,
        setup.lora_rank_pattern,
        setup.lora_target_parameters,
    )
