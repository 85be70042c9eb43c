"""Rows in which the instrument and memcalc differ, by how many bytes, and why. memcalc answers for a real GPU."""

KNOWN: dict[str, dict[str, int]] = {
    # The pooling head of SigLIP's tower, and the last block and the norm of LLaVA's, run without reaching the loss: on
    # a GPU what they save goes when their outputs go. The tracker's module hooks hold the graph in cycles, which
    # Python's collector frees now and then (`module_hooks.py` knows those that it never frees). LLaVA with
    # adapters (`lora_more`), measured without these hooks, agrees to the byte.
    "siglip:4": {"forward": -4096, "backward": 174592, "step": -8192},
    "llava:0": {"saved_for_backward": 400, "forward": -1187840, "backward": -1781760, "step": -1781760},
    "llava:2": {"saved_for_backward": 800, "forward": -593920, "backward": -1187840, "step": -1187840},
    # The tracker counts an input from its first view on: the mask of images, of which the decoder makes one, after the
    # peak in the tower; the next token's is cut out of it.
    "inference_with_images:25": {"prefill_peak": 7168, "decode_peak": 512},
    # The instrument knows saved tensors by their address, and one was saved where a freed one had been (the features of
    # the images): it counts them once.
    "llava:1": {"saved_for_backward": 256000},
    "llava:3": {"saved_for_backward": 256000},
    # So with four tensors of DeepSeek's latent attention; measured with a weak reference to each, none is missed.
    "lora:35": {"saved_for_backward": 1392640},
    # Adagrad makes its step counters when it is constructed, on PyTorch's default device: in the instrument's run that
    # is the GPU (512 bytes a weight), in a script that does not change it the CPU.
    "optimizers:0": {"forward": -15360, "backward": -15360, "step": -15360},
    "optimizers:1": {"forward": -29696, "backward": -29696, "step": -29696},
    # memcalc answers for a step in which GaLore computes its projections anew, as the first and every 200th does; the
    # instrument measured the second.
    "optimizers:2": {"step": 2084864},
    "optimizers:3": {"step": 355328},
    # A view of a transposed batch of one has another stride on shape-only tensors than on real ones, and so the weight
    # gradient of Step's second convolution another layout there, for which it is copied.
    "step3p7:1": {"backward": -1161728},
    # With double quantization bitsandbytes 0.50 keeps a copy of the 8-bit code for every weight (1,024 bytes), as real
    # CUDA tensors show: 543,232 bytes for a weight of 1024 x 1024. In the instrument's runs all had one.
    "quantized_bases:5": {"forward": 21504, "backward": 21504, "step": 21504},
    "quantized_bases:6": {"forward": 21504, "backward": 21504, "step": 21504},
    "quantized_bases:7": {"forward": 21504, "backward": 21504, "step": 21504},
    "quantized_bases:8": {"forward": 21504, "backward": 21504, "step": 21504},
    "quantized_bases:11": {"forward": 21504, "backward": 21504, "step": 21504},
    "quantized_bases:20": {"forward": 14336, "backward": 14336, "step": 14336},
    # A decoded token's attention in half precision: fused kernels make no log-sums where nothing needs a gradient;
    # memcalc counts inference as shape-only tensors show it, with them.
    "moonshine:5": {"decode_peak": 512},
    # The gradient of rows that an index picked is summed with a sort, whose scratch (five small tensors) falls into the
    # peak where the vocabulary is tiny.
    "switch_transformers:4": {"backward": -2560},
    # LOMO steps the last weight when backward has come back; the instrument counts that to its step phase.
    "optimizers:4": {"step": -179200},
    "optimizers:5": {"step": -89600},
}
