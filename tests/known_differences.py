"""Rows in which the instrument and memcalc differ, by how many bytes, and why. memcalc answers for a real GPU."""

KNOWN: dict[str, dict[str, int]] = {
    # The pooling head of SigLIP's tower, and the last block and the norm of LLaVA's, run without reaching the loss: on
    # a GPU what they save goes when their outputs go. The tracker's module hooks hold the graph in cycles, which
    # Python's collector frees now and then.
    "siglip:4": {"forward": -563200, "backward": -943616, "step": -1126400},
    "llava:0": {"saved_for_backward": 400, "forward": -2981888, "backward": -5369856, "step": -5369856},
    "llava:2": {"saved_for_backward": 800, "forward": -593920, "backward": -1187840, "step": -1187840},
    # The tracker counts an input from its first view on: the mask of images, of which the decoder makes one, after the
    # peak in the tower; the next token's is cut out of it.
    "inference_with_images:25": {"prefill_peak": 7168, "decode_peak": 512},
    # The instrument knows saved tensors by their address, and one was saved where a freed one had been (the features of
    # the images): it counts them once.
    "llava:1": {"saved_for_backward": 256000},
    "llava:3": {"saved_for_backward": 256000},
}
