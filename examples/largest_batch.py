"""Find the largest micro-batch that fits a GPU: python examples/largest_batch.py [GPU]"""

import sys

from memcalc import ModelSpec, TrainingSetup, estimate, find_gpu

LLAMA_3_2_1B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "tie_word_embeddings": True, "max_position_embeddings": 131072,
}  # fmt: skip


def largest_batch(spec: ModelSpec, gpu_name: str, seq_len: int) -> int:
    """The largest micro-batch of `seq_len` tokens that fits, 0 if not even one sequence does."""
    gpu = find_gpu(gpu_name)

    def fits(batch: int) -> bool:
        setup = TrainingSetup(batch=batch, seq_len=seq_len, precision="bf16", activation_checkpointing="full")
        return estimate(spec, setup, gpu).peak.process_bytes <= gpu.usable_bytes

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "RTX 4090"
    spec = ModelSpec.from_config(LLAMA_3_2_1B, "Llama-3.2-1B")
    print(f"{name}: micro-batch {largest_batch(spec, name, seq_len=2048)} at 2048 tokens")
