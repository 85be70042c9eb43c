"""Config against headers: where they disagree, one line each, and which of them was used.

The config gives the shapes that the model is built with; the headers give what is stored. Names differ between the two
(prefixes, fused experts), so parts are compared, not names: each layer, the embedding, the head, the vision tower.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from memcalc.config.dtypes import declared_dtypes
from memcalc.errors import CheckpointError
from memcalc.sources.checkpoint.checkpoint import Checkpoint, safetensors_dtype
from memcalc.sources.display_names import shown, some
from memcalc.units import format_bytes, format_count

# Parts of a model by what their tensors are called; the first that matches is taken.
_PARTS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (part, re.compile(pattern))
    for part, pattern in (
        ("multi-token prediction", r"(^|\.)(mtp|mtp_block|nextn|eh_proj|enorm|hnorm|shared_head)(\.|_|$)"),
        ("multimodal projector", r"(multi_modal_projector|mm_projector|mlp1\.|connector|merger|embed_vision|aligner)"),
        ("vision tower", r"(^|\.)(vision\w*|visual|vit|image_\w+|vpm)\."),
        ("audio tower", r"(^|\.)(audio\w*|speech\w*|whisper)\."),
        (
            "embedding",
            r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|token_embd|embed_in|embeddings?|shared)\.weight$",
        ),
        ("head", r"(lm_head|embed_out|output_projection|^output)\.(weight|bias)$|lm_head"),
    )
)
_LAYER = re.compile(r"(?:^|\.)(?:(encoder|decoder)\.)?(?:layers|layer|h|blocks|block|blk)\.(\d+)\.")


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

# No published model has more layers of multi-token prediction behind its last.
MOST_PREDICTING = 3

# Tensors by name: their shapes, or only how many elements they have.
Shapes = Mapping[str, int | tuple[int, ...]]


@dataclass(frozen=True)
class Dtypes:
    """Three dtypes that are easily taken for one another, as safetensors spells them."""

    stored: str | None
    declared: str | None
    loaded: str

    def line(self) -> str:
        return f"dtypes: stored {self.stored or 'unknown'}, declared {self.declared or 'none'}, loaded {self.loaded}"


def declared_dtype(config: Mapping[str, Any]) -> str | None:
    """What the config declares, as safetensors spells it; "auto", null and unknown words declare nothing."""
    return next((spelled for word in declared_dtypes(config) if (spelled := safetensors_dtype(word))), None)


def dtypes(checkpoint: Checkpoint | None, config: Mapping[str, Any] | None, asked: str | None = None) -> Dtypes:
    """The three dtypes. A run loads what was asked for, else what is declared, else what is stored, else BF16.

    That is what Transformers 5 does, of the dtypes that weights are loaded in; Transformers 4 without a `torch_dtype`
    argument loads F32.
    """
    stored = checkpoint.stored_dtype if checkpoint else None
    declared = declared_dtype(config or {})
    wanted = safetensors_dtype(asked) if asked else None
    loaded = next((dtype for dtype in (declared, stored) if dtype in _LOADED), "BF16")
    return Dtypes(stored, declared, wanted or loaded)


_LOADED = ("F32", "BF16", "F16")


def reconcile(
    checkpoint: Checkpoint,
    *,
    parameters: int | None = None,
    expected: Shapes | None = None,
    tied: bool | None = None,
    layers: int | None = None,
) -> tuple[str, ...]:
    """The lines for the report, empty when config and headers agree.

    Args:
        checkpoint: what the headers say.
        parameters: unique parameters of the model that the config builds.
        expected: its tensors where known, name to shape or to number of elements; a tied head is not listed.
        tied: whether the config ties the head to the embedding.
        layers: how many layers the config has, to tell multi-token-prediction layers behind them.
    """
    stored = _by_part(((t.weight, t.parameters) for t in checkpoint.tensors if t.parameters), layers)
    built = _by_part(((name, _elements(shape)) for name, shape in (expected or {}).items()), layers)
    lines = [*_depths(checkpoint, layers), *_declared(checkpoint)]
    twice = 0
    if tied:
        table = _tied_table(checkpoint, layers)
        twice = table if stored["embedding"] else 0
        _merge_head(stored, "the rest" if stored["embedding"] else "embedding", table, twice)
        _merge_head(built, "the rest", 0, 0)
    if twice:
        lines.append(
            f"the head is tied, but stored twice: {_count(twice)} counted once, as vLLM loads them, and Transformers 5 "
            "where both hold the same values (it keeps two where they differ)"
        )
    total = checkpoint.parameters - twice
    if built:
        parameters = sum(built.values())
    if built and total != parameters and _comparable(stored, built):
        lines.extend(_part_lines(stored, built))
    elif parameters is not None:
        lines.extend(_total_lines(stored, total, parameters, tied))
    return tuple(lines)


def _depths(checkpoint: Checkpoint, layers: int | None) -> Iterator[str]:
    """Whether the files hold far more layers than the config builds, or fewer."""
    parts = {part_of(tensor.weight) for tensor in checkpoint.tensors if tensor.parameters}
    depth = max((int(part[6:]) + 1 for part in parts if part.startswith("layer ")), default=0)
    if layers is None or not depth or layers <= depth <= layers + MOST_PREDICTING:
        return
    rest = "those behind are not counted" if depth > layers else "the others are counted from the config"
    yield (
        f"the files hold {depth:,} layers, the config builds {layers:,} (num_hidden_layers): is it the right config? "
        f"{rest[0].upper()}{rest[1:]}"
    )


def _tied_table(checkpoint: Checkpoint, layers: int | None) -> int:
    """Parameters of the head's tensor that is the embedding's table, 0 where none is: alike in size, or the largest."""
    sizes = {"head": [0], "embedding": [0]}
    for tensor in checkpoint.tensors:
        part = part_of(tensor.weight, layers)
        if part in sizes and tensor.parameters:
            sizes[part].append(tensor.parameters)
    if len(sizes["embedding"]) == 1:
        return max(sizes["head"])
    return max((size for size in sizes["head"] if size in sizes["embedding"]), default=0)


def _merge_head(parts: Counter[str], table_to: str, table: int, twice: int) -> None:
    """A tied head is no part: its table is the embedding's, and what else it has belongs to the rest."""
    head = parts.pop("head", 0)
    parts[table_to] += table - twice
    parts["the rest"] += head - table
    for part in ("embedding", "the rest"):
        if not parts[part]:
            del parts[part]


def _comparable(stored: Counter[str], built: Counter[str]) -> bool:
    """Whether both call their layers alike, so that the parts can be told apart."""
    layers = {part for part in built if "layer " in part}
    return layers <= stored.keys()


def _elements(shape: int | tuple[int, ...]) -> int:
    return shape if isinstance(shape, int) else prod(shape)


def _part_lines(stored: Counter[str], built: Counter[str]) -> Iterable[str]:
    """Extra, missing and differing parts; layers that differ alike share a line."""
    differing: dict[tuple[str, int], list[str]] = {}
    for part in sorted({*stored, *built}, key=_in_order):
        has, needs = stored[part], built[part]
        if has == needs:
            continue
        if "layer " in part and has and needs:
            differing.setdefault(("differ", has - needs), []).append(part)
        elif not needs:
            yield f"the files hold {part}, {_count(has)}, which the config does not build; not counted"
        elif not has:
            differing.setdefault(("lack", needs if "layer " in part else 0), []).append(part)
        else:
            yield f"{part}: the files hold {_count(has)}, the config builds {_count(needs)}; the config is used"
    for (kind, difference), parts in differing.items():
        where = parts[0] if len(parts) == 1 else f"each of {len(parts):,} layers"
        if kind == "differ":
            more = "more" if difference > 0 else "fewer"
            yield f"{where}: the files hold {_count(abs(difference))} {more} than the config builds; the config is used"
        elif difference == 0 or len(parts) == 1:
            for part in parts:
                yield f"the files hold no {part}, {_count(built[part])}; counted from the config"
        else:
            names = f"{parts[0]} to {parts[-1]} ({len(parts):,} of them, {_count(difference)} each)"
            yield f"the files hold no {names}; counted from the config"


def _in_order(part: str) -> tuple[str, int]:
    """Parts by name, layers by number."""
    words, _, number = part.rpartition(" ")
    return (words, int(number)) if number.isdecimal() else (part, 0)


def _total_lines(stored: Counter[str], total: int, parameters: int, tied: bool | None) -> Iterable[str]:
    """Without the config's tensors, only its total: name the parts that explain the difference, if they do."""
    difference = total - parameters
    if not difference:
        return
    extras = {
        part: stored[part] for part in ("multi-token prediction", "multimodal projector", "vision tower", "audio tower")
    }
    explained = [part for part, count in extras.items() if count and count == difference]
    if explained:
        yield f"the files hold {explained[0]}, {_count(difference)}, which the config does not build; not counted"
    elif difference < 0 and not stored["head"] and not tied and stored["embedding"] == -difference:
        yield f"the files hold no head, {_count(-difference)}; counted from the config"
    else:
        share = abs(difference) / max(parameters, 1)
        sentence = f"the files hold {_count(total)}, the config builds {_count(parameters)}"
        yield (
            sentence
            + (f" ({share:.0%} apart: is it the right config?)" if share > 0.2 else "")
            + "; the config is used"
        )


def _declared(checkpoint: Checkpoint) -> Iterable[str]:
    """Totals that the index states about itself; off by more than a thousandth, they are worth a line."""
    declared = checkpoint.declared
    for stated, found, show in (
        (declared.total_bytes, checkpoint.stored_bytes, format_bytes),
        (declared.total_parameters, checkpoint.parameters, _count),
    ):
        if stated is not None and abs(stated - found) * 1000 > max(found, 1):
            yield f"the index declares {show(stated)}, the headers add up to {show(found)}; the headers are used"


def check_names(checkpoint: Checkpoint, leaves: Collection[str], built: int, model_type: str) -> None:
    """Raise CheckpointError where the weights are another model's: not one module's name fits, nor does their number.

    Args:
        checkpoint: what the headers say. Files of GGUF and of the original release have names of their own.
        leaves: the last names of the modules that the config builds.
        built: its parameters.
        model_type: the family.
    """
    own = {t.weight.split(".")[-2] for t in checkpoint.tensors if t.parameters and t.weight.count(".")}
    differ = abs(checkpoint.parameters - built) * 1000 > built
    if checkpoint.format == "gguf" or not own or not differ or own & set(leaves) or own & _ORIGINAL:
        return
    raise CheckpointError(
        f"{shown(checkpoint.files[0])} holds weights of another model than config.json: not one of its tensors "
        f"({some(sorted(own))}) is one that {shown(model_type)} has; take the config that belongs to them."
    )


_ORIGINAL = frozenset({"wq", "wqkv", "attention_norm", "tok_embeddings"})
"""Modules of the formats that models were first published in (Llama, Mistral)."""


def part_of(name: str, layers: int | None = None) -> str:
    """The part that a tensor belongs to: "layer 12", "embedding", "head", "vision tower" ... or "the rest"."""
    part = _part_by_words(_NUMBER.sub("0", name))
    if part is not None:
        return part
    layer = _LAYER.search(name)
    if layer:
        if layers is not None and int(layer[2]) >= layers:
            return "multi-token prediction"
        return f"{layer[1]} layer {layer[2]}" if layer[1] else f"layer {layer[2]}"
    return "the rest"


@lru_cache(4096)
def _part_by_words(name: str) -> str | None:
    """The part that the words of a name tell, None where only the layer's number does."""
    return next((part for part, pattern in _PARTS if pattern.search(name)), None)


def _by_part(tensors: Iterable[tuple[str, int]], layers: int | None) -> Counter[str]:
    totals: Counter[str] = Counter()
    for name, count in tensors:
        totals[part_of(name, layers)] += count
    return totals


def _count(count: int) -> str:
    short = format_count(count)
    return f"{count:,} parameters" + (f" ({short})" if count >= 10**6 else "")
