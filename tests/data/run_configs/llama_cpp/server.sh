./build/bin/llama-server -hf example/small-GGUF:Q8_0 -c 8192 -np 4 -ctk q8_0 -ctv q4_0 -fa on -ub 256 -ngl 20
