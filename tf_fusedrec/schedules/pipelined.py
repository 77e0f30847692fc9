"""Every stage of a step works on another batch (TurboGR, section 4.2.3, appendix D; MTGRBoost's three streams)."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from tf_fusedrec.schedules.in_flight import InFlight
from tf_fusedrec.schedules.registry import register


class _Stages(NamedTuple):
    """Distances in batches from batch t, which computes, to the batches of the other stages."""

    input: int  # t + input is read
    ids: int  # t + ids: unique, all-to-all of ids
    rows: int  # t + rows: lookup, all-to-all of rows
    gradients: int  # t - gradients: all-to-all of gradients, update


_DEPTHS = {
    1: _Stages(0, 0, 0, 0),
    2: _Stages(1, 0, 0, 0),
    3: _Stages(2, 1, 0, 0),
    4: _Stages(3, 2, 1, 0),
    5: _Stages(3, 2, 1, 1),
    6: _Stages(4, 3, 1, 1),
}


@register("pipelined")
@dataclasses.dataclass(frozen=True)
class Pipelined(InFlight):
    """A step in six stages with up to six batches in flight.

    While batch t computes (dense forward, backward, update), the other stages work on

        depth   input   ids: unique, all-to-all   rows: lookup, all-to-all   gradients: all-to-all, update   staleness
        1       t       t                         t                          t                               0
        2       t+1     t                         t                          t                               0
        3       t+2     t+1                       t                          t                               0
        4       t+3     t+2                       t+1                        t                               1
        5       t+3     t+2                       t+1                        t-1                             1
        6       t+4     t+3                       t+1                        t-1                             1

    A step ends when all its stages end. At depth 6, ids have a whole step to arrive in: the stage "wait for unique".
    Depths 1 to 3 equal Sync bit for bit; depth 3 is MTGRBoost's copy, dispatch and compute. From depth 4 on, rows of
    every batch but the first lack the table update of the batch before, as under SemiAsync. Dense weights are always
    the newest.

    SemiAsync describes the gradients that wait between steps, and the refused tables. Tables need lookups_per_update=2
    from depth 4 on.

    Args:
      depth: Number of batches in flight, 1 to 6.

    Raises:
      ValueError: another depth; in fit, as SemiAsync.
    """

    depth: int = 6

    def __post_init__(self) -> None:
        if not isinstance(self.depth, int) or isinstance(self.depth, bool) or self.depth not in _DEPTHS:
            raise ValueError(f"depth must be an int from 1 to {max(_DEPTHS)}, got {self.depth!r}.")

    @property
    def looks_ahead(self) -> bool:
        return self.depth > 1

    @property
    def lead(self) -> int:
        return max(1, _DEPTHS[self.depth].input)

    @property
    def routes_ahead(self) -> int:
        return _DEPTHS[self.depth].ids

    @property
    def rows_ahead(self) -> bool:
        return _DEPTHS[self.depth].rows > 0

    @property
    def updates_late(self) -> bool:
        return _DEPTHS[self.depth].gradients > 0

    def get_config(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
