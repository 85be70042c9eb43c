"""Which files of a repository are the model, and why the others are not.

Repositories hold several copies of their weights: the original format, other precisions, other frameworks, training
states. Counting every file that looks like weights gives two to five times the truth.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from posixpath import dirname

from memcalc.sources.checkpoint.checkpoint import IgnoredFile

# The names that Transformers and diffusers load, the first first.
INDEXES = ("model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json")
SINGLES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
ADAPTER_CONFIG = "adapter_config.json"

PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class RepoFile:
    """A file of a repository: its path inside it, and its bytes where known."""

    path: str
    nbytes: int | None


@dataclass(frozen=True)
class Choice:
    """The files to read. With `index` set, the shards come from it; `weights` otherwise.

    `format` is "safetensors", "gguf", "pickle" (never opened: only its bytes are known) or "" for none at all.
    """

    format: str
    index: str | None = None
    weights: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


_WEIGHT_FILE = re.compile(
    r"\.(safetensors|bin|pt|pth|ckpt|gguf|ggml|h5|msgpack|onnx|onnx_data|ot|npz|tflite|mlmodel|pdparams|engine|nemo)$"
)
_SHARD = re.compile(r"^(?P<stem>.+)-\d{5,6}-of-(?P<count>\d{5,6})(?P<variant>\.[\w-]+)?\.(safetensors|bin|gguf)$")
_GGUF_TYPE = re.compile(r"(?<![a-z0-9])((?:ud-)?(?:i?q\d\w*|tq\d\w*|mxfp4\w*|bf16|fp?16|fp?32))(?![a-z0-9])", re.I)

# Folders and names whose files are never the model's weights, and why: the first line that matches gives the reason.
_REASONS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (r"(^|/)(checkpoint|global_step|step|epoch)[-_]?\d+/", "a training checkpoint"),
        (r"(^|/)(optimizer|scheduler|scaler|rng_state|random_states|training_args|trainer_state)", "a training state"),
        (r"(^|/)(mp_rank_|zero_pp_rank_|bf16_zero_pp_rank_)|optim_states", "a training state"),
        (r"^original/", "the original format of the same weights"),
        (r"(^|/)consolidated[^/]*\.", "the original format of the same weights"),
        (r"^metal/", "the same weights for Apple GPUs"),
        (r"(^|/)(onnx|openvino|coreml|tensorrt|tflite|ort)/", "an export for another runtime"),
        (r"\.(onnx|onnx_data|tflite|mlmodel|engine)$", "an export for another runtime"),
        (r"\.(h5|msgpack|ot|npz|pdparams|nemo)$", "the same weights for another framework"),
        (r"(^|/)adapter_model\.", "an adapter, not the model"),
        (r"(^|/)mmproj[^/]*\.gguf$", "the vision projector of a GGUF model"),
        (r"(^|/)imatrix[^/]*\.", "calibration data of a GGUF model"),
        (
            r"(^|/)(model|pytorch_model|diffusion_pytorch_model)[^/]*[.-](fp16|fp32|bf16|fp8|int8|int4|non_ema|ema)\b",
            "another precision of the same weights",
        ),
    )
)


def looks_like_weights(path: str) -> bool:
    return _WEIGHT_FILE.search(path.lower()) is not None


def choose(files: Sequence[RepoFile], wanted: str | None = None) -> Choice:
    """The model's files among `files`.

    Args:
        files: every file of the repository or folder.
        wanted: a weight file, an index, or a GGUF type such as "Q4_K_M", that the user asked for; a Choice without
            format when there is none.
    """
    weights = [file.path for file in files if looks_like_weights(file.path)]
    ggufs = [path for path in weights if path.endswith(".gguf") and not _reason(path)]
    if wanted and wanted.endswith(".json"):
        return Choice("safetensors", wanted) if any(file.path == wanted for file in files) else Choice("")
    if wanted:
        return _by_name(wanted, weights, ggufs)
    at_root = [path for path in weights if not dirname(path) and not _reason(path)]
    tensors = [path for path in at_root if path.endswith(".safetensors")]
    index = _index({file.path for file in files})
    if index:
        single = next((name for name in SINGLES if name in tensors), None)
        return Choice(
            "safetensors", index, notes=(f"{index} and {single} are both there; the index is used",) if single else ()
        )
    for name in SINGLES:
        if name in tensors:
            return Choice("safetensors", weights=(name,))
    if tensors:
        group = _groups(tensors)[0]
        return Choice("safetensors", weights=group, notes=_group_notes(group, len(tensors)))
    if spare := _spare(weights):
        return Choice("safetensors", weights=spare, notes=(f"no model.safetensors is there, so {spare[0]} is used",))
    if ggufs:
        return _gguf(ggufs, next((path for path in weights if "mmproj" in path and path.endswith(".gguf")), None))
    pickles = [path for path in at_root if path.endswith(PICKLES)]
    return Choice("pickle", weights=_groups(pickles)[0]) if pickles else Choice("")


def ignored_files(files: Sequence[RepoFile], used: Collection[str], choice: Choice) -> tuple[IgnoredFile, ...]:
    """Every file that looks like weights and is not among `used`, with the reason."""
    return tuple(
        IgnoredFile(file.path, file.nbytes, _reason(file.path) or _other_reason(file.path, choice))
        for file in files
        if looks_like_weights(file.path) and file.path not in used
    )


def _index(paths: set[str]) -> str | None:
    """A standard index, or the only one there is; never that of an original or of another precision."""
    standard = next((name for name in INDEXES if name in paths), None)
    others = [p for p in sorted(paths) if p.endswith(".safetensors.index.json") and not dirname(p) and not _reason(p)]
    return standard or (others[0] if len(others) == 1 else None)


def _spare(weights: list[str]) -> tuple[str, ...]:
    """An original or a variant at the top, where nothing better is; an adapter is never the model."""
    left = [path for path in weights if path.endswith(".safetensors") and not dirname(path)]
    unfit = ("a training", "an adapter")
    left = [path for path in left if not (_reason(path) or "").startswith(unfit)]
    return _groups(left)[0] if left else ()


def _groups(paths: Sequence[str]) -> list[tuple[str, ...]]:
    """Sets of shards and single files, by name; complete sets come first."""
    sets: dict[tuple[str, int], list[str]] = {}
    for path in sorted(paths):
        shard = _SHARD.match(path)
        key = (shard["stem"] + (shard["variant"] or ""), int(shard["count"])) if shard else (path, 1)
        sets.setdefault(key, []).append(path)
    return [tuple(group) for _, group in sorted(sets.items(), key=lambda item: len(item[1]) != item[0][1])]


def _group_notes(group: tuple[str, ...], candidates: int) -> tuple[str, ...]:
    shard = _SHARD.match(group[0])
    notes = []
    if shard and len(group) != int(shard["count"]):
        notes.append(f"only {len(group)} of {int(shard['count'])} shards are there; the missing ones are not counted")
    if candidates > len(group):
        notes.append(f"several weight files at the top; {group[0]} is used")
    return tuple(notes)


def _by_name(wanted: str, weights: list[str], ggufs: list[str]) -> Choice:
    """A file by its path, or the GGUF files whose name carries the type."""
    if wanted in weights:
        kind = "gguf" if wanted.endswith(".gguf") else "safetensors" if wanted.endswith(".safetensors") else "pickle"
        whole = next(group for group in _groups(weights) if wanted in group)
        return Choice(kind, weights=whole)
    if variant := variant_of(wanted, weights):
        return Choice("safetensors", weights=variant)
    typed = [path for path in ggufs if gguf_type(path) == wanted.upper()]
    return Choice("gguf", weights=_groups(typed)[0]) if typed else Choice("")


def variant_of(variant: str, weights: Sequence[str]) -> tuple[str, ...]:
    """The files of a variant such as fp16: `model.fp16.safetensors`, whole or in shards; empty where there is none."""
    word = re.escape(variant.lower())
    named = re.compile(rf"(^|/)[^/]*\.{word}([.-][^/]*)?\.safetensors$")
    found = [path for path in weights if not dirname(path) and named.search(path.lower())]
    return _groups(found)[0] if found else ()


def _gguf(paths: list[str], projector: str | None) -> Choice:
    """One of several GGUF files: Q4_K_M, which llama.cpp's tools take by default, or the first by name."""
    groups = _groups(paths)
    chosen = next((group for group in groups if gguf_type(group[0]) == "Q4_K_M"), groups[0])
    rest = [group for group in groups if group != chosen]
    alike = [group for group in rest if gguf_model(group[0]) == gguf_model(chosen[0])]
    others = sorted({gguf_type(group[0]) or group[0] for group in alike})
    others += sorted(group[0] for group in rest if group not in alike)
    notes = [f"{chosen[0]} is used of {len(groups)} GGUF files (others: {', '.join(others[:12])})"] if others else []
    if projector:
        notes.append(f"{projector}, which a run with images loads as well, is not counted")
    return Choice("gguf", weights=chosen, notes=tuple(notes))


def gguf_type(path: str) -> str:
    """ "Q4_K_M" out of `model-Q4_K_M.gguf`, `model.Q4_K_M-00001-of-00002.gguf` or `Q4_K_M/model.gguf`."""
    found = _GGUF_TYPE.findall(path)
    return found[-1].upper() if found else ""


def gguf_model(path: str) -> str:
    """The name of a GGUF file without its type, its shard and its folder: alike for quantizations of one model."""
    name = re.sub(r"-\d{5,6}-of-\d{5,6}", "", path.rpartition("/")[2].lower().removesuffix(".gguf"))
    return re.sub(r"[-._]+", "-", _GGUF_TYPE.sub("", name)).strip("-")


def _reason(path: str) -> str | None:
    return next((reason for pattern, reason in _REASONS if pattern.search(path)), None)


def _other_reason(path: str, choice: Choice) -> str:
    if choice.format == "safetensors" and path.endswith(PICKLES):
        return "the same weights as a pickle"
    if path.endswith(PICKLES):
        return "a pickle, which memcalc never opens"
    if path.endswith(".gguf"):
        if choice.format != "gguf":
            return "the same weights as GGUF"
        same = any(gguf_model(path) == gguf_model(used) for used in choice.weights)
        return "another GGUF quantization of the same weights" if same else "another model"
    if dirname(path):
        return "in a subfolder that is not the model"
    return "not named by the index" if choice.index else "another weight file"
