"""PyTorch's caching allocator for CUDA, simulated: what is reserved, what counts as allocated, what a job needs."""
