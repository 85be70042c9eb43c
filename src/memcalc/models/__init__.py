"""What a model is: spec, registry of families, canonical Llama shape, stored weights."""
