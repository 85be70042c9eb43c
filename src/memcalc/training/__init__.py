"""One optimizer step: prepare the model, run it, and what steps in backward."""
