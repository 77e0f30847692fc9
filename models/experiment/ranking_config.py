"""Inputs, tasks and sizes that all ranking models share: the base of their records in model_config.py.

    contextual_*           columns of the user
    item_features, item_lists, crosses    columns of an item or event, as history_<name> and exposed_<name>
    history_dense, exposed_dense          numbers of an event, as history_<name> and exposed_<name>

Every ranking model reads all of these columns, so two models of equal fields see the same information.
"""

from __future__ import annotations

import dataclasses

from tf_fusedrec.config import check_input_name
from tf_fusedrec.models.experiment.yaml_records import check_at_least, check_choice, check_dropout

ROLES = ("history", "exposed")  # kinds of events
HOUR = "hour"  # name in a cross of an event's hour of the day, which has no column
COMBINERS = ("mean", "sum", "sqrtn")
_LISTS = (
    "contextual", "contextual_lists", "contextual_dense", "item_features", "item_lists", "history_dense",
    "exposed_dense", "log1p", "crosses", "other_labels",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RankingConfig:
    """Inputs, tasks and sizes that all ranking models share."""

    contextual: tuple[str, ...] = ()  # scalar columns of ids
    contextual_lists: tuple[str, ...] = ()  # columns with a list of ids for each user
    contextual_dense: tuple[str, ...] = ()  # scalar columns of numbers; NaN is missing
    item_features: tuple[str, ...] = ()  # names of more id columns of items: history_<name> and exposed_<name>
    item_lists: tuple[str, ...] = ()  # names of columns with several ids of an event, beside <role>_<name>_count
    history_dense: tuple[str, ...] = ()  # names of columns of numbers: history_<name>; NaN is missing
    exposed_dense: tuple[str, ...] = ()  # names of columns of numbers: exposed_<name>; NaN is missing
    log1p: tuple[str, ...] = ()  # dense names whose numbers x become sign(x) log(1 + |x|) before they are normalized
    crosses: tuple[str, ...] = ()  # learned crosses "a*b" of two ids, such as gender*genre or user_id*hour
    list_combiner: str = "mean"  # pools the rows of a list: one of COMBINERS
    time_features: bool = True  # exposures see the history's length, the time since its end, and the hour as numbers
    click_label: str = "exposed_click"
    conversion_label: str = "exposed_conversion"  # CTCVR = click and conversion
    other_labels: tuple[str, ...] = ()  # names of more tasks, with labels in the columns exposed_<name>
    max_history: int = 200  # events; a longer history keeps its newest
    max_exposures: int = 32  # exposures per row; a longer row keeps its last
    dim: int = 32  # columns of an embedding row
    dropout: float = 0.0
    history_dropout: float = 0.0  # share of the history's events that a training step leaves out
    min_item_count: int = 1  # items with fewer training interactions share one row with unknown items
    item_dropout: float = 0.0  # share of exposures that train the row of unknown items; needs min_item_count > 1

    def __post_init__(self) -> None:
        for name in ("max_history", "max_exposures", "dim", "min_item_count"):
            check_at_least(f"model.{name}", getattr(self, name), 1)
        check_dropout("dropout", self.dropout)
        check_dropout("history_dropout", self.history_dropout)
        check_dropout("item_dropout", self.item_dropout)
        check_choice("model.list_combiner", self.list_combiner, COMBINERS)
        if self.item_dropout and self.min_item_count == 1:
            raise ValueError(
                f"model.item_dropout {self.item_dropout} trains the row of unknown items, which needs "
                "model.min_item_count > 1, got 1. Raise it, or set item_dropout to 0."
            )
        for name in _LISTS:
            if len(set(getattr(self, name))) != len(getattr(self, name)):
                raise ValueError(f"model.{name} names a column twice: {list(getattr(self, name))}.")
        dense = {*self.contextual_dense, *self.history_dense, *self.exposed_dense}
        for name in self.log1p:
            if name not in dense:
                raise ValueError(f"model.log1p names {name!r}, want one of the dense names {sorted(dense)}.")
        for name in self.crosses:
            self._check_cross(name)
        self._check_inputs()

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, in the order of the heads."""
        return ("ctr", "ctcvr", *self.other_labels)

    @property
    def label_of_task(self) -> dict[str, str]:
        """The user's name of each task's label. "ctcvr", a click with a conversion, has the name of the conversion."""
        names = {"ctr": self.click_label, "ctcvr": self.conversion_label}
        return {task: names.get(task, task).removeprefix("exposed_") for task in self.tasks}

    @property
    def label_columns(self) -> tuple[str, ...]:
        """Distinct label columns."""
        others = [f"exposed_{name}" for name in self.other_labels]
        return tuple(dict.fromkeys([self.click_label, self.conversion_label, *others]))

    @property
    def contextual_features(self) -> tuple[str, ...]:
        """The looked-up features of the user, each with one row for each user."""
        return (*self.contextual, *self.contextual_lists)

    def id_columns(self, role: str) -> tuple[str, ...]:
        """Returns the columns with one id for each event of the role "history" or "exposed", the item's first."""
        return tuple(f"{role}_{name}" for name in ("item", *self.item_features))

    def list_columns(self, role: str) -> tuple[str, ...]:
        """Returns the columns with several ids for each event of a role. Each has a column <name>_count beside it."""
        return tuple(f"{role}_{name}" for name in self.item_lists)

    def cross_features(self, role: str) -> dict[str, tuple[str, ...]]:
        """Returns the two names of each learned cross of a role, by feature."""
        return {f"{role}_{name.replace('*', '_x_')}": parts_of(name) for name in self.crosses}

    def columns_of(self, role: str) -> tuple[str, ...]:
        """Returns the looked-up features of a role, each with one row for each event, the item's first."""
        return (*self.id_columns(role), *self.list_columns(role), *self.cross_features(role))

    def dense_columns(self, role: str) -> tuple[str, ...]:
        """Returns the columns of numbers of the role "contextual", "history" or "exposed"."""
        if role == "contextual":
            return self.contextual_dense
        return tuple(f"{role}_{name}" for name in getattr(self, f"{role}_dense"))

    def dense_log1p(self, role: str) -> tuple[bool, ...]:
        """Returns whether each of the dense_columns of a role goes through log1p."""
        return tuple(name in self.log1p for name in getattr(self, f"{role}_dense"))

    @property
    def table_of_feature(self) -> dict[str, str]:
        """The table that each looked-up feature reads, by feature name."""
        roles = {name: name.partition("_")[2] for role in ROLES for name in self.columns_of(role)}
        return {**roles, "history_action": "action", **{name: name for name in self.contextual_features}}

    def _check_inputs(self) -> None:
        """Raises ValueError unless a server can have the columns as inputs, and each has its own name there."""
        names = [*self.contextual_features, *self.contextual_dense]
        names += [f"{name}_row_splits" for name in (*self.contextual_lists, *ROLES)]
        for role in ROLES:
            names += [*self.columns_of(role), *self.dense_columns(role), f"{role}_time"]
            names += [f"{name}_count" for name in self.list_columns(role)]
        names.append("history_action")
        for name in names:
            check_input_name("model: the name of a column", name)
            if names.count(name) > 1:
                raise ValueError(
                    f"model names two columns {name!r}. A list x of the user also has x_row_splits, and a list of an "
                    "event x_count. Rename one."
                )

    def _check_cross(self, name: str) -> None:
        of_events = ("item", HOUR, *self.item_features)
        known = [*of_events, *self.contextual]
        parts = parts_of(name)
        if len(parts) != 2 or any(part not in known for part in parts) or not set(parts) & set(of_events):
            raise ValueError(
                f"model.crosses has {name!r}, want a*b of two names of {known}, at least one of {list(of_events)}. "
                "Lists of ids have no crosses."
            )


def parts_of(cross: str) -> tuple[str, ...]:
    """Returns the names a and b of a cross "a*b"."""
    return tuple(cross.split("*"))
