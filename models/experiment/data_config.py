"""The data section of an experiment: where its samples come from. See records.py."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from tf_fusedrec.data.columns import POLICIES
from tf_fusedrec.models.data_sets.events import HELD_OUT
from tf_fusedrec.models.data_sets.kuairand import SPLITS
from tf_fusedrec.models.data_sets.table import ColumnMap, column_map
from tf_fusedrec.models.experiment.yaml_records import check_at_least, check_choice, check_positive

SOURCES = {
    "synthetic-ranking": ("ranking",),
    "synthetic-retrieval": ("retrieval",),
    "movielens": ("retrieval",),
    "sequences": ("retrieval",),
    "kuairand": ("ranking",),
    "movielens_ranking": ("ranking",),
    "table": ("ranking", "retrieval"),
}
WINDOWED = ("movielens_ranking", "table")  # sources whose rows have data.window exposures
_SIZES = ("users", "items", "clusters", "mean_history", "exposures")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Source of the data. The sizes apply to synthetic sets; 0 takes the set's default."""

    source: str  # one of SOURCES
    input: str = ""  # raw files of a source that is not synthetic, or a converted folder
    earlier: tuple[str, ...] = ()  # table: files or folders of earlier days, whose events are history only
    texts: int = 1_000_000  # table: most texts of a column of ids that the data set keeps, the most frequent; 0: none
    users: int = 0
    items: int = 0
    clusters: int = 0
    mean_history: int = 0  # interactions per user
    exposures: int = 0  # exposures per user and split
    bad_rows: str = "error"  # or "skip", which omits unusable rows and counts them in the log
    split: str = "time"  # kuairand: one of data.kuairand.SPLITS
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # table: see data.table_map.ColumnMap
    held_out: str = "both"  # retrieval, movielens_ranking, table: one of data.events.HELD_OUT
    window: int = 32  # movielens_ranking, table: exposures of a row
    cache: str = "runs/.data"  # folder of converted data, on a file system that all ranks see
    follow: bool = False  # train/, or the input of a table, grows by partitions, see tf_fusedrec.data.GrowingFolder
    marker: str = "_SUCCESS"  # file of a complete partition; "" takes folders with Parquet files, or files of a table
    poll_s: float = 30.0
    timeout_s: float = 0.0  # seconds without a new partition after which training ends; 0: it never ends
    max_partitions: int = 0  # largest number of partitions; 0: all

    def __post_init__(self) -> None:
        check_positive("data.poll_s", self.poll_s)
        if not self.timeout_s >= 0:
            raise ValueError(f"data.timeout_s must be >= 0, got {self.timeout_s}.")
        check_at_least("data.max_partitions", self.max_partitions, 0)
        check_choice("data.source", self.source, tuple(SOURCES))
        check_choice("data.bad_rows", self.bad_rows, POLICIES)
        check_choice("data.split", self.split, tuple(SPLITS))
        check_choice("data.held_out", self.held_out, HELD_OUT)
        check_at_least("data.window", self.window, 1)
        check_at_least("data.texts", self.texts, 0)
        if self.source == "table":
            _ = self.column_map
        elif self.columns:
            raise ValueError(f"data.columns is for the source 'table', but data.source is {self.source!r}. Remove it.")
        if self.earlier and self.source != "table":
            raise ValueError(f"data.earlier is for the source 'table', but data.source is {self.source!r}. Remove it.")
        given = list(self.sizes())
        if given and not self.source.startswith("synthetic"):
            raise ValueError(
                f"data.{given[0]} is a size of a synthetic data set, but data.source is {self.source!r}. Remove it."
            )
        for name in given:
            check_at_least(f"data.{name}", getattr(self, name), 1)

    @property
    def follows_table(self) -> bool:
        """Whether raw partitions of a table are converted as they come."""
        return self.follow and self.source == "table" and not (pathlib.Path(self.input) / "dataset.json").is_file()

    @property
    def column_map(self) -> ColumnMap:
        """The record of `columns`. Raises ValueError: a field is unknown, missing or does not fit the others."""
        return column_map(self.columns)

    def sizes(self) -> dict[str, int]:
        """Returns the sizes that are set, by name."""
        return {name: getattr(self, name) for name in _SIZES if getattr(self, name)}
