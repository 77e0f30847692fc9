"""Converts nested dicts of YAML to frozen dataclasses and back.

Each value is checked against its field's annotation: int, float, str, bool, tuple[T, ...] or Mapping[str, Any]. The
module knows no field of records.py.
"""

import dataclasses
import difflib
import itertools
import math
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

import yaml

_MOST_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """A loader that refuses what PyYAML takes in another sense than its author, or does not end."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a name", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} occurs twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        if ":" in node.value or re.match(r"[-+]?0[0-9_]", node.value):
            words = f"{node.value!r} is a number of base 60 or 8 in YAML; write it in base 10, or as text in quotes"
            raise yaml.constructor.ConstructorError(None, None, words, node.start_mark)
        return self.construct_yaml_int(node) if node.tag.endswith("int") else self.construct_yaml_float(node)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)


def read_yaml(text: str | IO[str]) -> Any:
    """The value of a YAML document.

    Raises:
      yaml.YAMLError: The text is not YAML, has a key twice, a key that is no name or a number of base 8 or 60, or names
        more than 100,000 values by aliases.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Returns the values that a node stands for, every alias written out."""
    if id(node) not in sizes:
        sizes[id(node)] = _MOST_VALUES  # of an alias to a node around it
        inner = [] if isinstance(node, yaml.ScalarNode) else node.value
        pairs = itertools.chain.from_iterable(inner) if isinstance(node, yaml.MappingNode) else inner
        sizes[id(node)] = 1 + sum(_check_size(each, sizes) for each in pairs)
    if sizes[id(node)] > _MOST_VALUES:
        words = f"its aliases stand for more than {_MOST_VALUES:,} values"
        raise yaml.constructor.ConstructorError(None, None, words, node.start_mark)
    return sizes[id(node)]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns a sentence with the nearest known name, or "" if none is near."""
    close = difflib.get_close_matches(str(name), known, 1)
    return f" Did you mean {close[0]!r}?" if close else ""


# The field at the begin of a message, and the unknown one in it.
_FIELD = re.compile(r"(the top level|[\w.]+)(?: has an unknown field '([^']+)')?")


def with_place(file: str, text: str, message: str) -> str:
    """Returns a message about a field with its file and line, and the line itself, if the file has the field."""
    match = _FIELD.match(message)
    if match is None:
        return message
    names = [*(match[1].split(".") if match[1] != "the top level" else []), *([match[2]] if match[2] else [])]
    node, mark = yaml.compose(text, Loader=_Loader), None
    for name in names:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        key, node = next(((key, value) for key, value in pairs if key.value == name), (None, None))
        if key is None:
            return message
        mark = key.start_mark
    if mark is None:
        return message
    number = f"{mark.line + 1:>4} | "
    pointer = f"{'| ':>{len(number)}}{' ' * mark.column}{'^' * len(names[-1])}"
    return f"{file}:{mark.line + 1}: {message}\n{number}{text.splitlines()[mark.line]}\n{pointer}"


def override_field(fields: dict[str, Any], override: str) -> None:
    """Sets a field from "path=value", a path such as train.epochs or embedding.tables.item.dim; the value is YAML."""
    path, equals, text = override.partition("=")
    *sections, field = path.split(".")
    if not equals or not all(sections) or not field:
        raise ValueError(f"--set must be section.field=value, got {override!r}. Example: --set train.epochs=2.")
    target = fields
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise ValueError(f"--set {override!r}: {section!r} is a field, not a section.")
    try:
        target[field] = read_yaml(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"--set {override!r}: the value is not YAML: {error}") from error


def make_record(record: type, values: Any, section: str) -> Any:
    """Returns an instance of the dataclass `record` from the dict of its section.

    Raises:
      ValueError: A field is unknown, lacks a value and a default, or has the wrong type. The message names the field
        and its section.
    """
    where = section or "the top level"
    values = {} if values is None else values
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} must hold fields, got {values!r}.")
    known = {field.name: field for field in dataclasses.fields(record)}
    types = typing.get_type_hints(record)
    for name in values:
        if name not in known:
            meant = did_you_mean(name, known)
            raise ValueError(f"{where} has an unknown field {name!r}.{meant} Known fields: {sorted(known)}.")
    for name, field in known.items():
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where} lacks the field {name!r}.")
    prefix = f"{section}." if section else ""
    return record(**{name: typed(prefix + name, value, types[name]) for name, value in values.items()})


def typed(name: str, value: Any, wanted: Any) -> Any:
    """Converts `value` to its annotation: a list becomes a tuple, and an integer a float where one is wanted."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if dataclasses.is_dataclass(value):
        return value  # A section that is already a record.
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{name} must be a list of {arguments[0].__name__}, got {value!r}.")
        return tuple(typed(f"{name}[{i}]", item, arguments[0]) for i, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ValueError(f"{name} must hold names and their values, got {value!r}.")
        return dict(value)
    if wanted is float and not isinstance(value, bool):
        # YAML 1.1 reads 1e-3 (without a point) as text, so numbers in text are accepted.
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    elif isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{name} must be {wanted.__name__}, got {value!r} ({type(value).__name__}).")


def plain(value: Any) -> Any:
    """Replaces tuples by lists, as YAML and JSON would return them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}.{did_you_mean(value, choices)}")


def check_at_least(name: str, value: float, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}.")


def check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be > 0, got {value}.")


def check_fraction(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}.")


def check_dropout(name: str, dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise ValueError(f"model.{name} must be 0 <= {name} < 1, got {dropout}.")
