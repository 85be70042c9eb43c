"""A pickle of plain containers, read without pickle: nothing in it is ever called or imported.

Dictionaries, lists, tuples, strings, bytes, numbers, booleans and None are what PyTorch's memory snapshots are made of.
The opcodes are those of Python's pickletools; any other is refused, so no class is looked up and no object is made.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import unpack_from
from typing import Any

from memcalc.errors import ConfigError

LARGEST = 1 << 30
"""Bytes of the largest file that is read (1 GiB)."""

_LONGEST_NUMBER = 255
"""Bytes of the longest whole number; addresses and times take eight."""

_STOP = 0x2E

NOT_PLAIN = "holds more than plain containers (an object of a class, or a call), which memcalc does not read"
BROKEN = "ends in the middle, or is no pickle"


def loads(data: bytes) -> Any:
    """The value of a pickle. Raises ConfigError for one that is not plain, broken, or larger than LARGEST."""
    if len(data) > LARGEST:
        raise ConfigError(f"the snapshot is larger than {LARGEST >> 20} MiB; record fewer events (max_entries).")
    try:
        return _Reader(data).read()
    except ConfigError:
        raise
    except (IndexError, ValueError, TypeError, KeyError, RecursionError, OverflowError):  # of struct too
        raise ConfigError(f"the snapshot {BROKEN}; make it with torch.cuda.memory._dump_snapshot.") from None
    except Exception as problem:
        if type(problem).__name__ == "error":  # struct.error: the data ends early
            raise ConfigError(f"the snapshot {BROKEN}; make it with torch.cuda.memory._dump_snapshot.") from None
        raise


class _Reader:
    """A stack machine for the opcodes of plain containers."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def read(self) -> Any:
        """Run to the end; the value on top is the pickle's."""
        data, operations = self.data, _OPERATIONS
        while True:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                return self.stack[-1]
            operation = operations.get(code)
            if operation is None:
                raise ConfigError(f"the snapshot {NOT_PLAIN}.")
            operation(self)

    def take(self, count: int) -> bytes:
        """The next bytes. ValueError where there are not so many."""
        end = self.at + count
        if count < 0 or end > len(self.data):
            raise ValueError
        taken, self.at = self.data[self.at : end], end
        return taken

    def number(self, form: str, size: int) -> int:
        """The next whole number."""
        (value,) = unpack_from(form, self.data, self.at)
        self.at += size
        return int(value)

    def since_mark(self) -> list[Any]:
        """What was put on the stack since the last mark."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items


def _push(make: Callable[[_Reader], Any]) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(make(reader))


def _text(form: str, size: int) -> Callable[[_Reader], str]:
    return lambda reader: reader.take(reader.number(form, size)).decode("utf-8", "surrogatepass")


def _bytes(form: str, size: int) -> Callable[[_Reader], bytes]:
    return lambda reader: reader.take(reader.number(form, size))


def _long(form: str, size: int) -> Callable[[_Reader], int]:
    def read(reader: _Reader) -> int:
        length = reader.number(form, size)
        if length > _LONGEST_NUMBER:
            raise ValueError
        return int.from_bytes(reader.take(length), "little", signed=True)

    return read


def _tuple_of(count: int) -> Callable[[_Reader], None]:
    def make(reader: _Reader) -> None:
        if len(reader.stack) < count:
            raise IndexError
        reader.stack[-count:] = [tuple(reader.stack[-count:])]

    return make


def _skip(size: int) -> Callable[[_Reader], None]:
    def skip(reader: _Reader) -> None:
        reader.take(size)

    return skip


def _append(reader: _Reader) -> None:
    value = reader.stack.pop()
    _list(reader).append(value)


def _appends(reader: _Reader) -> None:
    items = reader.since_mark()
    _list(reader).extend(items)


def _set_item(reader: _Reader) -> None:
    value, key = reader.stack.pop(), reader.stack.pop()
    _dict(reader)[key] = value


def _set_items(reader: _Reader) -> None:
    items = reader.since_mark()
    _dict(reader).update(zip(items[::2], items[1::2], strict=True))


def _list(reader: _Reader) -> list[Any]:
    if not isinstance(reader.stack[-1], list):
        raise TypeError
    found: list[Any] = reader.stack[-1]
    return found


def _dict(reader: _Reader) -> dict[Any, Any]:
    if not isinstance(reader.stack[-1], dict):
        raise TypeError
    found: dict[Any, Any] = reader.stack[-1]
    return found


def _memoize(index: Callable[[_Reader], int]) -> Callable[[_Reader], None]:
    def keep(reader: _Reader) -> None:
        reader.memo[index(reader)] = reader.stack[-1]

    return keep


def _dict_of(reader: _Reader) -> dict[Any, Any]:
    items = reader.since_mark()
    return dict(zip(items[::2], items[1::2], strict=True))


_OPERATIONS: dict[int, Callable[[_Reader], Any]] = {
    0x80: _skip(1),  # PROTO
    0x95: _skip(8),  # FRAME
    ord("("): lambda reader: reader.marks.append(len(reader.stack)),
    ord("}"): _push(lambda reader: {}),
    ord("]"): _push(lambda reader: []),
    ord(")"): _push(lambda reader: ()),
    ord("d"): _push(_dict_of),
    ord("l"): _push(_Reader.since_mark),
    ord("t"): _push(lambda reader: tuple(reader.since_mark())),
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    ord("a"): _append,
    ord("e"): _appends,
    ord("s"): _set_item,
    ord("u"): _set_items,
    ord("N"): _push(lambda reader: None),
    0x88: _push(lambda reader: True),
    0x89: _push(lambda reader: False),
    ord("J"): _push(lambda reader: reader.number("<i", 4)),
    ord("K"): _push(lambda reader: reader.number("<B", 1)),
    ord("M"): _push(lambda reader: reader.number("<H", 2)),
    0x8A: _push(_long("<B", 1)),  # LONG1
    0x8B: _push(_long("<i", 4)),  # LONG4
    ord("G"): _push(lambda reader: unpack_from(">d", reader.take(8))[0]),
    0x8C: _push(_text("<B", 1)),
    ord("X"): _push(_text("<I", 4)),
    0x8D: _push(_text("<Q", 8)),
    ord("C"): _push(_bytes("<B", 1)),
    ord("B"): _push(_bytes("<I", 4)),
    0x8E: _push(_bytes("<Q", 8)),
    0x94: _memoize(lambda reader: len(reader.memo)),  # MEMOIZE
    ord("q"): _memoize(lambda reader: reader.number("<B", 1)),
    ord("r"): _memoize(lambda reader: reader.number("<I", 4)),
    ord("h"): _push(lambda reader: reader.memo[reader.number("<B", 1)]),
    ord("j"): _push(lambda reader: reader.memo[reader.number("<I", 4)]),
    ord("0"): lambda reader: reader.stack.pop(),
    ord("1"): _Reader.since_mark,
    ord("2"): _push(lambda reader: reader.stack[-1]),
}
"""What each opcode does; those of objects, classes and calls are not among them."""
