"""Small damages of bytes, as by disks and networks, and of JSON, as by other programs."""

from __future__ import annotations

import copy
import random
from typing import Any

ODD_VALUES = [
    None, True, -1, 0, 1, 2, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 1.5, float("nan"), "", "x", "../x", "/x",
    "a\0b", "\ud800", "<f4", [], [0], [[]], {}, {"a": 1},
]  # fmt: skip


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Returns randomly changed bytes of `data`, which may equal `data`."""
    kinds = [_flip, _overwrite, _cut, _cut, _lengthen, _move, _zero]
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        data = chance.choice(kinds)(data, chance)
    return data


def _span(data: bytes, chance: random.Random) -> tuple[int, int]:
    begin = chance.randrange(len(data) + 1)
    return begin, min(len(data), begin + chance.choice([1, 4, 8, 100, 4096]))


def _flip(data: bytes, chance: random.Random) -> bytes:
    if not data:
        return data
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def _overwrite(data: bytes, chance: random.Random) -> bytes:
    begin, end = _span(data, chance)
    return data[:begin] + chance.randbytes(end - begin) + data[end:]


def _cut(data: bytes, chance: random.Random) -> bytes:
    begin, end = _span(data, chance)
    return data[:begin] if chance.random() < 0.5 else data[:begin] + data[end:]


def _lengthen(data: bytes, chance: random.Random) -> bytes:
    begin, end = _span(data, chance)
    return data + chance.randbytes(chance.choice([1, 8, 500])) if chance.random() < 0.5 else data[:end] + data[begin:]


def _move(data: bytes, chance: random.Random) -> bytes:
    begin, end = _span(data, chance)
    to = chance.randrange(len(data) + 1)
    return data[:to] + data[begin:end] + data[to + end - begin :]


def _zero(data: bytes, chance: random.Random) -> bytes:
    begin, end = _span(data, chance)
    return data[:begin] + bytes(end - begin) + data[end:]


def altered(value: Any, chance: random.Random) -> Any:
    """Copies a JSON value and changes one or two entries: other types, missing, repeated or renamed."""
    value = copy.deepcopy(value)
    for _ in range(chance.choice([1, 1, 2])):
        places = list(_places(value))
        if not places:
            return copy.deepcopy(chance.choice(ODD_VALUES))
        container, key = chance.choice(places)
        what = chance.randrange(6)
        if what == 0:
            del container[key]
        elif what == 1 and isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        elif what == 1:
            container[chance.choice(["", "x", "../x", "a/b"])] = container.pop(key)
        elif what == 2:  # A value that is valid elsewhere.
            other, at = chance.choice(places)
            container[key] = copy.deepcopy(other[at]) if at in _keys(other) else None
        else:
            container[key] = copy.deepcopy(chance.choice(ODD_VALUES))
    return value


def _keys(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def _places(value: Any) -> Any:
    """Yields (container, key) of every entry in a value."""
    if isinstance(value, (dict, list)):
        for key in list(_keys(value)):
            yield value, key
            yield from _places(value[key])
