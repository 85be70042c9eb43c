"""Defaults that more than one room needs, and the objectives that share a rule."""

DEFAULT_SEQ_LEN = 256
"""Tokens per sequence when the user names none (the example of the documentation page)."""

WITH_REFERENCE = ("dpo", "grpo", "ppo")
"""Objectives that compare the trained model with a reference."""

WITH_COMPLETIONS = ("dpo", "grpo", "ppo", "distillation")
"""Objectives that learn from completions of prompts."""
