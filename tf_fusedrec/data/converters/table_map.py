"""The column map of a table of events: which columns of somebody's files are the user, the item, the labels and so on.

user: customer                     names of columns in the files
item: sku
time: seen_at                      seconds (or finer) since 1970, a date, or text like 2024-05-01 12:30:00
labels: {click: clicked}           name for the model: column in the files; 0 or 1
context: {city: town}              ids of the user: integers or text
context_numbers: [age]             a list keeps the names of the files
features: [brand]                  ids of the event or its item
lists: {tag: tags}                 several ids: a list, or text with | between the ids
numbers: [price]                   numbers of the event, known before it
outcomes: [seconds_watched]        numbers of the event, known after it: for the history alone
past: [brand]                      features whose counts and label rates of the past become numbers
kinds: {sku: string}               columns of ids. string: an id is the fingerprint of its text. integer: other text is
                                   refused. Without a kind, 12 and 12.0 are the id 12 in every type of
                                   column, and text that is no int64 (A7, 007) is its fingerprint.
order: file                        file: a user's rows lie in one file, by time; any: rows are sorted
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

ORDERS = ("file", "any")
KINDS = ("integer", "string")
_RESERVED = ("item", "time", "action", "user_id", "hour")


@dataclasses.dataclass(frozen=True)
class ColumnMap:
    """Columns of a table of events; see the head of this file.

    Raises:
      ValueError: there is no label; a name is given twice or reserved; `past` names no feature, or `kinds` no column of
        ids; a kind or order is unknown.
    """

    user: str
    item: str
    time: str
    labels: Mapping[str, str]
    context: Mapping[str, str] = dataclasses.field(default_factory=dict)
    context_numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    features: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lists: Mapping[str, str] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    outcomes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    past: tuple[str, ...] = ()
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    order: str = "file"

    def __post_init__(self) -> None:
        if not self.labels:
            raise ValueError("columns.labels names no label, want at least one, such as {click: clicked}.")
        if self.order not in ORDERS:
            raise ValueError(f"columns.order must be one of {list(ORDERS)}, got {self.order!r}.")
        for group in (("context", "context_numbers"), ("features", "lists", "numbers", "outcomes", "labels")):
            names = [name for field in group for name in getattr(self, field)]
            for name in names:
                if names.count(name) > 1 or name in _RESERVED or name.startswith("past_"):
                    raise ValueError(
                        f"columns has the name {name!r} twice in {list(group)}, or it is one of {list(_RESERVED)} or "
                        "begins with past_. Choose another name for the model."
                    )
        for name in self.past:
            if name not in (*self.features, *self.lists):
                raise ValueError(
                    f"columns.past names {name!r}, want one of the features {[*self.features, *self.lists]}."
                )

        ids = self.ids()
        for column, kind in self.kinds.items():
            if column not in ids.values() or kind not in KINDS:
                raise ValueError(
                    f"columns.kinds has {column}: {kind}, want a column of ids, one of {sorted(set(ids.values()))}, "
                    f"and one of {list(KINDS)}."
                )

    def ids(self) -> dict[str, str]:
        """Returns the column of the files behind each name of ids for the model."""
        return {"user_id": self.user, "item": self.item, **self.context, **self.features, **self.lists}

    def columns(self) -> dict[str, str]:
        """Returns the role of each column of the files, in the words of messages."""
        roles = {self.user: "user", self.item: "item", self.time: "time"}
        for field in dataclasses.fields(self):
            values = getattr(self, field.name)
            if isinstance(values, Mapping) and field.name != "kinds":
                roles |= {column: f"{field.name} {name!r}" for name, column in values.items() if column not in roles}
        return roles


def column_map(given: Mapping[str, Any], where: str = "data.columns") -> ColumnMap:
    """Returns the record of a section of YAML.

    Args:
      given: The section.
      where: Name of the section, for messages.

    Raises:
      ValueError: a field is unknown, is missing or has the wrong type, or ColumnMap refuses the values.
    """
    fields = {field.name: field for field in dataclasses.fields(ColumnMap)}
    unknown = sorted(set(given) - set(fields))
    if unknown:
        raise ValueError(f"{where} names {unknown}, and a column map takes {list(fields)}. Remove the others.")
    missing = [name for name in ("user", "item", "time", "labels") if name not in given]
    if missing:
        raise ValueError(f"{where} lacks {missing}. Name these columns of the files, such as user: customer.")
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in ("user", "item", "time", "order"):
            good = isinstance(value, str)
            values[name] = value
        else:
            pairs = (
                value if isinstance(value, Mapping) else {one: one for one in value or ()} if _is_list(value) else None
            )
            good = pairs is not None and all(isinstance(text, str) for pair in pairs.items() for text in pair)
            values[name] = tuple(pairs or ()) if name == "past" else dict(pairs or {})
        if not good:
            wanted = "a name" if name in ("user", "item", "time", "order") else "a list of names, or {name: column}"
            raise ValueError(f"{where}.{name} must be {wanted}, got {value!r}.")
    try:
        return ColumnMap(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)
