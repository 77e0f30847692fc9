"""Places for the rows of a native table, and what a table cannot do there.

A table reads its record before any of its ops runs. A layer or a schedule that asks for more is refused when it is
made. custom_ops/hash_table/cuda/kernels/device_form.h repeats the refusals of options for callers of the op.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tf_fusedrec._tf_compat import tf
from tf_fusedrec.config import TableConfig
from tf_fusedrec.ops._library import built_with_cuda

_TO_HOST = "a layer under tf.device('/CPU:0'), whose memory has all options"


@dataclasses.dataclass(frozen=True)
class Place:
    """A place for the rows of the tables of a group.

    Attributes:
      name: "CPU", "device" or "host_rows".
      lacks: Paths of options that must have their default value.
      accumulates_steps: True if the gradients of several steps can make one update.
      averages: True if replicas can train apart and be averaged, under the topology rule "weight_sync".
      lookups_per_update: Largest number of steps with lookups before the update of the first; None: any.
      ids_on_host: True if ids travel in host memory, so that a look-ahead waits for no kernel (docs/gpu.md, "Streams").
    """

    name: str
    lacks: tuple[str, ...] = ()
    accumulates_steps: bool = True
    averages: bool = True
    lookups_per_update: int | None = None
    ids_on_host: bool = False


CPU = Place("CPU")
DEVICE = Place("device", lacks=("tier.memory_budget", "tier.folder", "tier.hot_rows"))
# The buffers have room for the rows of one lookup; its update precedes the next lookup.
HOST_ROWS = Place(
    "host_rows",
    lacks=("limits.admission_count", "storage.hot_after", "external.folder", "external.table"),
    accumulates_steps=False,
    averages=False,
    lookups_per_update=1,
    ids_on_host=True,
)
PLACES = (CPU, DEVICE, HOST_ROWS)
# Options that averaged tables lack everywhere: they count lookups of all ranks, and each group sees only its own.
AVERAGED_LACK = ("limits.admission_count", "storage.hot_after", "limits.frequency_decay_steps")


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


def check(
    place: Place, tables: Sequence[TableConfig], *, accumulate_steps: int, lookups_per_update: int, averaged: bool
) -> None:
    """Raises ValueError unless the tables of a group can have these options at a place.

    Args:
      place: The place.
      tables: Configs of the tables, of equal spec, each with its limits.
      accumulate_steps, lookups_per_update, averaged: As for NativeTable.
    """
    names = f"tables {[table.name for table in tables]}"
    given = {path: value for table in tables for path, value in table.options.items()}
    for path, value in given.items():
        if path in place.lacks:
            raise ValueError(
                f"{names} on a GPU got TableConfig.{path}={value!r}, and must have its default. Use {_TO_HOST}; or "
                "leave this option out."
            )
    if averaged and not place.averages:
        raise ValueError(
            f"{names} lie on a GPU with host_rows, so they cannot be averaged; the topology's rule is 'weight_sync'. "
            f"Use Topology(rule='gradient_sync'); or {_TO_HOST}."
        )
    if averaged and not given.keys().isdisjoint(AVERAGED_LACK):
        raise ValueError(
            f"{names} have admission_count > 1, hot_after or frequency_decay_steps, which count lookups of all ranks, "
            "while under the rule 'weight_sync' every group sees its own. Use Topology(rule='gradient_sync')."
        )
    if accumulate_steps > 1 and not place.accumulates_steps:
        raise ValueError(
            f"{names} on a GPU with host_rows got accumulate_steps={accumulate_steps}, and must have 1, because the "
            f"device holds the rows of one lookup. Use FrozenWindow or Nested, which sum inside a step; or "
            f"{_TO_HOST}."
        )
    if place.lookups_per_update is not None and lookups_per_update > place.lookups_per_update:
        raise ValueError(
            f"{names} on a GPU with host_rows got lookups_per_update={lookups_per_update}, and must have "
            f"{place.lookups_per_update}, because the device holds the rows of one lookup. Use a schedule whose "
            f"rows are fresh, such as DualBuffer(); or {_TO_HOST}."
        )
