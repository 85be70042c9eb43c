"""Shapes read off names, for `--generic`."""

from support.weights import layers

from memcalc.sources.generic.shape_from_names import NEEDED, generic_shape

SHAPES = {
    "model.embed_tokens.weight": (1000, 64),
    **{name: shape for name, (_, shape) in layers(3).items()},
    "model.norm.weight": (64,),
}


def test_a_llama_by_its_names() -> None:
    found = generic_shape(SHAPES, {"head_dim": 16})
    assert found.config == {
        "num_hidden_layers": 3,
        "vocab_size": 1000,
        "hidden_size": 64,
        "tie_word_embeddings": True,
        "intermediate_size": 192,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    assert found.missing == ()


def test_heads_cannot_be_told_from_matrices_alone() -> None:
    assert generic_shape(SHAPES).missing == ("num_attention_heads", "num_key_value_heads", "head_dim")


def test_a_norm_over_heads_tells_their_size() -> None:
    assert generic_shape({**SHAPES, "model.layers.0.self_attn.q_norm.weight": (32,)}).config["num_attention_heads"] == 2


def test_the_stated_number_of_heads_helps() -> None:
    found = generic_shape(SHAPES, {"num_attention_heads": 8, "vocab_size": None})
    assert (found.config["head_dim"], found.config["num_key_value_heads"]) == (8, 4)


def test_other_spellings_of_the_same_names() -> None:
    raw = {
        "tok_embeddings.weight": (500, 32),
        "output.weight": (500, 32),
        "layers.1.attention.wq.weight": (32, 32),
        "layers.1.attention.wk.weight": (16, 32),
        "layers.1.feed_forward.w1.weight": (80, 32),
        "layers.1.feed_forward.w3.weight": (80, 32),
        "layers.1.feed_forward.w2.weight": (32, 80),
    }
    found = generic_shape(raw, {"head_dim": 8})
    assert found.missing == ()
    assert found.config["tie_word_embeddings"] is False
    fused = {
        "transformer.wte.weight": (500, 32),
        "transformer.h.0.attn.qkv_proj.weight": (64, 32),
        "transformer.h.0.mlp.gate_up_proj.weight": (160, 32),
    }
    found = generic_shape(fused, {"head_dim": 8, "num_attention_heads": 4})
    assert (found.config["num_key_value_heads"], found.config["intermediate_size"]) == (2, 80)


def test_experts() -> None:
    raw = {**SHAPES, **{f"model.layers.0.mlp.experts.{i}.up_proj.weight": (24, 64) for i in range(8)}}
    found = generic_shape(raw, {"head_dim": 16})
    assert (found.config["num_experts"], found.config["moe_intermediate_size"]) == (8, 24)


def test_nothing_to_see() -> None:
    assert generic_shape({"x": (3,)}).missing == NEEDED
