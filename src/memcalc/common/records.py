"""Frozen records: standard dataclasses whose methods are shared instead of compiled anew for every class.

Why not `dataclass` alone: it compiles seven methods for each class, which takes a millisecond, and the forty classes
on the way to an estimate took longer than the estimate (benchmarks/startup.py). What it declares stays as it is:
`fields`, `replace` and `asdict` of the standard library, and pydantic, read a record as any other dataclass.
"""

from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from typing import Any, NoReturn, TypeVar, dataclass_transform, overload

_T = TypeVar("_T")


@overload
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[_T], /) -> type[_T]: ...
@overload
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(*, kw_only: bool = False, eq: bool = True) -> Callable[[type[_T]], type[_T]]: ...
def frozen(cls: Any = None, /, *, kw_only: bool = False, eq: bool = True) -> Any:
    """Make a class a frozen record of its annotated fields: `dataclass(frozen=True, kw_only=kw_only, eq=eq)`."""

    def made(cls: Any) -> Any:
        dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
        declared = fields(cls)
        cls._defaults = {f.name: f.default for f in declared if f.default is not MISSING}
        cls._factories = [(f.name, f.default_factory) for f in declared if f.default_factory is not MISSING]
        cls._checked = hasattr(cls, "__post_init__")
        for method in (_init, _repr, _setattr, _delattr, *((_eq, _hash) if eq else ())):
            setattr(cls, f"_{method.__name__}__", method)
        return cls

    return made if cls is None else made(cls)


def _init(self: Any, *positional: Any, **named: Any) -> None:
    cls, values = type(self), self.__dict__
    given = dict(zip(cls.__match_args__, positional, strict=False), **named) if positional else named
    if cls._defaults:
        values.update(cls._defaults)
    values.update(given)
    for name, factory in cls._factories:
        if name not in given:
            values[name] = factory()
    if len(given) < len(positional) + len(named) or values.keys() != cls.__dataclass_fields__.keys():
        raise TypeError(
            f"{cls.__name__} takes {', '.join(cls.__dataclass_fields__)}, each once; not {positional} {named}"
        )
    if cls._checked:
        self.__post_init__()


def _values(self: Any) -> tuple[Any, ...]:
    return tuple(getattr(self, name) for name in self.__dataclass_fields__)


def _repr(self: Any) -> str:
    return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields(self))})"


def _eq(self: Any, other: object) -> Any:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _setattr(self: Any, name: str, value: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot change {name!r} of a {type(self).__name__}")


def _delattr(self: Any, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot remove {name!r} from a {type(self).__name__}")
