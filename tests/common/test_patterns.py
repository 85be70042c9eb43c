"""Regular expressions of other people's files: those in use are taken, those that could take for ever are not."""

import re
import time

import pytest

from memcalc.common.patterns import SlowPattern, compiled

IN_USE = [
    "re:.*lm_head"[3:],
    r".*(q_proj|v_proj)",
    r".*\.(q|k|v|o|gate|up|down)_proj",
    r"model\.layers\.\d+\.mlp\.experts\..*",
    r"^(?!.*visual).*(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*",
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:k_proj|v_proj|o_proj|linear).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj|v_proj)))",
    r"(model\.)?layers\.([0-9]|1[0-9])\.self_attn\.[qkv]_proj",
    r"(?i)lm_head",
]

SLOW = [
    "(a+)+b",
    "(a*)*b",
    "(a|a)+b",
    "(a?){30}a{30}",
    "a?" * 30 + "a" * 30,
    "(a|a)" * 30 + "b",
    ".*" * 6 + "b",
    "(.*a){12}b",
    r"(\w+\s?)*$",
    "((a+)b)*c",
    r"(.*)\1\1b",
    "a{1,100}{1,100}b",
    "(?=(a+)+b)",
    "x" * 3000,
]


@pytest.mark.parametrize("pattern", IN_USE)
def test_patterns_in_use(pattern: str) -> None:
    found = compiled(pattern)
    began = time.process_time()
    for name in ("model.layers.31.self_attn.q_proj", "a" * 60, ".".join("ab" * 20)):
        found.fullmatch(name)
        found.search(name)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("pattern", SLOW)
def test_patterns_that_take_for_ever(pattern: str) -> None:
    with pytest.raises((SlowPattern, re.error)):
        compiled(pattern)
