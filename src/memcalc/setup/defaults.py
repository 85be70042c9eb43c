"""Defaults that more than one room needs, and the objectives that share a rule."""

DEFAULT_SEQ_LEN = 256
"""Tokens per sequence when the user names none (the example of the documentation page)."""

LONGEST = 2**24
"""Tokens of a sequence at most."""

WITH_REFERENCE = ("dpo", "kto", "grpo", "rloo", "ppo")
"""Objectives that compare the trained model with a reference."""

WITH_COMPLETIONS = ("dpo", "kto", "grpo", "rloo", "ppo", "distillation", "gkd")
"""Objectives that learn from completions of prompts."""

OF_PAIRS = ("dpo", "reward", "orpo", "cpo")
"""Objectives whose --batch counts pairs of a chosen and a rejected sequence."""

OF_GENERATIONS = ("grpo", "rloo", "ppo")
"""Objectives whose --batch counts prompts with --num-generations completions each."""

FUSED_HEAD = ("dpo", "kto", "grpo", "rloo")
"""Objectives besides sft that TRL scores with its fused head."""

IN_PLAIN_LOOPS = ("sft", "dpo", "reward", "grpo", "ppo", "distillation")
"""Objectives that a plain loop is computed for: but for sft as TRL 1.12 ran them, with full logits."""

DEFAULT_IMAGE_SIDE = 448
"""Height and width of an image in pixels where neither the config nor an option decides."""

OFFLOADS = ("none", "model", "sequential", "group", "group-leaf")
"""How components of a diffusion pipeline wait in host memory (`--cpu-offload` of `--mode inference`)."""
