"""Every stage of a step for another batch (TurboGR, section 4.2.3 and appendix D; MTGRBoost's three streams)."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from tf_fusedrec.schedules.in_flight import InFlight
from tf_fusedrec.schedules.registry import register


class _Stages(NamedTuple):
    """Which batch each stage works on while batch t computes."""

    input: int  # t + so many is read
    ids: int  # t + so many: unique, all-to-all of ids
    rows: int  # t + so many: lookup, all-to-all of rows
    gradients: int  # t - so many: all-to-all of gradients, update


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

    A step ends when all its stages have. At depth 6 ids have a step of their own to arrive in before anything asks for
    them: that is the stage "wait for unique". Up to 3 the result is that of Sync, bit for bit; depth 3 is MTGRBoost's
    copy, dispatch and compute. From 4 on rows of every batch but the first lack one update of the tables, that of the
    batch before, as under SemiAsync, whose staleness it is; dense weights are always the newest.

    What waits between steps, and what may be refused: see SemiAsync; tables need lookups_per_update=2 from depth 4 on.

    Args:
      depth: batches in flight, 1 to 6.

    Raises:
      ValueError: no such depth; in fit, as SemiAsync.
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
