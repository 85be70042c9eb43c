"""Objects whose fields are checked when the object is made. Declarations read as in pydantic, whose subset this is.

Why not pydantic: importing it and building the schemas of the setups takes ten times as long as an estimate, and the
whole command is allowed 1.3 times what an interpreter takes to import its libraries (benchmarks/startup.py).
"""

from collections.abc import Mapping
from inspect import get_annotations
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, Self, dataclass_transform, get_args, get_origin

from memcalc.common.escaping import quoted
from memcalc.errors import UsageError, close_matches

_REQUIRED: Any = object()
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_NOUNS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


class FieldInfo:
    """What is declared of one field: its type without None, default, meaning and bounds."""

    __slots__ = ("bounds", "default", "description", "kind", "optional")

    def __init__(self, default: Any, description: str, bounds: Mapping[str, float]) -> None:
        self.default, self.description, self.bounds = default, description, dict(bounds)
        self.kind: Any = None
        self.optional = False

    def annotated(self, annotation: Any) -> "FieldInfo":
        """This field with the type of `annotation`: X, X | None, Annotated[X, Field(...)], or both."""
        args = get_args(annotation)
        if NoneType in args:
            self.optional = True
            return self.annotated(next(arg for arg in args if arg is not NoneType))
        if get_origin(annotation) is Annotated:
            for other in args[1:]:
                self.bounds |= other.bounds
            return self.annotated(args[0])
        self.kind = annotation
        return self

    def check(self, name: str, value: Any) -> None:
        """Raise UsageError where `value` does not fit; the message names the option and what would do."""
        if value is None and self.optional:
            return
        option = option_name(name)
        if get_origin(self.kind) is Literal:
            choices = get_args(self.kind)
            if value not in choices:
                near = close_matches(str(value), choices) or f": choose from {', '.join(choices)}."
                raise UsageError(f"{option} cannot be {quoted(str(value))}{near}")
            return
        number = self.kind is float and isinstance(value, int)
        if isinstance(value, bool) != (self.kind is bool) or not (number or isinstance(value, self.kind)):
            raise UsageError(f"{option} needs {_NOUNS[self.kind]}, not {quoted(str(value))}.")
        for bound, limit in self.bounds.items():
            within = {"ge": value >= limit, "gt": value > limit, "le": value <= limit, "lt": value < limit}
            if not within[bound]:
                raise UsageError(f"{option} must be {_BOUNDS[bound]} {limit}, not {value}.")


def Field(
    default: Any = _REQUIRED,
    *,
    description: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """Declare a field's default, meaning and bounds; in Annotated, bounds alone."""
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    return FieldInfo(default, description, {name: limit for name, limit in bounds.items() if limit is not None})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
class Checked:
    """A frozen object whose fields are its annotations. Raises UsageError when a value does not fit its field."""

    model_fields: ClassVar[Mapping[str, FieldInfo]] = {}
    model_fields_set: ClassVar[frozenset[str]]
    """Names of the fields that were given (an attribute of the object)."""

    def __init_subclass__(cls) -> None:
        own = {}
        for name, annotation in get_annotations(cls).items():
            declared = cls.__dict__.get(name, _REQUIRED)
            info = declared if isinstance(declared, FieldInfo) else Field(declared)
            own[name] = info.annotated(annotation)
            if name in cls.__dict__:
                delattr(cls, name)
        cls.model_fields = {**cls.model_fields, **own}

    def __init__(self, **values: Any) -> None:
        for name in values.keys() - self.model_fields.keys():
            raise UsageError(f"There is no option {option_name(name)}{close_matches(name, self.model_fields) or '.'}")
        for name, info in self.model_fields.items():
            value = values.get(name, info.default)
            if value is _REQUIRED:
                raise UsageError(f"{option_name(name)} is missing: give it a value.")
            info.check(name, value)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "model_fields_set", frozenset(values))
        self.check()

    def check(self) -> None:
        """Raise UsageError for fields that contradict each other; for subclasses to say."""

    def model_dump(self) -> dict[str, Any]:
        """Every field by its name."""
        return {name: getattr(self, name) for name in self.model_fields}

    def model_copy(self, *, update: Mapping[str, Any]) -> Self:
        """This object with other values for some fields, checked again."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**(given | dict(update)))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: use model_copy to change {name}")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Checked) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash((type(self), *self.model_dump().values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.model_dump().items())})"


def option_name(field: str) -> str:
    """The option of a field: `seq_len` is `--seq-len`."""
    return "--" + field.replace("_", "-")
