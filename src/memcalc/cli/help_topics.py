"""What `memcalc help TOPIC` prints: half a screen each. Commands in it are run by the tests."""

TOPICS = {
    "precision": """\
Which dtype weights, compute and optimizer states have.

  mixed-bf16     fp32 weights under autocast (16-bit copies are made as layers run): 16 bytes a parameter with AdamW
  bf16, fp16     everything in 16 bits: 8 bytes a parameter with AdamW
  fp32           everything in 32 bits: 16 bytes a parameter with AdamW

bf16=True of Hugging Face's Trainer is autocast over whatever was loaded: a 16-bit checkpoint under it is
--precision bf16 --autocast bf16, the usual LoRA job; an fp32 one is mixed-bf16. Gradients have the dtype of weights.

  memcalc estimate --params 1B --seq-len 2048 --precision bf16 --autocast bf16 --lora-rank 16
""",
    "checkpointing": """\
What is kept for backward, and what is computed again.

  --activation-checkpointing full        each block keeps its input only, and runs again in backward: about a third
                                         more compute, and the memory of one block's inside
  --checkpoint-every-n-blocks 2          every second block does
  --activation-checkpointing selective   scores and probabilities of attention alone are computed again
  --checkpoint-reentrant                 PyTorch's old way, which some trainers use by default
  --activation-offloading                what is kept lies in host memory

The logits are no part of a block: with a large vocabulary they are the peak, and a fused loss is what helps.

  memcalc estimate --params 1B --seq-len 2048 --activation-checkpointing full --loss-implementation liger
""",
    "lora": """\
Adapters on a frozen model: no gradients and states of the model itself; its activations stay.

  --lora-rank 16                rank; --lora-targets all-linear or module names, PEFT's default of the family else
  --lora-dtype bf16             adapters in 16 bits; PEFT makes them fp32
  --quantization nf4-double     QLoRA: the base in 4 bits; each layer's weight is unpacked as it is used
  --no-prepare-kbit-training    norms, embeddings and head stay in 16 bits, as TRL, LLaMA-Factory and axolotl have it
  --modules-to-save embed_tokens,lm_head    trained whole beside the adapters, as after adding tokens

  memcalc estimate --params 1B --seq-len 2048 --precision bf16 --lora-rank 16 --lora-targets all-linear
  memcalc estimate --params 1B --seq-len 2048 --precision bf16 --lora-rank 16 --quantization nf4-double
""",
    "sharding": """\
What each of several GPUs holds; --batch stays the micro-batch of one of them.

  --gpus N                             GPUs of the whole job: DDP, where nothing else is said
  --parallel fsdp2 | zero3             weights, gradients and states shared; gathered block by block
  --parallel zero1 | zero2             states shared, with zero2 gradients too
  --cpu-offload optimizer,parameters   and those in host memory
  --tensor-parallel-size N             every layer shared, with --sequence-parallel what lies between too
  --context-parallel-size N            every sequence shared, for long ones; --sequence-parallel-size N is ZeRO's way
  --pipeline-parallel-size N           blocks divided into stages; --expert-parallel-size N spreads experts

The report is for the most loaded rank. memcalc fit says the fewest GPUs that a job fits.

  memcalc estimate --params 8B --seq-len 4096 --gpus 8 --parallel fsdp2 --activation-checkpointing full
  memcalc estimate --params 8B --seq-len 65536 --gpus 8 --context-parallel-size 8 --activation-checkpointing full
""",
    "serving": """\
Weights, caches and what an engine reserves.

  --engine vllm|sglang|tgi|llama.cpp|transformers   how caches are kept, and what share of the GPU is taken
  --seq-len N --batch N       tokens of a sequence, sequences at a time
  --kv-dtype fp8              dtype of the KV cache
  --quantization fp8          weights packed when loading; stored formats are read from the checkpoint
  --tensor-parallel-size N    GPUs that share every layer; the report is for one of them
  --gpu NAME                  says how many sequences and how long a context fit; with vLLM, the pool of its startup log
  --max-num-batched-tokens N --max-num-seqs N --enforce-eager --engine-version 0.11.0   what vLLM profiles
  --ubatch-size N --cache-type-k q8_0 --cache-type-v q4_0 --flash-attn off --swa-full    llama.cpp's buffers and cache
  --n-gpu-layers N --n-cpu-moe N    what llama.cpp leaves on the host

  memcalc estimate --params 1B --mode inference --engine vllm --seq-len 8192 --gpu 24GB
""",
    "pictures": """\
The memory of one step over time, and where an answer goes.

  memcalc timeline MODEL      in the terminal: the six rows stacked, the peak, phases and blocks; --json has the series
  --html FILE                 a page: the step over time, rows, tensors at the peak, assumptions; setups side by side
                              with memcalc compare, a heat map with memcalc sweep
  --svg FILE                  the picture alone
  --output FILE               the answer itself, whole or not at all; --json, --markdown or --csv choose its format,
                              else .json, .md, .csv, .html or .svg of the name does

Pages and pictures are one file each, without scripts or anything from elsewhere. The axis counts allocations, not
seconds: a run of equal blocks looks equally long.

  memcalc estimate --params 1B --seq-len 2048 --json
""",
    "run-files": """\
The files and launch lines of training and serving frameworks, as they are.

  memcalc from-config FILE            a YAML, JSON or TOML, a script with the launch line, or - for standard input
  memcalc from-config FILE FILE       one run: training file, Accelerate or DeepSpeed file, adapter_config.json
  memcalc from-config FILE -- LINE    with its launch line, or with options that override the file's (lora_rank=8)
  --show-setup                        what became of each key; needs no model
  --as-options                        the memcalc command that it stands for
  --model PATH|ID|COUNT               the model, where the file's own is not to be had

Nothing of a file is run or fetched, and no path in it is followed.
""",
}
"""Text by topic."""
