"""No option is taken in silence: it changes the answer, is refused, or a line says why it changes nothing."""

from typing import Any

import pytest
from support.reports import lines

from memcalc import InferenceSetup, ModelSpec, TrainingSetup, estimate, find_gpu
from memcalc.errors import UsageError
from memcalc.render import styles
from memcalc.render.box import render

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 4000,
}
LORA = {"lora_rank": 8}
FULL = {"activation_checkpointing": "full"}

TRAINING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"batch": 5}),
    ({}, {"seq_len": 300}),
    ({}, {"lengths": "40..90", "seq_len": None}),
    ({"lengths": "40..90", "seq_len": None}, {"max_steps": 3}),
    ({"lengths": "40..90", "seq_len": None}, {"seed": 3}),
    ({}, {"attention": "eager"}),
    ({}, {"padding_mask": True}),
    ({}, {"precision": "bf16"}),
    ({}, FULL),
    (FULL, {"checkpoint_every_n_blocks": 2}),
    (FULL, {"checkpoint_every_n_blocks": 3}),
    (FULL, {"checkpoint_reentrant": True}),
    ({}, {"activation_checkpointing": "selective"}),
    ({}, {"activation_offloading": True}),
    ({}, {"optimizer": "sgd"}),
    ({}, {"optimizer_impl": "for-loop"}),
    ({}, {"optimizer_in_backward": True}),
    ({}, {"grad_accum": 2}),
    ({}, {"keep_logits": True}),
    ({}, LORA),
    (LORA, {"lora_targets": "all-linear"}),
    (LORA, {"lora_dtype": "bf16"}),
    (LORA, {"lora_dropout": 0.1}),
    (LORA, {"lora_bias": "adapter"}),
    (LORA, {"dora": True}),
    (LORA, {"modules_to_save": "lm_head"}),
    (LORA, {"quantization": "nf4"}),
    (LORA | {"quantization": "nf4"}, {"prepare_kbit_training": False}),
    ({}, {"train_only": "head"}),
    ({}, {"freeze": "embedding"}),
    ({}, {"loss_implementation": "chunked"}),
    ({}, {"logits_to_keep": 3}),
    ({}, {"kernels": "liger"}),
    ({"kernels": "liger"}, {"liger_kernels": "rope,rms_norm"}),
    ({}, {"loss_implementation": "liger"}),
    ({}, {"loss_implementation": "cut-cross-entropy"}),
    ({"loss_implementation": "chunked"}, {"loss_num_chunks": 2}),
    ({}, {"z_loss": True}),
    ({}, {"label_smoothing": 0.1}),
    ({}, {"objective": "dpo"}),
    ({}, {"objective": "reward"}),
    ({}, {"objective": "ppo"}),
    ({"objective": "grpo"}, {"num_generations": 2}),
    ({"objective": "dpo"}, {"reference_model": "precomputed"}),
    ({"objective": "grpo"}, {"max_completion_length": 9}),
    ({}, {"trainer": "hf"}),
    ({}, {"trainer": "trl"}),
    ({}, {"loss_implementation": "tiled"}),
    ({"trainer": "trl"}, {"max_completion_length": 9}),
    ({"precision": "bf16"} | LORA, {"autocast": "bf16"}),
    ({"optimizer": "sgd"}, {"max_grad_norm": 1.0}),
    ({"objective": "dpo"} | LORA, {"reference_model": "copy"}),
    ({"objective": "grpo"}, {"reference_model": "none"}),
    ({"optimizer": "galore-adamw"}, {"galore_rank": 4}),
    ({}, {"cuda_context": "0"}),
    ({}, {"cublas_workspace": "0"}),
    ({}, {"allocator_reserve": 0.1}),
    ({}, {"alloc_conf": "expandable_segments:True"}),
    ({}, {"gpus": 2, "device_map": "auto"}),
    ({"gpus": 3, "device_map": "auto"}, {"device_map": "balanced_low_0"}),
    ({"gpus": 2, "device_map": "auto"}, {"max_memory": "0=3MiB,1=1GiB"}),
]

INFERENCE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"batch": 5}),
    ({}, {"seq_len": 300}),
    ({}, {"attention": "eager"}),
    ({}, {"padding_mask": True}),
    ({}, {"dtype": "fp32"}),
    ({}, {"engine": "vllm"}),
    ({}, {"engine": "transformers-static"}),
    ({}, {"kv_dtype": "fp8"}),
    ({}, {"max_new_tokens": 9}),
    ({}, {"num_beams": 2}),
    ({}, {"prefill_logits": "all"}),
    ({}, {"prefill_chunk_size": 16}),
    ({}, {"tensor_parallel_size": 2}),
    ({}, {"quantization": "nf4"}),
    ({}, {"gpu_memory_utilization": 0.5}),
    ({}, {"gpus": 2, "device_map": "auto"}),
    ({"engine": "vllm"}, {"pipeline_parallel_size": 2}),
    ({"engine": "vllm"}, {"data_parallel_size": 2}),
    ({"tensor_parallel_size": 2}, {"nccl_buffers": "1GiB"}),
    ({"engine": "vllm"}, {"enable_expert_parallel": True}),
    ({"engine": "vllm"}, {"expert_parallel_size": 2}),
    ({"engine": "sglang", "tensor_parallel_size": 2}, {"data_parallel_size": 2, "enable_dp_attention": True}),
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"galore_rank": 4}, "--galore-rank .* --optimizer is adamw"),
    ({"loss_num_chunks": 4}, "--loss-num-chunks .* is eager"),
    ({"max_completion_length": 4}, "--max-completion-length changes nothing .* use --trainer trl"),
    ({"reference_model": "copy"}, "--reference-model .* --objective is sft"),
    ({"objective": "dpo", "reference_model": "shared"}, "--reference-model shared .* add --lora-rank"),
    ({"objective": "dpo", "reference_model": "none"}, "--objective dpo .* use --reference-model copy"),
    ({"objective": "dpo", "num_generations": 2}, "--num-generations .* --objective is dpo"),
    ({"objective": "dpo", "keep_logits": True}, "--keep-logits .* leave it out"),
    ({"objective": "grpo", "loss_implementation": "chunked"}, "--objective sft, but --objective is grpo"),
    ({"objective": "reward", "max_completion_length": 3}, "--max-completion-length .* reward"),
    ({"objective": "ppo", "trainer": "trl"}, "PPO is gone from TRL 1.16; use --trainer plain"),
    ({"objective": "kto", "trainer": "plain"}, "--objective kto .* leave --trainer out"),
    ({"objective": "dpo", "trainer": "hf"}, "has a trainer of TRL"),
    ({"autocast": "bf16"}, "--autocast .* use --precision bf16"),
    ({"trainer": "trl", "loss_implementation": "liger"}, "its own fused head"),
    ({"trainer": "trl", "keep_logits": True}, "--keep-logits needs full logits"),
    ({"loss_implementation": "tiled", "z_loss": True}, "--z-loss needs full logits"),
    ({"objective": "dpo", "seq_len": 1}, "one token has none; raise --seq-len"),
    ({"objective": "grpo", "max_completion_length": 300}, "--max-completion-length 300 exceeds"),
    ({"prepare_kbit_training": False}, "--no-prepare-kbit-training .* no --lora-rank"),
    ({"checkpoint_every_n_blocks": 2}, "--checkpoint-every-n-blocks"),
    ({"checkpoint_reentrant": True}, "--checkpoint-reentrant"),
]


def answer(setup: TrainingSetup | InferenceSetup) -> tuple[object, ...]:
    """Numbers and lines of a report."""
    report = estimate(ModelSpec.from_config(LLAMA), setup)
    numbers = report.components, report.phases, report.peak, report.kv_cache_bytes, report.saved_for_backward_bytes
    return *numbers, tuple(line for line in lines(report) if not line.startswith("defaults:"))


@pytest.mark.parametrize(("base", "option"), TRAINING, ids=str)
def test_a_training_option_shows(base: dict[str, Any], option: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"batch": 2, "seq_len": 64}
    assert answer(TrainingSetup(**(sizes | base))) != answer(TrainingSetup(**(sizes | base | option)))


@pytest.mark.parametrize(("base", "option"), INFERENCE, ids=str)
def test_an_inference_option_shows(base: dict[str, Any], option: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"batch": 2, "seq_len": 64}
    assert answer(InferenceSetup(**sizes, **base)) != answer(InferenceSetup(**(sizes | base | option)))


@pytest.mark.parametrize(("option", "message"), REFUSED, ids=str)
def test_an_option_that_says_nothing_is_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainingSetup(**option)


VIT = {"model_type": "vit", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64}
BLOOM = {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4}
WHISPER = {"model_type": "whisper", "d_model": 96, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64}
IDLE: list[tuple[dict[str, Any], TrainingSetup | InferenceSetup, str]] = [
    (LLAMA, TrainingSetup(images_per_sequence=3), "--images-per-sequence changes nothing: llama reads no images"),
    (LLAMA, InferenceSetup(image_size=8), "--image-size changes nothing: llama reads no images"),
    (LLAMA, TrainingSetup(target_len=8), "--target-len changes nothing: llama is no encoder-decoder"),
    (LLAMA, InferenceSetup(target_len=8), "--target-len changes nothing: generation begins with one token"),
    (LLAMA, TrainingSetup(lora_rank=2, prepare_kbit_training=False), "change nothing: the model is not quantized"),
    (
        LLAMA,
        TrainingSetup(keep_logits=True, loss_implementation="cut-cross-entropy"),
        "--keep-logits changes nothing: --loss-implementation cut-cross-entropy makes no logits",
    ),
    (
        LLAMA,
        TrainingSetup(gpus=2, parallel="zero2", zero_allgather_bucket_size=9),
        "--zero-allgather-bucket-size changes nothing",
    ),
    (
        LLAMA,
        TrainingSetup(gpus=2, parallel="zero2", optimizer="adafactor"),
        "--optimizer adafactor keeps a whole variance",
    ),
    (LLAMA, InferenceSetup(padding_mask=True, engine="vllm"), "--padding-mask is not used: vllm packs sequences"),
    (BLOOM, TrainingSetup(attention="flash"), "--attention flash is not used: Transformers has eager for bloom"),
    (WHISPER, TrainingSetup(seq_len=8, target_len=9), "--seq-len changes nothing: the source is no text"),
    (WHISPER, InferenceSetup(seq_len=8), "--seq-len changes nothing: the source is no text"),
    (VIT, TrainingSetup(seq_len=8), "--seq-len changes nothing"),
    (VIT, TrainingSetup(images_per_sequence=3), "--batch says how many"),
    (VIT, TrainingSetup(image_size=32), "--image-size changes nothing"),
]


@pytest.mark.parametrize(("config", "setup", "line"), IDLE)
def test_an_option_without_use_is_said_to_be(
    config: dict[str, Any], setup: TrainingSetup | InferenceSetup, line: str
) -> None:
    report = estimate(ModelSpec.from_config({**config, "vocab_size": 100}), setup)
    assert any(line in said for said in lines(report))


def test_a_source_of_sound_has_no_tokens() -> None:
    """The one length of text is the target's, whichever option names it."""
    spec = ModelSpec.from_config(WHISPER)
    by_target, by_length = (estimate(spec, setup) for setup in (TrainingSetup(target_len=9), TrainingSetup(seq_len=9)))
    assert by_target.peak == by_length.peak
    assert (by_target.setup["seq_len"], by_target.setup["target_len"]) == (None, 9)
    assert "batch 1 × 9 tokens" in styles.plain(render(by_target, 80))
    assert not any("sequence length" in line for line in lines(by_target))


def test_a_model_of_images_alone_serves_a_batch() -> None:
    report = estimate(ModelSpec.from_config(VIT), InferenceSetup(batch=2), find_gpu("24GB"))
    box = styles.plain(render(report, 80, "GiB", unicode=True))
    assert "SERVES   a batch of " in box
    assert "tokens" not in box
    assert report.setup["seq_len"] is None


@pytest.mark.parametrize("quantization", ["gptq-4", "awq-4", "fp8"])
def test_experts_in_one_tensor_are_quantized(quantization: Any) -> None:
    config = {
        "model_type": "llama4_text",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "intermediate_size_mlp": 512,
        "num_local_experts": 4,
        "vocab_size": 500,
        "head_dim": 64,
    }
    spec = ModelSpec.from_config(config)
    wide = estimate(spec, InferenceSetup()).components.model_weights.peak_bytes
    assert estimate(spec, InferenceSetup(quantization=quantization)).components.model_weights.peak_bytes < 0.7 * wide


def test_quantizing_that_raises_the_peak_is_told() -> None:
    options: dict[str, Any] = {"precision": "bf16", "lora_rank": 8, "quantization": "nf4"}
    wide_vocabulary = ModelSpec.from_config({**LLAMA, "vocab_size": 100_000})
    said = lines(estimate(wide_vocabulary, TrainingSetup(**options)))
    assert any(line.startswith("quantizing raises the peak here") for line in said)
    large = ModelSpec.from_config({**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12})
    assert not any("raises the peak" in line for line in lines(estimate(large, TrainingSetup(**options))))


def test_packed_experts_take_no_adapters() -> None:
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 500,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    }
    with pytest.raises(UsageError, match=r"experts .* are quantized.*--lora-targets"):
        estimate(ModelSpec.from_config(config), TrainingSetup(lora_rank=4, lora_targets="all-linear"))


def test_every_nth_block_is_checkpointed() -> None:
    def saved(**options: Any) -> int:
        report = estimate(ModelSpec.from_config(LLAMA), TrainingSetup(batch=2, seq_len=64, **options))
        assert report.saved_for_backward_bytes is not None
        return report.saved_for_backward_bytes

    none, one = saved(), saved(**FULL, checkpoint_every_n_blocks=6)
    assert one < none
    for step, chosen in ((2, 3), (3, 2), (4, 2)):
        assert saved(**FULL, checkpoint_every_n_blocks=step) == none - (none - one) * chosen
