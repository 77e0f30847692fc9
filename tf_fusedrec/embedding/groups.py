"""Tables of equal spec become one group (FusedRec eq. 1): spec = (dim, dtype, optimizer, initializer).

Limits (config.LIMIT_FIELDS) belong to a table, not to the spec: every table of a group keeps its own.
K groups make 2K + 1 all-to-alls in a training step, however many tables they hold. The ids of all groups travel
together, then each group sends rows and gradients. A layer chooses its groups once, when it is made.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Container, Sequence

from tf_fusedrec.config import LIMIT_FIELDS, SUMMED_FIELDS, FeatureConfig, TableConfig
from tf_fusedrec.optimizers import Rule


@dataclasses.dataclass(frozen=True)
class Group:
    """Tables that are stored, exchanged and trained together."""

    name: str  # from the spec alone: adding a table of another spec renames nothing
    tables: tuple[TableConfig, ...]  # sorted by name; table s is segment s
    features: tuple[FeatureConfig, ...]  # sorted by segment, inside a segment in the user's order
    segments: tuple[int, ...]  # segment of each feature

    @property
    def external(self) -> bool:
        """True if the rows belong to another model. They are never trained and never saved."""
        return self.tables[0].external is not None

    @property
    def trains(self) -> bool:
        """True if training changes the rows."""
        return self.tables[0].trainable and not self.external


def _optimizer_spec(optimizer: object, shared: bool) -> str:
    """A text that is equal for optimizers that train alike. A TF1 optimizer equals itself only."""
    if isinstance(optimizer, Rule):
        return repr(optimizer.to_dict())
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if not hasattr(optimizer, "get_config"):
        return kind if shared else f"{kind}@{id(optimizer)}"
    return f"{kind}{json.dumps(optimizer.get_config(), sort_keys=True, default=str)}"


def _spec(table: TableConfig, shared: bool = False) -> tuple:
    """The spec that tables of one group share. With `shared`, the part of it that is equal on all ranks."""
    if table.external is not None:  # external tables share a group, whatever their checkpoints
        return (table.dim, table.dtype, "external")
    described = ("name", "dim", "dtype", "initializer", "optimizer", "trainable", *SUMMED_FIELDS, *LIMIT_FIELDS)
    values = {f.name: getattr(table, f.name) for f in dataclasses.fields(table) if f.name not in described}
    values["unknown"] = table.unknown != "initial"
    values["frozen"] = not table.trainable
    if shared:
        values["tier_folder"] = bool(table.tier_folder)
    # The group has the sum over its tables, so only its presence belongs to the spec.
    hot = ["hot_rows"] if table.hot_rows else []
    others = (*[(name, value) for name, value in values.items() if value], table.memory_budget > 0, *hot)
    return (table.dim, table.dtype, table.initializer, _optimizer_spec(table.optimizer, shared), others)


def _group_name(table: TableConfig, taken: Container[str]) -> str:
    """A name from the spec that all ranks share, because collectives carry it."""
    digest = hashlib.blake2b(repr(_spec(table, shared=True)[2:]).encode(), digest_size=3).hexdigest()
    kind = "external" if table.external is not None else type(table.optimizer).__name__.lower()
    name = f"{kind}-{table.dtype}-{table.dim}-{digest}"
    return next(n for n in itertools.chain([name], (f"{name}-{k}" for k in itertools.count(1))) if n not in taken)


def check_names(tables: Sequence[TableConfig], features: Sequence[FeatureConfig]) -> None:
    """Raises ValueError if names repeat, a feature names an unknown table, or no feature names a table."""
    for kind, names in (("tables", [t.name for t in tables]), ("features", [f.name for f in features])):
        repeated = sorted({n for n in names if names.count(n) > 1})
        if repeated:
            raise ValueError(f"Names of {kind} must be unique, got {repeated} more than once.")
        if not names:
            raise ValueError(f"{kind} must hold at least one config, got none.")
    known = {t.name for t in tables}
    for feature in features:
        if feature.table not in known:
            raise ValueError(
                f"FeatureConfig.table must name one of the tables {sorted(known)}, got {feature.table!r} for feature "
                f"{feature.name!r}. Add the TableConfig or correct the name."
            )
    unused = sorted(known - {f.table for f in features})
    if unused:
        raise ValueError(f"Every table must be used by a feature, got no feature for {unused}. Remove the tables.")


def _check_optimizers(tables: Sequence[TableConfig]) -> None:
    """Refuses a TF1 optimizer in two groups, because it has one state for all its variables."""
    first: dict[int, TableConfig] = {}
    for table in tables:
        if table.optimizer is None or isinstance(table.optimizer, Rule) or hasattr(table.optimizer, "get_config"):
            continue
        other = first.setdefault(id(table.optimizer), table)
        if _spec(other) != _spec(table):
            raise ValueError(
                f"{type(table.optimizer).__name__} of table {other.name!r} also serves table {table.name!r}, which is "
                "in another group. Give each group a TF1 optimizer of its own, or use Keras optimizers."
            )


def group_tables(tables: Sequence[TableConfig], features: Sequence[FeatureConfig]) -> tuple[Group, ...]:
    """Fuses tables of equal spec into groups.

    Returns:
      Groups in the order of their first table's name, which is the same on all ranks.

    Raises:
      ValueError: see check_names.
    """
    check_names(tables, features)
    _check_optimizers(tables)
    by_spec: dict[tuple, list[TableConfig]] = {}
    for table in sorted(tables, key=lambda t: t.name):
        by_spec.setdefault(_spec(table), []).append(table)
    groups: list[Group] = []
    for members in by_spec.values():
        segment_of = {table.name: s for s, table in enumerate(members)}
        mine = sorted((f for f in features if f.table in segment_of), key=lambda f: segment_of[f.table])
        groups.append(
            Group(
                name=_group_name(members[0], {group.name for group in groups}),
                tables=tuple(members),
                features=tuple(mine),
                segments=tuple(segment_of[f.table] for f in mine),
            )
        )
    return tuple(groups)
