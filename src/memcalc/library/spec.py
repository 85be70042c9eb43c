"""Models as the library's users make them: from an object, a file, the Hub, or a parameter count."""

import os
from dataclasses import fields
from typing import TYPE_CHECKING, Self, Unpack

from memcalc.common.arguments import check_type
from memcalc.common.assumption import Assumption
from memcalc.models import spec as models
from memcalc.models.llama_shape import Shape, canonical_spec
from memcalc.units import parse_parameters

if TYPE_CHECKING:
    from memcalc.sources import LoadedModel


class ModelSpec(models.ModelSpec):
    """A model as its config.json describes it, read from an object, a file, the Hub, or made for a parameter count.

    `assumptions` says what was taken for granted when it was read; reports of it begin with that.
    """

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, weights: str | None = None, generic: bool = False) -> Self:
        """The model of a config.json, of a folder that holds one, or of a .safetensors or .gguf file.

        Headers of weights are read, weights are not.

        Args:
            path: where it is.
            weights: one weight file or GGUF type, where there are several.
            generic: take a decoder of an unknown family for a Llama-like one, and say so.

        Raises:
            MemcalcError: it cannot be read, or no family describes it.
        """
        check_type("path", path, (str, os.PathLike), "a path")
        check_type("weights", weights, (str, type(None)), "the name of a weight file")
        from memcalc.sources import load
        from memcalc.sources.display_names import short_name

        where = os.fspath(path)
        return cls._of(load(where, kind="file", weights=weights), short_name(where), generic)

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        revision: str | None = None,
        token: str | None = None,
        timeout: float = 30.0,
        weights: str | None = None,
        generic: bool = False,
    ) -> Self:
        """A model of the Hugging Face Hub: its config and the headers of its weights are fetched, and cached.

        Args:
            model: its id (org/name); a path that exists on disk is read as `from_file` does.
            revision: branch, tag or commit; None is the main branch.
            token: for gated and private models; None is the login's.
            timeout: seconds that the Hub may take for everything.
            weights: one weight file or GGUF type, where there are several.
            generic: take a decoder of an unknown family for a Llama-like one, and say so.

        Raises:
            HubError: the Hub does not give it.
            MemcalcError: no family describes it, or its config lacks something.
        """
        check_type("model", model, str, "the id of a model of the Hub, such as org/name")
        for name, value in (("revision", revision), ("token", token), ("weights", weights)):
            check_type(name, value, (str, type(None)), "text")
        check_type("timeout", timeout, (int, float), "a number of seconds")
        if os.path.exists(model):
            return cls.from_file(model, weights=weights, generic=generic)
        from memcalc.sources import load

        found = load(model, kind="hub", revision=revision, token=token, timeout=timeout, weights=weights)
        return cls._of(found, found.name, generic)

    @classmethod
    def from_parameters(cls, count: int | str, *, like: str | None = None, **shape: Unpack[Shape]) -> Self:
        """A model of about `count` parameters; its shape is stated.

        Args:
            count: how many, such as 4_000_000_000 or "4B".
            like: the model whose shape it has, as `--like` takes it; None: as models of that size are today.
            shape: numbers to use in place of the usual ones: hidden_size, num_layers, num_heads, num_kv_heads,
                head_dim, intermediate_size, vocab_size, tie_embeddings.

        Raises:
            UsageError: there is no such shape.
        """
        check_type("count", count, (int, str), "a number of parameters, or text such as 4B")
        check_type("like", like, (str, type(None)), "the name of a model")
        made, assumptions = canonical_spec(
            parse_parameters(count) if isinstance(count, str) else count, like=like, **shape
        )
        return cls._like(made, tuple(assumptions))

    @classmethod
    def _of(cls, found: "LoadedModel", name: str, generic: bool) -> Self:
        from memcalc.sources.model_spec import model_alone

        check_type("generic", generic, bool, "True or False")
        return cls._like(*model_alone(found, name, generic=generic))

    @classmethod
    def _like(cls, spec: models.ModelSpec, assumptions: tuple[Assumption, ...]) -> Self:
        values = {field.name: getattr(spec, field.name) for field in fields(spec)}
        return cls(**{**values, "assumptions": assumptions})
