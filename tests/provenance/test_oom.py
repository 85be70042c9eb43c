"""Out-of-memory messages: their numbers, and the allocation that they mean in a known setup.

The facts of `REPORTED` are from public reports of users whose tensor can be named by its shape: what was tried, the
model's sizes, the setup, the tensor. Depth is left out where it changes nothing.
"""

from typing import Any

import pytest
from support.cli_runs import answer, refused, run
from support.shapes import decoder

from memcalc.errors import UsageError
from memcalc.models.spec import ModelSpec
from memcalc.provenance.oom import OomAnswer, explain_oom
from memcalc.provenance.oom_message import message_in, parse_message, segment_bytes
from memcalc.setup.setup import InferenceSetup, TrainingSetup
from memcalc.tables.gpus import find_gpu

GIB = 2**30
MIB = 2**20
LLAMA_8B = decoder(4096, 2, 32, 8, 14336, 128256)
QWEN3_8B = decoder(4096, 2, 32, 8, 12288, 151936, model_type="qwen3", head_dim=128, tie_word_embeddings=False)
QWEN_7B = decoder(3584, 2, 28, 4, 18944, 152064, model_type="qwen2")
QWEN_VL_7B = QWEN_7B | {
    "model_type": "qwen2_5_vl",
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 2,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [1],
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
QWEN3_30B = decoder(2048, 2, 32, 4, 6144, 151936, model_type="qwen3_moe", head_dim=128) | {
    "moe_intermediate_size": 768,
    "num_experts": 8,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
}
QWEN_32B = decoder(5120, 2, 40, 8, 27648, 152064, model_type="qwen2")
QWEN_14B = decoder(5120, 2, 40, 8, 13824, 152064, model_type="qwen2")
KIMI_LAYER = decoder(7168, 2, 64, 64, 18432, 163840, model_type="kimi_k2") | {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "topk_group": 1,
    "v_head_dim": 128,
}

REPORTED: list[tuple[str, dict[str, Any], TrainingSetup | InferenceSetup, tuple[int, ...], str]] = [
    (
        "2.32 GiB",
        QWEN3_30B,
        TrainingSetup(
            seq_len=4096, precision="bf16", lora_rank=8, lora_targets="q_proj,v_proj", trainer="plain", batch=1
        ),
        (1, 4096, 151936),
        "to",
    ),
    ("1.16 GiB", QWEN3_30B, TrainingSetup(seq_len=512, batch=1, precision="fp32"), (151936, 2048), "momentum"),
    ("1.16 GiB", QWEN3_8B, InferenceSetup(dtype="fp16"), (151936, 4096), "parameter"),
    ("298.0 MiB", QWEN3_8B, InferenceSetup(engine="vllm", batch=256), (256, 151936), "indices of the sorted logits"),
    ("1002.0 MiB", LLAMA_8B, InferenceSetup(), (128256, 4096), "parameter"),
    ("1002.0 MiB", LLAMA_8B, InferenceSetup(engine="vllm", dtype="bf16"), (128256, 4096), "parameter"),
    (
        "112.0 MiB",
        LLAMA_8B,
        TrainingSetup(batch=4, seq_len=1024, precision="fp16", lora_rank=8),
        (4, 1024, 14336),
        "mul",
    ),
    ("270.0 MiB", QWEN_32B, InferenceSetup(engine="vllm", dtype="bf16"), (5120, 27648), "parameter"),
    ("270.0 MiB", QWEN_14B, InferenceSetup(engine="vllm", dtype="fp16"), (27648, 5120), "parameter"),
    ("130.0 MiB", QWEN_VL_7B, InferenceSetup(dtype="bf16"), (18944, 3584), "parameter"),
    ("21.0 GiB", KIMI_LAYER, InferenceSetup(engine="vllm", dtype="bf16"), (384, 4096, 7168), "parameter"),
    ("1.02 GiB", QWEN_7B, InferenceSetup(dtype="fp16"), (152064, 3584), "parameter"),
    (
        "17.37 GiB",
        QWEN3_8B,
        TrainingSetup(batch=1, seq_len=30688, precision="bf16", trainer="plain"),
        (30688, 151936),
        "backward of",
    ),
]


@pytest.mark.parametrize(("tried", "config", "setup", "shape", "what"), REPORTED, ids=range(len(REPORTED)))
def test_reported_allocations_are_named(
    tried: str, config: dict[str, Any], setup: TrainingSetup | InferenceSetup, shape: tuple[int, ...], what: str
) -> None:
    found = explain_oom(ModelSpec.from_config(config), setup, parse_message(f"Tried to allocate {tried}"))
    assert any(one.shape == shape and one.operation.startswith(what) for one in found.candidates)


NEW = (
    "CUDA out of memory. Tried to allocate {}. GPU 3 has a total capacity of 79.15 GiB of which 601.25 MiB is free. "
    "Including non-PyTorch memory, this process has 78.55 GiB memory in use. Of the allocated memory 74.93 GiB is "
    "allocated by PyTorch, and 3.10 GiB is reserved by PyTorch but unallocated."
)
OLD = (
    "CUDA out of memory. Tried to allocate {} (GPU 1; 15.90 GiB total capacity; 14.75 GiB already allocated; "
    "11.88 MiB free; 15.00 GiB reserved in total by PyTorch)"
)


def test_the_numbers_of_both_formats() -> None:
    new = parse_message(NEW.format("1.96 GiB"))
    assert (new.device, new.capacity, new.free) == (3, round(79.15 * GIB), round(601.25 * MIB))
    assert (new.process, new.allocated) == (round(78.55 * GIB), round(74.93 * GIB))
    assert new.reserved == round(74.93 * GIB) + round(3.10 * GIB)
    assert abs((new.outside or 0) - 0.52 * GIB) < 0.01 * GIB
    old = parse_message(OLD.format("20.00 MiB"))
    assert (old.device, old.capacity, old.free) == (1, round(15.90 * GIB), round(11.88 * MIB))
    assert (old.allocated, old.reserved, old.process) == (round(14.75 * GIB), 15 * GIB, None)
    oldest = parse_message(
        "Tried to allocate 512.00 KiB (GPU 0; 7.92 GiB total capacity; 6.9 GiB already allocated; 2.00 MiB free; "
        "100.00 MiB cached)"
    )
    assert (oldest.reserved, oldest.tried.nbytes) == (100 * MIB, 512 * 2**10)
    typo = parse_message(
        "Tried to allocate 2.00 GiB. GPU 0 has a total capacty of 23.65 GiB of which 1.00 GiB is free. Process 42 has "
        "22.6 GiB memory in use. 20.00 GiB allowed; Of the allocated memory"
    )
    assert (typo.capacity, typo.allowed, typo.process) == (round(23.65 * GIB), 20 * GIB, None)


def test_only_the_first_message_counts() -> None:
    both = parse_message(f"{OLD.format('1.00 GiB')} and then {NEW.format('3.00 GiB')}")
    assert both.tried.nbytes == GIB
    assert both.capacity == round(15.90 * GIB)


def test_sizes_are_those_of_segments() -> None:
    assert [segment_bytes(size) for size in (1, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 10 * MIB + 512)] == [
        2 * MIB,
        2 * MIB,
        20 * MIB,
        20 * MIB,
        10 * MIB,
        12 * MIB,
    ]
    tried = parse_message("Tried to allocate 20.00 MiB").tried
    assert tried.is_printed_for(2 * MIB)
    assert not tried.is_printed_for(11 * MIB)
    assert parse_message("2.32 GiB").tried.is_printed_for(4096 * 151936 * 4)


def of(text: str, setup: TrainingSetup) -> OomAnswer:
    return explain_oom(ModelSpec.from_config(LLAMA_8B), setup, parse_message(text))


def test_the_moment_that_fits_the_message_comes_first() -> None:
    setup = TrainingSetup(batch=1, seq_len=2048, precision="bf16", optimizer_impl="fused")
    peak = of("Tried to allocate 1002.00 MiB", setup)
    first = peak.candidates[0]
    assert (first.shape, first.when) == ((2048, 128256), "in backward")
    assert first.off_bytes is None
    early = of(OLD.format("1002.00 MiB").replace("14.75", "0.98"), setup).candidates[0]
    assert (early.when, early.module) == ("while the weights are loaded", "lm_head.weight")
    assert abs(early.off_bytes or 0) < GIB


CALLS = (
    # allocated GiB and free MiB of the message, on devices of 20, 24 and 28 GiB; what asked for the logits' 3.91 GiB
    (19.42, 590, "to", "in forward of the first step"),
    (23.34, 678, "log_softmax of cross_entropy", "in forward of the first step"),
    (25.29, 2775, "backward of log_softmax of cross_entropy", "in backward of the first step"),
)


@pytest.mark.parametrize(("allocated", "free", "what", "when"), CALLS)
def test_the_allocation_that_failed_comes_first(allocated: float, free: int, what: str, when: str) -> None:
    """Messages of torch 2.14.1's allocator for Llama-3.2-1B's shape, 4 x 2048 tokens, fused AdamW, and their lines."""
    model = ModelSpec.from_config(decoder(2048, 16, 32, 8, 8192, 128256, tie_word_embeddings=True))
    setup = TrainingSetup(batch=4, seq_len=2048, precision="bf16", optimizer_impl="fused", padding_mask=True)
    text = (
        f"Tried to allocate 3.91 GiB. GPU 0 has a total capacity of 20.00 GiB of which {free}.00 MiB is free. Of the "
        f"allocated memory {allocated} GiB is allocated by PyTorch, and 251.00 KiB is reserved by PyTorch but "
        "unallocated."
    )
    first = explain_oom(model, setup, parse_message(text), find_gpu("H100-80GB")).candidates[0]
    assert first.operation == what
    assert first.when.startswith(when)
    assert abs(first.off_bytes or 0) < 0.03 * allocated * GIB


def test_what_makes_it_smaller() -> None:
    setup = TrainingSetup(batch=1, seq_len=2048, precision="bf16", optimizer_impl="fused")
    changes = {one.command_line: one.bytes for one in of("Tried to allocate 1002.00 MiB", setup).smaller_with}
    assert changes["--loss-implementation liger"] == 0
    assert changes["--seq-len 1024"] == 1024 * 128256 * 4


def test_a_size_that_is_not_there_is_said_to_be_none() -> None:
    found = of("Tried to allocate 7.77 GiB", TrainingSetup(batch=1, seq_len=512))
    assert found.candidates == ()
    assert found.nearest


def test_the_command(tmp_path: Any) -> None:
    log = tmp_path / "train.log"
    log.write_text("step 1\n" * 1000 + f"RuntimeError: {NEW.format('1002.00 MiB')}\nmore\n")
    job = ("8B", "--seq-len", "2048", "--precision", "bf16")
    text = run("explain", *job, "--oom", str(log)).stdout
    assert "in the message" in text
    found = answer("explain", *job, "--oom", log.read_text())
    assert found["message"]["capacity_bytes"] == round(79.15 * GIB)
    assert run("explain", *job, "--oom", "-", input=log.read_text()).stdout == text
    log.write_text("nothing here")
    assert "Tried to allocate" in refused(2, "explain", *job, "--oom", str(log))
    assert "paste the whole message" in refused(2, "explain", *job, "--oom", "out of memory")
    assert "--top" in refused(2, "explain", *job, "--oom", "1 GiB", "--top", "3")


def test_a_log_is_read_up_to_its_message() -> None:
    endless = (f"line {number}\n" if number != 500 else f"{NEW.format('1.00 GiB')}\n" for number in range(10**9))
    assert parse_message(message_in(endless)).tried.nbytes == GIB


def test_what_is_no_message() -> None:
    with pytest.raises(UsageError, match="MPS"):
        parse_message("MPS backend out of memory (MPS allocated: 5.00 GB)")
