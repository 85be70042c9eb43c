"""Diffusion pipelines: model_index.json names the components, and each has its own weights."""

import re
from collections.abc import Sequence
from typing import Any

from memcalc.errors import CheckpointError
from memcalc.sources.display_names import shown
from memcalc.sources.file_selection import Choice, RepoFile, choose, ignored_files
from memcalc.sources.folder import Folder, SubFolder
from memcalc.sources.json_object import parse_object
from memcalc.sources.loaded_model import CONFIG, Component, LoadedModel
from memcalc.sources.repository import HF_QUANT, object_in, read_texts, read_weights

PIPELINE = "model_index.json"


_WEIGHTLESS = re.compile(
    r"(tokenizer|scheduler|processor|feature_extractor)[\w-]*$|(Tokenizer\w*|Scheduler|Processor\w*|Extractor)$"
)
"""Components that have no weights, by their own names or by those of their classes."""


def is_pipeline(files: Sequence[RepoFile], wanted: str | None) -> bool:
    """Whether the files are a pipeline's, and none of them alone was asked for; `wanted` may be a variant."""
    alone = wanted is not None and any(file.path == wanted for file in files)
    return not alone and any(file.path == PIPELINE for file in files)


def read_pipeline(folder: Folder, origin: str, variant: str | None = None) -> LoadedModel:
    """Every component that model_index.json names and that has weights; schedulers and tokenizers have none.

    `variant` is that of the files, such as fp16, where the components have it.

    Raises:
        CheckpointError, ConfigError: a file is damaged, or no component can be read.
    """
    index = parse_object(folder.text(PIPELINE), folder.label(PIPELINE))
    named = {name: value for name, value in index.items() if not name.startswith("_") and _is_component(value)}
    folders = {file.path.split("/")[0] for file in folder.files() if "/" in file.path}
    components = [
        part for name, value in named.items() if (part := _component(folder, name, value, variant, name in folders))
    ]
    if not any(part.checkpoint or part.config for part in components):
        raise CheckpointError(
            f"{shown(folder.name)} is a pipeline without any component that memcalc reads; download its folders too."
        )
    used = {f"{part.name}/{path}" for part in components if part.checkpoint for path in part.checkpoint.files}
    missing = [name for name in named if name not in folders]
    notes = ["only weights are counted, by component: activations of diffusion pipelines are out of scope"]
    if missing:
        notes.append(f"model_index.json names {', '.join(map(shown, missing))}, which the folder lacks")
    if variant is not None:
        notes += _variant_notes(folder, variant, components)
    ignored = ignored_files(folder.files(), used, Choice("safetensors"))
    return LoadedModel(
        folder.name, origin, None, None, components=tuple(components), ignored=ignored, notes=tuple(notes)
    )


def _variant_notes(folder: Folder, variant: str, components: Sequence[Component]) -> list[str]:
    held = [part for part in components if part.checkpoint]
    with_it = [part for part in held if any(f".{variant.lower()}" in path.lower() for path in part.files)]
    if not with_it:
        raise CheckpointError(
            f"no component of {shown(folder.name)} has weights of the variant {shown(variant)}; leave out --weights."
        )
    others = [part.name for part in held if part not in with_it]
    return (
        [
            f"{', '.join(map(shown, others))} {'has' if len(others) == 1 else 'have'} no {shown(variant)} weights: "
            "the usual ones are counted"
        ]
        if others
        else []
    )


def _is_component(value: Any) -> bool:
    """`["diffusers", "UNet2DConditionModel"]`; a component that is switched off is `[null, null]`."""
    return isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)


def _component(folder: Folder, name: str, value: list[str], variant: str | None, there: bool) -> Component | None:
    """A component with what its folder holds; None for one that has no weights by its kind."""
    weightless = _WEIGHTLESS.search(name) or _WEIGHTLESS.search(value[1])
    if not there:
        return None if weightless else Component(name, value[0], value[1], None, None, why="its folder is missing")
    part = SubFolder(folder, name)
    files = part.files()
    choice = choose(files, variant) if variant is not None else choose(files)
    if not choice.format:
        choice = choose(files)
    if not choice.format and weightless:
        return None
    paths = {file.path for file in files}
    texts = read_texts(part, [file for file in (CONFIG, HF_QUANT, choice.index) if file in paths])
    found = read_weights(part, files, choice, texts)
    why = "its weights are only a pickle" if choice.format == "pickle" else "its folder holds no weights"
    return Component(name, value[0], value[1], object_in(part, CONFIG, texts), found.checkpoint, found.notes, why)
