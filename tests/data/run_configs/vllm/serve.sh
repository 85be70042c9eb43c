docker run --gpus all vllm/vllm-openai:latest --model example/small-decoder -tp 4 --max-num-batched-tokens=4096 --enable-expert-parallel --enforce-eager
