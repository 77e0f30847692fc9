"""Tables of an experiment: the sections `all_tables` and `tables` of `embedding:` become records of tf_fusedrec.

Every field of tf_fusedrec.TableConfig may be set under its own name, so a new field needs no code here:

    embedding:
      optimizer: adagrad                 of all tables, as learning_rate, arguments and stddev
      all_tables: {limits: {ttl: 100000}}
      tables:
        item:
          dim: 64
          limits: {max_rows_per_rank: 1000000, eviction: lru}
          optimizer: {name: adam, learning_rate: 0.001, beta_2: 0.99}
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import tf_fusedrec.config as config
from tf_fusedrec.config import TableConfig
from tf_fusedrec.models.experiment.yaml_records import check_choice, typed
from tf_fusedrec.optimizers.rules import RULES, Rule

TABLE_OPTIMIZERS = {name.replace("RowWise", "rowwise_").lower(): rule for name, rule in sorted(RULES.items())}
LEARNING_RATES = {name: 0.001 if "adam" in name or name == "rmsprop" else 0.05 for name in TABLE_OPTIMIZERS}
INITIALIZERS = {
    "constant": config.Constant,
    "normal": config.Normal,
    "truncated_normal": config.TruncatedNormal,
    "uniform": config.Uniform,
    "zeros": config.Zeros,
}
# An experiment names them for all tables by fields of `embedding`.
_OF_ALL = {"optimizer": "optimizer, learning_rate and arguments", "initializer": "stddev"}


class Defaults(typing.NamedTuple):
    """The options of a table that has none of its own."""

    dim: int
    optimizer: str  # one of TABLE_OPTIMIZERS
    learning_rate: float  # 0: that of LEARNING_RATES
    arguments: Mapping[str, Any]  # more arguments of the optimizer
    stddev: float
    fields: Mapping[str, Any]  # embedding.all_tables


def make_tables(names: Iterable[str], defaults: Defaults, tables: Mapping[str, Mapping[str, Any]]) -> list[TableConfig]:
    """Returns the record of each table.

    Args:
      names: Names of the tables.
      defaults: Options of every table.
      tables: embedding.tables: own options by name of a table. An external table takes these and `dim` alone.

    Raises:
      ValueError: A table or an option is unknown, or a value has the wrong type, is out of range or does not fit the
        others. The message names the field and its section.
    """
    names = sorted(set(names))
    unknown = sorted(set(tables) - set(names))
    if unknown:
        raise ValueError(f"embedding.tables names {unknown}, and the model has the tables {names}. Remove the others.")
    for field, instead in _OF_ALL.items():
        if field in defaults.fields:
            raise ValueError(
                f"embedding.all_tables.{field} is not taken: for all tables, set embedding.{instead}; for one table, "
                f"embedding.tables.<name>.{field}."
            )
    return [_make_table(name, defaults, tables.get(name, {})) for name in names]


def make_rule(where: str, name: str, learning_rate: float, arguments: Mapping[str, Any]) -> Rule:
    """Returns the record of an update rule. Raises ValueError: an argument is unknown or out of its range."""
    kind = TABLE_OPTIMIZERS[name]
    return _make(where, name, kind, {"learning_rate": learning_rate}, arguments)


def _make_table(name: str, defaults: Defaults, own: Any) -> TableConfig:
    where = f"embedding.tables.{name}"
    mine = _checked(where, own, TableConfig)
    fields: dict[str, Any] = {"dim": defaults.dim}
    if "external" not in mine:
        fields.update(_checked("embedding.all_tables", defaults.fields, TableConfig))
        fields["optimizer"] = _rule_of(f"{where}.optimizer", defaults, mine.pop("optimizer", {}))
        fields["initializer"] = _initializer_of(f"{where}.initializer", defaults, mine.pop("initializer", {}))
    for section, record in config.RECORDS.items():
        values = {**fields.get(section, {}), **mine.get(section, {})}
        if values:
            mine[section] = _record(where, record, values)
    return _record(where, TableConfig, {"name": name, **fields, **mine})


def _record(where: str, record: Any, values: Mapping[str, Any]) -> Any:
    try:
        return record(**values)
    except (TypeError, ValueError) as error:  # an external table needs a folder
        raise ValueError(f"{where}: {error}") from error


def _checked(where: str, values: Any, record: type) -> dict[str, Any]:
    """Returns the options of a section, which names fields of a record and of the records in it."""
    known = sorted(field.name for field in dataclasses.fields(record) if field.name != "name")
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} must hold options of a table, got {values!r}. Options: {known}.")
    unknown = sorted(str(name) for name in values if name not in known)
    if unknown:
        raise ValueError(f"{where} names {unknown}, and a table takes {known}. Remove the others.")
    records = config.RECORDS
    return {n: _checked(f"{where}.{n}", v, records[n]) if n in records else v for n, v in values.items()}


def _rule_of(where: str, defaults: Defaults, given: Any) -> Rule:
    """Returns the rule that a name, or a mapping with a name and arguments, describes."""
    values = _named(where, given, defaults.optimizer, tuple(TABLE_OPTIMIZERS))
    name = values.pop("name")
    default = defaults.learning_rate or LEARNING_RATES[name]
    rate = typed(f"{where}.learning_rate", values.pop("learning_rate", default), float)
    others = defaults.arguments if name == defaults.optimizer else {}
    return make_rule(where, name, rate, {**others, **values})


def _initializer_of(where: str, defaults: Defaults, given: Any) -> config.Initializer:
    if not given:
        return config.TruncatedNormal(stddev=defaults.stddev)
    values = _named(where, given, "truncated_normal", tuple(INITIALIZERS))
    name = values.pop("name")
    return _make(where, name, INITIALIZERS[name], {}, values)


def _named(where: str, given: Any, default: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Returns {"name": one of names, other values}."""
    values = {"name": given} if isinstance(given, str) else given
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{where} must be a name, or hold a name and arguments, got {given!r}. Names: {list(names)}.")
    check_choice(f"{where}.name", values.get("name", default), names)
    return {"name": default, **values}


def _make(where: str, name: str, kind: Any, given: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """Returns a record of tf_fusedrec. `given` fields are no arguments."""
    known = sorted(field.name for field in dataclasses.fields(kind) if field.name not in given)
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise ValueError(f"{where} names {unknown}, and {name!r} takes {known}. Remove them, or choose another name.")
    types = typing.get_type_hints(kind)
    values = {field: typed(f"{where}.{field}", value, types[field]) for field, value in arguments.items()}
    try:
        return kind(**given, **values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
