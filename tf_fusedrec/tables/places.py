"""Places for the rows of a native table, and what a table cannot do there.

custom_ops/hash_table/options.h says which options a place lacks. A layer or a schedule that asks for more is refused
when it is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import TableConfig
from tf_fusedrec.ops._library import built_with_cuda
from tf_fusedrec.ops.table import check_tables

_TO_HOST = "a layer under tf.device('/CPU:0'), whose memory has all options"


@dataclasses.dataclass(frozen=True)
class Place:
    """A place for the rows of the tables of a group.

    Attributes:
      name: "CPU", "device" or "host_rows".
      accumulates_steps: True if the gradients of several steps can make one update.
      lookups_per_update: Largest number of steps with lookups before the update of the first; None: any.
      ids_on_host: True if ids travel in host memory, so that a look-ahead waits for no kernel (docs/gpu.md, "Streams").
    """

    name: str
    accumulates_steps: bool = True
    lookups_per_update: int | None = None
    ids_on_host: bool = False


CPU = Place("CPU")
DEVICE = Place("device")
# The buffers have room for the rows of one lookup; its update precedes the next lookup.
HOST_ROWS = Place("host_rows", accumulates_steps=False, lookups_per_update=1, ids_on_host=True)
PLACES = (CPU, DEVICE, HOST_ROWS)


def on_gpu() -> bool:
    """Returns whether a table that is made here is on a GPU. TensorFlow places its handle like a variable's."""
    if not built_with_cuda():
        return False
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[])
    return tf.DeviceSpec.from_string(handle.device).device_type == "GPU"


def place_of(spec: TableConfig) -> Place:
    """The place of a table of this config that is made here, under the current tf.device."""
    if not on_gpu():
        return CPU
    return HOST_ROWS if spec.tier.host_rows else DEVICE


def check(place: Place, records: Sequence[Mapping[str, Any]], *, accumulate_steps: int) -> None:
    """Raises ValueError unless tables with these records, of TableConfig.record, can be a group at a place."""
    names = f"tables {[record['name'] for record in records]} on a GPU with host_rows"
    if accumulate_steps > 1 and not place.accumulates_steps:
        raise ValueError(
            f"{names} got accumulate_steps={accumulate_steps}, and must have 1, because the device holds the rows of "
            f"one lookup. Use FrozenWindow or Nested, which sum inside a step; or {_TO_HOST}."
        )
    if place is HOST_ROWS and records[0].get("averaged"):
        raise ValueError(
            f"{names} cannot be averaged (rule 'weight_sync'). Use Topology(rule='gradient_sync'); or {_TO_HOST}."
        )
    refusal = check_tables(records, "CPU" if place is CPU else "device")
    if refusal:
        raise ValueError(f"TableConfig.{refusal}")
