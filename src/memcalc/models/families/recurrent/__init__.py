"""State-space, recurrent and hybrid decoders."""
