"""Where the peak is computed: the sweep over allocations, and extrapolation to blocks that were not traced."""
