"""Skeletons that families fill in: decoder, causal LM, encoder, encoder-decoder, heads, image, speech."""
