"""From a folder of files to a LoadedModel: which files matter, what they hold, and what they say otherwise."""

import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from memcalc.config.quantization import find_quantization, with_hf_quant
from memcalc.errors import CheckpointError, ConfigError
from memcalc.sources.adapter import adapter_from
from memcalc.sources.checkpoint.byte_ranges import ByteRanges
from memcalc.sources.checkpoint.checkpoint import Checkpoint, Declared, assemble
from memcalc.sources.checkpoint.safetensors import read_header
from memcalc.sources.checkpoint.shard_index import ShardIndex, check_present, disagreements, parse_index
from memcalc.sources.display_names import shown
from memcalc.sources.file_selection import ADAPTER_CONFIG, Choice, RepoFile, choose, ignored_files
from memcalc.sources.folder import Folder
from memcalc.sources.gguf.config import config_from_gguf
from memcalc.sources.gguf.header import IMAGE_ARCHITECTURES, gguf_checkpoint, read_gguf
from memcalc.sources.json_object import parse_object
from memcalc.sources.loaded_model import CONFIG, LoadedModel
from memcalc.units import format_bytes

HF_QUANT = "hf_quant_config.json"

T = TypeVar("T")


@dataclass(frozen=True)
class Weights:
    """What the chosen files gave; `config` only from GGUF, which has its own."""

    checkpoint: Checkpoint | None
    notes: tuple[str, ...] = ()
    config: dict[str, Any] | None = None


def read_model(folder: Folder, origin: str, wanted: str | None = None) -> LoadedModel:
    """Everything that `folder` holds of one model or one adapter.

    Args:
        folder: where the files are.
        origin: "file", "hub" or "cache", for the report.
        wanted: a weight file or GGUF type that the user named.

    Raises:
        CheckpointError, ConfigError: a file that is needed is damaged, or there is nothing to read.
    """
    files = folder.files()
    paths = {file.path for file in files}
    choice = choose(files, wanted)
    if wanted and not choice.format:
        raise CheckpointError(
            f"{shown(folder.name)} has no weights called {shown(wanted)}; look at its files for the right name."
        )
    texts = read_texts(folder, [name for name in (CONFIG, HF_QUANT, ADAPTER_CONFIG, choice.index) if name in paths])
    config = object_in(folder, CONFIG, texts)
    if ADAPTER_CONFIG in texts and not choice.format:
        return _adapter(folder, origin, config, texts)
    found = read_weights(folder, files, choice, texts)
    config_file = CONFIG
    if config is not None:
        config = with_hf_quant(config, object_in(folder, HF_QUANT, texts))
    elif found.checkpoint is not None:
        config, config_file = found.config, posixpath.basename(found.checkpoint.files[0])
    if config is None and found.checkpoint is None:
        raise ConfigError(
            f"{shown(folder.name)} has neither a config.json nor weights that memcalc reads; is it a model's folder?"
        )
    ignored = found.checkpoint.ignored if found.checkpoint else ignored_files(files, (), choice)
    model = LoadedModel(
        folder.name, origin, config, found.checkpoint, ignored=ignored, notes=found.notes, config_file=config_file
    )
    if config is not None:
        return model
    from memcalc.sources.lora_file import as_adapter
    from memcalc.sources.single_file.read import as_pipeline  # builds models, which a config makes needless

    return as_pipeline(as_adapter(model))


def read_texts(folder: Folder, names: Sequence[str | None]) -> dict[str, bytes]:
    """The small files `names`, at once."""
    wanted = [name for name in names if name]
    return dict(zip(wanted, folder.each(folder.text, wanted, "files"), strict=True))


def object_in(folder: Folder, name: str, texts: Mapping[str, bytes]) -> dict[str, Any] | None:
    """The JSON object of a file that was read, None for one that is not there."""
    return parse_object(texts[name], folder.label(name)) if name in texts else None


def read_weights(folder: Folder, files: Sequence[RepoFile], choice: Choice, texts: Mapping[str, bytes]) -> Weights:
    """The headers of the files that `choice` names; pickles are never opened."""
    if choice.format == "gguf":
        headers = folder.each(_reading(folder, read_gguf), choice.weights, "headers")
        checkpoint = gguf_checkpoint(headers, ignored_files(files, choice.weights, choice), choice.notes)
        first = headers[0][1]
        if first.architecture in IMAGE_ARCHITECTURES:
            return Weights(checkpoint)
        return Weights(checkpoint, (), config_from_gguf(first, folder.label(headers[0][0])))
    if choice.format == "safetensors":
        return _safetensors(folder, files, choice, texts)
    if choice.format == "pickle":
        sizes = {file.path: file.nbytes or 0 for file in files}
        total = format_bytes(sum(sizes[path] for path in choice.weights))
        note = (
            f"the weights are pickles ({total}), which memcalc never opens; shapes and dtype are those of config.json"
        )
        return Weights(None, (*choice.notes, note))
    return Weights(None, (*choice.notes, "there are no weight files; shapes and dtype are those of config.json"))


def _safetensors(folder: Folder, files: Sequence[RepoFile], choice: Choice, texts: Mapping[str, bytes]) -> Weights:
    index: ShardIndex | None = None
    if choice.index and _lists_nothing(texts[choice.index], folder.label(choice.index)):
        rest = choose([file for file in files if file.path != choice.index])
        if rest.format == "safetensors":
            empty = f"{choice.index} lists no tensor, so it is passed over"
            return _safetensors(folder, files, replace(rest, notes=(*rest.notes, empty)), texts)
    weights, declared, notes = choice.weights, Declared(), list(choice.notes)
    if choice.index:
        index = parse_index(texts[choice.index], folder.label(choice.index))
        weights, declared = index.shards, index.declared
        try:
            check_present(index, [file.path for file in files])
        except CheckpointError as problem:
            if not folder.partial:
                raise
            return Weights(None, (*notes, str(problem)))
    headers = folder.each(_reading(folder, read_header), weights, "headers")
    if index:
        notes.extend(disagreements(index, headers))
    quantization = find_quantization(object_in(folder, CONFIG, texts), object_in(folder, HF_QUANT, texts))
    ignored = ignored_files(files, weights, choice)
    return Weights(assemble(headers, quantization, declared=declared, ignored=ignored, notes=notes))


def _lists_nothing(data: bytes, name: str) -> bool:
    """Whether an index is there, but empty: some writers leave one beside a file that holds everything."""
    return not parse_object(data, name, CheckpointError).get("weight_map")


def _reading(folder: Folder, read: Callable[[ByteRanges, str], T]) -> Callable[[str], tuple[str, T]]:
    return lambda path: (path, read(folder.open(path), folder.label(path)))


def _adapter(folder: Folder, origin: str, config: dict[str, Any] | None, texts: Mapping[str, bytes]) -> LoadedModel:
    """A PEFT adapter; a config.json beside it is the base model's."""
    files = folder.files()
    weights = [f.path for f in files if f.path.startswith("adapter_model") and f.path.endswith(".safetensors")]
    checkpoint = assemble(folder.each(_reading(folder, read_header), weights, "headers")) if weights else None
    notes = () if weights else ("the adapter's weights are no safetensors file, so its size is not known",)
    adapter = adapter_from(object_in(folder, ADAPTER_CONFIG, texts) or {}, checkpoint)
    ignored = ignored_files(files, weights, Choice("safetensors"))
    return LoadedModel(folder.name, origin, config, None, adapter, ignored=ignored, notes=notes)
