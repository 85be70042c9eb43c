"""Whatever stands where, the answer is a setup or one sentence."""

import json
from typing import Any

import pytest
from support.paths import DATA

from memcalc.errors import MemcalcError
from memcalc.run_configs.documents import Document, parse
from memcalc.run_configs.output import as_json
from memcalc.run_configs.read import put_together

WRONG: tuple[Any, ...] = (None, "auto", [], {"a": 1}, -1, "${oc.env:X}", 1e400, True)
FILES = [path for path in sorted((DATA / "run_configs").rglob("*.*")) if path.suffix in (".yaml", ".json", ".toml")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_value_of_the_wrong_type(path: Any) -> None:
    document = parse(path.read_text(encoding="utf-8"), path.name)
    for key, right in document.values.items():
        for wrong in WRONG:
            answered(document, {**document.values, key: wrong})
            for inner in right if isinstance(right, dict) else ():
                answered(document, {**document.values, key: {**right, inner: wrong}})


def answered(document: Document, values: dict[str, Any]) -> None:
    sentence = ""
    try:
        json.dumps(as_json(put_together([Document(document.where, document.kind, values)])))
    except MemcalcError as problem:
        sentence = str(problem)
    assert "\n" not in sentence
    assert len(sentence) < 500
