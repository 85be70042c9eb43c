"""Model types whose layers keep a state in place of keys and values, and which no family here describes.

Sources: flash-linear-attention 0.3 (fla/models), the repositories of RWKV 5 to 7, Transformers 5.24 (xlstm).
"""

from __future__ import annotations

NOT_DESCRIBED = frozenset(
    (
        "abc",
        "arwkv7",
        "based",
        "comba",
        "delta_net",
        "deltanet",
        "forgetting_transformer",
        "gated_deltanet",
        "gated_delta_net",
        "gated_deltaproduct",
        "gla",
        "gsa",
        "hgrn",
        "hgrn2",
        "kda",
        "lightnet",
        "linear_attn",
        "log_linear_mamba2",
        "mesa_net",
        "mom",
        "path_attn",
        "plamo2",
        "retnet",
        "rodimus",
        "rwkv5",
        "rwkv6",
        "rwkv6qwen2",
        "rwkv7",
        "samba",
        "stripedhyena",
        "ttt",
        "xlstm",
    )
)


def why_not(model_type: str) -> str | None:
    """Why nothing is said of a model of this type; None where it is none of them."""
    if model_type not in NOT_DESCRIBED:
        return None
    return (
        f"layers of model_type {model_type!r} keep a state in place of keys and values, which no family here has, and "
        "--generic would take it for attention; its files say what its weights take."
    )
