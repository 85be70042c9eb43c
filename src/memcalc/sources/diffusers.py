"""Diffusion pipelines: model_index.json names the components, and each has its own weights."""

from typing import Any

from memcalc.errors import CheckpointError
from memcalc.sources.display_names import shown
from memcalc.sources.file_selection import Choice, choose, ignored_files
from memcalc.sources.folder import Folder, SubFolder
from memcalc.sources.json_object import parse_object
from memcalc.sources.loaded_model import CONFIG, Component, LoadedModel
from memcalc.sources.repository import HF_QUANT, object_in, read_texts, read_weights

PIPELINE = "model_index.json"


def read_pipeline(folder: Folder, origin: str) -> LoadedModel:
    """Every component that model_index.json names and that has weights; schedulers and tokenizers have none.

    Raises:
        CheckpointError, ConfigError: a file is damaged, or no component can be read.
    """
    index = parse_object(folder.text(PIPELINE), folder.label(PIPELINE))
    named = {name: value for name, value in index.items() if not name.startswith("_") and _is_component(value)}
    folders = {file.path.split("/")[0] for file in folder.files() if "/" in file.path}
    components = [
        part for name, value in named.items() if name in folders and (part := _component(folder, name, value))
    ]
    if not components:
        raise CheckpointError(
            f"{shown(folder.name)} is a pipeline without any component that memcalc reads; download its folders too."
        )
    used = {f"{part.name}/{path}" for part in components if part.checkpoint for path in part.checkpoint.files}
    missing = [name for name in named if name not in folders]
    notes = ["only weights are counted, by component: activations of diffusion pipelines are out of scope"]
    if missing:
        notes.append(f"model_index.json names {', '.join(map(shown, missing))}, which the folder lacks")
    ignored = ignored_files(folder.files(), used, Choice("safetensors"))
    return LoadedModel(
        folder.name, origin, None, None, components=tuple(components), ignored=ignored, notes=tuple(notes)
    )


def _is_component(value: Any) -> bool:
    """`["diffusers", "UNet2DConditionModel"]`; a component that is switched off is `[null, null]`."""
    return isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)


def _component(folder: Folder, name: str, value: list[str]) -> Component | None:
    part = SubFolder(folder, name)
    files = part.files()
    choice = choose(files)
    if not choice.format:
        return None
    paths = {file.path for file in files}
    texts = read_texts(part, [file for file in (CONFIG, HF_QUANT, choice.index) if file in paths])
    found = read_weights(part, files, choice, texts)
    return Component(name, value[0], value[1], object_in(part, CONFIG, texts), found.checkpoint, found.notes)
